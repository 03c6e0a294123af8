"""Recording: watch a model while any code calls it, and get trajectories."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from softgap.attention import Mechanism, resolve
from softgap.errors import ModelError, UnsupportedError, ValueInputError
from softgap.probe.meter import Meter
from softgap.probe.provenance import manifest_of
from softgap.probe.stream import Stream
from softgap.probe.tap import AttentionCall, tapped
from softgap.probe.token_scores import TokenScores
from softgap.trajectories import Trajectories

__all__ = ["DEFAULT_MECHANISMS", "Recording", "Step", "record"]

DEFAULT_MECHANISMS = ("elu1", "uniform")
BLOCK = 32


@dataclass(frozen=True, eq=False)
class Step:
    """One step of every row, as a listener gets it: the values of a query, and the token it led to."""

    index: int
    token_ids: Int[np.ndarray, " batch"]
    quantities: Float[np.ndarray, "quantity mechanism layer batch head"]


class Recording:
    """What was seen of a model's attention; made by :func:`record`."""

    def __init__(
        self,
        model: PreTrainedModel,
        mechanisms: Sequence[str | Mechanism] = DEFAULT_MECHANISMS,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        listener: Callable[[Step], None] | None = None,
        block: int = BLOCK,
        focus: bool = False,
        drop_sinks: int = 0,
        logits: bool = True,
    ) -> None:
        if not mechanisms:
            raise ValueInputError("mechanisms must name at least one, got none; leave it out for elu1 and uniform")
        if block < 1:
            raise ValueInputError(f"block must be at least 1 step, got {block}")
        if drop_sinks < 0:
            raise ValueInputError(f"drop_sinks must not be negative, got {drop_sinks}")
        self.model = model
        self.mechanisms = tuple(_ready(resolve(mechanism), model) for mechanism in mechanisms)
        if len({mechanism.name for mechanism in self.mechanisms}) < len(self.mechanisms):
            raise ValueInputError(f"each mechanism may be named once, got {', '.join(map(str, mechanisms))}")
        self.tokenizer = tokenizer
        self.streams: list[Stream] = []
        self._listener = listener
        self._block = 1 if listener is not None else block
        self._focus = focus
        self._drop = drop_sinks
        self._logits = logits
        self._active: Stream | None = None
        self._generating: _Generation | None = None
        self._paused = False

    def trajectories(self) -> list[Trajectories]:
        """One Trajectories per sequence, in the order they were run."""
        manifest = manifest_of(self.model, self.mechanisms, drop_sinks=self._drop)
        names = [mechanism.name for mechanism in self.mechanisms]
        runs: list[Trajectories] = []
        for stream in self.streams:
            if not stream.fed or not stream.heads:
                continue
            rows = range(len(runs), len(runs) + stream.fed[0].shape[0])
            runs += stream.trajectories(names, self._decode, manifest, self._drop, [str(row) for row in rows])
        return runs

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forwards in this block are not part of the recording."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def add_logits(self, first: int, logits: Tensor) -> None:
        """Score logits that were computed apart from the forward they belong to (replay does, to save memory)."""
        stream = self.streams[-1]
        stream.scores.add(first, logits.detach(), stream.tokens)

    def _decode(self, token: int) -> str:
        return "" if self.tokenizer is None else str(self.tokenizer.decode([token]))

    def _before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._paused:
            return
        tokens = _tokens(args, kwargs)
        cache = kwargs.get("past_key_values")
        stream = self._active
        if stream is None or not self._continues(stream, tokens, cache):
            stream = self._new_stream(cache)
        elif self._listener is not None:
            self._tell(stream, tokens[:, 0])
        self._active = stream
        stream.begin(tokens, _valid(kwargs.get("attention_mask"), tokens.shape[1]))

    def _continues(self, stream: Stream, tokens: Tensor, cache: object) -> bool:
        if self._generating is not None:
            if not self._generating.started:
                return False
            if tokens.shape[1] >= stream.meter.length:
                raise UnsupportedError(
                    "recording a generation needs the KV cache, got a forward over the whole text again; call generate "
                    "with use_cache=True, or generate first and then softgap.read the text"
                )
            return True
        return (
            cache is not None
            and cache is stream.cache
            and tokens.shape[0] == stream.fed[0].shape[0]
            and _length(cache) == stream.meter.length
        )

    def _new_stream(self, cache: object) -> Stream:
        base = _length(cache)
        meter = Meter(self.mechanisms, block=self._block, focus=self._focus, drop_sinks=self._drop, base=base)
        stream = Stream(meter, TokenScores(self._block), base=base, cache=cache)
        if self._generating is not None:
            self._generating.started = True
            self._generating.stream = stream
        self.streams.append(stream)
        return stream

    def _on_call(self, call: AttentionCall) -> None:
        if not self._paused and self._active is not None:
            with torch.inference_mode():
                self._active.observe(call)

    def _after_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        stream = self._active
        if self._paused or stream is None:
            return
        cache = getattr(output, "past_key_values", None)
        stream.cache = cache if cache is not None else stream.cache
        with torch.inference_mode():
            stream.end(getattr(output, "logits", None) if self._logits else None)
        if self._generating is not None and stream.prompts is None:
            stream.prompts = [self._generating.n_prompt] * stream.fed[0].shape[0]

    def _tell(self, stream: Stream, tokens: Int[Tensor, " batch"]) -> None:
        """Give the listener the last step, now that its token is known."""
        n_prompt = stream.prompts[0] if stream.prompts is not None else stream.base + 1
        index = stream.meter.length - n_prompt
        if self._listener is None or index < 0:
            return
        values = torch.stack(stream.meter.last_step(), dim=2)
        self._listener(Step(index, tokens.cpu().numpy(), values.numpy()))

    def _generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(*args: Any, **kwargs: Any) -> Any:
            config = _generation_config(self.model, kwargs)
            self._generating = _Generation(_prompt_length(args, kwargs))
            try:
                result = original(*args, **kwargs)
                self._finish(getattr(result, "sequences", result), config)
                return result
            finally:
                self._generating, self._active = None, None

        return generate

    def _finish(self, sequences: Int[Tensor, "batch time"], config: Any) -> None:
        stream = None if self._generating is None else self._generating.stream
        if stream is None:
            return
        fed = torch.cat(stream.fed, dim=1)
        total = stream.base + fed.shape[1] + 1
        new = total - (total if stream.prompts is None else stream.prompts[0])
        if sequences.shape[1] == total:
            stream.sequences = sequences
        else:  # embeddings went in: only the new tokens come out
            stream.sequences = torch.cat([fed[:, : fed.shape[1] + 1 - new], sequences[:, -new:]], dim=1)
        stream.row_lengths = _row_lengths(sequences[:, sequences.shape[1] - new :], config)
        if self._listener is not None:
            self._tell(stream, sequences[:, -1])


