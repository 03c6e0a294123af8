"""Allocate substitutes to KV groups: what each may become, what that keeps and costs, and which to take.

A KV group keeps softmax or becomes one of several options. An option keeps the same bytes at any length; softmax keeps
all keys and values of the context. Costs are scores (``softgap.linearize.scores.unit_scores``), taken as additive. At
any total of bytes the cheapest allocation then is, up to one group, one where every group takes the option with the
least

    score + lambda x bytes,

with one lambda for all groups. ``cheapest_path`` lists these allocations, from softmax everywhere to the fewest bytes:
each step moves one group along the lower convex hull of its options, the step that costs least per byte first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import rankdata

from softgap.attention import ExactSet, Mechanism, resolve
from softgap.attention.memory import SINKS, keys_worth, split_keys, trade_for_far_keys
from softgap.checkpoints import Checkpoints
from softgap.cluster import Workers
from softgap.errors import UnsupportedError, ValueInputError
from softgap.intervene.state_cache import bounded_layers
from softgap.intervene.substitute import Mixture, Substitute, Swaps
from softgap.linearize.baselines import ONLY, group_bytes
from softgap.linearize.candidates import Candidate, CandidateCosts, SearchText, largest_candidate
from softgap.linearize.frontier import Budget, Unit, units_of
from softgap.linearize.impact import mean_outputs
from softgap.linearize.plan import Plan, cache_bytes_at, kind_of, streams
from softgap.linearize.scores import unit_scores
from softgap.linearize.sequences import Sequences, context_of, digest_of_sequences
from softgap.models.loading import Model
from softgap.models.tensor_files import calibrated_mechanisms, equip_mechanism
from softgap.probe.layout import attention_layers, head_dim
from softgap.progress import Progress, partial_progress

__all__ = [
    "CONTEXT",
    "SOFTMAX",
    "Allocations",
    "Menu",
    "calibrated_options",
    "cheapest_path",
    "choose_allocation",
    "default_options",
    "larger_rank",
    "original_cache_bytes",
    "pure_plans",
    "score_options",
]

CONTEXT = 8192
"""Tokens at which bytes are counted, unless said otherwise."""

SOFTMAX = -1
"""The choice of a group that keeps its softmax."""


WITH_FAR_KEYS = " with far keys"
# Groups that keep softmax where no allocation keeps enough recall, tried in turn.
KEPT: tuple[int, ...] = (6, 12, 24)
# Windows with fewer keys have none to spare for far keys.
FEWEST_TO_TRADE = 32


def cheapest_path(
    scores: Float[np.ndarray, "option unit"], sizes: Float[np.ndarray, " option"], softmax_size: float
) -> list[Int[np.ndarray, " unit"]]:
    """For every unit its option, or ``SOFTMAX``, step by step from softmax everywhere to the fewest bytes.

    Parameters
    ----------
    scores
        What each option costs in each unit; softmax costs 0.
    sizes
        Bytes that an option keeps per unit.
    softmax_size
        Bytes that softmax keeps per unit. Options that keep as much are never taken.

    Examples
    --------
    Two units: the first hardly misses its softmax, the second does.

    >>> import numpy as np
    >>> scores = np.array([[0.01, 0.5], [0.02, 2.0]])
    >>> for choice in cheapest_path(scores, np.array([64.0, 0.0]), 1000.0):
    ...     print(choice)
    [-1 -1]
    [ 0 -1]
    [ 1 -1]
    [1 0]
    [1 1]
    """
    steps = []
    for unit in range(scores.shape[1]):
        hull = _lower_hull(scores[:, unit], softmax_size - sizes)
        steps += [(slope, place, unit, option) for place, (slope, option) in enumerate(hull)]
    choice = np.full(scores.shape[1], SOFTMAX)
    path = [choice]
    for _, _, unit, option in sorted(steps):
        choice = choice.copy()
        choice[unit] = option
        path.append(choice)
    return path


def _lower_hull(scores: Float[np.ndarray, " option"], saved: Float[np.ndarray, " option"]) -> list[tuple[float, int]]:
    """The options on the lower convex hull of (bytes saved, score), with the slope of the edge that leads to each."""
    order = sorted((i for i in range(len(scores)) if saved[i] > 0), key=lambda i: (saved[i], scores[i]))
    hull: list[tuple[float, int]] = []
    for option in order:
        while True:
            last = hull[-1][1] if hull else SOFTMAX
            x, y = (0.0, 0.0) if last == SOFTMAX else (float(saved[last]), float(scores[last]))
            if saved[option] == x:  # as many bytes as the last one, and no better
                break
            slope = (float(scores[option]) - y) / (float(saved[option]) - x)
            if hull and slope <= hull[-1][0]:
                hull.pop()
                continue
            hull.append((slope, option))
            break
    return hull


@dataclass(frozen=True, eq=False)
class Allocations:
    """The cheapest allocations of some options, from softmax everywhere to the fewest bytes."""

    menu: Menu
    path: Sequence[Int[np.ndarray, " unit"]]

    def __len__(self) -> int:
        return len(self.path)

    def nbytes(self, step: int) -> float:
        """Bytes that all units keep at a step of the path."""
        choice = self.path[step]
        return float(np.where(choice == SOFTMAX, self.menu.softmax_size, self.menu.sizes[choice]).sum())

    def within(self, budget: float) -> int | None:
        """The first step whose bytes stay within a budget; None where no step does."""
        return next((step for step in range(len(self)) if self.nbytes(step) <= budget), None)

    def candidate(self, step: int) -> Candidate:
        """The heads that are swapped at a step, with what they become."""
        choice = self.path[step]
        parts = []
        for number, option in enumerate(self.menu.options):
            chosen = np.flatnonzero(choice == number).tolist()
            if chosen:
                parts.append((sorted(head for unit in chosen for head in self.menu.units[unit]), option.mechanism))
        heads = sorted(head for part, _ in parts for head in part)
        return Candidate(tuple(heads), Mixture(parts) if parts else self.menu.options[0])


@dataclass(frozen=True, eq=False)
class Menu:
    """What the KV groups of a model may become.

    Attributes
    ----------
    units
        The heads of each KV group whose cache grows with the text.
    options
        What groups may become; all live in a state of constant size.
    sizes
        Bytes per group that each option keeps.
    softmax_size
        Bytes per group that softmax keeps at ``context`` tokens.
    context
        Tokens at which bytes are counted.
    """

    units: tuple[Unit, ...]
    options: tuple[Substitute, ...]
    sizes: Float[np.ndarray, " option"]
    softmax_size: float
    context: int

    @classmethod
    def of(cls, model: Model, options: Sequence[Substitute], context: int | None = None) -> Menu:
        """The menu of a model; ``context`` is 8,192 or the model's context where it is None."""
        for option in options:
            if not streams(option):
                raise UnsupportedError(
                    f"mechanism '{option.name}' keeps every key, so that it saves no bytes; choose among mechanisms "
                    "with a state of constant size, such as window, fitted or elu1"
                )
        units = _growing_units(model)
        if not units:
            raise UnsupportedError(
                "no layer of this model has a cache that grows with the text, so there are no bytes to save"
            )
        length = context or default_context(model)
        sizes = np.array([group_bytes(model, option.mechanism) for option in options])
        return cls(units, tuple(options), sizes, original_cache_bytes(model, length) / len(units), length)

    @property
    def original_bytes(self) -> float:
        """Bytes of the whole cache with softmax everywhere."""
        return self.softmax_size * len(self.units)

    def check_budget(self, budget_bytes: float) -> None:
        """Raise unless some allocation meets a byte budget, and softmax everywhere does not."""
        where = f"at {self.context:,} tokens"
        if budget_bytes >= self.original_bytes:
            raise ValueInputError(
                f"the model's own cache takes {self.original_bytes:,.0f} bytes {where}, which the byte budget of "
                f"{budget_bytes:,.0f} allows already; give a smaller one"
            )
        least = min(float(self.sizes.min()), self.softmax_size) * len(self.units)
        if budget_bytes < least:
            raise ValueInputError(
                f"nothing meets the byte budget of {budget_bytes:,.0f}: the least that these mechanisms keep is "
                f"{least:,.0f} bytes {where}; allow more, or add a smaller mechanism"
            )

    @property
    def kinds(self) -> list[str]:
        """The kind of each option: constant, window, hybrid (those with far keys apart), or the name."""
        return [
            f"{kind_of(option.mechanism)}{WITH_FAR_KEYS if option.mechanism.options.get('far') else ''}"
            for option in self.options
        ]

    def allocations(
        self, scores: Float[np.ndarray, "option unit"], kind: str | None = None, *, kept: int = 0
    ) -> Allocations:
        """The cheapest allocations of all options, or of those of one kind.

        The ``kept`` groups that miss softmax most keep it: those with the largest mean rank over all options. An option
        with far keys costs little on the lists that score it, and ranks a group that recall needs too low.
        """
        sizes = self.sizes
        if kind is not None:
            # What keeps as much as softmax is never taken.
            own = np.array([name == kind for name in self.kinds])
            sizes = np.where(own, sizes, self.softmax_size)
        ranks = rankdata(scores, axis=1).mean(axis=0)
        free = np.sort(np.argsort(-ranks, kind="stable")[kept:])
        path = []
        for choice in cheapest_path(scores[:, free], sizes, self.softmax_size):
            whole = np.full(len(ranks), SOFTMAX)
            whole[free] = choice
            path.append(whole)
        return Allocations(self, path)


