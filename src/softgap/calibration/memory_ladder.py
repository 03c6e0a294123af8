"""The ladder at equal memory: window, fitted map and hybrid at 16 to 256 keys' worth per KV head, in a few layers.

Two choices are free at a given memory: how many sinks a window keeps, and how a hybrid divides its memory between
features and exact keys. Both are made on text of the fit, for all layers and heads together. The share of the gap that
the chosen substitutes close is then measured on held-out text. Fits are short, so the ladder compares substitutes with
each other, not with the fit of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float

from softgap.attention import ExactSet, Mechanism, resolve
from softgap.attention.memory import features_worth, keys_worth, split_keys, split_memory
from softgap.calibration.activations import Activations
from softgap.calibration.fit import FEWEST_FEATURES, Recipe, fit_maps
from softgap.calibration.held_out import FIRST, HeldLayer, divergences, gap_closed
from softgap.errors import ValueInputError
from softgap.intervals import Interval

__all__ = ["KEYS", "SUBSTITUTES", "MemoryEntry", "MemoryLadder", "MemoryRung", "climb_memory"]

# Keys with their values that every substitute of a rung is worth.
KEYS = (16, 32, 64, 128, 256)

# Numbers of sinks tried for a window, and shares of a hybrid's memory tried for its features.
SINKS = (0, 1, 4, 8, 16)
SHARES = (0.25, 0.5, 0.75)

STEPS = 75

SUBSTITUTES = ("window", "fitted", "hybrid")


@dataclass(frozen=True)
class MemoryEntry:
    """One substitute at one memory.

    Attributes
    ----------
    features, recent, sinks
        What it keeps per KV head; 0 of what it does not have.
    keys_worth
        The same in keys with their values.
    gap_closed
        Share of the gap that it closes on held-out text, from position 64 on.
    choices
        Share of the gap that each choice closes on text of the fit: by the number of sinks of a window, and by the
        share of the memory that goes to a hybrid's features. The best one was taken.
    """

    features: int
    recent: int
    sinks: int
    keys_worth: float
    gap_closed: Interval
    choices: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "gap_closed": self.gap_closed.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MemoryEntry:
        """From plain data."""
        kept = {name: int(data[name]) for name in ("features", "recent", "sinks")}
        choices = {str(name): float(value) for name, value in data["choices"].items()}
        return cls(
            **kept, keys_worth=float(data["keys_worth"]), gap_closed=Interval(**data["gap_closed"]), choices=choices
        )


@dataclass(frozen=True)
class MemoryRung:
    """Window, fitted map and hybrid that keep as much per KV head as ``keys`` keys with their values."""

    keys: int
    window: MemoryEntry
    fitted: MemoryEntry
    hybrid: MemoryEntry


@dataclass(frozen=True)
class MemoryLadder:
    """The rungs by memory, and where they were measured.

    Attributes
    ----------
    rungs
        From the least memory to the most.
    layers
        Numbers of the layers.
    steps
        Steps of each fit.
    texts
        Held-out texts.
    """

    rungs: tuple[MemoryRung, ...]
    layers: tuple[int, ...]
    steps: int
    texts: int

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        rungs = [
            {"keys": rung.keys, **{name: getattr(rung, name).to_json() for name in SUBSTITUTES}} for rung in self.rungs
        ]
        return {"rungs": rungs, "layers": list(self.layers), "steps": self.steps, "texts": self.texts}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MemoryLadder:
        """From plain data."""
        rungs = tuple(
            MemoryRung(int(rung["keys"]), *(MemoryEntry.from_json(rung[name]) for name in SUBSTITUTES))
            for rung in data["rungs"]
        )
        return cls(rungs, tuple(map(int, data["layers"])), int(data["steps"]), int(data["texts"]))

    @property
    def curve(self) -> dict[str, Interval]:
        """The share of the gap that the fitted map closes by number of features."""
        return {str(rung.fitted.features): rung.fitted.gap_closed for rung in self.rungs}


@dataclass(frozen=True)
class _Candidate:
    """A substitute to try: its memory, what it is called among its choices, and what it keeps."""

    keys: int
    choice: str
    features: int
    exact: ExactSet | None

    @property
    def recent(self) -> int:
        return 0 if self.exact is None else self.exact.recent

    @property
    def sinks(self) -> int:
        return 0 if self.exact is None else self.exact.sinks


def climb_memory(
    held_out: Sequence[HeldLayer],
    fit_text: Sequence[HeldLayer],
    gathered: Activations,
    recipe: Recipe,
    *,
    keys: Sequence[int] = KEYS,
    workers: int = 1,
    report: Callable[[float], None] = lambda share: None,
) -> MemoryLadder:
    """Fit and compare the substitutes at each memory.

    Parameters
    ----------
    held_out, fit_text
        The same layers on held-out text and on text of the fit.
    gathered
        What the layers' maps are fitted on.
    recipe
        Of the fits, except for the number of features and of steps, which is at most ``STEPS``.
    keys
        The memories, in keys with their values per KV head.
    workers
        Fits that run at a time, the longest first.
    report
        Called with the share of the work that is done.
    """
    if not keys or min(keys) < 2:
        raise ValueInputError(f"keys must be numbers from 2 on, got {list(keys)}; 16 to 256 is usual")
    runner = _Runner(held_out, fit_text, gathered, replace(recipe, steps=min(recipe.steps, STEPS)))
    dim, value_dim = gathered.sites[0].dim, gathered.mean.shape[-1]
    windows = [candidate for n in keys for candidate in _windows(n)]
    by_candidate = runner.run(windows, workers, lambda share: report(0.1 * share))
    best = {n: runner.best([each for each in windows if each.keys == n], by_candidate) for n in keys}
    maps = [candidate for n in sorted(keys, reverse=True) for candidate in _maps(n, best[n].sinks, dim, value_dim)]
    by_candidate |= runner.run(maps, workers, lambda share: report(0.1 + 0.9 * share))
    rng = np.random.default_rng(recipe.seed)
    rungs = []
    for n in sorted(keys):
        parts = ([each for each in windows if each.keys == n], *_partition(each for each in maps if each.keys == n))
        rungs.append(MemoryRung(n, *(runner.entry(part, by_candidate, rng) for part in parts)))
    return MemoryLadder(tuple(rungs), tuple(layer.number for layer in held_out), runner.steps, runner.texts)


def _windows(keys: int) -> list[_Candidate]:
    """Windows of this memory with each number of sinks that leaves at least half of it to recent keys."""
    allowed = [sinks for sinks in SINKS if sinks <= keys // 2]
    return [_Candidate(keys, str(sinks), 0, ExactSet(*split_keys(keys, sinks=sinks))) for sinks in allowed]


def _maps(keys: int, sinks: int, dim: int, value_dim: int) -> list[_Candidate]:
    """The fitted map of this memory, and hybrids with each share of features."""
    candidates = [_Candidate(keys, "1", max(FEWEST_FEATURES, features_worth(keys, dim, value_dim)), None)]
    for share in SHARES:
        features, exact = split_memory(keys, share, dim, value_dim, sinks=sinks)
        candidates.append(_Candidate(keys, f"{share:g}", max(FEWEST_FEATURES, features), exact))
    return candidates


def _partition(maps: Iterator[_Candidate]) -> tuple[list[_Candidate], list[_Candidate]]:
    """Fitted maps, and hybrids."""
    candidates = list(maps)
    return [each for each in candidates if each.exact is None], [each for each in candidates if each.exact is not None]


@dataclass(frozen=True, eq=False)
class _Measured:
    """One candidate in one layer: its divergence by text, and what it keeps in keys."""

    fit_text: Sequence[Float[np.ndarray, "head time"]]
    held_out: Sequence[Float[np.ndarray, "head time"]]
    keys_worth: float


Results = Mapping[_Candidate, Sequence[_Measured]]


class _Runner:
    """Fits candidates in the layers and measures them on both texts."""

    def __init__(
        self, held_out: Sequence[HeldLayer], fit_text: Sequence[HeldLayer], gathered: Activations, recipe: Recipe
    ) -> None:
        self._layers = list(zip(held_out, fit_text, strict=True))
        self._gathered, self._recipe = gathered, recipe
        self._gap = sum(_total(layer.uniform) for layer in fit_text)
        self._uniform = by_text([layer.uniform for layer in held_out])
        self.steps, self.texts = recipe.steps, len(self._uniform)

    def run(
        self, candidates: Sequence[_Candidate], workers: int, report: Callable[[float], None]
    ) -> dict[_Candidate, list[_Measured]]:
        """Every candidate in every layer."""
        tasks = list(product(candidates, range(len(self._layers))))
        results: dict[_Candidate, list[_Measured]] = {}
        with ThreadPoolExecutor(workers) as pool:
            for done, ((candidate, _), measured) in enumerate(
                zip(tasks, pool.map(lambda task: self._measure(*task), tasks), strict=True)
            ):
                results.setdefault(candidate, []).append(measured)
                report((done + 1) / len(tasks))
        return results

    def best(self, candidates: Sequence[_Candidate], results: Results) -> _Candidate:
        """The candidate that closes most of the gap on text of the fit."""
        return max(candidates, key=lambda each: self._closed(results[each]))

    def entry(self, candidates: Sequence[_Candidate], results: Results, rng: np.random.Generator) -> MemoryEntry:
        """What the best candidate keeps and closes on held-out text."""
        chosen = self.best(candidates, results)
        measured = results[chosen]
        closed = gap_closed(by_text([each.held_out for each in measured]), self._uniform, rng=rng)
        if closed is None:
            raise ValueInputError(f"held-out texts must be longer than {FIRST} tokens; give longer ones")
        return MemoryEntry(
            features=chosen.features,
            recent=chosen.recent,
            sinks=chosen.sinks,
            keys_worth=measured[0].keys_worth,
            gap_closed=closed,
            choices={each.choice: self._closed(results[each]) for each in candidates},
        )

    def _closed(self, measured: Sequence[_Measured]) -> float:
        return 1 - sum(_total(each.fit_text) for each in measured) / self._gap

    def _measure(self, candidate: _Candidate, at: int) -> _Measured:
        held_out, fit_text = self._layers[at]
        mechanism = self._mechanism(candidate, held_out.number)
        site = self._gathered.sites[held_out.number]
        worth = keys_worth(mechanism, site.dim, self._gathered.mean.shape[-1], kv_heads=site.kv_heads)
        return _Measured(divergences(mechanism, fit_text.texts), divergences(mechanism, held_out.texts), worth)

    def _mechanism(self, candidate: _Candidate, layer: int) -> Mechanism:
        if not candidate.features and candidate.exact is not None:
            return resolve(f"window:w={candidate.exact.recent},sinks={candidate.exact.sinks}")
        site = self._gathered.sites[layer]
        maps = fit_maps(
            self._gathered.layer(layer),
            replace(self._recipe, features=candidate.features),
            scale=site.scale,
            window=site.window,
            softcap=site.softcap,
            rotation=site.rotation,
            layer=layer,
            exact=candidate.exact,
        )
        return maps.mechanism(site.rotation, candidate.exact)


def _total(texts: Sequence[Float[np.ndarray, "head time"]]) -> float:
    return float(sum(np.nansum(text[..., FIRST:], dtype=float) for text in texts))


def by_text(layers: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Layers of texts to texts of layers."""
    return [np.stack(text) for text in zip(*layers, strict=True)]
