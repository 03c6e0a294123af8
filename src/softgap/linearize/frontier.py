"""The frontier: how many heads or KV groups can go at what rise in loss and drop in recall.

One-shot orders rank all heads once; the greedy order scores the remaining heads anew, with those swapped that went
already, whenever another share of them has gone. Every point is measured on text that neither scores nor repairs saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from softgap.attention import Mechanism
from softgap.errors import ValueInputError
from softgap.inputs import as_items
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
from softgap.probe.fingerprint import model_fingerprint
from softgap.probe.models import Model
from softgap.probe.progress import Report
from softgap.probe.support import check_measurable

__all__ = ["BEST", "frontier"]

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
BEST = "gradient+fisher"
RANDOM = "random"
# Settings that only what is measured depends on.
MEASURED = {"held_out", "length", "tokens", "by"}
PLAIN, REPAIRED, TUNED, ABLATED = "plain", "repaired", "tuned", "ablated"


def frontier(
    model: Model,
    fit: Passages,
    held_out: Passages,
    asked: Passages | None,
    mechanism: str | Mechanism | Substitute,
    *,
    by: str = "heads",
    orders: Sequence[str] = (BEST, "divergence", RANDOM),
    shares: Sequence[float] = SHARES,
    greedy: bool = True,
    repair: bool = True,
    tune: int = 0,
    ablation: bool = True,
    fit_asked: Passages | None = None,
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
    fit_asked
        Lookups, others than ``asked``, that scores and tuning count beside ``fit``: heads that text hardly misses may
        be all of recall.
    folder
        Where finished points wait, so that the same call goes on after an interruption.
    """
    check_measurable(model)
    orders = as_items(orders)
    if not orders:
        raise ValueInputError("orders must name at least one score or 'random', got none")
    units = units_of(model, by)
    counts = _counts(len(units), shares)
    one = substitute(mechanism, model)
    settings = _settings(model, fit, held_out, asked, one, by, seed)
    if fit_asked is not None:
        settings["fit_asked"] = digest_of_passages(fit_asked)
    expected = len(counts) * (len(orders) + greedy * (1 + repair) + repair + bool(tune) + ablation)
    # Frontiers at other lengths, or by groups, have the same scores.
    scored = Kept(folder, {name: value for name, value in settings.items() if name not in MEASURED})
    walk = _Walk(
        model, fit, fit_asked, held_out, asked, one, units, Kept(folder, settings), scored, seed, tune, progress,
        expected,
    )  # fmt: skip
    also = (PLAIN, *(REPAIRED,) * repair)
    walk.one_shot(orders, counts, (*also, *(TUNED,) * bool(tune), *(ABLATED,) * ablation))
    if greedy:
        walk.greedy(orders, counts, also)
    return Frontier(by, walk.original.means(), tuple(walk.points), {**settings, "orders": list(orders)})


def _counts(units: int, shares: Sequence[float]) -> list[int]:
    """How many units go at each share."""
    if not shares or min(shares) <= 0 or max(shares) > 1:
        raise ValueInputError(f"shares must be above 0 and at most 1, got {list(shares)}")
    return sorted({min(units, max(1, round(share * units))) for share in shares})


