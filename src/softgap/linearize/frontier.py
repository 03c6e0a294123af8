"""The frontier: how many heads or KV groups can go at what rise in loss and drop in recall.

One-shot orders rank all heads once; the greedy order scores the remaining heads anew, with those swapped that went
already, whenever another share of them has gone. Every point is measured on text that neither scores nor repairs saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from softgap.attention import Mechanism
from softgap.errors import ValueInputError
from softgap.linearize.frontier_result import Frontier, Point
from softgap.linearize.heads import Head
from softgap.linearize.kept import Kept
from softgap.linearize.mean_output import mean_outputs
from softgap.linearize.orders import Unit, ordered, random_order, taken, units_of
from softgap.linearize.passages import Passages, digest_of_passages
from softgap.linearize.repair import repaired
from softgap.linearize.scores import SCORES, Scores, head_scores
from softgap.linearize.substitute import Substitute, substitute
from softgap.linearize.together import Reading, read_swapped
from softgap.linearize.tuning import tuned
from softgap.probe.calibrations import digest_of
from softgap.probe.fingerprint import model_fingerprint
from softgap.probe.models import Model
from softgap.probe.progress import Report

__all__ = ["BEST", "frontier"]

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
BEST = "gradient+fisher"
PLAIN, REPAIRED, TUNED, ABLATED = "plain", "repaired", "tuned", "ablated"


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
    tune: int = 0,
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
    tune
        Also tune every set of the first order after its repair, by so many steps (:func:`tuned`); 0 for none.
    ablation
        Also swap the sets of the first order by mean ablation.
    folder
        Where finished points wait, so that the same call goes on after an interruption.
    """
    if not orders:
        raise ValueInputError("orders must name at least one score or 'random', got none")
    units = units_of(model, by)
    counts = _counts(len(units), shares)
    one = substitute(mechanism, model)
    settings = _settings(model, fit, held_out, asked, one, by, seed)
    walk = _Walk(model, fit, held_out, asked, one, units, Kept(folder, settings), seed, tune, progress)
    walk.expect(len(counts) * (len(orders) + greedy * (1 + repair) + repair + bool(tune) + ablation))
    also = (REPAIRED,) * repair
    scored = [name for name in orders if name != "random"]
    scores = walk.scores(scored) if scored else None
    for place, name in enumerate(orders):
        order = walk.order(name, scores)
        kinds = (PLAIN, *also, *(TUNED,) * bool(tune), *(ABLATED,) * ablation) if place == 0 else (PLAIN,)
        for n in counts:
            walk.measure(name, taken(order, n), n, kinds)
    if greedy and scored:
        for n, heads in walk.greedy(scored[0], counts):
            walk.measure("greedy", heads, n, (PLAIN, *also))
    return Frontier(by, walk.original.means(), tuple(walk.points), {**settings, "orders": list(orders)})


def _counts(units: int, shares: Sequence[float]) -> list[int]:
    """How many units go at each share."""
    if not shares or min(shares) <= 0 or max(shares) > 1:
        raise ValueInputError(f"shares must be above 0 and at most 1, got {list(shares)}")
    return sorted({min(units, max(1, round(share * units))) for share in shares})


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
        tune: int,
        progress: Report,
    ) -> None:
        self._model, self._fit, self._held_out, self._asked = model, fit, held_out, asked
        self._one, self._units, self._kept, self._seed, self._progress = one, units, kept, seed, progress
        self._tune = tune
        self._ablation: Substitute | None = None
        self.original = Reading.from_json(
            kept.made("original", lambda: read_swapped(model, held_out, asked, [], None).to_json())
        )
        self.points: list[Point] = []
        self._expected = 1

    def expect(self, points: int) -> None:
        """How many points there will be, for the progress."""
        self._expected = points

    def scores(self, names: Sequence[str], swapped: Sequence[Head] = ()) -> Scores:
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

    def greedy(self, name: str, counts: Sequence[int]) -> list[tuple[int, list[Head]]]:
        """Sets that grow, each by the cheapest of what remains under the ones before."""
        gone: list[Unit] = []
        found = []
        for n in counts:
            rest = [unit for unit in self._units if unit not in gone]
            scores = self.scores([name], taken(gone, len(gone)))
            gone += ordered(rest, scores.heads, scores.mean(name))[: n - len(gone)]
            found.append((n, taken(gone, len(gone))))
        return found

    def measure(self, order: str, heads: list[Head], n: int, kinds: Sequence[str]) -> None:
        """Measure one set, plain, repaired, tuned or ablated, and note it."""
        for kind in kinds:

            def make(kind: str = kind) -> dict[str, Any]:
                used = self._used(kind, heads)
                return read_swapped(self._model, self._held_out, self._asked, heads, used).to_json()

            name = ["point", heads, kind == REPAIRED, kind == ABLATED, *([self._tune] if kind == TUNED else [])]
            reading = Reading.from_json(self._kept.made(name, make))
            change = reading.change_from(self.original, seed=self._seed)
            called = "mean_ablation" if kind == ABLATED else self._one.name + f", {kind}" * (kind != PLAIN)
            self.points.append(Point(order, called, n, len(heads), n / len(self._units), change))
            self._progress(f"{order}, {n} of {len(self._units)}", min(1.0, len(self.points) / self._expected))

    def _used(self, kind: str, heads: list[Head]) -> Substitute:
        if kind == ABLATED:
            self._ablation = self._ablation or substitute(mean_outputs(self._model, self._fit), self._model)
            return self._ablation
        if kind == PLAIN:
            return self._one
        mended = repaired(self._model, self._fit, heads, self._one)
        if kind == REPAIRED:
            return mended
        return tuned(
            self._model, self._fit, heads, mended, steps=self._tune, seed=self._seed,
            progress=lambda stage, share: self._progress(stage, len(self.points) / self._expected),
        )  # fmt: skip


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