def _growing_units(model: Model) -> tuple[Unit, ...]:
    """The KV groups of layers whose cache grows with the text."""
    bounded = bounded_layers(model)
    return tuple(unit for unit in units_of(model, "groups") if unit[0][0] not in bounded)


def default_context(model: Model) -> int:
    """Tokens at which bytes are counted: 8,192, or the model's context where that is shorter."""
    return min(CONTEXT, context_of(model) or CONTEXT)


def original_cache_bytes(model: Model, context: int | None = None) -> float:
    """Bytes of the KV cache of one sequence that grow with the text, at a context of so many tokens."""
    per_token = 2.0 * head_dim(model) * model.dtype.itemsize
    return per_token * len(_growing_units(model)) * (context or default_context(model))


def default_options(model: Model, fit: Sequences) -> list[Substitute]:
    """A constant, windows from a quarter of the usual memory to half of the sequences, the fitted map and hybrids.

    Windows and hybrids come twice: with recent keys alone, and with half of them traded for far keys. Fitted map and
    hybrids need a calibration; without one the constant is the mean output over ``fit``. Windows of more than half the
    sequences are left out: such sequences cannot tell them from softmax.
    """
    longest = fit.ids.shape[1] // 2
    if calibrated_mechanisms(model):
        return calibrated_options(model, partial(equip_mechanism, model=model), longest)
    windows = _and_far_keys(model, [_window_of(keys) for keys in _sizes(64, longest)])
    return [Substitute(mean_outputs(model, fit)), *windows]


