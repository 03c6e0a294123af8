"""The network F on the separation's data, and how often it tells the classes apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Float

from softgap.attention import Mechanism, mechanisms, resolve
from softgap.errors import UnsupportedError, unknown_name
from softgap.inputs import as_items
from softgap.intervals import Interval
from softgap.theory.separation.classes import (
    GAP,
    ClassOutputs,
    Construction,
    Draw,
    block_column,
    class_outputs,
    dense_products,
    distinct_products,
    draw_many,
    form_of,
    same_column,
)

__all__ = [
    "Firing",
    "Share",
    "Trial",
    "argument",
    "computable",
    "fire",
    "hoeffding",
    "mechanism_names",
    "missing_bound",
    "share",
    "signal_margin",
    "trial",
    "trials",
]


_FORMS = ("auto", "classes", "distinct", "dense")


@dataclass(frozen=True, eq=False)
class Firing:
    """The network on one class of sequences, one value per draw.

    Attributes
    ----------
    value
        F = relu(sum relu(C Y - tau)); in the distinct form every different row counts once, so only its sign is F's.
    largest
        max_ik (C Y)_ik / L: F > 0 iff it exceeds c + 0.1, up to rounding.
    """

    value: Float[np.ndarray, " draw"]
    largest: Float[np.ndarray, " draw"]


def fire(
    mechanism: Mechanism,
    construction: Construction,
    label: int,
    draws: Sequence[Draw],
    *,
    form: str = "auto",
    normalised: bool = True,
) -> Firing:
    """F on class D0 (label 0) or D1 (label 1), for every draw.

    Parameters
    ----------
    form
        ``classes`` costs O(d m) per draw, ``distinct`` O(d^2 m), ``dense`` O(n^2 d); ``auto`` takes the first that is
        exact for the mechanism.
    normalised
        False leaves out the division by the row's sum (softmax and identity, in the classes form).
    """
    if form not in _FORMS:
        raise unknown_name("form", form, _FORMS)
    layout = form_of(mechanism, construction) if form == "auto" else form
    if layout == "classes":
        outputs = class_outputs(mechanism, construction, label, normalised=normalised)
        return _fire_classes(outputs, construction, draws)
    products_of = distinct_products if layout == "distinct" else dense_products
    value, largest = np.empty(len(draws)), np.empty(len(draws))
    for i, draw in enumerate(draws):
        products = products_of(mechanism, construction, label, draw)
        value[i] = np.maximum(products - construction.tau, 0).sum()
        largest[i] = products.max() / construction.unit
    return Firing(value, largest)


def _fire_classes(outputs: ClassOutputs, construction: Construction, draws: Sequence[Draw]) -> Firing:
    size = construction
    signs = [draw.signs for draw in draws]
    first, last = (np.stack([sign[at] for sign in signs]).astype(np.float64) for at in (0, -1))
    block = np.stack([draw.block_sums for draw in draws]).astype(np.float64)
    keyed = np.stack([draw.signs[block_column(size, draw.key_row)] for draw in draws]).astype(np.float64)
    queried = np.stack([draw.signs[block_column(size, draw.row)] for draw in draws]).astype(np.float64)
    same = np.array([same_column(size, draw) for draw in draws])[:, None]

    def product(row: int, block_sign: Float[np.ndarray, "draw m"] | float) -> Float[np.ndarray, "draw m"]:
        c = outputs.rows[row]
        remainder = block - keyed - block_sign
        return np.asarray(c[0] * first + c[1] * keyed + c[2] * block_sign + c[3] * remainder + c[4] * last)

    plus = (size.d - 3 + block - keyed) / 2
    minus = size.d - 3 - plus
    missing = np.where(same, 0.0, 1.0)  # the marked query leaves its block column one unmarked row short
    # Queries in the marked key's column see all other columns alike: c[2] = c[3], so any own sign serves.
    kinds = [
        (np.where(same, product(0, 0.0), product(1, queried)), np.ones_like(first)),
        (product(2, 0.0), np.broadcast_to(size.t - 1 + missing, first.shape)),
        (product(3, 1.0), size.t * plus - missing * (queried > 0)),
        (product(3, -1.0), size.t * minus - missing * (queried < 0)),
    ]
    value, largest = np.zeros(len(draws)), np.full(len(draws), -np.inf)
    for products, counts in kinds:
        value += (counts * np.maximum(products - size.tau, 0)).sum(axis=1)
        largest = np.maximum(largest, np.where(counts > 0, products, -np.inf).max(axis=1))
    return Firing(value, largest / size.unit)


def hoeffding(outputs: ClassOutputs, construction: Construction) -> float:
    """An upper bound on P(F > 0) from the rows of C, by Hoeffding's inequality for the signs of columns 1 to d - 1.

    A row passes with probability at most 1/2 sum_{s = +1, -1} exp(-(tau - s C_d - h)^2 / 2V), h = 0 and
    V = sum_{l < d} C_l^2; a term whose tau - s C_d - h is not positive is 1. The union over m columns and d - 1
    different rows is the source's. A sharper one takes all unmarked rows of a column of Y at once: they differ only by
    the sign in their own block column, so their largest product is that of one row with that sign fixed (h = C_r - C_l
    of another column l, V with C_l in its place). The smaller of the two is returned.
    """
    size = construction
    others = [(row, 0.0) for row in (*outputs.rows[: 2 if size.cross else 1], outputs.rows[2])]
    shared = sum(_passing(row, shift, size) for row, shift in others)
    each = (size.d - 3) * _passing(outputs.unmarked, 0.0, size)
    fixed = outputs.unmarked.copy()
    shift, fixed[2] = abs(fixed[2] - fixed[3]), fixed[3]
    return min(1.0, size.m * (shared + min(each, _passing(fixed, shift, size))))


def _passing(row: Float[np.ndarray, " 5"], shift: float, construction: Construction) -> float:
    variance = float(row[0] ** 2 + row[1] ** 2 + row[2] ** 2 + (construction.d - 4) * row[3] ** 2)
    total = 0.0
    for sign in (1, -1):
        distance = construction.tau - sign * float(row[4]) - shift
        if distance <= 0:
            total += 0.5
        elif variance > 0:
            total += 0.5 * math.exp(-(distance**2) / (2 * variance))
    return total


def signal_margin(outputs: ClassOutputs, construction: Construction) -> float:
    """What the marked row's large entries have above the threshold, in L: above 0, the signs can make it pass.

    C_1 + C_r + C_d - tau, r the block column of the marked row; in cross-attention the queries' and the keys' marked
    rows have different block columns but for one draw in d - 2, and both are counted.
    """
    row = outputs.rows[1] if construction.cross else outputs.marked
    large = row[0] + row[1] + row[4] + (row[2] if construction.cross else 0.0)
    return float((large - construction.tau) / construction.unit)


def missing_bound(outputs: ClassOutputs, construction: Construction) -> float:
    """An upper bound on P(F = 0): (15/16)^m where the signal margin is positive (cross: (31/32)^m), else 1.

    With probability 1/8 (cross: 1/16) a column of Y has +1 at all large entries of the marked row, and with at least
    1/2 the rest adds nothing negative; the m columns are independent.
    """
    if signal_margin(outputs, construction) <= 0:
        return 1.0
    return float((1 - 2.0 ** -(5 if construction.cross else 4)) ** construction.m)


def argument(construction: Construction, *, median: bool = False) -> float:
    """b (w + z / sqrt(d - 2)) / 0.1, below 1 where softmax should stay silent on D0.

    w = t n^(b^2) / (t n^(b^2) + n - t) is the weight of a row's own block column, z / sqrt(d - 2) the largest of the m
    random sums over the others. z = sqrt(2 log m) is the usual bound; with ``median`` it is the median of the largest
    of m / 2 normal numbers, Phi^-1(2^(-2 / m)), since only columns of Y with +1 for column d can pass. At t = 1 and
    large n this is the b / sqrt(d - 2) argument with its constant.
    """
    size = construction
    block_weight = size.t * math.exp(size.b**2 * math.log(size.n))
    weight = block_weight / (block_weight + size.n - size.t)
    z = NormalDist().inv_cdf(2 ** (-2 / max(2, size.m))) if median else math.sqrt(2 * math.log(size.m))
    return size.b * (weight + z / math.sqrt(size.d - 2)) / GAP


# 97.5th percentile of the normal distribution.
_Z = 1.959963984540054


@dataclass(frozen=True)
class Share(Interval):
    """How many of so many, as a share with its 95 % Wilson interval."""

    count: int
    of: int

    def to_json(self) -> dict[str, float]:
        """The interval and its counts."""
        return {**super().to_json(), "count": self.count, "of": self.of}


def share(count: int, of: int) -> Share:
    """The share count / of with Wilson's score interval (Wilson 1927), which stays in [0, 1] and never has width 0."""
    p, z2 = count / of, _Z * _Z
    centre = (p + z2 / (2 * of)) / (1 + z2 / of)
    half = _Z / (1 + z2 / of) * math.sqrt(p * (1 - p) / of + z2 / (4 * of * of))
    # At the ends centre and half are equal but for rounding.
    low = 0.0 if count == 0 else centre - half
    high = 1.0 if count == of else centre + half
    return Share(p, low, high, count, of)


