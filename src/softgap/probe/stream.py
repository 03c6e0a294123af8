"""One batch of sequences on its way through a model, and the Trajectories it becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from softgap.errors import ModelError
from softgap.models.support import layer_numbers
from softgap.probe.meter import LayerMeasurements, Meter
from softgap.probe.tap import AttentionCall
from softgap.probe.token_scores import TokenScores
from softgap.probe.visibility import VisibleSets
from softgap.trajectories import FOCUS, QUANTITIES, Manifest, Trajectories

__all__ = ["Stream"]


@dataclass
class Stream:
    """A batch that is fed forward by forward: one step of a trajectory for every position fed.

    Attributes
    ----------
    base
        Positions that were in the cache before the first forward.
    prompts
        Length of each row's prompt counted from position 0, padding included; None where all is text to read.
    sequences
        All tokens of each row from the first one fed, where more is known than was fed; -1 behind a row's end.
    row_lengths
        New tokens of each row that stopped early.
    open
        Whether a forward has begun and not ended.
    cache
        The cache its forwards fill, which is the caller's to keep.
    keys
        The first layer's keys as the last forward left them in the cache.
    """

    meter: Meter
    scores: TokenScores
    base: int = 0
    prompts: Sequence[int] | None = None
    sequences: Int[Tensor, "batch time"] | None = None
    row_lengths: Sequence[int] | None = None
    cache: Callable[[], object] = lambda: None
    keys: Callable[[], object] = lambda: None
    open: bool = False
    fed: list[Int[Tensor, "batch time"]] = field(default_factory=list)
    layer_ids: list[int | None] = field(default_factory=list)
    heads: list[tuple[int, int]] = field(default_factory=list)
    _modules: list[int] = field(default_factory=list)
    _sets: VisibleSets = field(default_factory=VisibleSets)
    _calls: int = 0

    @property
    def tokens(self) -> Int[Tensor, "batch time"]:
        """All tokens known so far, from the first one fed."""
        fed = torch.cat(self.fed, dim=1)
        return fed if self.sequences is None else self.sequences.to(fed.device)

    @property
    def length(self) -> int:
        """Positions whose forward is over."""
        return self.meter.length - self.base

    def begin(
        self, tokens: Int[Tensor, "batch time"], valid: Bool[Tensor, "batch time"] | None, *, by_reference: bool = False
    ) -> None:
        """A forward over these tokens starts; ``valid`` is False at padding, None where the caller does not say."""
        self.fed.append(tokens)
        self.open = True
        self.meter.begin_forward(tokens.shape[1], valid, by_reference=by_reference)
        self._calls = 0
        self._sets = VisibleSets(self.meter.length)

    def observe_step(self, call: AttentionCall) -> bool:
        """One attention call of the present forward, if it is an ordinary step; False leaves it to observe."""
        index = self._calls
        # Steps are noted only at the calls that their layers made before.
        if index >= len(self._modules) or self._modules[index] != id(call.module):
            return False
        if call.query.shape[0] != self.fed[-1].shape[0] or call.query.shape[2] != 1:
            return False
        if not self.meter.observe_step(index, call):
            return False
        self._calls += 1
        return True

    def observe(self, call: AttentionCall) -> None:
        """One attention call of the present forward; calls are told apart by their order in it."""
        index = self._calls
        self._calls += 1
        batch, n = self.fed[-1].shape
        if tuple(call.query.shape[0:3:2]) != (batch, n):
            raise ModelError(
                f"'{type(call.module).__name__}' attends with {list(call.query.shape)} queries where {batch} sequences "
                f"of {n} tokens were fed: its positions are not tokens, so this model type cannot be recorded"
            )
        if index == len(self._modules):
            self._modules.append(id(call.module))
            self.layer_ids.append(getattr(call.module, "layer_idx", None))
            self.heads.append((call.query.shape[1], call.key.shape[1]))
        elif self._modules[index] != id(call.module):
            raise ModelError("the model's attention layers changed between two forwards; record one path at a time")
        self.meter.observe(index, call, self._sets.of(call))

    def end(self, logits: Tensor | None) -> None:
        """The forward is over; ``logits`` are those of its last positions."""
        if self._calls == 0:
            raise ModelError(
                "a forward pass made no attention call that the tap could see; do not change the attention "
                "implementation while recording"
            )
        if self._calls < len(self._modules):
            raise ModelError("the model's attention layers changed between two forwards; record one path at a time")
        self.meter.end_forward()
        self._sets = VisibleSets()
        if logits is not None:
            tokens = torch.cat(self.fed, dim=1)
            self.scores.add(tokens.shape[1] - logits.shape[1], logits.detach(), tokens)
        self.open = False

    def close(self) -> None:
        """Nothing more will come: keep the numbers, and no tensor of the model."""
        self.meter.close()
        if self.fed:
            self.scores.close(self.tokens)

    def trajectories(
        self,
        mechanisms: Sequence[str],
        decode: Callable[[int], str],
        manifest: Manifest,
        drop_sinks: int,
        sample_ids: Sequence[str],
    ) -> list[Trajectories]:
        """One Trajectories per row, padding left out."""
        measured = self.meter.measurements()
        # A forward that was interrupted left some layers ahead of others.
        n = min([self.length, *(layer.shape[-1] for layer in measured.quantities)])
        if n == 0 or not measured.quantities:
            return []
        tokens = self.tokens.cpu()
        logprob, entropy = self.scores.result(tokens, n)
        layout = _Layout.of(self.layer_ids, self.heads)
        valid = self.meter.valid
        runs = []
        for row, sample_id in enumerate(sample_ids):
            padding, real = 0, np.arange(n)
            if valid is not None:
                known = valid[row].cpu().numpy()
                padding, real = int(known.argmax()), known[self.base : self.base + n].nonzero()[0]
            queries = _Row(
                measurements=measured,
                layout=layout,
                row=row,
                tokens=tokens[row].numpy(),
                logprob=logprob[row].numpy(),
                entropy=entropy[row].numpy(),
                padding=padding,
                base=self.base,
                mechanisms=tuple(mechanisms),
                decode=decode,
            )
            selected = real[real + self.base - padding >= drop_sinks]
            runs.append(self._run(queries, selected, row, sample_id, manifest))
        return runs

    def _run(
        self, queries: _Row, real: Int[np.ndarray, " step"], row: int, sample_id: str, manifest: Manifest
    ) -> Trajectories:
        if self.prompts is None:
            return queries.part(real, "completion", sample_id, manifest)
        first = self.prompts[row] - 1 - self.base
        count = len(real) if self.row_lengths is None else self.row_lengths[row]
        completion = real[(real >= first) & (real < first + count)]
        prompt = real[real < first]
        n_prompt = self.prompts[row] - queries.padding
        return queries.part(
            completion,
            "completion",
            sample_id,
            manifest,
            n_prompt=n_prompt,
            prompt=queries.part(prompt, "prompt", sample_id, manifest, n_prompt=n_prompt) if len(prompt) else None,
        )


@dataclass(frozen=True)
class _Layout:
    """Where the tapped layers go in an array of equal rows."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    kv_group: Int[np.ndarray, "layer head"]

    @classmethod
    def of(cls, layer_ids: Sequence[int | None], heads: Sequence[tuple[int, int]]) -> _Layout:
        widest = max(query for query, _ in heads)
        kv_group = np.full((len(heads), widest), -1, dtype=np.int32)
        for i, (query, kv) in enumerate(heads):
            kv_group[i, :query] = np.arange(query) // (query // kv)
        return cls(layer_numbers(layer_ids), tuple(query for query, _ in heads), kv_group)