@contextmanager
def record(
    model: PreTrainedModel,
    mechanisms: Sequence[str | Mechanism] = DEFAULT_MECHANISMS,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    listener: Callable[[Step], None] | None = None,
    block: int = BLOCK,
    focus: bool = False,
    drop_sinks: int = 0,
    logits: bool = True,
) -> Iterator[Recording]:
    """Record every forward and every generation of a model while the block runs.

    Parameters
    ----------
    model
        Any causal model of transformers whose attention goes through the registry.
    mechanisms
        What to compare the model's softmax attention with.
    tokenizer
        For the text of the tokens; without it they stay empty.
    listener
        Called with each :class:`Step` while the model generates; steps are then reduced one by one.
    block
        Steps to reduce together; it changes the speed, not the numbers.
    focus
        Measure S(a), attention entropy and the largest weight too.
    drop_sinks
        Leave out the first keys of every sequence, on both sides.
    logits
        Score the logits of each forward; replay does that apart.
    """
    recording = Recording(
        model,
        mechanisms,
        tokenizer=tokenizer,
        listener=listener,
        block=block,
        focus=focus,
        drop_sinks=drop_sinks,
        logits=logits,
    )
    with ExitStack() as stack:
        stack.enter_context(tapped(model, recording._on_call))
        before = model.register_forward_pre_hook(recording._before_forward, with_kwargs=True)
        stack.callback(before.remove)
        after = model.register_forward_hook(recording._after_forward, with_kwargs=True)
        stack.callback(after.remove)
        stack.enter_context(_own_generate(model, recording))
        yield recording


