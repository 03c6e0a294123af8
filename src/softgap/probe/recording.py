"""Recording: watch a model while any code calls it, and get trajectories."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
            if stream.length == 0:
                continue
            rows = range(len(runs), len(runs) + stream.fed[0].shape[0])
            with _arithmetic(self.model.device):
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
        given = _by_name(module.forward, args, kwargs)
        tokens = _tokens(given)
        cache = given.get("past_key_values")
        stream = self._active
        if stream is None or not self._continues(stream, tokens, cache):
            stream = self._new_stream(cache)
        elif self._listener is not None:
            self._tell(stream, tokens[:, 0])
        self._active = stream
        stream.begin(tokens, _valid(given.get("attention_mask"), tokens.shape[1], stream.meter.length))

    def _continues(self, stream: Stream, tokens: Tensor, cache: object) -> bool:
        if self._generating is not None:
            if not self._generating.started:
                return False
            if tokens.shape[1] > stream.meter.length:
                raise UnsupportedError(
                    "recording a generation needs the KV cache, got a forward over the whole text again; call generate "
                    "with use_cache=True, or generate first and then softgap.read the text"
                )
            if cache is not None and cache is not stream.cache():
                raise UnsupportedError(
                    "recording a generation follows one cache, got a forward with another one in the same generation; "
                    "generate without recording, then replay the text with softgap.read"
                )
            return True
        return (
            not stream.open
            and cache is not None
            and cache is stream.cache()
            and tokens.shape[0] == stream.fed[0].shape[0]
            and _length(cache) == stream.meter.length
        )

    def _new_stream(self, cache: object) -> Stream:
        self._close()
        base = _length(cache)
        meter = Meter(self.mechanisms, block=self._block, focus=self._focus, drop_sinks=self._drop, base=base)
        stream = Stream(meter, TokenScores(self._block), base=base, cache=_weakly(cache))
        if self._generating is not None:
            self._generating.started = True
            self._generating.stream = stream
        self.streams.append(stream)
        return stream

    def _on_call(self, call: AttentionCall) -> None:
        # Part of a model may be called on its own, between two forwards of the whole: that is no step.
        if not self._paused and self._active is not None and self._active.open:
            with _arithmetic(call.query.device):
                self._active.observe(call)

    def _after_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        stream = self._active
        if self._paused or stream is None:
            return
        cache = getattr(output, "past_key_values", None)
        stream.cache = _weakly(cache) if cache is not None else stream.cache
        with _arithmetic(self.model.device):
            stream.end(getattr(output, "logits", None) if self._logits else None)
        if self._generating is not None and stream.prompts is None:
            stream.prompts = [self._generating.n_prompt] * stream.fed[0].shape[0]

    def _tell(self, stream: Stream, tokens: Int[Tensor, " batch"]) -> None:
        """Give the listener the last step, now that its token is known."""
        n_prompt = stream.prompts[0] if stream.prompts is not None else stream.base + 1
        index = stream.meter.length - n_prompt
        if self._listener is None or index < 0:
            return
        with _arithmetic(self.model.device):
            layers = stream.meter.last_step()
        widest = max(layer.shape[-1] for layer in layers)
        # Layers with fewer heads are padded, as in the trajectories.
        padded = [torch.nn.functional.pad(x, (0, widest - x.shape[-1]), value=torch.nan) for x in layers]
        self._listener(Step(index, tokens.cpu().numpy(), torch.stack(padded, dim=2).numpy()))

    def _close(self) -> None:
        """End the stream that was fed last."""
        stream, self._active = self._active, None
        if stream is not None:
            with _arithmetic(self.model.device):
                stream.close()

    def _generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(*args: Any, **kwargs: Any) -> Any:
            kind: Any = type(self.model)
            given = _by_name(kind.generate, (self.model, *args), kwargs)
            config = _generation_config(self.model, given)
            generation = self._generating = _Generation(_prompt_length(given))
            sequences: Tensor | None = None
            try:
                result = original(*args, **kwargs)
                sequences = getattr(result, "sequences", result)
                return result
            finally:
                self._generating = None
                if generation.stream is not None and generation.stream.prompts is not None:
                    self._finish(generation.stream, generation.n_prompt, sequences, config, given)
                self._close()

        return generate

    def _finish(
        self, stream: Stream, n_prompt: int, sequences: Tensor | None, config: Any, given: dict[str, Any]
    ) -> None:
        """Note the token that was never fed back, and where each row stopped; no sequences: it was interrupted."""
        known = torch.cat(stream.fed, dim=1)
        if sequences is not None:
            known = stream.sequences = torch.cat([known, sequences[:, -1:]], dim=1)
        stream.row_lengths = _row_lengths(known[:, n_prompt - stream.base :], config, given, known.shape[1])
        if self._listener is not None and sequences is not None:
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
        stack.callback(recording._close)
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


def _arithmetic(device: torch.device) -> AbstractContextManager[object]:
    """The instrument computes without gradients, and in float32 also where the caller casts automatically."""
    if not torch.is_autocast_enabled(device.type):
        return torch.inference_mode()
    stack = ExitStack()
    stack.enter_context(torch.autocast(device.type, enabled=False))
    stack.enter_context(torch.inference_mode())
    return stack


def _weakly(cache: object) -> Callable[[], object]:
    """A reference that does not keep a cache alive."""
    try:
        return weakref.ref(cache)
    except TypeError:  # tuples and None
        return lambda: cache


def _by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by the names that the function gives them."""
    if not args:
        return kwargs
    return {**dict(zip(inspect.signature(function).parameters, args, strict=False)), **kwargs}


