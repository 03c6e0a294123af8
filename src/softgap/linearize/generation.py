"""Generate text under a plan, with the plan's cache, and say what that saves.

``apply`` leaves ``model.generate`` to the user. ``generate`` here does the whole of it: chat template, padding, the
plan's cache, and a count of the bytes that the cache holds and that the original model's would hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from softgap.errors import UnsupportedError, ValueInputError
from softgap.inputs import check_count, refuse_string
from softgap.intervene.state_cache import bounded_layers, cache_bytes, state_cache
from softgap.linearize.application import Applied
from softgap.linearize.attached import applied_plan
from softgap.linearize.plan import Plan, cache_bytes_at, memory_of, streams
from softgap.models.loading import Model, Tokenizer
from softgap.probe.capture import (
    check_lengths,
    fixed_seed,
    pad_rows,
    sampling_settings,
    stopping_settings,
)
from softgap.probe.prompts import as_prompts, check_loaded, decode_tokens, pad_id, prompt_ids, prompt_text
from softgap.probe.tap import prepared_config, row_lengths

__all__ = ["Generation", "GenerationStep", "generate", "saving_words"]

_OWN_SETTINGS = ("past_key_values", "use_cache", "cache_implementation", "stopping_criteria", "return_dict_in_generate")
"""Settings of ``model.generate`` that ``generate`` makes itself."""


@dataclass(frozen=True)
class GenerationStep:
    """One new token of every prompt, as a ``listener`` gets it.

    Attributes
    ----------
    index
        Number of the step, from 0.
    token_ids
        The new token of each prompt; padding for those that have ended.
    seconds
        Time since the step before; of the first step, since the generation began.
    cache_bytes, original_bytes
        What the caches of all prompts hold now, and what the original model's would hold.
    """

    index: int
    token_ids: tuple[int, ...]
    seconds: float
    cache_bytes: int
    original_bytes: int


@dataclass(frozen=True)
class Generation:
    """Texts that were generated under a plan, and what that saved.

    Attributes
    ----------
    prompts, texts
        The prompts and their continuations, without special tokens.
    token_ids
        New tokens of each continuation, the one that ended it included.
    prompt_tokens
        Number of tokens of each prompt, with the chat template.
    seconds_to_first
        Time until the first token: reading the prompts.
    seconds_per_token
        Mean time of a further step, which writes one token of every prompt; NaN where there was none.
    cache_bytes, original_bytes
        What the caches of all prompts held at the end, and what the original model's would have held: keys and values
        of all KV groups at the same length, padding included.
    smaller_from
        Length in tokens from which the cache under the plan holds less than the original's; infinite where the plan
        frees no KV group.
    without_cache
        Why the plan's cache was not used, in words that follow a colon; "" where it was.
    """

    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    prompt_tokens: tuple[int, ...]
    seconds_to_first: float
    seconds_per_token: float
    cache_bytes: int
    original_bytes: int
    smaller_from: float
    without_cache: str = ""

    def __post_init__(self) -> None:
        refuse_string("prompts", self.prompts, "one prompt per continuation")
        refuse_string("texts", self.texts, "one text per prompt")

    @property
    def text(self) -> str:
        """The continuation, where there is one prompt."""
        if len(self.texts) != 1:
            raise ValueInputError(f"text is of one continuation, and there are {len(self.texts)}; use texts")
        return self.texts[0]

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second of all prompts together, once the prompts are read; NaN where that is not known."""
        return len(self.texts) / self.seconds_per_token if self.seconds_per_token else math.nan

    def sentence(self) -> str:
        """What the plan saved, in one sentence."""
        saved = saving_words(self.cache_bytes, self.original_bytes, self.smaller_from, self.without_cache)
        saved = saved[:1].upper() + saved[1:]
        if math.isnan(self.tokens_per_second):
            return f"{saved}."
        return f"{saved}; the model wrote {self.tokens_per_second:.1f} tokens per second."

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "continuations": [
                {"prompt": prompt, "text": text, "prompt_tokens": count, "token_ids": list(ids)}
                for prompt, text, count, ids in zip(
                    self.prompts, self.texts, self.prompt_tokens, self.token_ids, strict=True
                )
            ],
            "seconds_to_first": self.seconds_to_first,
            "seconds_per_token": self.seconds_per_token,
            "tokens_per_second": self.tokens_per_second,
            "cache_bytes": self.cache_bytes,
            "original_cache_bytes": self.original_bytes,
            "smaller_from": self.smaller_from,
            "plan_cache": not self.without_cache,
            "sentence": self.sentence(),
        }


