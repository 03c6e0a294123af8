"""Generate with a model, or read a text with it, and get the trajectories."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from softgap.attention import Mechanism
from softgap.errors import ModelError, NonFiniteWarning, ValueInputError
from softgap.models.fingerprint import dropout_options, live_options, manifest_of, replay_options
from softgap.models.placement import input_device, random_devices
from softgap.models.support import check_measurable, context_length
from softgap.probe.prompts import (
    Prompt,
    as_prompts,
    check_loaded,
    completion_ids,
    decode_tokens,
    is_ids,
    pad_id,
    prompt_ids,
    prompt_text,
    uses_chat,
)
from softgap.probe.recording import BLOCK, Step, record
from softgap.probe.tap import takes_positions
from softgap.probe.token_scores import forward_then_logits
from softgap.trajectories import Manifest, NonFinite, Trajectories, inputs_digest

__all__ = [
    "COLDEST",
    "Interrupted",
    "check_lengths",
    "check_temperature",
    "fixed_seed",
    "generate",
    "read",
    "read_ids",
]


def sampling_settings(seed: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with sampling on where there is a seed, and off otherwise, unless they say so themselves."""
    settings = {"do_sample": seed is not None, **settings}
    if settings["do_sample"] is False:
        # Sampling defaults of the model's own generation config would only warn here.
        settings = {"temperature": None, "top_p": None, "top_k": None, **settings}
    return settings


def stopping_settings(stop: Callable[[], bool] | None, note: Callable[[Tensor], None] | None = None) -> dict[str, Any]:
    """The setting that ends all rows of a generation once ``stop`` says so, and shows ``note`` the tokens so far."""
    if stop is None and note is None:
        return {}
    return {"stopping_criteria": StoppingCriteriaList([_StopRequest(stop, note)])}


class _StopRequest(StoppingCriteria):
    """Ends all rows of a generation once somebody says so."""

    def __init__(self, stop: Callable[[], bool] | None, note: Callable[[Tensor], None] | None) -> None:
        self._stop, self._note = stop, note

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Whether each row is over."""
        if self._note is not None:
            self._note(input_ids)
        over = self._stop is not None and self._stop()
        return torch.full((len(input_ids),), over, dtype=torch.bool, device=input_ids.device)


@contextmanager
def fixed_seed(seed: int | None, model: PreTrainedModel) -> Iterator[None]:
    """A seed for sampling that leaves the global random state as it was."""
    if seed is None:
        yield
        return
    devices = random_devices(model)
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed would seed every other device too, and nobody would put those back.
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.cuda.device(input_device(model)):
                torch.cuda.manual_seed(seed)
        yield


def check_lengths(model: PreTrainedModel, rows: Sequence[Sequence[int]], more: int) -> None:
    """Refuse rows of tokens that the model's context does not hold, ``more`` new ones included."""
    longest = max((len(row) for row in rows), default=0)
    context = context_length(model)
    if context is not None and longest + more > context:
        length = f"{longest} tokens" + (f" and {more} new ones" if more else "")
        raise ValueInputError(f"the model's context is {context} tokens, got {length}; shorten the text")


def check_sinks(rows: Sequence[Sequence[int]], drop_sinks: int) -> None:
    """Refuse to drop all tokens of a row."""
    shortest = min((len(row) for row in rows), default=0)
    if drop_sinks and shortest <= drop_sinks:
        raise ValueInputError(f"drop_sinks must leave some text, got {drop_sinks} of {shortest} tokens; drop fewer")


def pad_rows(
    rows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase | None, side: str, device: torch.device
) -> tuple[Int[Tensor, "batch time"], Int[Tensor, "batch time"]]:
    """Rows as one tensor, padded on one side, with its mask."""
    if not rows:
        raise ValueInputError("at least one text is needed, got none")
    length = max(len(row) for row in rows)
    ids = torch.full((len(rows), length), pad_id(tokenizer))
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(length - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, place] = torch.tensor(row)
        mask[i, place] = 1
    return ids.to(device), mask.to(device)


