"""Measure the impact of each head: swap it alone, by a mechanism and by baselines."""

from __future__ import annotations

import csv
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softgap.attention import Mechanism, resolve
from softgap.checkpoints import written_whole
from softgap.cluster import Workers, check_engine, workers_of
from softgap.deprecation import deprecated_keywords
from softgap.errors import StoreError, ValueInputError, unknown_name
from softgap.inputs import as_items
from softgap.intervals import Interval, interval_of, resampled
from softgap.intervene.layerwise import Blocks
from softgap.intervene.substitute import Head, Substitute, SwappedLayer, substitute, swapped_layer
from softgap.intervene.swap import heads_by_layer, swap
from softgap.linearize.sequences import (
    LENGTH,
    Original,
    Sequences,
    digest_of_sequences,
    read_original,
    recall_sequences,
    score_forward,
    split_sequences,
)
from softgap.models.fingerprint import model_fingerprint
from softgap.models.loading import Model, Tokenizer
from softgap.models.support import check_measurable
from softgap.probe.layout import AttentionLayer, LayerTensors, attention_layers, visit_layers
from softgap.probe.tap import AttentionCall, replace_attention
from softgap.probe.visibility import VisibleSets
from softgap.progress import Progress, silent

__all__ = ["Impact", "SideBySide", "impact", "impact_on", "mean_outputs"]


QUANTITIES = ("loss", "kl", "accuracy")


FORMAT = 1


