"""What a calibration costs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from softgap.attention import ExactSet, Mechanism, resolve
from softgap.attention.memory import equal_window
from softgap.calibration import Recipe
from softgap.calibration.activations import Activations, gather
from softgap.calibration.conditions import DOMAINS, SEQUENCES
from softgap.calibration.conditions import LONGEST as LONGEST_CONDITION
from softgap.calibration.fit import Maps, fit_maps
from softgap.calibration.held_out import LAYERS, TEXTS, TOKENS, measure_sequence
from softgap.calibration.layers import single_threaded_torch
from softgap.calibration.memory_ladder import OWN_SHARES, STEPS, Division, features_tried
from softgap.calibration.rank_floor import ladders
from softgap.calibration.sufficiency import far_lengths, measure_kinds
from softgap.calibration.texts import (
    BEGINNINGS,
    FEWEST_NEW,
    GENERATED_TOKENS,
    MOST_NEW,
    Corpus,
    context_of,
    corpus_of,
    cut_corpus,
    generate_texts,
    quick_corpus,
    tokens_needed,
)
from softgap.calibration.whole_model import (
    BASELINES,
    DISTANCES,
    GENERATED_POSITIONS,
    LADDER_TOKENS,
    QUICK,
    REFERENCE_MECHANISMS,
    calibration_tensors,
)
from softgap.costs.probe import LONG, SHORT, Cost, Curve, Probe
from softgap.kinds import KINDS
from softgap.models.loading import Model, Tokenizer
from softgap.models.tensor_files import StoredCalibration
from softgap.models.tokens import first_tokens, token_ids
from softgap.probe.layout import layer_rotations
from softgap.trajectories.validation import BASELINE

__all__ = ["calibration_cost"]

# Steps of a fit that are timed; the first ones are slower.
FIT_STEPS = 8
# New tokens that are timed.
NEW_TOKENS = 5


def calibration_cost(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str] | None,
    probe: Probe,
    *,
    recipe: Recipe | None = None,
    minutes: float | None = None,
    positions: int | None = None,
    stability: bool = True,
    quick: bool = False,
) -> Cost:
    """What ``softgap.calibrate`` costs on this machine; the parameters are its own."""
    recipe = recipe or (QUICK if quick else Recipe())
    corpus, written, mixed = (
        (quick_corpus(model, tokenizer, texts), 0, 0) if quick else _corpus(model, tokenizer, texts, positions, recipe)
    )
    workers = torch.get_num_threads()
    stages = {"loading": probe.loading}
    if written:
        stages["generating text"] = _generation_seconds(model, tokenizer, written, probe)
    with tempfile.TemporaryDirectory(prefix="softgap-calibration-") as scratch:
        gathered, reading = _read(model, corpus, Path(scratch), probe)
        stages["reading"] = reading.over([*map(len, corpus.fitted), *[mixed // len(BEGINNINGS)] * len(BEGINNINGS)])
        fits = _time_fits(gathered, recipe, probe)
    layers, rounds = len(gathered.sites), -(-len(gathered.sites) // workers)
    fitting = sum(fit.seconds(recipe.steps) for fit in (fits.fitted, fits.tail))
    stages["fitting"] = rounds * fitting if minutes is None else 2 * 60 * minutes
    if not quick:
        stages["dividing memory"] = LAYERS * len(OWN_SHARES) * fits.tail.seconds(recipe.steps) / workers
    kinds = {name: fits.mechanisms[name] for name in KINDS if name in fits.mechanisms}
    ids = corpus.fitted[0]
    lengths = [min(n, len(ids)) for n in (SHORT, LONG)]
    far = [len(ids) for ids in corpus.far]
    longest = max(map(len, (*corpus.fitted, *corpus.held_out, *corpus.far)))
    held_out = [len(ids) for ids in corpus.held_out]
    sums = probe.curve(lambda n: measure_kinds(model, [ids[:n]], kinds), lengths, longest)
    stages["labelling heads"] = sums.over([*held_out, *(length for n in far if stability for length in far_lengths(n))])
    pair: list[Any] = [fits.mechanisms["fitted"], BASELINE]
    every: list[Any] = [pair[0], *REFERENCE_MECHANISMS, *(fits.mechanisms[name] for name in BASELINES)]
    by_all, by_pair = (
        probe.curve(lambda n, names=names: measure_sequence(model, ids[:n], names), lengths, longest)  # type: ignore[misc]
        for names in (every, pair)
    )
    stages["reading held-out text"] = by_all.over(held_out) + by_pair.over(far)
    if not quick:
        stages["reading other text"] = by_pair.over(_condition_lengths(tokenizer, corpus))
        whole = min(LADDER_TOKENS, held_out[0])
        compared = probe.curve(lambda n: ladders(model, ids[:n], pair[0]), [n // 2 for n in lengths], whole)
        stages["comparing weights"] = compared.at(whole)
        attending = sums.at(min(TOKENS, *held_out)) / (layers * (1 + len(kinds)))
        stages["comparing memory"] = _memory_ladder_seconds(gathered, recipe, fits, attending) / workers
    site = gathered.sites[0]
    tokens = sum(map(len, corpus.fitted))
    return Cost(
        command="calibrate",
        stages=stages,
        memory_bytes=probe.memory,
        disk_bytes=fits.nbytes,
        scratch_bytes=2 * layers * (site.heads + site.kv_heads) * site.dim * (tokens + mixed),
        counts={"layers": layers, "steps": recipe.steps, "tokens": tokens, "generated_tokens": written},
        probe_seconds=probe.seconds,
    )


def _corpus(
    model: Model, tokenizer: Tokenizer, texts: Sequence[str] | None, positions: int | None, recipe: Recipe
) -> tuple[Corpus, int, int]:
    """The text of the fit, the tokens that the model writes first, and those of them that are read beside the text."""
    if texts is None:
        positions = positions or min(GENERATED_POSITIONS, context_of(model))
        needed = tokens_needed(positions)
        ids = token_ids(tokenizer, BEGINNINGS)
        many = replace(ids, ids=(ids.ids * (2 * needed // len(ids) + 1))[: 2 * needed])
        return cut_corpus(model, many, positions), int(2.2 * needed), 0
    corpus = corpus_of(model, tokenizer, texts, positions=positions)
    mixed = min(GENERATED_TOKENS, sum(map(len, corpus.fitted)) // 2) if recipe.rows.generated else 0
    return corpus, mixed, mixed


class _Enough(Exception):
    """Ends a generation that has told what it was to tell."""


def _generation_seconds(model: Model, tokenizer: Tokenizer, tokens: int, probe: Probe) -> float:
    """The beginning of a generation from all beginnings: its first token, and how long the others take."""
    times = [probe.clock()]

    def tell(share: float) -> None:
        times.append(probe.clock())
        if len(times) > NEW_TOKENS:
            raise _Enough

    def generate() -> None:
        with suppress(_Enough):
            generate_texts(model, tokenizer, len(BEGINNINGS) * NEW_TOKENS, report=tell)

    _, _, held = probe.call(generate)
    probe.hold(held)
    each = max(FEWEST_NEW, -(-tokens // len(BEGINNINGS)))
    step = (times[-1] - times[1]) / (len(times) - 2)
    return -(-each // MOST_NEW) * (times[1] - times[0]) + each * step


def _read(model: Model, corpus: Corpus, scratch: Path, probe: Probe) -> tuple[Activations, Curve]:
    """What the layers attend with over the beginning of the text, and the seconds of reading more."""
    ids = corpus.fitted[0]
    short, long = ids[:SHORT], ids[:LONG]
    times: list[float] = []
    gathered, _, held = probe.call(
        lambda: gather(
            model,
            [short, long, short],
            scratch,
            sample=short,
            distances=min(DISTANCES, corpus.longest),
            rotations=layer_rotations(model),
            report=lambda n: times.append(probe.clock()),
        )
    )
    probe.hold(held * corpus.longest / len(long))
    return gathered, Curve.through((len(short), times[2] - times[1]), (len(long), times[1] - times[0]))


@dataclass(frozen=True)
class _Fit:
    """Seconds of a fit of one layer: before its first step, and of each."""

    begin: float
    step: float
    features: int

    def seconds(self, steps: int) -> float:
        return self.begin + self.step * steps


@dataclass(frozen=True)
class _Fits:
    """Both fits of a layer; the mechanisms they give, alike in all layers; and the bytes of all parameters."""

    fitted: _Fit
    tail: _Fit
    mechanisms: Mapping[str, Mechanism]
    nbytes: int


def _time_fits(gathered: Activations, recipe: Recipe, probe: Probe) -> _Fits:
    dim, value_dim = gathered.sites[0].dim, gathered.mean.shape[-1]
    features, exact = Division().hybrid(recipe.features, dim, value_dim)
    with single_threaded_torch():
        maps, fitted = _time_fit(gathered, recipe, None, probe)
        tail_maps, tail = _time_fit(gathered, replace(recipe, features=features), exact, probe)
    layers = len(gathered.sites)
    tensors = calibration_tensors(gathered, [maps] * layers, [tail_maps] * layers)
    stored = StoredCalibration(tensors, {"hybrid": {"w": exact.recent, "sinks": exact.sinks}}, "")
    mechanisms = {name: stored.equip(name) for name in ("fitted", "hybrid", *BASELINES)}
    mechanisms["window"] = resolve(equal_window(mechanisms["fitted"], value_dim))
    return _Fits(fitted, tail, mechanisms, sum(x.numel() * x.element_size() for x in tensors.values()))


def _time_fit(gathered: Activations, recipe: Recipe, exact: ExactSet | None, probe: Probe) -> tuple[Maps, _Fit]:
    site, texts = gathered.sites[0], gathered.layer(0)
    times = [probe.clock()]
    maps = fit_maps(
        texts,
        replace(recipe, steps=FIT_STEPS),
        scale=site.scale,
        window=site.window,
        softcap=site.softcap,
        rotation=site.rotation,
        exact=exact,
        report=lambda step, loss: times.append(probe.clock()),
    )
    half = len(times) // 2
    step = (times[-1] - times[half]) / (len(times) - 1 - half)
    return maps, _Fit(max(0.0, times[1] - times[0] - step), step, recipe.features)


def _condition_lengths(tokenizer: Tokenizer, corpus: Corpus) -> list[int]:
    """Tokens of every text of every condition."""
    length = min(LONGEST_CONDITION, corpus.longest // 2)
    bare = tokenizer.bos_token_id is not None and not first_tokens(tokenizer)
    kinds = 3 + bare + (tokenizer.chat_template is not None)
    own = [min(length, len(tokenizer(text)["input_ids"])) for text in DOMAINS.values()]
    return [length] * kinds * SEQUENCES + own


def _memory_ladder_seconds(gathered: Activations, recipe: Recipe, fits: _Fits, attending: float) -> float:
    """Short fits in a few layers, compared on texts; ``attending`` is one mechanism in one layer over one text."""
    steps = min(recipe.steps, STEPS)
    both = (fits.fitted, fits.tail)
    per_feature = sum(fit.seconds(steps) for fit in both) / sum(fit.features for fit in both)
    tried = features_tried(gathered.sites[0].dim, gathered.mean.shape[-1])
    # About as many windows are compared as maps.
    return LAYERS * (sum(tried) * per_feature + 2 * len(tried) * TEXTS * attending)
