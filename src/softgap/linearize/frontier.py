"""The frontier: the rise in loss and the drop in recall by the number of swapped heads or KV groups."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from softgap.attention import Mechanism
from softgap.checkpoints import Checkpoints
from softgap.cluster import Workers, check_engine, workers_of
from softgap.deprecation import deprecated_keywords
from softgap.errors import ValueInputError
from softgap.inputs import as_items
from softgap.intervals import Interval
from softgap.intervene.substitute import Head, Substitute, substitute
from softgap.intervene.swap import heads_of_group
from softgap.linearize.baselines import EQUAL, group_bytes, window_of_equal_memory
from softgap.linearize.distil import distil_substitute
from softgap.linearize.impact import mean_outputs
from softgap.linearize.output_correction import fit_output_correction
from softgap.linearize.scores import SCORES, Scores, head_scores
from softgap.linearize.sequences import Reading, Sequences, digest_of_sequences, read_swapped
from softgap.models.fingerprint import model_fingerprint
from softgap.models.loading import Model
from softgap.models.support import check_measurable
from softgap.probe.layout import attention_layers
from softgap.progress import Progress, silent

__all__ = [
    "DEFAULT_SCORE",
    "Budget",
    "Frontier",
    "Point",
    "Unit",
    "first_heads",
    "frontier",
    "order_units",
    "random_order",
    "units_of",
]


@dataclass(frozen=True)
class Budget:
    """Both limits hold together.

    Attributes
    ----------
    loss
        Largest rise in loss, in nats per token; None does not limit it.
    recall
        Largest drop in recall, between 0 and 1; None does not limit it. Where changes come with ``recall_low``, the
        lower end of the interval of the change in recall, that end must meet the limit.
    """

    loss: float | None
    recall: float | None = None

    def __post_init__(self) -> None:
        if self.loss is not None and not 0 < self.loss < math.inf:
            raise ValueInputError(
                f"the budget must be above 0 nats per token and finite, got {self.loss:g}; 0.1 is usual"
            )
        if self.recall is not None and not 0 <= self.recall <= 1:
            raise ValueInputError(
                f"the recall budget must be between 0 and 1, the largest drop, got {self.recall:g}; 0.05 is usual"
            )

    def allows(self, change: Mapping[str, float]) -> bool:
        """Whether changes in ``loss`` and ``recall`` stay within it."""
        return not self._exceeded(change)

    def refusal(self, change: Mapping[str, float], cheapest: str) -> ValueInputError:
        """Which limits not even the cheapest set meets, in one sentence."""
        names, costs = zip(*self._exceeded(change), strict=True)
        return ValueInputError(
            f"nothing meets the {' nor the '.join(names)}: {cheapest} {' and '.join(costs)} already; allow more, or "
            "give more text"
        )

    def _exceeded(self, change: Mapping[str, float]) -> list[tuple[str, str]]:
        """Each limit that is not met, and by what."""
        exceeded = []
        if self.loss is not None and not change["loss"] <= self.loss:
            exceeded.append((f"budget of {self.loss:g} nats per token", f"costs {change['loss']:.3g}"))
        if self.recall is not None:
            if "recall" not in change and exceeded:  # the loss has decided
                return exceeded
            if "recall" not in change:
                raise ValueInputError(
                    f"a recall budget needs recall lists, and none were asked (recall budget {self.recall:g}); ask "
                    "some, or leave the recall budget out"
                )
            low = change.get("recall_low", change["recall"])
            if not -low <= self.recall:
                within = "" if low == change["recall"] else f" (up to {-low:.3g} within its interval)"
                drop = f"loses {-change['recall']:.3g} of recall{within}"
                exceeded.append((f"recall budget of {self.recall:g}", drop))
        return exceeded


@dataclass(frozen=True)
class Point:
    """One set of swapped heads.

    Attributes
    ----------
    order
        How they were chosen.
    mechanism
        What they became.
    units, heads
        How many went.
    share
        Of all heads or groups.
    change
        Rise in ``loss``, change in ``accuracy`` and in ``recall``.
    """

    order: str
    mechanism: str
    units: int
    heads: int
    share: float
    change: Mapping[str, Interval]


@dataclass(frozen=True, eq=False)
class Frontier:
    """All points, by units of heads or of groups; ``original`` is the unswapped model."""

    by: str
    original: Mapping[str, float]
    points: tuple[Point, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        points = [
            {**asdict(point), "change": {name: change.to_json() for name, change in point.change.items()}}
            for point in self.points
        ]
        return {"by": self.by, "original": dict(self.original), "points": points, "settings": dict(self.settings)}

    def curve(self, order: str, mechanism: str | None = None) -> list[Point]:
        """The points of one order, fewest swapped first."""
        return self._points(order, mechanism)

    def largest(
        self,
        budget: float,
        recall_budget: float | None = None,
        *,
        order: str | None = None,
        mechanism: str | None = None,
    ) -> Point:
        """The point with most units whose rise in loss, and drop in recall where that is limited, are allowed.

        Parameters
        ----------
        budget, recall_budget
            Largest rise in loss, in nats per token, and largest drop in recall; None does not limit it.
        order, mechanism
            Only points of these; None for all. Of equally large points the cheapest in loss is chosen.
        """
        limits = Budget(budget, recall_budget)
        points = self._points(order, mechanism)
        if not points:
            known = sorted({f"{point.order}: {point.mechanism}" for point in self.points})
            raise ValueInputError(f"this frontier has {', '.join(known)}, got {order or 'any'}: {mechanism or 'any'}")
        allowed = [point for point in points if limits.allows(_values(point))]
        if not allowed:
            raise limits.refusal(_values(points[0]), f"the smallest set ({points[0].units} {self.by})")
        return max(allowed, key=lambda point: (point.units, -point.change["loss"].value))

    def _points(self, order: str | None, mechanism: str | None) -> list[Point]:
        """Those of an order and a mechanism, fewest units first and then the cheapest."""
        matching = [p for p in self.points if order in (None, p.order) and mechanism in (None, p.mechanism)]
        return sorted(matching, key=lambda point: (point.share, point.change["loss"].value))


def _values(point: Point) -> dict[str, float]:
    return {name: interval.value for name, interval in point.change.items()}


UNITS = ("heads", "groups")


Unit = tuple[Head, ...]


"""Heads that go together: one, or all query heads of a KV head."""


def units_of(model: Model, by: str) -> list[Unit]:
    """All heads one by one, or all KV groups of a model."""
    if by not in UNITS:
        raise ValueInputError(f"by must be 'heads' or 'groups', got '{by}'")
    layers = [layer for layer in attention_layers(model) if not layer.shared]
    if by == "heads":
        return [((layer.number, head),) for layer in layers for head in range(layer.heads)]
    return [tuple(heads_of_group(model, x.number, group)) for x in layers for group in range(x.kv_heads)]


def order_units(units: Sequence[Unit], heads: Sequence[Head], score: Float[np.ndarray, " head"]) -> list[Unit]:
    """Units by the sum of their heads' scores, the cheapest first; units with heads that have no score are left out."""
    known = dict(zip(heads, map(float, score), strict=True))
    scored = [(sum(known[head] for head in unit), unit) for unit in units if all(head in known for head in unit)]
    return [unit for _, unit in sorted(scored)]