def _sizes(worth: int, longest: int) -> list[int]:
    """A quarter of a number of keys, as many, four times and sixteen times, but at most ``longest``."""
    return sorted({min(keys, longest) for keys in (worth // 4, worth, 4 * worth, 16 * worth)} - {0, 1})


def calibrated_options(model: Model, equip: Callable[[str], Mechanism], longest: int) -> list[Substitute]:
    """The options that a calibration has; ``equip`` gives its mechanisms by name, ``longest`` bounds windows."""
    constant, fitted, hybrid = (equip(name) for name in ("constant", "fitted", "hybrid"))
    worth = round(keys_worth(fitted, head_dim(model), kv_heads=attention_layers(model)[0].kv_heads))
    sizes = _sizes(worth, longest)
    own = int(hybrid.options["w"])
    hybrids = [hybrid.configure(w=own + keys - worth) for keys in sizes if keys >= worth]
    sinks = int(hybrid.options["sinks"])
    windows = _and_far_keys(model, [_window_of(keys, sinks) for keys in sizes])
    return [Substitute(constant), *windows, Substitute(fitted), *_and_far_keys(model, hybrids)]


def _window_of(keys: int, sinks: int = SINKS) -> Mechanism:
    """The window that keeps so many keys, a few of them at the beginning of the text."""
    recent, sinks = split_keys(keys, sinks=sinks)
    return resolve(f"window:w={recent},sinks={sinks}")


def _and_far_keys(model: Model, mechanisms: Sequence[Mechanism]) -> list[Substitute]:
    """Windows or hybrids, and those of them with far keys that keep as much."""
    dim = head_dim(model)
    wide = [mechanism for mechanism in mechanisms if ExactSet.of(mechanism.options).size >= FEWEST_TO_TRADE]
    return [Substitute(mechanism) for mechanism in (*mechanisms, *(trade_for_far_keys(each, dim) for each in wide))]


def score_options(
    model: Model,
    text: SearchText,
    menu: Menu,
    checkpoints: Checkpoints,
    progress: Progress,
    seed: int,
    workers: Workers | None = None,
) -> Float[np.ndarray, "option unit"]:
    """What every option costs in every unit: by the text, or by the recall lists where these miss it more."""

    def scored(sequences: Sequences, share: tuple[float, float]) -> np.ndarray:
        told = partial_progress(progress, *share)
        # Slopes are noise where a swap costs little, and whoever takes the least of many options takes the luckiest.
        _, curvature = unit_scores(
            model, sequences, menu.options, menu.units, seed=seed, workers=workers, progress=told
        )
        means: np.ndarray = curvature.mean(axis=-1)
        return means

    def make() -> dict[str, Any]:
        scores = scored(text.fit, (0.0, 0.3 if text.fit_recall_lists is None else 0.2))
        if text.fit_recall_lists is not None:
            # The first token of an answer asks for recall; the others may follow from it.
            lists = text.fit_recall_lists
            recall = scored(lists if lists.first is None else replace(lists, scored=lists.first), (0.2, 0.3))
            scores = larger_rank(scores, recall)
        return {"scores": scores.tolist()}

    lists = "" if text.fit_recall_lists is None else digest_of_sequences(text.fit_recall_lists)
    return np.asarray(checkpoints.find_or_make(["option scores", lists], make)["scores"])


def larger_rank(
    scores: Float[np.ndarray, "option unit"], others: Float[np.ndarray, "option unit"]
) -> Float[np.ndarray, "option unit"]:
    """The larger of two scores by rank, in the units of the first: the others get the values of its ranks.

    A sum would let the one with the longer tail decide alone: one KV group can carry most of recall.

    Examples
    --------
    >>> import numpy as np
    >>> larger_rank(np.array([[0.1, 0.2, 0.3]]), np.array([[5.0, 70.0, 6.0]]))
    array([[0.1, 0.3, 0.3]])
    """
    ranks = rankdata(others, method="min").astype(int) - 1
    mapped: np.ndarray = np.sort(scores, axis=None)[ranks].reshape(scores.shape)
    larger: np.ndarray = np.maximum(scores, mapped)
    return larger


def choose_allocation(
    costs: CandidateCosts,
    menu: Menu,
    scores: Float[np.ndarray, "option unit"],
    limits: Budget,
    budget_bytes: float | None,
    progress: Progress,
) -> tuple[Candidate, dict[str, Any]]:
    """The allocation for a budget, and how it was chosen.

    Within a byte budget the allocation of all options is compared with those of one kind each, and the best is taken.
    If none of them stays within the limits, the best one is tried again with softmax in the groups that miss it most.
    """
    mixed = menu.allocations(scores)
    about = {"context": menu.context, "budget_bytes": budget_bytes}
    if budget_bytes is None:
        found = largest_candidate(
            costs, len(mixed), mixed.candidate, limits, first="the cheapest allocation",
            words=lambda step: f"{mixed.nbytes(step) / menu.original_bytes:.0%} of the bytes fit the budget",
            progress=progress,
        )  # fmt: skip
        return found, about
    menu.check_budget(budget_bytes)
    step = next((step for step in range(len(mixed)) if mixed.nbytes(step) <= budget_bytes), len(mixed) - 1)
    candidates = {"mixed": mixed.candidate(step)}
    for kind in dict.fromkeys(menu.kinds):
        pure = menu.allocations(scores, kind)
        own_step = pure.within(budget_bytes)
        if own_step is not None:
            candidates.setdefault(kind, pure.candidate(own_step))
    changes = {}
    for number, (name, candidate) in enumerate(candidates.items()):
        progress(f"comparing allocations: {name}", 0.3 + 0.6 * number / len(candidates))
        changes[name] = costs.change(candidate)
    if not any(limits.allows(change) for change in changes.values()):
        cheapest = min(changes, key=lambda name: changes[name]["loss"])
        for kept in KEPT:
            spared = menu.allocations(scores, None if cheapest == "mixed" else cheapest, kept=kept)
            own_step = spared.within(budget_bytes)
            if own_step is None:
                break
            name = f"{cheapest}, softmax in {kept} groups"
            progress(f"comparing allocations: {name}", 0.9)
            candidates[name] = spared.candidate(own_step)
            changes[name] = costs.change(candidates[name])
            if limits.allows(changes[name]):
                break
    allowed = {name: change for name, change in changes.items() if limits.allows(change)}
    if not allowed:
        raise limits.refusal(changes["mixed"], f"the cheapest allocation of {budget_bytes:,.0f} bytes")
    best = min(allowed, key=lambda name: allowed[name]["loss"])
    rises = {name: change["loss"] for name, change in changes.items()}
    return candidates[best], {**about, "chosen": best, "rise_by_kind": rises}


def pure_plans(menu: Menu, scores: Float[np.ndarray, "option unit"], plan: Plan) -> dict[str, Swaps]:
    """For every kind of substitute the allocation of that kind alone that keeps no more bytes than the plan.

    Constants are left out: they have a row with the plan's own groups, and cost a hundred times as much.
    """
    own = cache_bytes_at(plan.memory, menu.context)
    plans = {}
    for kind in dict.fromkeys(kind for kind in menu.kinds if kind != "constant"):
        pure = menu.allocations(scores, kind)
        step = pure.within(own)
        if step:
            candidate = pure.candidate(step)
            plans[f"{ONLY} {kind}"] = candidate.plain.swaps(candidate.heads)
    return plans