def _tokens(given: dict[str, Any]) -> Int[Tensor, "batch time"]:
    ids = given.get("input_ids")
    if ids is not None:
        # A copy: the caller's may be a view that keeps all earlier tokens alive.
        return ids.detach().clone()  # type: ignore[no-any-return]
    embeddings = given.get("inputs_embeds")
    if embeddings is None:
        raise ModelError("a recorded forward needs input_ids or inputs_embeds, got neither")
    # Embeddings have no token ids: -1 stands for a token that is not known.
    return torch.full(embeddings.shape[:2], -1, dtype=torch.long, device=embeddings.device)


def _valid(attention_mask: object, n: int, cached: int) -> Bool[Tensor, "batch time"] | None:
    """Which tokens are no padding, where the caller's mask says so: all of them, or at least the n newest."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return None
    return (attention_mask if attention_mask.shape[1] == cached + n else attention_mask[:, -n:]).bool()


def _length(cache: object) -> int:
    """Positions a cache holds; 0 for none, or where it cannot tell."""
    count = getattr(cache, "get_seq_length", None)
    return int(count()) if callable(count) else 0


def _prompt_length(given: dict[str, Any]) -> int:
    """Tokens of the prompt, those in a cache included: the mask counts them where only new tokens are given."""
    lengths = [
        int(value.shape[1])
        for value in (given.get(name) for name in ("inputs", "input_ids", "inputs_embeds", "attention_mask"))
        if isinstance(value, Tensor) and value.dim() >= 2
    ]
    return max(lengths, default=1)  # nothing given: the model begins with its own first token


def _generation_config(model: Any, given: dict[str, Any]) -> Any:
    """The settings this generation will use, refused where one step is not one token of one sequence."""
    named = inspect.signature(type(model).generate).parameters
    settings = {key: value for key, value in given.items() if key not in named}
    config, _ = model._prepare_generation_config(given.get("generation_config"), **settings)
    mode = str(config.get_generation_mode(given.get("assistant_model")).value).replace("_", " ")
    if given.get("custom_generate") is not None:
        mode = "a custom generation"
    elif config.guidance_scale not in (None, 1):
        mode = "classifier-free guidance"
    if mode not in ("greedy search", "sample"):
        raise UnsupportedError(
            f"live recording follows greedy search and sampling, got {mode}; generate without recording, then replay "
            "the text with softgap.read"
        )
    if config.use_cache is False:
        raise UnsupportedError(
            "recording a generation needs the KV cache, got use_cache=False; leave it on, or generate without "
            "recording and then replay the text with softgap.read"
        )
    return config


def _row_lengths(new: Int[Tensor, "batch time"], config: Any, given: dict[str, Any], otherwise: int) -> list[int]:
    """New tokens of each row up to where it stopped; ``otherwise`` for a row that did not."""
    lengths = [otherwise] * len(new)
    if config.eos_token_id is None:
        return lengths
    ends = torch.as_tensor(config.eos_token_id, device=new.device).reshape(-1)
    criteria = bool(config.stop_strings or given.get("stopping_criteria"))
    for i, tokens in enumerate(new):
        stops, rest = torch.isin(tokens, ends), tokens != config.pad_token_id
        if bool(stops.any()):
            lengths[i] = int(stops.int().argmax()) + 1
        elif criteria and bool(rest.any()) and not bool(rest[-1]):
            # A row that a criterion stopped has no mark of its own, only padding behind it.
            lengths[i] = int(rest.nonzero()[-1]) + 1
    return lengths