def random_order(units: Sequence[Unit], *, rng: np.random.Generator) -> list[Unit]:
    """Units in any order."""
    return [units[i] for i in rng.permutation(len(units))]


def first_heads(order: Sequence[Unit], n: int) -> list[Head]:
    """The heads of the first n units."""
    return sorted(head for unit in order[:n] for head in unit)


SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


DEFAULT_SCORE = "gradient+fisher"


RANDOM = "random"


# Settings that only what is measured depends on.
EVALUATION_SETTINGS = {"held_out", "length", "tokens", "by"}


PLAIN, CORRECTED, DISTILLED, ABLATED, WINDOW = "plain", "repaired", "tuned", "ablated", "window"


@deprecated_keywords(
    asked="recall_lists", fit_asked="fit_recall_lists", repair="correct", tune="distil", ablation="baselines"
)
def frontier(
    model: Model,
    fit: Sequences,
    held_out: Sequences,
    recall_lists: Sequences | None,
    mechanism: str | Mechanism | Substitute,
    *,
    by: str = "heads",
    orders: Sequence[str] = (DEFAULT_SCORE, "divergence", RANDOM),
    shares: Sequence[float] = SHARES,
    greedy: bool = True,
    correct: bool = True,
    distil: int = 0,
    baselines: bool = True,
    fit_recall_lists: Sequences | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
    progress: Progress = silent,
) -> Frontier:
    """Swap more and more heads, in several orders.

    Parameters
    ----------
    fit
        Sequences that scores, output corrections and mean outputs come from.
    held_out, recall_lists
        Text and recall lists that every point is measured on.
    by
        ``heads``, or ``groups``: whole KV groups, which is what saves memory.
    orders
        Names of scores (``SCORES``) and ``random``.
    shares
        Of all units, between 0 and 1.
    greedy
        Also score anew after each share, by the first of the orders that is a score.
    correct
        Also correct the outputs of every set of the first order and of the greedy one.
    distil
        Also distil every set of the first order after the output correction, by so many steps
        (``distil_substitute``); 0 for none.
    baselines
        Also swap the sets of the first order for two baselines: the heads' mean outputs (``constant``), and sinks with
        a sliding window of as many bytes as the substitute keeps. A substitute that keeps nothing, or every key, has no
        such window.
    fit_recall_lists
        Recall lists, others than ``recall_lists``, that scores and distillation count beside ``fit``: heads that text
        hardly misses may carry all of recall.
    folder
        Where finished points wait, so that the same call goes on after an interruption.
    engine
        Where heads are scored and points measured: "local", or "ray" for the workers of a Ray cluster, which load the
        model by its name. With equal threads both give the same bytes.
    address
        Of the Ray cluster; None joins the one that is running, or starts one on this machine.
    """
    check_measurable(model)
    check_engine(engine)
    orders = as_items(orders)
    if not orders:
        raise ValueInputError("orders must name at least one score or 'random', got none")
    units = units_of(model, by)
    counts = _counts(len(units), shares)
    head_substitute = substitute(mechanism, model)
    settings = _settings(model, fit, held_out, recall_lists, head_substitute, by, seed)
    if fit_recall_lists is not None:
        settings["fit_asked"] = digest_of_sequences(fit_recall_lists)
    window = window_of_equal_memory(model, head_substitute.mechanism) if baselines else None
    own_bytes = group_bytes(model, head_substitute.mechanism)
    # One key is more than some substitutes keep; a window of more memory is no baseline at equal bytes.
    too_large = window is not None and group_bytes(model, window) > EQUAL * own_bytes
    same = window is not None and window.label == head_substitute.mechanism.label
    equal = None if window is None or too_large or same else Substitute(window)
    baseline_kinds = (ABLATED,) * baselines + (WINDOW,) * (equal is not None)
    expected = len(counts) * (len(orders) + greedy * (1 + correct) + correct + bool(distil) + len(baseline_kinds))
    # Frontiers at other lengths, or by groups, have the same scores.
    score_settings = {name: value for name, value in settings.items() if name not in EVALUATION_SETTINGS}
    material = _Material(fit, fit_recall_lists, held_out, recall_lists, head_substitute, equal, distil, seed)
    finished = Checkpoints(folder, settings), Checkpoints(folder, score_settings)
    corrected_kinds = (PLAIN, *(CORRECTED,) * correct)
    with workers_of(model, engine, address) as workers:
        run = _FrontierRun(model, material, units, *finished, progress, expected, workers)
        sets = run.sets_by_order(orders, counts, (*corrected_kinds, *(DISTILLED,) * bool(distil), *baseline_kinds))
        if greedy:
            sets += run.greedy_sets(orders, counts, corrected_kinds)
        run.measure(sets, {} if workers is None else run.read_on_workers(workers, sets))
    about = {**settings, "orders": list(orders), "equal_window": None if equal is None else equal.name}
    return Frontier(by, run.original.means(), tuple(run.points), about)