@dataclass(eq=False)
class _Walk:
    """Points that are measured one after the other, each once."""

    model: Model
    fit: Passages
    fit_asked: Passages | None
    held_out: Passages
    asked: Passages | None
    one: Substitute
    units: Sequence[Unit]
    kept: Kept
    scored: Kept
    seed: int
    tune: int
    progress: Report
    expected: int
    points: list[Point] = field(default_factory=list)
    ablation: Substitute | None = None

    def __post_init__(self) -> None:
        self.original = Reading.from_json(self.kept.made("original", lambda: self._read([], None)))

    def _read(self, heads: list[Head], used: Substitute | None) -> dict[str, Any]:
        return read_swapped(self.model, self.held_out, self.asked, heads, used).to_json()

    def _tell(self, stage: str) -> None:
        self.progress(stage, min(1.0, len(self.points) / self.expected))

    def scores(self, names: Sequence[str], swapped: Sequence[Head] = ()) -> Scores:
        """Scores of all heads that are not swapped."""
        for name in names:
            if name not in SCORES:
                raise ValueInputError(f"an order is a score ({', '.join(SCORES)}) or 'random', got '{name}'")

        def make() -> dict[str, Any]:
            found = head_scores(
                self.model, self.fit, self.one, asked=self.fit_asked, names=names, swapped=swapped, seed=self.seed,
                progress=lambda stage, share: self._tell(stage),
            )  # fmt: skip
            return {"heads": found.heads, "values": {name: found.values[name].tolist() for name in names}}

        data = self.scored.made(["scores", list(names), sorted(swapped)], make)
        heads = tuple((int(layer), int(head)) for layer, head in data["heads"])
        return Scores(heads, {name: np.asarray(values) for name, values in data["values"].items()})

    def one_shot(self, orders: Sequence[str], counts: Sequence[int], kinds: Sequence[str]) -> None:
        """Sets by orders that are settled beforehand; those of the first order in all kinds."""
        named = [name for name in orders if name != RANDOM]
        scores = self.scores(named) if named else None
        for place, name in enumerate(orders):
            if name == RANDOM or scores is None:
                order = random_order(self.units, rng=np.random.default_rng(self.seed))
            else:
                order = ordered(self.units, scores.heads, scores.mean(name))
            for n in counts:
                self.measure(name, taken(order, n), n, (PLAIN,) if place else kinds)

    def greedy(self, orders: Sequence[str], counts: Sequence[int], kinds: Sequence[str]) -> None:
        """Sets that grow, each by the cheapest of what remains under the ones before; by the first of the scores."""
        gone: list[Unit] = []
        for name in [name for name in orders if name != RANDOM][:1]:
            for n in counts:
                rest = [unit for unit in self.units if unit not in gone]
                scores = self.scores([name], taken(gone, len(gone)))
                gone += ordered(rest, scores.heads, scores.mean(name))[: n - len(gone)]
                self.measure("greedy", taken(gone, len(gone)), n, kinds)

    def measure(self, order: str, heads: list[Head], n: int, kinds: Sequence[str]) -> None:
        """Measure one set, plain, repaired, tuned or ablated, and note it."""
        for kind in kinds:

            def make(kind: str = kind) -> dict[str, Any]:
                return self._read(heads, self._used(kind, heads))

            name = ["point", heads, kind == REPAIRED, kind == ABLATED, *([self.tune] if kind == TUNED else [])]
            reading = Reading.from_json(self.kept.made(name, make))
            change = reading.change_from(self.original, seed=self.seed)
            called = "mean_ablation" if kind == ABLATED else self.one.name + f", {kind}" * (kind != PLAIN)
            self.points.append(Point(order, called, n, len(heads), n / len(self.units), change))
            self._tell(f"{order}, {n} of {len(self.units)}")

    def _used(self, kind: str, heads: list[Head]) -> Substitute:
        if kind == ABLATED:
            self.ablation = self.ablation or substitute(mean_outputs(self.model, self.fit), self.model)
            return self.ablation
        if kind == PLAIN:
            return self.one
        mended = repaired(self.model, self.fit, heads, self.one)
        if kind == REPAIRED:
            return mended
        return tuned(
            self.model, self.fit, heads, mended, asked=self.fit_asked, steps=self.tune, seed=self.seed,
            progress=lambda stage, share: self._tell(stage),
        )  # fmt: skip


def _settings(
    model: Model, fit: Passages, held_out: Passages, asked: Passages | None, one: Substitute, by: str, seed: int
) -> dict[str, Any]:
    return {
        "model": model.name_or_path or model.config.model_type,
        "fingerprint": model_fingerprint(model),
        "mechanism": one.name,
        "parameters": one.digest,
        "fit": digest_of_passages(fit),
        "held_out": digest_of_passages(*([held_out] if asked is None else [held_out, asked])),
        "length": int(held_out.ids.shape[1]),
        "fit_tokens": fit.tokens,
        "tokens": held_out.tokens,
        "by": by,
        "seed": seed,
    }
