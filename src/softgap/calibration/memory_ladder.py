"""Equal memory: how a calibration divides its own, and a ladder of substitutes at 16 to 256 keys' worth per KV head.

Two choices are free at a given memory: how many sinks a window keeps, and how a hybrid divides its memory between
features and exact keys. Both are made in a few layers, on text of the fit, for all layers and heads together.
``choose_division`` makes them for the window and the hybrid of a calibration, by fits as long as its own.
``climb_memory`` makes them at each memory of the ladder, and measures the share of the gap that the chosen substitutes
close on held-out text. The fits of the ladder are short, so it compares substitutes with each other, not with the fit
of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from softgap.attention import ExactSet, Mechanism, resolve
from softgap.attention.memory import SINKS as USUAL_SINKS
from softgap.attention.memory import (
    divide_features,
    features_worth,
    keys_per_feature,
    keys_worth,
    split_keys,
    split_memory,
)
from softgap.calibration.activations import Activations
from softgap.calibration.fit import FEWEST_FEATURES, Recipe, fit_maps
from softgap.calibration.held_out import FIRST, HeldLayer, divergences, gap_closed
from softgap.errors import ValueInputError
from softgap.intervals import Interval

__all__ = [
    "KEYS",
    "OWN_SHARES",
    "SUBSTITUTES",
    "Division",
    "MemoryEntry",
    "MemoryLadder",
    "MemoryRung",
    "choose_division",
    "climb_memory",
    "features_tried",
]

# Keys with their values that every substitute of a rung is worth.
KEYS = (16, 32, 64, 128, 256)

# Numbers of sinks tried for a window, and shares of a hybrid's memory tried for its features.
SINKS = (0, 1, 4, 8, 16)
SHARES = (0.25, 0.5, 0.75)

STEPS = 75

# Shares of a calibration's own memory that are tried for the features of its hybrid.
OWN_SHARES = (0.125, 0.25, 0.5)
USUAL_SHARE = 0.25

# A choice that closes less than so much more of the gap than the usual one is not taken: texts differ by as much.
MARGIN = 0.01

SUBSTITUTES = ("window", "fitted", "hybrid")


@dataclass(frozen=True)
class Division:
    """How the window and the hybrid of a calibration divide their memory.

    Attributes
    ----------
    sinks
        First tokens that both keep exactly.
    share
        The part of the hybrid's memory that goes to features.
    by_sinks, by_share
        Share of the gap that each choice closes on text of the fit, in a few layers; empty where nothing was tried.
    """

    sinks: int = USUAL_SINKS
    share: float = USUAL_SHARE
    by_sinks: Mapping[str, float] = field(default_factory=dict)
    by_share: Mapping[str, float] = field(default_factory=dict)

    def hybrid(self, features: int, dim: int, value_dim: int) -> tuple[int, ExactSet]:
        """Features and exact set of the hybrid that keeps as much as a fitted map with so many features."""
        tail, exact = divide_features(features, dim, value_dim, share=self.share, sinks=self.sinks)
        return max(FEWEST_FEATURES, tail), exact

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Division:
        """From plain data."""
        by_sinks, by_share = (
            {str(choice): float(closed) for choice, closed in data[name].items()} for name in ("by_sinks", "by_share")
        )
        return cls(int(data["sinks"]), float(data["share"]), by_sinks, by_share)


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
    comparison = _Comparison(held_out, fit_text, gathered, replace(recipe, steps=min(recipe.steps, STEPS)), workers)
    dim, value_dim = gathered.sites[0].dim, gathered.mean.shape[-1]
    windows = {n: _windows(n) for n in keys}
    comparison.try_all([each for n in keys for each in windows[n]], lambda share: report(0.1 * share))
    fitted = {n: [_fitted(n, dim, value_dim)] for n in keys}
    hybrids = {n: _hybrids(n, comparison.best(windows[n]).sinks, dim, value_dim) for n in keys}
    maps = [each for n in sorted(keys, reverse=True) for each in (*fitted[n], *hybrids[n])]
    comparison.try_all(maps, lambda share: report(0.1 + 0.8 * share))
    parts = [kind[n] for n in sorted(keys) for kind in (windows, fitted, hybrids)]
    entries = comparison.entries(parts, lambda share: report(0.9 + 0.1 * share))
    rungs = tuple(MemoryRung(n, *(next(entries) for _ in SUBSTITUTES)) for n in sorted(keys))
    return MemoryLadder(rungs, tuple(layer.number for layer in held_out), comparison.steps, comparison.texts)


def choose_division(
    fit_text: Sequence[HeldLayer],
    gathered: Activations,
    recipe: Recipe,
    *,
    workers: int = 1,
    report: Callable[[float], None] = lambda share: None,
) -> Division:
    """Sinks and share of features that close most of the gap on text of the fit, at the memory of a recipe.

    The usual ones, 4 sinks and a quarter, are kept unless others close at least 0.01 more of the gap.

    Parameters
    ----------
    fit_text
        A few layers on text of the fit.
    gathered
        What the layers' maps are fitted on.
    recipe
        Of the fits; its number of features sets the memory.
    workers
        Fits that run at a time.
    report
        Called with the share of the work that is done.
    """
    dim, value_dim = gathered.sites[0].dim, gathered.mean.shape[-1]
    comparison = _Comparison(fit_text, fit_text, gathered, recipe, workers)
    keys = max(1, round(recipe.features * keys_per_feature(dim, value_dim)))
    windows = _windows(keys)
    comparison.try_all(windows, lambda share: report(0.1 * share))
    by_sinks = comparison.closed(windows)
    sinks = int(_best_choice(by_sinks, str(min(USUAL_SINKS, keys // 2))))
    hybrids = []
    for share in OWN_SHARES:
        features, exact = divide_features(recipe.features, dim, value_dim, share=share, sinks=sinks)
        if features >= FEWEST_FEATURES:
            hybrids.append(_Candidate(keys, f"{share:g}", features, exact))
    if not hybrids:
        return Division(sinks, by_sinks=by_sinks)
    comparison.try_all(hybrids, lambda share: report(0.1 + 0.9 * share))
    by_share = comparison.closed(hybrids)
    return Division(sinks, float(_best_choice(by_share, f"{USUAL_SHARE:g}")), by_sinks, by_share)


def _best_choice(closed: Mapping[str, float], usual: str) -> str:
    """The choice that closes most of the gap, or the usual one where none closes much more than it."""
    best = max(closed, key=lambda choice: closed[choice])
    return usual if usual in closed and closed[best] < closed[usual] + MARGIN else best


def features_tried(dim: int, value_dim: int) -> list[int]:
    """Features of every map that a ladder fits in each of its layers, with the usual number of sinks."""
    maps = [(_fitted(n, dim, value_dim), *_hybrids(n, min(4, n // 4), dim, value_dim)) for n in KEYS]
    return [candidate.features for rung in maps for candidate in rung]


def _windows(keys: int) -> list[_Candidate]:
    """Windows of this memory with each number of sinks that leaves at least half of it to recent keys."""
    allowed = [sinks for sinks in SINKS if sinks <= keys // 2]
    return [_Candidate(keys, str(sinks), 0, ExactSet(*split_keys(keys, sinks=sinks))) for sinks in allowed]


def _fitted(keys: int, dim: int, value_dim: int) -> _Candidate:
    """The fitted map of this memory."""
    return _Candidate(keys, "1", max(FEWEST_FEATURES, features_worth(keys, dim, value_dim)), None)


def _hybrids(keys: int, sinks: int, dim: int, value_dim: int) -> list[_Candidate]:
    """Hybrids of this memory with each share of features, and with as many sinks as the best window."""
    splits = [(share, split_memory(keys, share, dim, value_dim, sinks=sinks)) for share in SHARES]
    return [
        _Candidate(keys, f"{share:g}", max(FEWEST_FEATURES, features), exact) for share, (features, exact) in splits
    ]


Task = TypeVar("Task")
Result = TypeVar("Result")


class _Comparison:
    """Candidates as they were fitted in each layer, and the divergence that they leave on text of the fit."""

    def __init__(
        self,
        held_out: Sequence[HeldLayer],
        fit_text: Sequence[HeldLayer],
        gathered: Activations,
        recipe: Recipe,
        workers: int,
    ) -> None:
        self._held_out, self._fit_text = held_out, fit_text
        self._gathered, self._recipe, self._workers = gathered, recipe, workers
        self._gap = sum(_total(layer.uniform) for layer in fit_text)
        self._uniform = _by_text([layer.uniform for layer in held_out])
        self._mechanisms: dict[_Candidate, list[Mechanism]] = {}
        self._left: dict[_Candidate, float] = {}
        self.steps, self.texts = recipe.steps, len(self._uniform)

    def try_all(self, candidates: Sequence[_Candidate], report: Callable[[float], None]) -> None:
        """Fit every candidate in every layer, and measure it on text of the fit."""

        def tried(task: tuple[_Candidate, HeldLayer]) -> tuple[Mechanism, float]:
            candidate, layer = task
            mechanism = self._mechanism(candidate, layer.number)
            return mechanism, _total(divergences(mechanism, layer.texts))

        tasks = list(product(candidates, self._fit_text))
        for (candidate, _), (mechanism, left) in zip(tasks, self._map(tried, tasks, report), strict=True):
            self._mechanisms.setdefault(candidate, []).append(mechanism)
            self._left[candidate] = self._left.get(candidate, 0.0) + left

    def best(self, candidates: Sequence[_Candidate]) -> _Candidate:
        """The candidate that closes most of the gap on text of the fit; the first of equal ones."""
        return min(candidates, key=lambda each: self._left[each])

    def entries(self, parts: Sequence[Sequence[_Candidate]], report: Callable[[float], None]) -> Iterator[MemoryEntry]:
        """The best of each of these lists of candidates, with what it closes on held-out text."""
        return self._map(self._entry, parts, report)

    def _entry(self, candidates: Sequence[_Candidate]) -> MemoryEntry:
        chosen = self.best(candidates)
        mechanisms = self._mechanisms[chosen]
        layers = [divergences(x, layer.texts) for x, layer in zip(mechanisms, self._held_out, strict=True)]
        # The same resampled texts for every entry.
        rng = np.random.default_rng(self._recipe.seed)
        closed = gap_closed(_by_text(layers), self._uniform, rng=rng)
        if closed is None:
            raise ValueInputError(f"held-out texts must be longer than {FIRST} tokens; give longer ones")
        site = self._gathered.sites[0]
        return MemoryEntry(
            features=chosen.features,
            recent=chosen.recent,
            sinks=chosen.sinks,
            keys_worth=keys_worth(mechanisms[0], site.dim, self._gathered.mean.shape[-1], kv_heads=site.kv_heads),
            gap_closed=closed,
            choices=self.closed(candidates),
        )

    def closed(self, candidates: Sequence[_Candidate]) -> dict[str, float]:
        """The share of the gap that each of these candidates closes on text of the fit, by choice."""
        return {each.choice: 1 - self._left[each] / self._gap for each in candidates}

    def _map(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], report: Callable[[float], None]
    ) -> Iterator[Result]:
        """The results in the order of their tasks, some at a time."""
        with ThreadPoolExecutor(self._workers) as pool:
            for done, result in enumerate(pool.map(function, tasks), start=1):
                report(done / len(tasks))
                yield result

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


def _by_text(layers: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Layers of texts to texts of layers."""
    return [np.stack(text) for text in zip(*layers, strict=True)]
