"""What an evaluation costs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from softgap.costs.probe import LONG, SHORT, Cost, Curve, Probe
from softgap.evaluation.answers import loss_by_position, new_cache
from softgap.evaluation.sampling import GENERATED, cells_of, most_contexts
from softgap.models.loading import Model, Tokenizer
from softgap.models.tokens import token_ids

__all__ = ["evaluation_cost"]

# Bytes of a row of the result.
_ROW_BYTES = 500
# Tokens that a model writes for an answer until its line ends, about; it may write more.
_ANSWER = 4
# Questions of a context, where it has more than one.
_QUESTIONS = {"recall": 12, "multi-query": 4}


def evaluation_cost(
    model: Model,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    probe: Probe,
    *,
    under: Any = None,
    against: Any = None,
    lengths: Sequence[int] | None = None,
    pairs: Sequence[int] = (12,),
    texts: Sequence[str] = (),
    questions: Sequence[tuple[str, str]] = (),
    generation: bool = True,
    contexts: int | None = None,
    **_: Any,
) -> Cost:
    """What ``softgap.evaluate`` costs on this machine at most; the parameters are its own.

    An evaluation draws no more contexts once its intervals are narrow enough, which no probe knows.
    """
    cells = cells_of(model, tasks, lengths, pairs)
    longest = max((length for _, _, length in cells), default=LONG)
    stages = {"loading": probe.loading}
    counts = {"contexts": 0, "tokens": 0}
    text_tokens = len(token_ids(tokenizer, texts)) if texts else 0
    for name, change in (("original", against), ("with the plan", under)):
        if name != "original" and under is None:
            continue
        with change() if change else nullcontext() as applied, torch.inference_mode():
            reading, step = _time_model(model, tokenizer, new_cache(applied), longest, probe)
        for task, n_pairs, length in cells:
            n = contexts or most_contexts(task, length)
            if task == "loss" and texts:
                n = min(n, max(1, text_tokens // length))
            asked = min(GENERATED, n_pairs or _QUESTIONS.get(task, 1))
            written = asked * _ANSWER if generation and task != "loss" else 0
            passes = 2 if written else 1
            key = f"{task}, {name}"
            stages[key] = stages.get(key, 0.0) + n * (passes * reading.at(length) + written * step)
            counts["contexts"] += n
            counts["tokens"] += n * length
        own = [len(tokenizer(f"{prompt} {answer}")["input_ids"]) for prompt, answer in questions]
        if own:
            answering = len(own) * _ANSWER * step if generation else 0.0
            stages[f"own, {name}"] = (1 + generation) * reading.over(own) + answering
    return Cost(
        command="evaluate",
        stages=stages,
        memory_bytes=probe.memory,
        disk_bytes=_ROW_BYTES * 20 * (len(cells) + bool(questions)),
        counts=counts,
        probe_seconds=probe.seconds,
        note="at most: a task ends as soon as its intervals are narrow enough" if contexts is None else "",
    )


def _time_model(model: Model, tokenizer: Tokenizer, cache: Any, longest: int, probe: Probe) -> tuple[Curve, float]:
    """Seconds of reading a text, and of a new token behind one."""
    words = tokenizer("The boat left the harbour before the sun was up. " * LONG, verbose=False)["input_ids"]
    lengths = [min(n, longest) for n in (SHORT, LONG)]
    loss_by_position(model, words[: lengths[0]])  # the first call of a model is slower than the others
    reading = probe.curve(lambda n: loss_by_position(model, words[:n]), lengths, longest)
    row = torch.tensor([words[: lengths[0]]], device=model.device)
    output = model(input_ids=row, past_key_values=cache, use_cache=True)

    def decode() -> None:
        last = row[:, -1:]
        for _ in range(_STEPS):
            model(input_ids=last, past_key_values=output.past_key_values, use_cache=True)

    decode()
    _, seconds, _ = probe.call(decode)
    return reading, seconds / _STEPS


# New tokens that are timed.
_STEPS = 8
