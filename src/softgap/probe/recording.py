"""Recording: watch a model while any code calls it, and get trajectories."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from softgap.attention import Mechanism
from softgap.errors import UnsupportedError, ValueInputError
from softgap.inputs import as_items
from softgap.models.fingerprint import dropout_options, manifest_of, model_fingerprint
from softgap.models.placement import input_device
from softgap.models.support import check_measurable, context_length
from softgap.models.tensor_files import DEFAULT_MECHANISMS, default_mechanisms, equip_mechanism
from softgap.probe.meter import Meter
from softgap.probe.stream import Stream
from softgap.probe.tap import (
    AttentionCall,
    by_name,
    cache_length,
    cached_keys,
    fed_tokens,
    generation_config,
    grows_by_copies,
    new_valid,
    observe_attention,
    prompt_length,
    row_lengths,
    second_thread,
)
from softgap.probe.token_scores import TokenScores
from softgap.trajectories import Trajectories

__all__ = ["DEFAULT_MECHANISMS", "Recording", "Step", "instrument_arithmetic", "prepare_mechanism", "record"]

BLOCK = 32


@dataclass(frozen=True, eq=False)
class Step:
    """One step of every row, as a listener gets it: the values of a query, and the token it led to.

    Attributes
    ----------
    logprob, entropy
        Of the token that it led to, and of its distribution; NaN where the recording looks at no logits.
    so_far
        The trajectories up to this step, one per row, prompt included: the first steps of what the recording will give
        at its end. It takes time that grows with the text, and is to be called before the listener returns.
    """

    index: int
    token_ids: Int[np.ndarray, " batch"]
    quantities: Float[np.ndarray, "quantity mechanism layer batch head"]
    logprob: Float[np.ndarray, " batch"]
    entropy: Float[np.ndarray, " batch"]
    so_far: Callable[[], list[Trajectories]]


class Recording:
    """What was seen of a model's attention; made by ``record``."""

    def __init__(
        self,
        model: PreTrainedModel,
        mechanisms: str | Mechanism | Sequence[str | Mechanism] | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        listener: Callable[[Step], None] | None = None,
        block: int = BLOCK,
        focus: bool = False,
        drop_sinks: int = 0,
        logits: bool = True,
        allow_dropout: bool = False,
    ) -> None:
        check_measurable(model, allow_dropout=allow_dropout)
        model_fingerprint(model)  # refuses weights that are not finite; the manifest asks for it anyway
        given: Any = default_mechanisms(model) if mechanisms is None else mechanisms
        mechanisms = as_items(given)
        if not mechanisms:
            raise ValueInputError("mechanisms must name at least one, got none; leave it out for the defaults")
        if block < 1:
            raise ValueInputError(f"block must be at least 1 step, got {block}")
        if drop_sinks < 0:
            raise ValueInputError(f"drop_sinks must not be negative, got {drop_sinks}")
        self.model = model
        self.mechanisms = tuple(prepare_mechanism(mechanism, model) for mechanism in mechanisms)
        label, times = Counter(mechanism.label for mechanism in self.mechanisms).most_common(1)[0]
        if times > 1:
            raise ValueInputError(
                f"each mechanism may be named once, got {', '.join(map(str, mechanisms))}; name '{label}' only once"
            )
        self.tokenizer = tokenizer
        self.streams: list[Stream] = []
        self._listener = listener
        self._block = 1 if listener is not None else block
        self._focus = focus
        self._drop = drop_sinks
        self._logits = logits
        self._allow_dropout = allow_dropout
        self._context = context_length(model)
        self._active: Stream | None = None
        self._generating: _Generation | None = None
        # Of the forward or the generation that began last.
        self._thread: threading.Thread | None = None
        self._paused = False

    def trajectories(self) -> list[Trajectories]:
        """One Trajectories per sequence, in the order they were run."""
        return self._runs(self.streams)

    def _runs(self, streams: Sequence[Stream]) -> list[Trajectories]:
        manifest = manifest_of(
            self.model,
            self.mechanisms,
            drop_sinks=self._drop,
            options=dropout_options(self.model, self._allow_dropout),
        )
        names = [mechanism.label for mechanism in self.mechanisms]
        runs: list[Trajectories] = []
        for stream in streams:
            if stream.length == 0:
                continue
            rows = range(len(runs), len(runs) + stream.fed[0].shape[0])
            with instrument_arithmetic(input_device(self.model)):
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
        self._refuse_second_thread()
        arguments = by_name(module.forward, args, kwargs)
        tokens = fed_tokens(arguments)
        cache = arguments.get("past_key_values")
        stream = self._active
        if stream is None or not self._continues(stream, tokens, cache):
            stream = self._new_stream(cache)
        elif self._listener is not None:
            self._tell(stream, tokens[:, 0])
        valid = new_valid(arguments.get("attention_mask"), tokens.shape[1], stream.meter.length)
        self._check_context(stream.meter.length + tokens.shape[1], valid, stream.meter.valid)
        self._active, self._thread = stream, threading.current_thread()
        stream.begin(tokens, valid, by_reference=grows_by_copies(cache))

    def _refuse_second_thread(self) -> None:
        """Refuse a forward or a generation while another thread is in the middle of one."""
        under_way = self._generating is not None or (self._active is not None and self._active.open)
        first = self._thread
        if under_way and first is not None and first is not threading.current_thread() and first.is_alive():
            raise second_thread(first)

    def _check_context(self, total: int, new: Tensor | None, before: Tensor | None) -> None:
        """Refuse positions that the model was not made for: it may answer, but what it answers is no measurement."""
        if self._context is None or total <= self._context:
            return
        padding = 0
        if new is not None:  # padding takes no position
            hidden = (~new).sum(dim=1) + (0 if before is None or new.shape[1] == total else (~before).sum(dim=1))
            padding = int(hidden.min())
        if total - padding > self._context:
            raise ValueInputError(
                f"the model's context is {self._context} tokens, got {total - padding}; shorten the text"
            )

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
            and cache_length(cache) == stream.meter.length
            and cached_keys(cache) is stream.keys()
        )

    def _new_stream(self, cache: object) -> Stream:
        self._close()
        base = cache_length(cache)
        meter = Meter(self.mechanisms, block=self._block, focus=self._focus, drop_sinks=self._drop, base=base)
        stream = Stream(meter, TokenScores(self._block), base=base, cache=_weak_reference(cache))
        if self._generating is not None:
            self._generating.started = True
            self._generating.stream = stream
        self.streams.append(stream)
        return stream

    def _on_call(self, call: AttentionCall) -> None:
        # Part of a model may be called on its own, between two forwards of the whole: that is no step.
        stream = self._active
        if self._paused or stream is None or not stream.open or stream.observe_step(call):
            return
        with instrument_arithmetic(call.query.device):
            stream.observe(call)

    def _after_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        stream = self._active
        if self._paused or stream is None:
            return
        cache = getattr(output, "past_key_values", None)
        if cache is not None:
            stream.cache, stream.keys = _weak_reference(cache), _weak_reference(cached_keys(cache))
        with instrument_arithmetic(input_device(self.model)):
            stream.end(getattr(output, "logits", None) if self._logits else None)
        if self._generating is not None and stream.prompts is None:
            stream.prompts = [self._generating.n_prompt] * stream.fed[0].shape[0]

    def _tell(self, stream: Stream, tokens: Int[Tensor, " batch"]) -> None:
        """Give the listener the last step, now that its token is known."""
        n_prompt = stream.prompts[0] if stream.prompts is not None else stream.base + 1
        index = stream.meter.length - n_prompt
        if self._listener is None or index < 0:
            return
        known = torch.cat([*stream.fed, tokens[:, None]], dim=1)
        with instrument_arithmetic(input_device(self.model)):
            layers = stream.meter.last_step()
            logprob, entropy = (scores[:, -1].numpy() for scores in stream.scores.result(known, stream.length))
        widest = max(layer.shape[-1] for layer in layers)
        # Layers with fewer heads are padded, as in the trajectories.
        padded = [torch.nn.functional.pad(x, (0, widest - x.shape[-1]), value=torch.nan) for x in layers]

        def so_far() -> list[Trajectories]:
            previous, stream.sequences = stream.sequences, known
            try:
                return self._runs([stream])
            finally:
                stream.sequences = previous

        values = torch.stack(padded, dim=2).numpy()
        self._listener(Step(index, tokens.cpu().numpy(), values, logprob, entropy, so_far))

    def _close(self) -> None:
        """End the stream that was fed last."""
        stream, self._active = self._active, None
        if stream is not None:
            with instrument_arithmetic(input_device(self.model)):
                stream.close()

    def _generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(*args: Any, **kwargs: Any) -> Any:
            kind: Any = type(self.model)
            arguments = by_name(kind.generate, (self.model, *args), kwargs)
            config = generation_config(self.model, arguments)
            with _lock:
                self._refuse_second_thread()
                self._thread = threading.current_thread()
                generation = self._generating = _Generation(prompt_length(arguments))
            sequences: Tensor | None = None
            try:
                result = original(*args, **kwargs)
                generated = getattr(result, "sequences", result)
                # Some models return something else than a row of tokens: those of several codebooks, or sound.
                if isinstance(generated, Tensor) and generated.dim() == 2 and not generated.is_floating_point():
                    sequences = generated
                return result
            finally:
                self._generating = None
                if generation.stream is not None and generation.stream.prompts is not None:
                    self._finish(generation.stream, generation.n_prompt, sequences, config, arguments)
                self._close()

        return generate

    def _finish(
        self, stream: Stream, n_prompt: int, sequences: Tensor | None, config: Any, arguments: dict[str, Any]
    ) -> None:
        """Note the token that was never fed back, and where each row stopped; no sequences: it was interrupted."""
        known = torch.cat(stream.fed, dim=1)
        if sequences is not None:
            known = stream.sequences = torch.cat([known, sequences[:, -1:]], dim=1)
        stream.row_lengths = row_lengths(known[:, n_prompt - stream.base :], config, arguments, known.shape[1])
        if self._listener is not None and sequences is not None:
            self._tell(stream, sequences[:, -1])


