"""What a page says of one sample: a line for the list, and for a carried one its text, tokens and arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64

from softgap.report.chosen import array_keys
from softgap.report.packing import Packed, pack
from softgap.trajectories import Trajectories
from softgap.trajectories.pieces import pieces

__all__ = ["array_of", "carried", "head_means", "line", "part_pieces", "pieces_of", "rounded"]

_EXCERPT = 120

# Says where a packed array can be found in the page.
Store = Callable[[Packed], int]


def line(run: Trajectories, means: Mapping[str, Float64[np.ndarray, " head"]]) -> dict[str, Any]:
    """The sample in a list."""
    return {
        "id": run.sample_id,
        "label": run.label,
        "promptTokens": run.n_prompt,
        "steps": run.n_steps,
        "excerpt": (run.prompt_text or run.completion_text)[:_EXCERPT],
        "divergence": [_overall(means[f"divergence/{mechanism}"]) for mechanism in run.mechanisms],
        "logprob": _overall(run.logprob),
        "entropy": _overall(run.entropy),
    }


def carried(
    run: Trajectories, keys: Sequence[str], means: Mapping[str, Float64[np.ndarray, " head"]], store: Store
) -> dict[str, Any]:
    """The sample with everything that can be shown token by token; steps of the prompt come first."""
    parts = [part for part in (run.prompt, run) if part is not None]
    real = run.kv_group >= 0
    return {
        "promptSteps": 0 if run.prompt is None else run.prompt.n_steps,
        "pieces": pieces_of(run),
        "tokens": [token for part in parts for token in part.tokens],
        "positions": [int(position) for part in parts for position in part.positions],
        "logprob": rounded(np.concatenate([part.logprob for part in parts])),
        "entropy": rounded(np.concatenate([part.entropy for part in parts])),
        "arrays": {
            key: store(pack(np.concatenate([array_of(part, key)[real] for part in parts], axis=-1))) for key in keys
        },
        "means": {key: rounded(means[key]) for key in array_keys(run) if key not in keys},
    }


def head_means(run: Trajectories) -> dict[str, Float64[np.ndarray, " head"]]:
    """Mean over the completion's steps of every array of a run, per head, padding left out."""
    real = run.kv_group >= 0
    found = {}
    for key in array_keys(run):
        values = array_of(run, key)[real].astype(np.float64)
        known = np.count_nonzero(~np.isnan(values), axis=-1)
        found[key] = np.where(known > 0, np.nansum(values, axis=-1) / np.maximum(known, 1), np.nan)
    return found


def rounded(values: Float[np.ndarray, " value"]) -> list[float | None]:
    """Six significant digits, null for what is not finite: what a reader of a page can use, in few bytes."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in np.asarray(values, np.float64)]


def array_of(run: Trajectories, key: str) -> Float32[np.ndarray, "layer head step"]:
    """The array of a run that a key of :func:`softgap.report.chosen.array_keys` names."""
    quantity, _, mechanism = key.partition("/")
    values: np.ndarray = run.quantities[quantity][run.mechanisms.index(mechanism)] if mechanism else run.focus[quantity]
    return values


def _overall(values: Float[np.ndarray, " value"]) -> float | None:
    known = np.asarray(values, np.float64)[np.isfinite(values)]
    return float(f"{known.mean():.6g}") if len(known) else None


def pieces_of(run: Trajectories) -> dict[str, list[list[Any]]]:
    """Of both parts the text in order as [piece, first step, steps, in the text].

    The first step is -1 where no step predicted the piece. Tokens that the text does not show, such as those of a chat
    template, are pieces of their own, not in the text.
    """
    if run.prompt is None:
        prompt = [[run.prompt_text, -1, 0, True]] if run.prompt_text else []
        return {"prompt": prompt, "completion": part_pieces(run.completion_text, run.tokens, 0)}
    return {
        "prompt": part_pieces(run.prompt_text, run.prompt.tokens, 0),
        "completion": part_pieces(run.completion_text, run.tokens, run.prompt.n_steps),
    }


def part_pieces(text: str, tokens: Sequence[str], offset: int) -> list[list[Any]]:
    """The pieces of one part, whose first step is ``offset``; see :func:`pieces_of`."""
    found = []
    following = 0
    for piece, indices in pieces(text, tokens):
        if indices:
            found += _hidden(tokens, following, indices[0], offset)
            found.append([piece, offset + indices[0], len(indices), True])
            following = indices[-1] + 1
        else:
            found.append([piece, -1, 0, True])
    return found + _hidden(tokens, following, len(tokens), offset)


def _hidden(tokens: Sequence[str], start: int, stop: int, offset: int) -> list[list[Any]]:
    return [[tokens[i], offset + i, 1, False] for i in range(start, stop) if tokens[i]]