def _counts(units: int, shares: Sequence[float]) -> list[int]:
    """How many units go at each share."""
    if not shares or min(shares) <= 0 or max(shares) > 1:
        raise ValueInputError(f"shares must be above 0 and at most 1, got {list(shares)}")
    return sorted({min(units, max(1, round(share * units))) for share in shares})


@dataclass(frozen=True)
class _SwappedSet:
    """Heads that go together in one point of the frontier: of which order, how many units, and what they become."""

    order: str
    heads: tuple[Head, ...]
    units: int
    kind: str


@dataclass(frozen=True, eq=False)
class _Material:
    """What a point is measured with, beside the model; a worker of a cluster is given all of it."""

    fit: Sequences
    fit_recall_lists: Sequences | None
    held_out: Sequences
    recall_lists: Sequences | None
    substitute: Substitute
    equal_window: Substitute | None
    distil: int
    seed: int
    ablation: Substitute | None = None

    def read(self, model: Model, heads: Sequence[Head], kind: str, progress: Progress = silent) -> dict[str, Any]:
        """The reading of the text and the lists with these heads swapped; with none, of the model as it is."""
        head_substitute = self._substitute_for(model, kind, heads, progress) if heads else None
        return read_swapped(model, self.held_out, self.recall_lists, heads, head_substitute).to_json()

    def _substitute_for(self, model: Model, kind: str, heads: Sequence[Head], progress: Progress) -> Substitute | None:
        if kind == WINDOW:
            return self.equal_window
        if kind == ABLATED:
            return self.ablation
        if kind == PLAIN:
            return self.substitute
        corrected = fit_output_correction(model, self.fit, heads, self.substitute)
        if kind == CORRECTED:
            return corrected
        return distil_substitute(
            model, self.fit, heads, corrected, recall_lists=self.fit_recall_lists, steps=self.distil, seed=self.seed,
            progress=progress,
        )  # fmt: skip


