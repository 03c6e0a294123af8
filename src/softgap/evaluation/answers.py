"""What a model answers in a context: by likelihood, and by generation."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from softgap.errors import UnsupportedError
from softgap.models.loading import Model, Tokenizer
from softgap.models.placement import input_device
from softgap.probe.token_scores import forward_then_logits
from softgap.tasks.long_context import Context, Question

__all__ = ["Entry", "generate_answers", "loss_by_position", "new_cache", "score_answers"]

Entry = tuple[str, int | None, float, float]
"""A metric, the distance of its answer or the position of its token, its value, and what chance gives."""

# A model may write a few tokens around its answer, but not every word of the context.
MORE_TOKENS = 4
# Positions of loss by position: each part is twice as long as all before it together.
FIRST_POSITIONS = 128


def score_answers(model: Model, context: Context) -> list[Entry]:
    """Score every answer of a context in one forward, each after the right answers before it.

    ``first`` is 1 where the most likely token is the first one of the answer. ``whole`` is 1 where that holds for
    every token of the answer, and ``answer_loss`` is the mean of -log p over its tokens.
    """
    from softgap.probe.logit_scores import score  # here, since it loads numba

    ids = torch.tensor([context.ids], device=input_device(model))
    places = [t - 1 for question in context.questions for t in range(question.start, question.stop)]
    logits = _logits_at(model, ids[:, :-1], torch.tensor(places, device=input_device(model)))
    wanted = ids[:, 1:][:, places]
    right = (logits.argmax(dim=-1) == wanted)[0].tolist()
    losses = (-score(logits, wanted)[0])[0].tolist()
    entries: list[Entry] = []
    begin = 0
    for question in context.questions:
        part = slice(begin, begin + question.stop - question.start)
        begin = part.stop
        first, whole = question.chance
        n = len(losses[part])
        entries += [
            ("first", question.distance, float(right[part.start]), first),
            ("whole", question.distance, float(all(right[part])), whole),
            ("answer_loss", question.distance, sum(losses[part]) / n, -math.log(whole) / n if whole else math.nan),
        ]
    return entries


def generate_answers(
    model: Model, tokenizer: Tokenizer, context: Context, cache: Any = None, questions: int | None = None
) -> list[Entry]:
    """Answer questions of a context in turn by greedy decoding, each after the model's own answers before it.

    ``generated_first`` is 1 where the first new token is the first one of the answer. ``generated_whole`` is 1 where
    the new text, up to its first line break, holds every word of the answer.

    Parameters
    ----------
    cache
        An empty KV cache; None takes the model's own.
    questions
        Ask at most so many, spread over all; the others are given with their answers. None asks all.
    """
    total = len(context.questions)
    stride = 1 if questions is None else -(-total // questions)
    # The offset differs between contexts, so that together they ask early and late questions alike.
    asked = context.questions[sum(context.ids) % min(stride, total) :: stride]
    entries: list[Entry] = []
    pending: list[int] = []
    begin = 0
    for question in asked:
        pending += context.ids[begin : question.start]
        begin = question.stop
        answer = context.ids[question.start : question.stop]
        # Where the text goes on behind the answer, more tokens would be no part of it.
        ends = question.stop == len(context.ids) or "\n" in str(tokenizer.decode([context.ids[question.stop]]))
        most = len(answer) + (MORE_TOKENS if ends and question.items else 0)
        new, cache, pending = _decode(model, tokenizer, pending, cache, most)
        first, whole = question.chance
        entries += [
            ("generated_first", question.distance, float(new[:1] == list(answer[:1])), first),
            ("generated_whole", question.distance, float(_holds(tokenizer, question, answer, new)), whole),
        ]
    return entries


def _decode(
    model: Model, tokenizer: Tokenizer, pending: list[int], cache: Any, most: int
) -> tuple[list[int], Any, list[int]]:
    """New tokens up to a line break or the end of the text; the cache; and the token that it does not hold yet."""
    new: list[int] = []
    ends = {tokenizer.eos_token_id}
    while True:
        ids = torch.tensor([pending], device=input_device(model))
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, **_last_logits(model))
        cache = output.past_key_values
        token = int(output.logits[0, -1].argmax())
        if token in ends or "\n" in tokenizer.decode([token]):
            return new, cache, []
        new.append(token)
        if len(new) == most:
            return new, cache, [token]
        pending = [token]


def _holds(tokenizer: Tokenizer, question: Question, answer: Sequence[int], new: Sequence[int]) -> bool:
    """Whether new tokens hold the answer: every word of it as often as it asks for, or else the same tokens."""
    if not question.items:
        return list(new[: len(answer)]) == list(answer)
    text = str(tokenizer.decode(list(new)))
    return all(
        len(re.findall(rf"(?<!\w){re.escape(item)}(?!\w)", text)) >= question.items.count(item)
        for item in set(question.items)
    )


def loss_by_position(model: Model, ids: Sequence[int]) -> list[Entry]:
    """The mean of -log p by position: up to 128, and in octaves from there on; an entry is named by where it begins."""
    from softgap.probe.logit_scores import score  # here, since it loads numba

    row = torch.tensor([list(ids)], device=input_device(model))
    n = row.shape[1] - 1
    losses = torch.empty(n)
    for start, logits in forward_then_logits(model, {"input_ids": row[:, :-1], "use_cache": False}, n)():
        stop = start + logits.shape[1]
        losses[start:stop] = -score(logits, row[:, start + 1 : stop + 1])[0][0].cpu()
    floor = float(torch.tensor(float(model.config.get_text_config().vocab_size)).log())
    entries: list[Entry] = []
    begin, end = 0, FIRST_POSITIONS
    while begin < n:
        entries.append(("loss", begin, float(losses[begin:end].double().mean()), floor))
        begin, end = end, 2 * end
    entries.append(("loss", None, float(losses.double().mean()), floor))
    return entries


def new_cache(applied: Any) -> Any:
    """The KV cache of what changes the model, where it has one; else None."""
    make = getattr(applied, "cache", None)
    if make is None:
        return None
    try:
        return make()
    except UnsupportedError:  # heads that cannot stream run in the model's own cache
        return None


def _logits_at(
    model: Model, ids: Int[Tensor, "1 time"], places: Int[Tensor, " place"]
) -> Float[Tensor, "1 place vocabulary"]:
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        kept: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=places).logits
        return kept
    every: Tensor = model(input_ids=ids, use_cache=False).logits
    return every[:, places]


def _last_logits(model: Model) -> dict[str, int]:
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
