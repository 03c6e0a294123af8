"""Text that a model writes itself, for a calibration without any text at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from softgap.probe.models import Model, Tokenizer
from softgap.probe.sampling import seeded

__all__ = ["own_texts"]

# Beginnings of many kinds: a fit learns only what its text shows.
BEGINNINGS = (
    "The history of the old harbour begins with",
    "In mathematics, a group is",
    "def read_lines(path):\n    ",
    "Dear Anna,\nthank you for your letter.",
    "Ingredients:\n- 200 g flour\n- ",
    "The war ended in the spring, when",
    "Once upon a time there was a miller who",
    "Q: How does a heat pump work?\nA:",
    "Breaking news: the city council has decided",
    "Chapter 3. The properties of light",
    "Anna: Did you hear that?\nTom:",
    "The species lives in rivers of",
    "1. Open the settings.\n2. ",
    "import numpy as np\n\nclass Grid:",
    "He played his first season for",
    "Abstract. We study the",
)
ROWS = 16


def own_texts(
    model: Model,
    tokenizer: Tokenizer,
    tokens: int,
    *,
    seed: int = 0,
    report: Callable[[float], None] = lambda fraction: None,
) -> list[str]:
    """Sampled continuations of seeded beginnings, together at least ``tokens`` tokens long.

    Parameters
    ----------
    seed
        Of the sampling; the global random state is left as it was.
    report
        Called with the share that is done.
    """
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    texts: list[str] = []
    written = 0
    each = min(512, max(64, -(-tokens // ROWS)))
    batch = 0
    while written < tokens:
        rows = [tokenizer(text)["input_ids"] for text in BEGINNINGS]
        longest = max(map(len, rows))
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
        with torch.inference_mode(), seeded(seed + batch, model):
            write: Any = model.generate
            found = write(
                ids, attention_mask=mask, max_new_tokens=each, min_new_tokens=each, do_sample=True, pad_token_id=pad
            )
        texts += tokenizer.batch_decode(found, skip_special_tokens=True)
        written += len(rows) * each
        batch += 1
        report(min(1.0, written / tokens))
    return texts
