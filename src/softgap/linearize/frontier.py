"""The frontier: how many heads or KV groups can go at what rise in loss and drop in recall.

One-shot orders rank all heads once; the greedy order scores the remaining heads anew, with those swapped that went
already, whenever another share of them has gone. Every point is measured on text that neither scores nor repairs saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from softgap.attention import Mechanism
from softgap.errors import ValueInputError
from softgap.linearize.kept import Kept
from softgap.linearize.mean_output import mean_outputs
from softgap.linearize.orders import Unit, ordered, random_order, taken, units_of
from softgap.linearize.passages import Passages, digest_of_passages
from softgap.linearize.repair import repaired
from softgap.linearize.resampling import Interval
from softgap.linearize.scores import SCORES, Scores, head_scores
from softgap.linearize.substitute import Substitute, substitute
from softgap.linearize.together import Reading, read_swapped
from softgap.probe.calibrations import digest_of
from softgap.probe.fingerprint import model_fingerprint
from softgap.probe.models import Model
from softgap.probe.progress import Report

__all__ = ["Frontier", "Point", "frontier"]

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
BEST = "gradient+fisher"


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
        points = [asdict(point) for point in self.points]
        return {"by": self.by, "original": dict(self.original), "points": points, "settings": dict(self.settings)}

    def curve(self, order: str, mechanism: str | None = None) -> list[Point]:
        """The points of one order, fewest swapped first."""
        chosen = [p for p in self.points if p.order == order and mechanism in (None, p.mechanism)]
        return sorted(chosen, key=lambda point: point.share)


def frontier(
    model: Model,
    fit: Passages,
    held_out: Passages,
    asked: Passages | None,
    mechanism: str | Mechanism | Substitute,
    *,
    by: str = "heads",
    orders: Sequence[str] = (BEST, "divergence", "random"),
    shares: Sequence[float] = SHARES,
    greedy: bool = True,
    repair: bool = True,
    ablation: bool = True,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Report = lambda stage, fraction: None,
) -> Frontier:
    """Swap more and more heads, in several orders.

    Parameters
    ----------
    fit
        Passages that scores, repairs and mean outputs come from.
    held_out, asked
        Passages and lookups that every point is measured on.
    by
        ``heads``, or ``groups``: whole KV groups, which is what saves memory.
    orders
        Names of scores (:data:`SCORES`) and ``random``.
    shares
        Of all units, between 0 and 1.
    greedy
        Also score anew after each share, by the first of the orders that is a score.
    repair
        Also repair every set of the first order and of the greedy one.
    ablation
        Also swap the sets of the first order by mean ablation.
    folder
        Where finished points wait, so that the same call goes on after an interruption.
    """
    units = units_of(model, by)
    counts = sorted({min(len(units), max(1, round(share * len(units)))) for share in shares})
    if not shares or min(shares) <= 0 or max(shares) > 1:
        raise ValueInputError(f"shares must be above 0 and at most 1, got {list(shares)}")
    if not orders:
        raise ValueInputError("orders must name at least one score or 'random', got none")
    one = substitute(mechanism, model)
    settings = _settings(model, fit, held_out, asked, one, by, seed)
    walk = _Walk(model, fit, held_out, asked, one, units, Kept(folder, settings), seed, progress)
    walk.expect(len(counts) * (len(orders) + greedy * (1 + repair) + repair + ablation))
    names = [name for name in orders if name != "random"]
    scores = walk.scores(names) if names else None
    for place, name in enumerate(orders):
        order = walk.order(name, scores)
        for n in counts:
            walk.point(name, taken(order, n), n)
            if place == 0 and repair:
                walk.point(name, taken(order, n), n, mended=True)
            if place == 0 and ablation:
                walk.point(name, taken(order, n), n, ablated=True)
    if greedy and names:
        for n, heads in walk.greedy(names[0], counts):
            walk.point("greedy", heads, n)
            if repair:
                walk.point("greedy", heads, n, mended=True)
    return Frontier(by, walk.original.means(), tuple(walk.points), {**settings, "orders": list(orders)})


class _Walk:
    """Points that are measured one after the other, each once."""

    def __init__(
        self,
        model: Model,
        fit: Passages,
        held_out: Passages,
        asked: Passages | None,
        one: Substitute,
        units: Sequence[Unit],
        kept: Kept,
        seed: int,
        progress: Report,
    ) -> None:
        self._model, self._fit, self._held_out, self._asked = model, fit, held_out, asked
        self._one, self._units, self._kept, self._seed, self._progress = one, units, kept, seed, progress
        self._ablation: Substitute | None = None
        self.original = Reading.from_json(
            kept.made("original", lambda: read_swapped(model, held_out, asked, [], None).to_json())
        )
        self.points: list[Point] = []
        self._expected = 1

    def expect(self, points: int) -> None:
        """How many points there will be, for the progress."""
        self._expected = points

    def scores(self, names: Sequence[str], swapped: Sequence[tuple[int, int]] = ()) -> Scores:
        """Scores of all heads that are not swapped."""
        for name in names:
            if name not in SCORES:
                raise ValueInputError(f"an order is a score ({', '.join(SCORES)}) or 'random', got '{name}'")

        def make() -> dict[str, Any]:
            found = head_scores(
                self._model, self._fit, self._one, names=names, swapped=swapped, seed=self._seed,
                progress=lambda stage, share: self._progress(stage, len(self.points) / self._expected),
            )  # fmt: skip
            return {"heads": found.heads, "values": {name: found.values[name].tolist() for name in names}}

        data = self._kept.made(["scores", list(names), sorted(swapped)], make)
        heads = tuple((int(layer), int(head)) for layer, head in data["heads"])
        return Scores(heads, {name: np.asarray(values) for name, values in data["values"].items()})

    def order(self, name: str, scores: Scores | None) -> list[Unit]:
        """All units, cheapest first."""
        if name == "random" or scores is None:
            return random_order(self._units, rng=np.random.default_rng(self._seed))
        return ordered(self._units, scores.heads, scores.mean(name))

    def greedy(self, name: str, counts: Sequence[int]) -> list[tuple[int, list[tuple[int, int]]]]:
        """Sets that grow, each by the cheapest of what remains under the ones before."""
        gone: list[Unit] = []
        found = []
        for n in counts:
            rest = [unit for unit in self._units if unit not in gone]
            scores = self.scores([name], taken(gone, len(gone)))
            gone += ordered(rest, scores.heads, scores.mean(name))[: n - len(gone)]
            found.append((n, taken(gone, len(gone))))
        return found

    def point(
        self, order: str, heads: list[tuple[int, int]], n: int, *, mended: bool = False, ablated: bool = False
    ) -> None:
        """Measure one set and note it."""
        chosen = self._one
        if ablated:
            self._ablation = self._ablation or substitute(mean_outputs(self._model, self._fit), self._model)
            chosen = self._ablation

        def make() -> dict[str, Any]:
            used = repaired(self._model, self._fit, heads, chosen) if mended else chosen
            return read_swapped(self._model, self._held_out, self._asked, heads, used).to_json()

        reading = Reading.from_json(self._kept.made(["point", heads, mended, ablated], make))
        name = f"{chosen.name}, repaired" if mended else chosen.name
        change = reading.change_from(self.original, seed=self._seed)
        self.points.append(Point(order, name, n, len(heads), n / len(self._units), change))
        self._progress(f"{order}, {n} of {len(self._units)}", min(1.0, len(self.points) / self._expected))


def _settings(
    model: Model, fit: Passages, held_out: Passages, asked: Passages | None, one: Substitute, by: str, seed: int
) -> dict[str, Any]:
    return {
        "model": model.name_or_path or model.config.model_type,
        "fingerprint": model_fingerprint(model),
        "mechanism": one.name,
        "parameters": digest_of(dict(one.mechanism.parameters)) if one.mechanism.parameters else "",
        "fit": digest_of_passages(fit),
        "held_out": digest_of_passages(*([held_out] if asked is None else [held_out, asked])),
        "length": int(held_out.ids.shape[1]),
        "fit_tokens": fit.tokens,
        "tokens": held_out.tokens,
        "by": by,
        "seed": seed,
    }
