"""How often the network tells the classes apart: success over draws with Wilson intervals, per mechanism."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from softgap.attention import Mechanism, mechanisms, resolve
from softgap.errors import UnsupportedError
from softgap.inputs import as_items
from softgap.theory.separation.classes import class_outputs, form_of
from softgap.theory.separation.data import Construction, Draw, draw_many
from softgap.theory.separation.network import fire, hoeffding, missing_bound, signal_margin

__all__ = ["Share", "Trial", "computable", "named", "share", "trial", "trials"]

# 97.5th percentile of the normal distribution.
_Z = 1.959963984540054


@dataclass(frozen=True)
class Share:
    """How many of so many, as a share with its 95 % Wilson interval."""

    value: float
    low: float
    high: float
    count: int
    of: int


def share(count: int, of: int) -> Share:
    """The share count / of with Wilson's score interval (Wilson 1927), which stays in [0, 1] and never has width 0."""
    p, z2 = count / of, _Z * _Z
    centre = (p + z2 / (2 * of)) / (1 + z2 / of)
    half = _Z / (1 + z2 / of) * math.sqrt(p * (1 - p) / of + z2 / (4 * of * of))
    # At the ends centre and half are equal but for rounding.
    low = 0.0 if count == 0 else centre - half
    high = 1.0 if count == of else centre + half
    return Share(p, low, high, count, of)


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
        return asdict(self)


def trial(mechanism: str | Mechanism, construction: Construction, draws: Sequence[Draw]) -> Trial:
    """Run the network with one mechanism on both classes, for every draw."""
    chosen = resolve(mechanism)
    if chosen.missing:
        raise UnsupportedError(
            f"mechanism '{chosen.name}' needs the parameters {', '.join(chosen.missing)}, which the separation's data "
            "do not bring; choose another or give them with Mechanism.with_parameters"
        )
    form = form_of(chosen, construction)
    silent, firing = (fire(chosen, construction, label, draws, form=form) for label in (0, 1))
    bound0 = bound1 = margin = math.nan
    if form == "classes":
        class0, class1 = (class_outputs(chosen, construction, label) for label in (0, 1))
        bound0, bound1 = hoeffding(class0, construction), missing_bound(class1, construction)
        margin = signal_margin(class1, construction)
    d0, d1 = silent.value > 0, firing.value > 0
    name = mechanism if isinstance(mechanism, str) else chosen.name
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
    return tuple(name for name, mechanism in mechanisms().items() if not mechanism.missing)


def named(names: Sequence[str] | None) -> tuple[str, ...]:
    """The mechanisms asked for, all computable ones if none; softmax and identity always, as the source's two."""
    wanted = computable() if not names else as_items(names)
    return tuple(dict.fromkeys(("softmax", "identity", *wanted)))