@contextmanager
def record(
    model: PreTrainedModel,
    mechanisms: str | Mechanism | Sequence[str | Mechanism] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    listener: Callable[[Step], None] | None = None,
    block: int = BLOCK,
    focus: bool = False,
    drop_sinks: int = 0,
    logits: bool = True,
    allow_dropout: bool = False,
) -> Iterator[Recording]:
    """Record every forward and every generation of a model while the block runs.

    Parameters
    ----------
    model
        Any causal model of transformers whose attention goes through the registry.
    mechanisms
        What to compare the model's softmax attention with; None takes the defaults of ``generate``.
    tokenizer
        For the text of the tokens; without it they stay empty.
    listener
        Called with each ``Step`` while the model generates; steps are then reduced one by one.
    block
        Steps to reduce together; it changes the speed, not the numbers.
    focus
        Measure S(a), attention entropy and the largest weight too.
    drop_sinks
        Leave out this many first keys of every sequence, in softmax and in the mechanisms.
    logits
        Score the logits of each forward; replay does that apart.
    allow_dropout
        Measure a model in training mode, whose dropout changes every number at random; the manifest says so.

    Yields
    ------
    Recording
        Its ``trajectories()`` returns one Trajectories per sequence.

    Examples
    --------
    ``tiny-llama`` is a folder with a small random model of two layers with four heads:

    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> inputs = tokenizer("A fox went out.", return_tensors="pt")
    >>> with softgap.record(model, ["elu1"], tokenizer=tokenizer) as recording:
    ...     ids = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    >>> [run.divergence.shape for run in recording.trajectories()]  # layer, head, step
    [(2, 4, 4)]
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
        allow_dropout=allow_dropout,
    )
    with ExitStack() as stack:
        stack.callback(recording._close)
        stack.enter_context(observe_attention(model, recording._on_call, allow_dropout=allow_dropout))
        before = model.register_forward_pre_hook(recording._before_forward, with_kwargs=True)
        stack.callback(before.remove)
        after = model.register_forward_hook(recording._after_forward, with_kwargs=True)
        stack.callback(after.remove)
        stack.enter_context(_wrap_generate(model, recording))
        yield recording


@dataclass
class _Generation:
    """A call of generate under way."""

    n_prompt: int
    started: bool = False
    stream: Stream | None = None


@dataclass(eq=False)
class _Wrapped:
    """A model whose generate is wrapped: what was there, what is there now, and the recordings that need it."""

    had: bool
    previous: Any
    ours: Any = None
    recordings: list[Recording] = field(default_factory=list)


_lock = threading.RLock()
_wrapped: dict[int, _Wrapped] = {}
"""By identity: no two live models share one, and a model lives as long as its generate is wrapped."""


@contextmanager
def _wrap_generate(model: PreTrainedModel, recording: Recording) -> Iterator[None]:
    """Wrap generate on this instance; the last recording to end puts back exactly what the first one replaced."""
    if not hasattr(model, "generate"):
        yield
        return
    with _lock:
        wrapped = _wrapped.get(id(model))
        if wrapped is None:
            wrapped = _wrapped[id(model)] = _Wrapped("generate" in model.__dict__, model.generate)
            model.__dict__["generate"] = wrapped.ours = _through_recordings(wrapped)
        wrapped.recordings.append(recording)
    try:
        yield
    finally:
        with _lock:
            wrapped.recordings.remove(recording)
            if not wrapped.recordings:
                del _wrapped[id(model)]
                if model.__dict__.get("generate") is wrapped.ours:  # else somebody has put another one there
                    del model.__dict__["generate"]
                    if wrapped.had:
                        model.__dict__["generate"] = wrapped.previous


def _through_recordings(wrapped: _Wrapped) -> Callable[..., Any]:
    def generate(*args: Any, **kwargs: Any) -> Any:
        through = wrapped.previous
        for recording in tuple(wrapped.recordings):
            through = recording._generate(through)
        return through(*args, **kwargs)

    return generate


def prepare_mechanism(mechanism: str | Mechanism, model: PreTrainedModel) -> Mechanism:
    """The mechanism as it is computed for this model, with every parameter that it needs."""
    equipped = equip_mechanism(mechanism, model)
    if "context" in equipped.options:
        context = context_length(model)
        return equipped.configure(context=context) if context else equipped
    return equipped


def instrument_arithmetic(device: torch.device) -> AbstractContextManager[object]:
    """The instrument computes without gradients, and in float32 also where the caller casts automatically."""
    # Results are on the CPU, wherever the model runs.
    cast = [kind for kind in dict.fromkeys((device.type, "cpu")) if torch.is_autocast_enabled(kind)]
    if not cast:
        return torch.inference_mode()
    stack = ExitStack()
    for kind in cast:
        stack.enter_context(torch.autocast(kind, enabled=False))
    stack.enter_context(torch.inference_mode())
    return stack


def _weak_reference(thing: object) -> Callable[[], object]:
    """A reference that does not keep a cache or its keys alive."""
    try:
        return weakref.ref(thing)
    except TypeError:  # tuples and None
        return lambda: thing
