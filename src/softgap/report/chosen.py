"""Which samples of a study, and which of their arrays, a page carries token by token."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import pandas as pd

from softgap.errors import unknown_name
from softgap.trajectories import FOCUS, QUANTITIES, Study, Trajectories

__all__ = ["VALUES", "Chosen", "array_keys", "choose", "keys_of"]

VALUES = 4_000_000
"""Values that a page carries: 2 bytes each, at most 10.7 MB in base64 if deflating gains nothing."""


@dataclass(frozen=True)
class Chosen:
    """What goes into a page.

    Attributes
    ----------
    samples
        Names of the samples whose text and trajectories are carried.
    keys
        ``quantity/mechanism`` or a focus quantity: what is carried for every step; the rest as means per head.
    """

    samples: frozenset[str]
    keys: tuple[str, ...]


def array_keys(run: Trajectories) -> tuple[str, ...]:
    """Every array of a run, the most wanted first."""
    return keys_of(run.mechanisms, run.focus)


def keys_of(mechanisms: Sequence[str], focus: Container[str] = ()) -> tuple[str, ...]:
    """Every array of runs with these mechanisms: divergences, focus, then the rest mechanism by mechanism."""
    divergence, *others = QUANTITIES
    return (
        *(f"{divergence}/{mechanism}" for mechanism in mechanisms),
        *(name for name in FOCUS if name in focus),
        *(f"{quantity}/{mechanism}" for mechanism in mechanisms for quantity in others),
    )


def choose(study: Study, first: Trajectories, wanted: Sequence[str], *, values: int = VALUES) -> Chosen:
    """Fill a page: samples with their divergences (one of every label in turn, or those asked for), then other arrays.

    Samples asked for are carried however large they are, and the first one is if nothing was asked for.
    """
    for sample_id in wanted:
        if sample_id not in study.ids:
            raise unknown_name("sample", sample_id, study.ids)
    table = study.samples()
    steps = _lengths(table)
    keys, needed = array_keys(first), len(first.mechanisms)
    room = values // first.n_heads
    kept: list[str] = []
    used = 0
    for sample_id in wanted or _in_turn(table):
        if kept and not wanted and used + steps[sample_id] * needed > room:
            continue
        kept.append(sample_id)
        used += steps[sample_id] * needed
    total = sum(steps[sample_id] for sample_id in kept)
    fitting = max(needed, min(len(keys), room // max(1, total)))
    return Chosen(frozenset(kept), keys[:fitting])


def _lengths(table: pd.DataFrame) -> dict[str, int]:
    """Steps of every sample, those of its prompt included."""
    prompts = [0 if steps is None else len(steps) for steps in table["prompt_positions"]]
    return {
        str(sample_id): len(steps) + prompt
        for sample_id, steps, prompt in zip(table["sample_id"], table["positions"], prompts, strict=True)
    }


def _in_turn(table: pd.DataFrame) -> list[str]:
    """Names of the samples, one of every label in turn."""
    turn = table.groupby("label", sort=False, dropna=False).cumcount()
    return [str(sample_id) for sample_id in table["sample_id"].iloc[turn.argsort(kind="stable")]]