def saving_words(now: int, original: int, smaller_from: float, without_cache: str = "") -> str:
    """What a cache of ``now`` bytes saves, as a sentence without its full stop."""
    if without_cache:
        return f"the cache holds {_megabytes(now)}, as the original's, because {without_cache}"
    if now <= original:
        share = f" ({now / original:.0%})" if original else ""
        return f"the cache holds {_megabytes(now)} under the plan and {_megabytes(original)} without it{share}"
    words = f"the cache holds {_megabytes(now)} under the plan, more than the {_megabytes(original)} without it"
    return words + (f": it saves memory from {smaller_from:,.0f} tokens on" if math.isfinite(smaller_from) else "")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def generate(
    model: Model,
    tokenizer: Tokenizer,
    plan: Plan | None,
    prompt: str | Sequence[str],
    max_new_tokens: int = 128,
    *,
    chat: bool | None = None,
    seed: int | None = None,
    listener: Callable[[GenerationStep], None] | None = None,
    stop: Callable[[], bool] | None = None,
    **settings: Any,
) -> Generation:
    """Let a model continue prompts under a plan, with the plan's cache.

    Heads are not measured: the states of freed KV groups keep no keys to measure with. ``softgap.read`` measures the
    original model on the text.

    Parameters
    ----------
    model
        The model that the plan was found for.
    tokenizer
        Its tokenizer.
    plan
        A plan from ``find_plan``, ``load_plan`` or ``import_pattern``; None takes the one that is attached to the
        model, as ``softgap.load_model`` does for an exported folder. A plan that cannot stream keeps all keys and
        values; ``without_cache`` of the result says why.
    prompt
        One text or several. Several are padded on the left and continued together.
    max_new_tokens
        The most tokens that the model may write for each prompt.
    chat
        Whether to wrap each prompt in the tokenizer's chat template; None does so where there is one.
    seed
        With it the model samples (temperature 1 unless ``settings`` say otherwise); without it greedy search. The
        global random state is left as it was.
    listener
        Called with each ``GenerationStep`` while the model writes.
    stop
        Asked after every token; once it says True the generation ends there, as if by itself.
    **settings
        Anything else that ``model.generate`` takes, such as ``temperature``. Each prompt has one continuation: beam
        search and assisted decoding are refused.

    Returns
    -------
    Generation
        Texts and tokens, time per token, and bytes of the cache under the plan and of the original's.

    Raises
    ------
    UnsupportedError
        If the plan belongs to another model, or a setting needs a cache that goes back.

    Examples
    --------
    ``plan.json`` is a plan that ``softgap linearize`` wrote for the small random model in ``tiny-llama``:

    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> plan = softgap.linearize.load_plan("plan.json")
    >>> prompts = ["A fox went out.", "Boat 7 left."]
    >>> made = softgap.linearize.generate(model, tokenizer, plan, prompts, max_new_tokens=50)
    >>> [len(ids) for ids in made.token_ids]
    [50, 50]
    >>> made.cache_bytes < made.original_bytes
    True
    """
    max_new_tokens = check_count("max_new_tokens", max_new_tokens)
    _check_settings(settings)
    check_loaded(model, tokenizer)
    prompts = as_prompts(prompt)[0]
    rows = [prompt_ids(tokenizer, each, chat) for each in prompts]
    check_lengths(model, rows, max_new_tokens)
    settings = {
        "max_new_tokens": max_new_tokens,
        "pad_token_id": pad_id(tokenizer),
        **sampling_settings(seed, settings),
    }
    config, mode = prepared_config(model, settings)
    if mode not in ("greedy search", "sample"):
        raise UnsupportedError(
            f"generation under a plan follows greedy search and sampling, got {mode}; the states of freed KV groups "
            "cannot go back"
        )
    ids, mask = pad_rows(rows, tokenizer, "left", model.device)
    with applied_plan(model, plan) as (plan, applied):
        cache, without_cache = _cache_of(model, plan, applied)
        watch = _Watch(model, plan, cache, len(rows), listener)
        stopping = stopping_settings(stop, watch.note)
        write: Any = model.generate
        with fixed_seed(seed, model):
            written = write(ids, attention_mask=mask, past_key_values=cache, **settings, **stopping)
        now, original = watch.bytes()
    new = written[:, ids.shape[1] :]
    lengths = row_lengths(new, config, stopping, new.shape[1])
    tokens = tuple(tuple(row[:length].tolist()) for row, length in zip(new, lengths, strict=True))
    return Generation(
        prompts=tuple(prompt_text(tokenizer, each) for each in prompts),
        texts=tuple(decode_tokens(tokenizer, row) for row in tokens),
        token_ids=tokens,
        prompt_tokens=tuple(len(row) for row in rows),
        seconds_to_first=watch.seconds[0],
        seconds_per_token=sum(watch.seconds[1:]) / (len(watch.seconds) - 1) if len(watch.seconds) > 1 else math.nan,
        cache_bytes=now,
        original_bytes=original,
        smaller_from=smaller_from(plan, model),
        without_cache=without_cache,
    )


