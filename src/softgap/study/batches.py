"""Which samples are computed together: a pure function of the prompts' lengths and the options."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Batch", "batch_seed", "plan_batches"]


@dataclass(frozen=True)
class Batch:
    """Samples that are computed together.

    ``indices`` are those of the study's prompts, ``seed`` is for sampling, ``replay`` for prompts with a completion.
    """

    number: int
    indices: tuple[int, ...]
    seed: int
    replay: bool


def plan_batches(lengths: Sequence[int], replay: Sequence[bool], batch_size: int, seed: int) -> tuple[Batch, ...]:
    """Batches of neighbours in length, so that little is padded; the longest come first.

    A machine too small for a study says so in the first minute and not in the last. Prompts that are read and prompts
    that are answered are never in one batch; of equal lengths, the first given comes first.
    """
    batches: list[Batch] = []
    for kind in (False, True):
        order = sorted((i for i in range(len(lengths)) if replay[i] == kind), key=lambda i: (-lengths[i], i))
        for start in range(0, len(order), batch_size):
            number = len(batches)
            batches.append(Batch(number, tuple(order[start : start + batch_size]), batch_seed(seed, number), kind))
    return tuple(batches)


def batch_seed(seed: int, number: int) -> int:
    """A seed of 32 bits for a batch of a study."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big")