@dataclass
class _Generation:
    """A call of generate under way."""

    n_prompt: int
    started: bool = False
    stream: Stream | None = None


@contextmanager
def _own_generate(model: PreTrainedModel, recording: Recording) -> Iterator[None]:
    """Wrap generate on this instance, and put back exactly what was there."""
    if not hasattr(model, "generate"):
        yield
        return
    had = "generate" in model.__dict__
    previous: Any = model.generate
    model.__dict__["generate"] = recording._generate(previous)
    try:
        yield
    finally:
        if had:
            model.__dict__["generate"] = previous
        else:
            del model.__dict__["generate"]


def _ready(mechanism: Mechanism, model: PreTrainedModel) -> Mechanism:
    if mechanism.missing:
        raise UnsupportedError(
            f"mechanism '{mechanism.name}' needs the parameters {', '.join(mechanism.missing)}, which a calibration "
            "brings; calibrate the model first or choose another mechanism"
        )
    if "context" in mechanism.options:
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        return mechanism.configure(context=context) if context else mechanism
    return mechanism


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Int[Tensor, "batch time"]:
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is not None:
        return ids.detach()  # type: ignore[no-any-return]
    embeddings = kwargs.get("inputs_embeds")
    if embeddings is None:
        raise ModelError("a recorded forward needs input_ids or inputs_embeds, got neither")
    # Embeddings have no token ids: -1 stands for a token that is not known.
    return torch.full(embeddings.shape[:2], -1, dtype=torch.long, device=embeddings.device)


def _valid(attention_mask: object, n: int) -> Bool[Tensor, "batch time"] | None:
    """Which of the n newest tokens are no padding, where the caller's mask says so."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return None
    return attention_mask[:, -n:].bool()


def _length(cache: object) -> int:
    """Positions a cache holds; 0 for none, or where it cannot tell."""
    count = getattr(cache, "get_seq_length", None)
    return int(count()) if callable(count) else 0


def _prompt_length(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for given in (
        args[0] if args else None,
        kwargs.get("inputs"),
        kwargs.get("input_ids"),
        kwargs.get("inputs_embeds"),
    ):
        if isinstance(given, Tensor):
            return int(given.shape[1])
    return 1  # nothing given: the model begins with its own first token


def _generation_config(model: PreTrainedModel, kwargs: dict[str, Any]) -> Any:
    """The settings this generation will use, refused where one step is not one token of one sequence."""
    config = copy.deepcopy(kwargs.get("generation_config") or model.generation_config)
    config.update(**{key: value for key, value in kwargs.items() if hasattr(config, key)})
    mode = config.get_generation_mode(kwargs.get("assistant_model"))
    if str(mode.value) not in ("greedy_search", "sample") or kwargs.get("custom_generate") is not None:
        raise UnsupportedError(
            f"live recording follows greedy search and sampling, got {str(mode.value).replace('_', ' ')}; generate "
            "without recording, then replay the text with softgap.read"
        )
    return config


def _row_lengths(new: Int[Tensor, "batch time"], config: Any) -> list[int]:
    """New tokens of each row up to its first end-of-sequence token."""
    ends = config.eos_token_id
    if ends is None:
        return [new.shape[1]] * len(new)
    stops = torch.isin(new, torch.as_tensor(ends, device=new.device).reshape(-1))
    return [int(row.int().argmax()) + 1 if bool(row.any()) else new.shape[1] for row in stops]
