"""How far a calibration closes the gap on other text and under other conditions than those it is judged by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from softgap.attention import Mechanism
from softgap.calibration.domains import DOMAINS
from softgap.calibration.held_out import Closed, compared, gap_closed
from softgap.calibration.texts import Corpus
from softgap.probe.arguments import takes_positions
from softgap.probe.models import Model, Tokenizer

__all__ = ["elsewhere"]

LONGEST = 512
PASSAGES = 2


@dataclass(frozen=True)
class _Reading:
    """Token sequences of one condition, and the position of the first token of each where it is not 0."""

    name: str
    sequences: Sequence[Sequence[int]]
    offsets: Sequence[int] = ()


def elsewhere(
    model: Model,
    tokenizer: Tokenizer,
    corpus: Corpus,
    fitted: Mechanism,
    *,
    seed: int = 0,
    report: Callable[[float], None] = lambda share: None,
) -> Mapping[str, Closed]:
    """The share of the gap that the fitted map closes by condition, from position 64 on.

    ``text of the fit`` and ``held-out text`` are passages of equal length; ``after a BOS token``, ``as a chat message``
    and ``at random offsets`` (the first token far behind position 0) are the held-out passages again, where the model
    allows it; the others are texts of four kinds that come with softgap.
    """
    length = min(LONGEST, corpus.longest // 2)
    rng = np.random.default_rng(seed)
    readings = list(_readings(model, tokenizer, corpus, length, rng))
    found = {}
    for number, reading in enumerate(readings):
        closed = _closed(model, reading, fitted, rng)
        if closed is not None:
            found[reading.name] = closed
        report((number + 1) / len(readings))
    return found


def _readings(
    model: Model, tokenizer: Tokenizer, corpus: Corpus, length: int, rng: np.random.Generator
) -> Iterator[_Reading]:
    held_out = [ids[:length] for ids in corpus.held_out[:PASSAGES]]
    yield _Reading("text of the fit", [ids[-length:] for ids in corpus.fitted[-PASSAGES:]])
    yield _Reading("held-out text", held_out)
    if tokenizer.bos_token_id is not None:
        yield _Reading("after a BOS token", [(tokenizer.bos_token_id, *ids[:-1]) for ids in held_out])
    if tokenizer.chat_template is not None:
        yield _Reading("as a chat message", [_as_message(tokenizer, ids)[:length] for ids in held_out])
    if takes_positions(model):
        offsets = rng.integers(1, corpus.longest - length + 1, size=len(held_out)).tolist()
        yield _Reading("at random offsets", held_out, offsets)
    for name, text in DOMAINS.items():
        yield _Reading(name, [tokenizer(text)["input_ids"][:length]])


def _as_message(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    messages = [{"role": "user", "content": str(tokenizer.decode(list(ids)))}]
    encoded: Any = tokenizer.apply_chat_template(messages, return_dict=True)
    return list(encoded["input_ids"])


def _closed(model: Model, reading: _Reading, fitted: Mechanism, rng: np.random.Generator) -> Closed | None:
    offsets = reading.offsets or [0] * len(reading.sequences)
    runs = [
        compared(model, ids, [fitted, "uniform"], offset=offset)
        for ids, offset in zip(reading.sequences, offsets, strict=True)
    ]
    mine, uniform = ([run.select(name).divergence for run in runs] for name in ("fitted", "uniform"))
    return gap_closed(mine, uniform, rng=rng)