@dataclass(frozen=True, eq=False)
class Impact:
    """What each head is worth.

    Attributes
    ----------
    mechanisms
        What heads were swapped for, the baselines last.
    heads
        (layer, head) pairs.
    original
        Of the unswapped model, per text: ``loss`` in nats per token, ``accuracy`` of the top token; per recall
        list: ``recall``, the share of answers whose first token is right, and ``whole_answers``, the share that
        are right in every token.
    change
        By swapping one head, ``[mechanism, head, text]``: the rise in ``loss``, the ``kl`` divergence of the swapped
        model's next-token distribution from the original one, and the changes in ``accuracy``, ``recall`` and
        ``whole_answers``.
    settings
        Model, hash of the sequences and whatever else it depends on.
    """

    mechanisms: tuple[str, ...]
    heads: tuple[Head, ...]
    original: Mapping[str, Float[np.ndarray, " text"]]
    change: Mapping[str, Float[np.ndarray, "mechanism head text"]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def mean(self, quantity: str = "loss", mechanism: str | None = None) -> Float[np.ndarray, " head"]:
        """Mean change over texts, per head."""
        means: np.ndarray = self._of(quantity, mechanism).mean(axis=-1)
        return means

    def interval(self, head: Head, quantity: str = "loss", mechanism: str | None = None) -> Interval:
        """Mean change of one head, with its middle 95 % over resampled texts."""
        values = self._of(quantity, mechanism)[self.heads.index(head)]
        return interval_of(values, rng=np.random.default_rng(self.settings.get("seed", 0)))

    @deprecated_keywords(control="baseline")
    def linearizable(self, baseline: str | None = None) -> Bool[np.ndarray, " head"]:
        """Heads where the mechanism costs less than the baseline (the last one), in 97.5 % of resampled texts."""
        if len(self.mechanisms) == 1:
            raise ValueInputError("this impact has no baseline to compare with; measure it with baselines")
        baseline_name = self.mechanisms[-1] if baseline is None else baseline
        gains = self._of("loss", baseline_name) - self._of("loss", None)
        resampled_gains = resampled(gains, rng=np.random.default_rng(self.settings.get("seed", 0)))
        linearizable: np.ndarray = np.quantile(resampled_gains, 0.025, axis=-1) > 0
        return linearizable

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write all of it to an ``.npz`` file."""
        target = Path(path)
        about = {"format": FORMAT, "mechanisms": self.mechanisms, "heads": self.heads, "settings": dict(self.settings)}
        arrays = {f"{kind}.{name}": x for kind in ("original", "change") for name, x in getattr(self, kind).items()}
        with written_whole(target) as partial, partial.open("wb") as file:
            np.savez_compressed(file, about=np.array(json.dumps(about)), allow_pickle=False, **arrays)
        return target

    def write_heads(self, path: str | os.PathLike[str]) -> Path:
        """Write the mean changes of every head as the CSV that ``softgap report --heads`` shows in its map."""
        target = Path(path)
        columns = [(name, quantity) for name in self.mechanisms for quantity in self.change]
        rows = np.stack([self.mean(quantity, name) for name, quantity in columns], axis=1).tolist()
        try:
            with target.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(["layer", "head", *(f"{quantity}, swapped for {name}" for name, quantity in columns)])
                writer.writerows([*head, *row] for head, row in zip(self.heads, rows, strict=True))
        except OSError as error:
            raise StoreError(f"cannot write '{target}': {error.strerror or error}; choose another place") from error
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Impact:
        """Read one from a file."""
        try:
            # Opened here: numpy leaves a broken archive open.
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as stored:
                about = json.loads(str(stored["about"]))
                arrays = {name: stored[name] for name in stored.files if "." in name}
            return cls._of_stored(about, arrays)
        except (
            OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, EOFError, MemoryError,
            NotImplementedError, OverflowError, zipfile.BadZipFile, zlib.error,
        ) as error:  # fmt: skip
            raise StoreError(f"cannot read an impact from '{path}': {error}; measure it again") from error

    @classmethod
    def _of_stored(cls, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Impact:
        """What a file holds, with every array of the shape that heads and mechanisms give it."""
        heads = tuple((int(layer), int(head)) for layer, head in about["heads"])
        mechanisms = tuple(map(str, about["mechanisms"]))
        parts: dict[str, dict[str, np.ndarray]] = {"original": {}, "change": {}}
        for name, array in arrays.items():
            kind, _, quantity = name.partition(".")
            if array.dtype.kind != "f":
                raise ValueError(f"{name} must hold numbers with a fraction, got {array.dtype}")
            expected = (len(mechanisms), len(heads)) if kind == "change" else ()
            if array.ndim != len(expected) + 1 or array.shape[:-1] != expected or not array.size:
                raise ValueError(f"{name} must have the shape {[*expected, 'texts']}, got {list(array.shape)}")
            parts[kind][quantity] = array
        if not mechanisms or not heads or not parts["change"]:
            raise ValueError("mechanisms, heads and changes must not be empty")
        return cls(mechanisms, heads, parts["original"], parts["change"], dict(about["settings"]))

    def _of(self, quantity: str, mechanism: str | None) -> Float[np.ndarray, "head text"]:
        if quantity not in self.change:
            raise unknown_name("quantity", quantity, tuple(self.change))
        if mechanism is not None and mechanism not in self.mechanisms:
            raise unknown_name("mechanism of this impact", mechanism, self.mechanisms)
        place = 0 if mechanism is None else self.mechanisms.index(mechanism)
        values: np.ndarray = self.change[quantity][place]
        return values


def mean_outputs(model: Model, sequences: Sequences) -> Mechanism:
    """``constant`` with the mean output of each head over these sequences."""
    sums: list[Tensor] = []

    def visit(layer: LayerTensors) -> None:
        totals = layer.output.sum(dim=1, dtype=torch.float64).cpu()
        if layer.layer == len(sums):
            sums.append(totals)
        else:
            sums[layer.layer] += totals

    for row in sequences.ids[:, :-1].tolist():
        visit_layers(model, row, visit)
    heads, dim = (max(x.shape[axis] for x in sums) for axis in (0, 1))
    # Layers may differ in their heads; the rows behind them are never used.
    padded = [torch.nn.functional.pad(x, (0, dim - x.shape[1], 0, heads - x.shape[0])) for x in sums]
    mean = torch.stack(padded) / (len(sequences) * (sequences.ids.shape[1] - 1))
    return resolve("constant").with_parameters(mean=mean)


# Tokens of all copies of a batch: with more, activations leave the processor's cache (8192 took 1.2 times as long).
BATCH_TOKENS = 1024


# Two computations of one model differ by rounding; a forward that begins in the middle may not differ by more.
TOLERANCE = 1e-3


@deprecated_keywords(controls="baselines")
def impact(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    mechanism: str | Mechanism | Substitute = "elu1",
    *,
    baselines: Sequence[str | Mechanism | Substitute] | None = None,
    heads: Sequence[Head] | None = None,
    length: int = LENGTH,
    tokens: int | None = None,
    recalls: int = 8,
    seed: int = 0,
    reuse: bool = True,
    engine: str = "local",
    address: str | None = None,
    progress: Progress = silent,
) -> Impact:
    """Swap every head alone and measure what the model loses.

    Parameters
    ----------
    model
        Any causal model of transformers that softgap supports.
    tokenizer
        Its tokenizer.
    texts
        What the model reads, cut into sequences of ``length`` tokens, about ``tokens`` in all (None: all of it).
    mechanism
        What the heads are swapped for.
    baselines
        Swapped for as well. None takes ``constant`` with each head's mean output over the same sequences: a head
        is linearizable only where the mechanism beats it.
    heads
        Some heads; None for all.
    length
        Tokens per sequence.
    tokens
        About how many tokens of the texts to use; None for all.
    recalls
        Lists to measure associative recall with; 0 for none. Few, because every head is asked all of them:
        ``Impact.interval`` says how far each number may be off.
    seed
        Random seed of the recall lists and of the bootstrap.
    reuse
        False runs a whole forward for every head: the same numbers, more slowly.
    engine
        "local", or "ray": the same batches of sequences as tasks of a Ray cluster, whose workers load the model by its
        name. Both give the same numbers.
    address
        Of the Ray cluster; None joins the one that is running, or starts one on this machine.
    progress
        Called with the stage in words and the share that is done.

    Returns
    -------
    Impact
        Changes of loss, KL divergence, accuracy and recall for each mechanism and head.

    Examples
    --------
    ``tiny-llama`` is a folder with a small random model of two layers with four heads:

    >>> from pathlib import Path
    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> book = Path("book.txt").read_text()
    >>> impact = softgap.linearize.impact(
    ...     model, tokenizer, [book], "elu1", heads=[(0, 0), (1, 3)], length=64, tokens=512, recalls=0
    ... )
    >>> impact.mechanisms, impact.heads
    (('elu1', 'constant'), ((0, 0), (1, 3)))
    >>> bool((impact.mean("kl", "elu1") >= 0).all())
    True
    """
    check_measurable(model)
    sequences = split_sequences(model, tokenizer, texts, length=length, tokens=tokens)
    recall = recall_sequences(model, tokenizer, recalls, seed=seed) if recalls else None
    return impact_on(
        model, sequences, recall, mechanism, baselines=baselines, heads=heads, seed=seed, reuse=reuse, engine=engine,
        address=address, progress=progress,
    )  # fmt: skip


@deprecated_keywords(controls="baselines", asked="recall_lists", read="sequences")
def impact_on(
    model: Model,
    sequences: Sequences,
    recall_lists: Sequences | None,
    mechanism: str | Mechanism | Substitute,
    *,
    baselines: Sequence[str | Mechanism | Substitute] | None = None,
    heads: Sequence[Head] | None = None,
    seed: int = 0,
    reuse: bool = True,
    engine: str = "local",
    address: str | None = None,
    progress: Progress = silent,
) -> Impact:
    """The same on given sequences and recall lists; see ``impact``."""
    check_measurable(model)
    check_engine(engine)
    layers = attention_layers(model)
    all_heads = [(layer.number, head) for layer in layers if not layer.shared for head in range(layer.heads)]
    by_layer = heads_by_layer(layers, all_heads if heads is None else heads)
    swapped = [substitute(mechanism, model)]
    baseline_mechanisms = [mean_outputs(model, sequences)] if baselines is None else as_items(baselines)
    swapped += [substitute(other, model) for other in baseline_mechanisms]
    names = [other.name for other in swapped]
    if len(set(names)) < len(names):
        raise ValueInputError(f"the mechanism and its baselines must differ, got {', '.join(names)}; leave one out")
    sweep = _Sweep(model, layers, by_layer, swapped, reuse)
    share = len(sequences) / (len(sequences) + (0 if recall_lists is None else len(recall_lists)))
    with workers_of(model, engine, address) as sweep.workers:
        text = sweep.over(sequences, lambda done: progress("reading text", share * done))
        recall = (
            None
            if recall_lists is None
            else sweep.over(recall_lists, lambda done: progress("asking for recall", share + (1 - share) * done))
        )
    quantities = dict(zip(QUANTITIES, text, strict=True))
    if recall is not None:
        quantities["recall"], quantities["whole_answers"] = recall[3], recall[4]
    originals = {name: values[0, 0] for name, values in quantities.items()}
    changes = {name: values[1:] - (0 if name == "kl" else values[:1]) for name, values in quantities.items()}
    return Impact(
        mechanisms=tuple(names),
        heads=tuple((layer.number, head) for layer, layer_heads in by_layer for head in layer_heads),
        original=originals,
        change=changes,
        settings={
            "model": model.name_or_path or model.config.model_type,
            "fingerprint": model_fingerprint(model),
            "passages": digest_of_sequences(*([sequences] if recall_lists is None else [sequences, recall_lists])),
            "length": int(sequences.ids.shape[1]),
            "tokens": sequences.tokens,
            "recall_tokens": 0 if recall_lists is None else recall_lists.tokens,
            "calibration": swapped[0].mechanism.origin,
            "seed": seed,
        },
    )


def _sweep_batch(
    model: Model,
    heads: Sequence[tuple[int, list[int]]],
    swapped: Sequence[Substitute],
    reuse: bool,
    part: Sequences,
) -> Float[np.ndarray, "quantity swap head text"]:
    """On a worker: one batch of sequences."""
    layers = attention_layers(model)
    by_number = {layer.number: layer for layer in layers}
    by_layer = [(by_number[number], list(layer_heads)) for number, layer_heads in heads]
    return _Sweep(model, layers, by_layer, swapped, reuse).batch(part)


class _Sweep:
    """Every chosen head swapped alone, by each substitute, over sequences."""

    def __init__(
        self,
        model: Model,
        layers: Sequence[AttentionLayer],
        by_layer: Sequence[tuple[AttentionLayer, list[int]]],
        swapped: Sequence[Substitute],
        reuse: bool,
    ) -> None:
        self._model, self._heads_by_layer, self._swapped = model, by_layer, swapped
        self._parts = [
            [swapped_layer(layer, heads, head_substitute, len(layers)) for head_substitute in swapped]
            for layer, heads in by_layer
        ]
        self._blocks = Blocks(model)
        self._last = layers[-1]
        self._reuse = reuse and self._blocks.is_stack
        self._reuse_checked = False
        self.workers: Workers | None = None

    def over(
        self, sequences: Sequences, report: Callable[[float], None]
    ) -> Float[np.ndarray, "quantity swap head text"]:
        """Loss, KL and accuracy of every text: of the original (first), then of each substitute."""
        widest = max(len(heads) for _, heads in self._heads_by_layer)
        size = max(1, BATCH_TOKENS // (widest * sequences.ids.shape[1]))
        starts = range(0, len(sequences), size)
        if self.workers is not None:
            parts = [sequences.part(slice(start, start + size)) for start in starts]
            return self._on_workers(self.workers, parts, report)
        columns = []
        with torch.inference_mode():
            for number, start in enumerate(starts):
                done = number / len(starts)
                part = sequences.part(slice(start, start + size))
                columns.append(self._batch(part, lambda share, done=done: report(done + share / len(starts))))  # type: ignore[misc]
        return np.concatenate(columns, axis=-1)

    def _on_workers(
        self, workers: Workers, parts: Sequence[Sequences], report: Callable[[float], None]
    ) -> Float[np.ndarray, "quantity swap head text"]:
        """The batches as tasks of a cluster; whether to reuse blocks is decided here, as without one."""
        if self._reuse and not self._reuse_checked:
            with torch.inference_mode():
                with self._blocks.keep_outputs():
                    original = read_original(self._model, parts[0].ids)
                self._check(parts[0], original)
        heads = [(layer.number, layer_heads) for layer, layer_heads in self._heads_by_layer]
        columns = workers.map(
            _sweep_batch,
            [(heads, self._swapped, self._reuse, part) for part in parts],
            name="batch",
            advice="measure again",
            report=lambda done: report(done / len(parts)),
        )
        return np.concatenate(columns, axis=-1)

    def batch(self, part: Sequences) -> Float[np.ndarray, "quantity swap head text"]:
        """One batch alone, where it was decided before whether blocks are reused."""
        self._reuse_checked = True
        with torch.inference_mode():
            return self._batch(part, lambda share: None)

    def _batch(self, part: Sequences, report: Callable[[float], None]) -> Float[np.ndarray, "quantity swap head text"]:
        with self._blocks.keep_outputs():
            original = read_original(self._model, part.ids)
        if self._reuse and not self._reuse_checked:
            self._check(part, original)
        columns = []
        for number, (layer, heads) in enumerate(self._heads_by_layer):
            rows = [self._layer(layer, heads, index, part, original) for index in range(len(self._swapped))]
            base = original.scores.means(part).expand(-1, len(heads), -1)
            columns.append(torch.stack([base.cpu(), *rows], dim=1))
            report((number + 1) / len(self._heads_by_layer))
        return torch.cat(columns, dim=2).double().numpy()

    def _layer(
        self, layer: AttentionLayer, heads: list[int], index: int, part: Sequences, original: Original
    ) -> Float[Tensor, "quantity head text"]:
        if not self._reuse:
            return torch.cat([self._alone((layer.number, head), index, part, original) for head in heads], dim=1)
        place = next(i for i, (other, _) in enumerate(self._heads_by_layer) if other is layer)
        side = SideBySide(self._parts[place][index], len(part))
        step = max(1, BATCH_TOKENS // part.ids.numel())
        columns = []
        for first in range(0, len(heads), step):
            side.places = [[place] for place in range(first, min(len(heads), first + step))]
            copies = len(side.places)
            with self._blocks.start_at(layer, copies), replace_attention(self._model, side.output):
                columns.append(score_forward(self._model, part.ids, original, copies).means(part, copies).cpu())
        return torch.cat(columns, dim=1)

    def _alone(self, head: Head, index: int, part: Sequences, original: Original) -> Float[Tensor, "quantity 1 text"]:
        with swap(self._model, [head], self._swapped[index]):
            return score_forward(self._model, part.ids, original).means(part).cpu()

    def _check(self, part: Sequences, original: Original) -> None:
        """A model that keeps more than hidden states between its blocks is read by whole forwards."""
        self._reuse_checked = True
        with self._blocks.start_at(self._last):
            restarted_loss = score_forward(self._model, part.ids, None).loss.to(original.scores.loss)
        if float((restarted_loss - original.scores.loss).abs().max()) > TOLERANCE * max(
            1.0, float(original.scores.loss.max())
        ):
            self._reuse = False


class SideBySide:
    """Copies of one batch, the i-th with the i-th set of heads swapped: all below is the same in every copy.

    Attributes
    ----------
    places
        For each copy the heads that are swapped in it, by their places among the heads of the part.
    """

    def __init__(self, part: SwappedLayer, texts: int) -> None:
        self._part, self._texts = part, texts
        self._output: Tensor | None = None
        self.places: Sequence[Sequence[int]] = ()

    def output(self, call: AttentionCall) -> Float[Tensor, "batch query head value_dim"]:
        """The outputs of all heads, for all copies."""
        if call.module is not self._part.layer.module:
            return call.output
        if self._output is None:
            first = slice(0, self._texts)
            mask = call.mask if call.mask is None or call.mask.shape[0] == 1 else call.mask[first]
            single = call._replace(query=call.query[first], key=call.key[first], value=call.value[first], mask=mask)
            self._output = self._part.output(single, VisibleSets().of(single))
        output = call.output.clone()
        for copy, places in enumerate(self.places):
            rows = slice(copy * self._texts, (copy + 1) * self._texts)
            heads = self._part.heads[list(places)].to(output.device)
            output[rows].index_copy_(2, heads, self._output[:, :, list(places)])
        return output