def plain_fields(record: Any) -> dict[str, Any]:
    """The fields of a result by name, its shares as plain values."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value.to_json() if isinstance(value, Share) else value for name, value in values.items()}


@dataclass(frozen=True)
class Trial:
    """One mechanism in the network, at one construction.

    Attributes
    ----------
    fires_d0, fires_d1
        P(F > 0) on each class.
    success
        P(F = 0 on D0 and F > 0 on D1), the same signs and rows for both.
    largest_d0, largest_d1
        Mean of max (C Y) / L over draws; the threshold is c + 0.1.
    bound_d0
        Hoeffding's bound on P(F > 0) on D0; NaN where the mechanism has no classes of rows.
    margin, bound_d1
        What the marked row of D1 has above the threshold, in L, and the bound on P(F = 0) that follows; or NaN.
    form
        How it was computed: classes, distinct or dense.
    """

    mechanism: str
    fires_d0: Share
    fires_d1: Share
    success: Share
    largest_d0: float
    largest_d1: float
    bound_d0: float
    bound_d1: float
    margin: float
    form: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return plain_fields(self)


def trial(mechanism: str | Mechanism, construction: Construction, draws: Sequence[Draw]) -> Trial:
    """Run the network with one mechanism on both classes, for every draw."""
    entry = resolve(mechanism)
    if entry.missing:
        raise UnsupportedError(
            f"mechanism '{entry.name}' needs the parameters {', '.join(entry.missing)}, which the separation data "
            "do not provide; choose another mechanism, or pass them with Mechanism.with_parameters"
        )
    if not _is_order_free(entry):
        raise UnsupportedError(
            f"mechanism '{entry.label}' chooses keys by their order, and the rows of the separation data have none; "
            "choose another mechanism"
        )
    form = form_of(entry, construction)
    silent, firing = (fire(entry, construction, label, draws, form=form) for label in (0, 1))
    bound0 = bound1 = margin = math.nan
    if form == "classes":
        class0, class1 = (class_outputs(entry, construction, label) for label in (0, 1))
        bound0, bound1 = hoeffding(class0, construction), missing_bound(class1, construction)
        margin = signal_margin(class1, construction)
    d0, d1 = silent.value > 0, firing.value > 0
    name = mechanism if isinstance(mechanism, str) else entry.label
    return Trial(
        name,
        share(int(d0.sum()), len(draws)),
        share(int(d1.sum()), len(draws)),
        share(int((d1 & ~d0).sum()), len(draws)),
        float(silent.largest.mean()),
        float(firing.largest.mean()),
        bound0,
        bound1,
        margin,
        form,
    )


def trials(
    names: Iterable[str | Mechanism], construction: Construction, draws: int, *, rng: np.random.Generator
) -> tuple[Trial, ...]:
    """The same draws for every mechanism."""
    drawn = draw_many(construction, draws, rng=rng)
    return tuple(trial(name, construction, drawn) for name in as_items(names))


def computable() -> tuple[str, ...]:
    """Every registered mechanism that needs no parameters."""
    return tuple(
        name for name, mechanism in mechanisms().items() if not mechanism.missing and _is_order_free(mechanism)
    )


def _is_order_free(mechanism: Mechanism) -> bool:
    """Whether it is neither a window nor a hybrid with one."""
    return mechanism.kind not in ("window", "hybrid")


def mechanism_names(names: Sequence[str] | None) -> tuple[str, ...]:
    """The mechanisms asked for, all computable ones if none; softmax and identity always, as the source's two."""
    requests = computable() if not names else as_items(names)
    return tuple(dict.fromkeys(("softmax", "identity", *requests)))