def _read_on_worker(model: Model, material: _Material, chosen: _SwappedSet) -> dict[str, Any]:
    """On a worker: one point."""
    return material.read(model, chosen.heads, chosen.kind)


@dataclass(eq=False)
class _FrontierRun:
    """Sets in their orders, and their points, each measured once."""

    model: Model
    material: _Material
    units: Sequence[Unit]
    checkpoints: Checkpoints
    score_checkpoints: Checkpoints
    progress: Progress
    expected: int
    workers: Workers | None = None
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        read = self.checkpoints.find_or_make("original", lambda: self.material.read(self.model, (), PLAIN))
        self.original = Reading.from_json(read)

    def _tell(self, stage: str, further: int = 0) -> None:
        self.progress(stage, min(1.0, (len(self.points) + further) / self.expected))

    def scores(self, names: Sequence[str], swapped: Sequence[Head] = ()) -> Scores:
        """Scores of all heads that are not swapped."""
        for name in names:
            if name not in SCORES:
                raise ValueInputError(f"an order is a score ({', '.join(SCORES)}) or 'random', got '{name}'")

        def make() -> dict[str, Any]:
            scores = head_scores(
                self.model, self.material.fit, self.material.substitute, recall_lists=self.material.fit_recall_lists,
                names=names, swapped=swapped, seed=self.material.seed, engine=self.workers or "local",
                progress=lambda stage, share: self._tell(stage),
            )  # fmt: skip
            return {"heads": scores.heads, "values": {name: scores.values[name].tolist() for name in names}}

        data = self.score_checkpoints.find_or_make(["scores", list(names), sorted(swapped)], make)
        heads = tuple((int(layer), int(head)) for layer, head in data["heads"])
        return Scores(heads, {name: np.asarray(values) for name, values in data["values"].items()})

    def sets_by_order(self, orders: Sequence[str], counts: Sequence[int], kinds: Sequence[str]) -> list[_SwappedSet]:
        """Sets by orders that are settled beforehand; those of the first order in all kinds."""
        named = [name for name in orders if name != RANDOM]
        scores = self.scores(named) if named else None
        sets = []
        for place, name in enumerate(orders):
            if name == RANDOM or scores is None:
                order = random_order(self.units, rng=np.random.default_rng(self.material.seed))
            else:
                order = order_units(self.units, scores.heads, scores.mean(name))
            for n in counts:
                heads = tuple(first_heads(order, n))
                sets += [_SwappedSet(name, heads, n, kind) for kind in ((PLAIN,) if place else kinds)]
        return sets

    def greedy_sets(self, orders: Sequence[str], counts: Sequence[int], kinds: Sequence[str]) -> list[_SwappedSet]:
        """Sets that grow, each by the cheapest of what remains under the ones before; by the first of the scores."""
        swapped_units: list[Unit] = []
        sets = []
        for name in [name for name in orders if name != RANDOM][:1]:
            for n in counts:
                remaining = [unit for unit in self.units if unit not in swapped_units]
                scores = self.scores([name], first_heads(swapped_units, len(swapped_units)))
                swapped_units += order_units(remaining, scores.heads, scores.mean(name))[: n - len(swapped_units)]
                heads = tuple(first_heads(swapped_units, len(swapped_units)))
                sets += [_SwappedSet("greedy", heads, n, kind) for kind in kinds]
        return sets

    def measure(self, sets: Sequence[_SwappedSet], readings: Mapping[str, dict[str, Any]]) -> None:
        """The points of sets, of which some may have been read on a cluster."""
        for chosen in sets:

            def make(chosen: _SwappedSet = chosen) -> dict[str, Any]:
                if self._key(chosen) in readings:
                    return readings[self._key(chosen)]
                self._find_ablation([chosen])
                tell: Progress = lambda stage, share: self._tell(stage)  # noqa: E731
                return self.material.read(self.model, chosen.heads, chosen.kind, tell)

            reading = Reading.from_json(self.checkpoints.find_or_make(self._name(chosen), make))
            change = reading.change_from(self.original, seed=self.material.seed)
            share = chosen.units / len(self.units)
            substitute_name = self._substitute_name(chosen.kind)
            self.points.append(Point(chosen.order, substitute_name, chosen.units, len(chosen.heads), share, change))
            self._tell(f"{chosen.order}, {chosen.units} of {len(self.units)}")

    def read_on_workers(self, workers: Workers, sets: Sequence[_SwappedSet]) -> dict[str, dict[str, Any]]:
        """The readings of all sets that are not on disk, each a task of a cluster."""
        missing = {self._key(chosen): chosen for chosen in sets if not self.checkpoints.has(self._name(chosen))}
        self._find_ablation(list(missing.values()))
        tasks = {key: (self.material, chosen) for key, chosen in missing.items()}
        readings: dict[str, dict[str, Any]] = {}
        advice = "the points measured so far are saved; run the same command again to resume"
        for key, found in workers.run(_read_on_worker, tasks, name="set", advice=advice):
            readings[key] = self.checkpoints.find_or_make(self._name(missing[key]), lambda found=found: found)  # type: ignore[misc]
            self._tell("measuring sets on the cluster", len(readings))
        return readings

    def _find_ablation(self, sets: Sequence[_SwappedSet]) -> None:
        """Mean outputs of the heads, once they are needed."""
        if self.material.ablation is None and any(chosen.kind == ABLATED for chosen in sets):
            ablation = substitute(mean_outputs(self.model, self.material.fit), self.model)
            self.material = replace(self.material, ablation=ablation)

    def _name(self, chosen: _SwappedSet) -> list[Any]:
        """What a point is called on disk."""
        kind, window = chosen.kind, self.material.equal_window
        name: list[Any] = ["point", list(chosen.heads), kind == CORRECTED, kind == ABLATED]
        name += [self.material.distil] if kind == DISTILLED else []
        return [*name, window.name] if kind == WINDOW and window is not None else name

    def _key(self, chosen: _SwappedSet) -> str:
        return json.dumps(self._name(chosen))

    def _substitute_name(self, kind: str) -> str:
        if kind == WINDOW and self.material.equal_window is not None:
            return self.material.equal_window.name
        own = self.material.substitute.name
        return "constant" if kind == ABLATED else own + f", {kind}" * (kind != PLAIN)


def _settings(
    model: Model,
    fit: Sequences,
    held_out: Sequences,
    recall_lists: Sequences | None,
    head_substitute: Substitute,
    by: str,
    seed: int,
) -> dict[str, Any]:
    return {
        "model": model.name_or_path or model.config.model_type,
        "fingerprint": model_fingerprint(model),
        "mechanism": head_substitute.name,
        "parameters": head_substitute.digest,
        "fit": digest_of_sequences(fit),
        "held_out": digest_of_sequences(*([held_out] if recall_lists is None else [held_out, recall_lists])),
        "length": int(held_out.ids.shape[1]),
        "fit_tokens": fit.tokens,
        "tokens": held_out.tokens,
        "by": by,
        "seed": seed,
    }