Mechanisms = str | Mechanism | Sequence[str | Mechanism]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a generation; ``runs`` holds the trajectories of every row up to then, or nothing."""

    def __init__(self, runs: list[Trajectories]) -> None:
        super().__init__("interrupted")
        self.runs = runs


@overload
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: str | Sequence[int] | Sequence[Mapping[str, str]],
    max_new_tokens: int = ...,
    **options: Any,
) -> Trajectories: ...


@overload
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: list[str] | list[list[int]],
    max_new_tokens: int = ...,
    **options: Any,
) -> list[Trajectories]: ...


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Prompt | Sequence[Prompt],
    max_new_tokens: int = 128,
    *,
    mechanisms: Mechanisms | None = None,
    chat: bool | None = None,
    seed: int | None = None,
    listener: Callable[[Step], None] | None = None,
    stop: Callable[[], bool] | None = None,
    block: int = BLOCK,
    focus: bool = False,
    drop_sinks: int = 0,
    allow_dropout: bool = False,
    **settings: Any,
) -> Trajectories | list[Trajectories]:
    """Let a model continue a prompt, or a batch of prompts, and record it with its KV cache on.

    Parameters
    ----------
    model
        Any causal model of transformers whose attention goes through the registry.
    tokenizer
        Its tokenizer; None if the prompt is token ids.
    prompt
        A text, chat messages (``[{"role": "user", "content": "..."}]``) or token ids give one Trajectories, a list of
        these gives a list; ``num_return_sequences`` makes it a list too.
    max_new_tokens
        The most tokens that the model may write.
    mechanisms
        What to compare the model's softmax attention with: a name (``"elu1"``, ``"top_k:k=8"``), a ``Mechanism``, or
        several. None takes elu1 and uniform, and for a calibrated model also fitted and the window of equal memory.
    chat
        Whether to wrap the prompt in the tokenizer's chat template; None does so where there is one.
    seed
        With it the model samples (temperature 1 unless ``settings`` say otherwise); without it greedy search. The
        global random state is left as it was.
    listener
        Called with each ``softgap.probe.Step`` while the model writes.
    stop
        Asked after every token; once it says True the generation ends there, as if by itself.
    block
        Steps to reduce together; it changes the speed, not the numbers.
    focus
        Measure S(a), attention entropy and the largest weight too.
    drop_sinks
        Leave out this many first keys of every sequence, in softmax and in the mechanisms.
    allow_dropout
        Measure a model in training mode, whose dropout changes every number at random; the manifest says so.
    **settings
        Anything else that ``model.generate`` takes.

    Returns
    -------
    Trajectories or list of Trajectories
        Divergence, relative L2 and norm ratio ``[layer, head, step]`` for each mechanism; tokens, log-probability and
        entropy of each step.

    Raises
    ------
    Interrupted
        On Ctrl-C: a KeyboardInterrupt that carries what was measured up to then.

    Examples
    --------
    >>> import softgap
    >>> model, tokenizer = softgap.load_model("smollm2-135m")
    >>> run = softgap.generate(model, tokenizer, "Tell me a story about a fox.", max_new_tokens=4)
    >>> "".join(run.tokens)
    'The story of a'
    >>> run.divergence.shape  # layer, head, step; of the first mechanism
    (30, 9, 4)
    >>> run.mechanisms
    ('elu1', 'uniform')
    """
    check_loaded(model, tokenizer)
    check_measurable(model, allow_dropout=allow_dropout)
    if max_new_tokens < 1:
        raise ValueInputError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    prompts, single = as_prompts(prompt)
    rows = [prompt_ids(tokenizer, each, chat) for each in prompts]
    texts = [prompt_text(tokenizer, each) for each in prompts]
    in_template = uses_chat(tokenizer, chat) and not all(is_ids(each) for each in prompts)
    check_lengths(model, rows, max_new_tokens)
    check_sinks(rows, drop_sinks)
    settings = sampling_settings(seed, settings)
    recorded: dict[str, Any] = {"listener": listener, "block": block, "focus": focus, "drop_sinks": drop_sinks}
    recorded["allow_dropout"] = allow_dropout
    with record(model, mechanisms, tokenizer=tokenizer, **recorded) as recording, fixed_seed(seed, model):
        whole = _continue_rows(
            model, tokenizer, rows, {"max_new_tokens": max_new_tokens, **stopping_settings(stop), **settings}
        )
    options = live_options(
        model, max_new_tokens=max_new_tokens, chat=in_template, focus=focus, settings=settings
    ) | dropout_options(model, allow_dropout)
    manifest = manifest_of(
        model, recording.mechanisms, drop_sinks=drop_sinks, seed=seed, inputs=inputs_digest(texts), options=options
    )
    runs = _with_texts(recording.trajectories(), texts, manifest, tokenizer)
    _warn_non_finite(runs)
    if not whole:
        raise Interrupted(runs)
    return runs[0] if single and len(runs) == 1 else runs


_NO_DISTRIBUTION = "probability tensor contains either"
"""How torch begins to refuse probabilities that are none."""


def _continue_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    rows: Sequence[Sequence[int]],
    settings: dict[str, Any],
) -> bool:
    """Let the model continue rows of tokens; whether it came to its end, or was interrupted by Ctrl-C."""
    ids, mask = pad_rows(rows, tokenizer, "left", input_device(model))
    write: Any = model.generate
    try:
        write(ids, attention_mask=mask, pad_token_id=pad_id(tokenizer), **settings)
    except KeyboardInterrupt:
        return False
    except RuntimeError as error:
        if _NO_DISTRIBUTION not in str(error):
            raise
        raise ModelError(
            "a model must give finite logits to sample from, got NaN or infinity; check the model with softgap doctor, "
            "or load it in float32"
        ) from error
    return True


def _with_texts(
    runs: Sequence[Trajectories], prompts: Sequence[str], manifest: Manifest, tokenizer: PreTrainedTokenizerBase | None
) -> list[Trajectories]:
    """The runs with their texts and how they came about; each prompt may have several answers, one after the other."""
    answers = len(runs) // len(prompts)
    return [
        dataclasses.replace(
            run,
            manifest=manifest,
            prompt_text=prompts[i // answers],
            completion_text=decode_tokens(tokenizer, run.token_ids.tolist()),
        )
        for i, run in enumerate(runs)
    ]


@overload
def read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    text: str | Sequence[int],
    completion: str | Sequence[int] | None = ...,
    *,
    mechanisms: Mechanisms = ...,
    chat: bool = ...,
    focus: bool = ...,
    drop_sinks: int = ...,
    allow_dropout: bool = ...,
) -> Trajectories: ...


@overload
def read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    text: list[str] | list[list[int]],
    completion: list[str] | list[list[int]] | None = ...,
    *,
    mechanisms: Mechanisms = ...,
    chat: bool = ...,
    focus: bool = ...,
    drop_sinks: int = ...,
    allow_dropout: bool = ...,
) -> list[Trajectories]: ...


def read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    text: Prompt | Sequence[Prompt],
    completion: Prompt | Sequence[Prompt] | None = None,
    *,
    mechanisms: Mechanisms | None = None,
    chat: bool = False,
    focus: bool = False,
    drop_sinks: int = 0,
    allow_dropout: bool = False,
) -> Trajectories | list[Trajectories]:
    """Read a text in one teacher-forced pass: one step per query, whoever wrote the text.

    Parameters
    ----------
    model
        Any causal model of transformers whose attention goes through the registry.
    tokenizer
        Its tokenizer; None if text and completion are token ids.
    text
        A text, chat messages or token ids give one Trajectories, a list of these (a batch, padded on the right) a list.
    completion
        What followed the text: then steps are those of a generation of exactly these tokens.
    mechanisms
        What to compare the model's softmax attention with: a name (``"elu1"``, ``"top_k:k=8"``), a ``Mechanism``, or
        several. None takes elu1 and uniform, and for a calibrated model also fitted and the window of equal memory.
    chat
        Wrap the text in the tokenizer's chat template (with a completion).
    focus
        Measure S(a), attention entropy and the largest weight too.
    drop_sinks
        Leave out this many first keys of every sequence, in softmax and in the mechanisms.
    allow_dropout
        Measure a model in training mode, whose dropout changes every number at random; the manifest says so.

    Returns
    -------
    Trajectories or list of Trajectories
        The same as ``generate`` returns for these tokens.

    Examples
    --------
    ``tiny-llama`` is a folder with a small random model of two layers with four heads:

    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> run = softgap.read(model, tokenizer, "A fox went out", completion=" at night.", mechanisms=["elu1"])
    >>> "".join(run.tokens)
    ' at night.'
    >>> run.divergence.shape
    (2, 4, 10)
    """
    check_loaded(model, tokenizer)
    check_measurable(model, allow_dropout=allow_dropout)
    prompts, single = as_prompts(text)
    followed = None if completion is None else as_prompts(completion)[0]
    if followed is not None and len(followed) != len(prompts):
        raise ValueInputError(f"text and completion must go together, got {len(prompts)} and {len(followed)}")
    messages = [not isinstance(each, str) and not is_ids(each) for each in prompts]
    rows = [
        prompt_ids(tokenizer, each, chat or None if is_chat else chat)
        for each, is_chat in zip(prompts, messages, strict=True)
    ]
    texts = [prompt_text(tokenizer, each) for each in prompts]
    completions = None if followed is None else [prompt_text(tokenizer, each) for each in followed]
    runs = read_ids(
        model,
        rows,
        None if followed is None else [completion_ids(tokenizer, each) for each in followed],
        tokenizer=tokenizer,
        mechanisms=mechanisms,
        focus=focus,
        drop_sinks=drop_sinks,
        allow_dropout=allow_dropout,
    )
    inputs = inputs_digest([*texts, *(completions or ())])
    named = []
    for i, run in enumerate(runs):
        options = replay_options(chat=chat or any(messages), focus=focus) | dropout_options(model, allow_dropout)
        manifest = dataclasses.replace(run.manifest, inputs=inputs, options=options)
        before, after = ("", texts[i]) if completions is None else (texts[i], completions[i])
        named.append(dataclasses.replace(run, manifest=manifest, prompt_text=before, completion_text=after))
    _warn_non_finite(named)
    return named[0] if single else named


def _warn_non_finite(runs: Sequence[Trajectories]) -> None:
    """Warn whoever called ``generate`` or ``read`` of numbers that their means will leave out."""
    counts = sum((run.non_finite for run in runs), NonFinite())
    if counts:
        warnings.warn(counts.sentence, NonFiniteWarning, stacklevel=3)


def read_ids(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    mechanisms: Mechanisms | None = None,
    focus: bool = False,
    drop_sinks: int = 0,
    allow_dropout: bool = False,
) -> list[Trajectories]:
    """Read token ids: the same as ``read``, for who has tokens already."""
    check_measurable(model, allow_dropout=allow_dropout)
    followed: Sequence[Sequence[int]] = [()] * len(prompts) if completions is None else completions
    # The last token of a completion is predicted, never fed: as in a generation.
    fed = [[*p, *c[:-1]] for p, c in zip(prompts, followed, strict=True)]
    check_lengths(model, fed, 0)
    check_sinks(fed, drop_sinks)
    ids, mask = pad_rows(fed, tokenizer, "right", input_device(model))
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if not bool(mask.all()):
        inputs["attention_mask"] = mask
    if takes_positions(model):
        # What generate passes; some types would count otherwise by themselves.
        inputs["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    whole = [[*p, *c] for p, c in zip(prompts, followed, strict=True)]
    sequences = torch.full((len(whole), ids.shape[1] + 1), -1, device=ids.device)
    for row, tokens in enumerate(whole):
        sequences[row, : len(tokens)] = torch.tensor(tokens, device=ids.device)
    recorded: dict[str, Any] = {
        "tokenizer": tokenizer,
        "focus": focus,
        "drop_sinks": drop_sinks,
        "block": 1,
        "logits": False,
        "allow_dropout": allow_dropout,
    }
    with record(model, mechanisms, **recorded) as recording, torch.inference_mode():
        blocks = forward_then_logits(model, inputs, ids.shape[1])
        stream = recording.streams[-1]
        stream.sequences = sequences
        if completions is not None:
            stream.prompts = [len(p) for p in prompts]
            stream.row_lengths = [len(c) for c in followed]
        with recording.paused():
            for start, logits in blocks():
                recording.add_logits(start, logits)
                del logits  # before the next block is made: one at a time
    return recording.trajectories()


COLDEST = 0.001


"""Logits divided by much less leave float32, and no token could be drawn."""


def check_temperature(value: float, name: str = "temperature") -> float:
    """The temperature, if a model can sample at it; ``name`` begins the sentence about one that is not."""
    if not (math.isfinite(value) and value >= COLDEST):
        raise ValueInputError(
            f"{name} must be a number from {COLDEST:g}, got {value:g}; leave it and the seed out for greedy search"
        )
    return value
