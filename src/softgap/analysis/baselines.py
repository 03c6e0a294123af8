"""What a comparison knows for free: the length of an answer and how sure the model was of its tokens."""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Float64

__all__ = ["BASELINES", "baseline_table"]

BASELINES = ("length", "mean entropy", "maximum entropy", "perplexity", "minimum probability", "first-token entropy")
"""Columns of the table of baselines."""


def baseline_table(samples: pd.DataFrame) -> Float64[np.ndarray, "sample baseline"]:
    """The baselines of each row of a study's samples table; what a sample does not know is the others' mean."""
    rows = [
        _row(np.asarray(x, float), np.asarray(y, float))
        for x, y in zip(samples["entropy"], samples["logprob"], strict=True)
    ]
    table = np.array(rows, float).reshape(len(rows), len(BASELINES))
    known = np.isfinite(table)
    counts = known.sum(axis=0)
    means = np.where(known, table, 0).sum(axis=0) / np.maximum(counts, 1)
    return np.where(known, table, means)


def _row(entropy: np.ndarray, logprob: np.ndarray) -> list[float]:
    sure, scored = entropy[np.isfinite(entropy)], logprob[np.isfinite(logprob)]
    return [
        float(len(entropy)),
        float(sure.mean()) if len(sure) else np.nan,
        float(sure.max()) if len(sure) else np.nan,
        float(np.exp(-scored.mean())) if len(scored) else np.nan,
        float(np.exp(scored.min())) if len(scored) else np.nan,
        float(sure[0]) if len(sure) else np.nan,
    ]