def smaller_from(plan: Plan, model: Model) -> float:
    """Length in tokens from which a sequence keeps less under a plan; infinite where the plan frees no KV group."""
    memory = memory_of(model, plan.groups, plan.substitute)
    return math.floor(memory["states"] / memory["saved_per_token"]) + 1 if memory["saved_per_token"] else math.inf


def _check_settings(settings: dict[str, Any]) -> None:
    for name in _OWN_SETTINGS:
        if name in settings:
            raise ValueInputError(
                f"generate under a plan makes {name} itself, got {settings[name]!r}; leave it out, or call "
                "model.generate inside softgap.linearize.apply"
            )
    if settings.get("num_return_sequences") not in (None, 1):
        raise ValueInputError(
            f"num_return_sequences must be 1 under a plan, got {settings['num_return_sequences']}; repeat the prompt"
        )


def _cache_of(model: Model, plan: Plan, applied: Applied) -> tuple[Any, str]:
    """The cache for a generation, and why it is not the plan's."""
    if applied.streams:
        return applied.cache(), ""
    parts = plan.substitute.swaps(plan.heads)
    names = ", ".join(dict.fromkeys(f"'{part.mechanism.name}'" for _, part in parts if not streams(part)))
    return state_cache(model, {}), f"mechanism {names} has no state of constant size"


@dataclass(eq=False)
class _Watch:
    """The time of every step, and the size of the cache."""

    model: Model
    plan: Plan
    cache: Any
    batch: int
    listener: Callable[[GenerationStep], None] | None
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._per_token = memory_of(self.model, (), self.plan.substitute)
        self._bounded = bounded_layers(self.model)
        self._last = time.perf_counter()

    def note(self, ids: Tensor) -> None:
        """Take the time of a step whose token is the last of ``ids``."""
        tokens = tuple(ids[:, -1].tolist())  # waits for the device
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        if self.listener is not None:
            self.listener(GenerationStep(len(self.seconds) - 1, tokens, self.seconds[-1], *self.bytes()))

    def bytes(self) -> tuple[int, int]:
        """Bytes of the cache, and of the original model's at the same length."""
        length = self.cache.get_seq_length()
        growing = self.batch * cache_bytes_at(self._per_token, length, original=True)
        # Layers such as sliding windows keep the same with and without a plan.
        bounded = SimpleNamespace(layers=[x for i, x in enumerate(self.cache.layers) if i in self._bounded])
        return cache_bytes(self.cache), int(growing) + cache_bytes(bounded)