@dataclass(frozen=True)
class _Row:
    """One row of a batch, from which parts of a trajectory are cut."""

    measurements: LayerMeasurements
    layout: _Layout
    row: int
    tokens: Int[np.ndarray, " time"]
    logprob: np.ndarray
    entropy: np.ndarray
    padding: int
    base: int
    mechanisms: tuple[str, ...]
    decode: Callable[[int], str]

    def part(
        self,
        queries: Int[np.ndarray, " step"],
        name: str,
        sample_id: str,
        manifest: Manifest,
        *,
        n_prompt: int = 0,
        prompt: Trajectories | None = None,
    ) -> Trajectories:
        """The trajectory of these queries (indices into what was fed)."""
        # Nearly always a range: then it is cut out, not gathered.
        contiguous = len(queries) > 0 and queries[-1] - queries[0] == len(queries) - 1
        steps = slice(queries[0], queries[-1] + 1) if contiguous else torch.from_numpy(np.ascontiguousarray(queries))
        following = [int(self.tokens[i + 1]) if i + 1 < len(self.tokens) else -1 for i in queries]
        return Trajectories(
            mechanisms=self.mechanisms,
            layers=self.layout.layers,
            kv_group=self.layout.kv_group,
            quantities={
                q: self._stack_layers(self.measurements.quantities, i, steps) for i, q in enumerate(QUANTITIES)
            },
            focus={
                q: self._stack_layers(self.measurements.focus, i, steps)
                for i, q in enumerate(FOCUS)
                if self.measurements.focus
            },
            positions=(queries - self.padding + self.base).astype(np.int32),
            token_ids=np.array(following, dtype=np.int32),
            tokens=tuple("" if token < 0 else self.decode(token) for token in following),
            logprob=self.logprob[queries].astype(np.float32),
            entropy=self.entropy[queries].astype(np.float32),
            heads_per_layer=self.layout.heads,
            part="prompt" if name == "prompt" else "completion",
            prompt=prompt,
            sample_id=sample_id,
            n_prompt=n_prompt,
            manifest=manifest,
        )

    def _stack_layers(self, source: Sequence[Tensor], quantity: int, steps: slice | Int[Tensor, " step"]) -> np.ndarray:
        """One quantity of every layer, ``[mechanism, layer, head, step]`` or without the first axis."""
        layers = [x[quantity][..., self.row, :, :][..., steps] for x in source]
        widest = self.layout.kv_group.shape[1]
        padded = [
            torch.nn.functional.pad(x, (0, 0, 0, widest - x.shape[-2]), value=torch.nan) if x.shape[-2] < widest else x
            for x in layers
        ]
        return np.ascontiguousarray(torch.stack(padded, dim=-3).numpy())
