"""Mixed plans against pure ones: KV groups that become several kinds or one, at the same bytes, on unseen text.

Run: python experiments/mixed_plans.py --fit FILE --text FILE --calibration FITTED [--budgets 0.25 0.12]

The calibration must be fitted on the text of ``--fit``, which also scores the groups. Neither may have seen ``--text``,
which the plans are evaluated on. At every budget (a share of the model's KV cache at 8,192 tokens) the groups are
allocated among all kinds and among each kind alone, by the same scores and without output correction. Finished readings
lie in ``--parts``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np
import torch

from harness import FINDINGS, machine, write_section
from softgap.calibration import Calibration
from softgap.checkpoints import Checkpoints
from softgap.intervals import interval_of
from softgap.linearize.allocation import SOFTMAX, Allocations, Menu, calibrated_options
from softgap.linearize.scores import unit_scores
from softgap.linearize.sequences import Sequences, cut_sequences, digest_of_sequences, read_swapped, token_ids
from softgap.models import load_model

LENGTHS = {512: 8, 2048: 4, 8192: 3}
FIT_LENGTH, FIT_TEXTS = 2048, 4
MIXED = "mixed"
# A kind that costs so many times what the mixed plan costs at one length is not read at longer ones.
HOPELESS = 5


def say(*words: object) -> None:
    """A line of progress."""
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def scored(model: Any, fit: Sequences, menu: Menu, checkpoints: Checkpoints) -> np.ndarray:
    """Curvature of every option in every group, from the text of the fit."""

    def make() -> dict[str, Any]:
        tell = lambda stage, share: say(f"{stage}: {share:.0%}")  # noqa: E731
        return {"curvature": unit_scores(model, fit, menu.options, menu.units, progress=tell)[1].mean(axis=-1).tolist()}

    return np.asarray(checkpoints.find_or_make("scores", make)["curvature"])


class Losses:
    """The loss of every text under an allocation, read once."""

    def __init__(self, model: Any, texts: dict[int, Sequences], checkpoints: Checkpoints) -> None:
        self._model, self._texts, self._checkpoints = model, texts, checkpoints

    def rises(self, allocations: Allocations, step: int, mixed: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Rise in loss by length, one number per text; up to the length where it is hopeless against the mixed plan."""
        chosen = allocations.candidate(step)
        rises: dict[int, np.ndarray] = {}
        for length in self._texts:
            loss = self._loss(length, chosen.heads, chosen.plain, chosen.key)
            rises[length] = loss - self._loss(length, (), None, [])
            if mixed and rises[length].mean() > HOPELESS * mixed[length].mean():
                break
        return rises

    def _loss(self, length: int, heads: Any, plain: Any, key: Any) -> np.ndarray:
        texts = self._texts[length]

        def make() -> dict[str, Any]:
            return {"loss": read_swapped(self._model, texts, None, heads, plain).loss.tolist()}

        return np.asarray(self._checkpoints.find_or_make([digest_of_sequences(texts), key], make)["loss"])


def counts_of(allocations: Allocations, step: int) -> str:
    """How many groups become what."""
    choice = allocations.path[step]
    names = [option.mechanism.label for option in allocations.menu.options]
    counts = Counter(names[option] for option in choice if option != SOFTMAX)
    return ", ".join(f"{n} {name}" for name, n in counts.items())


def budget_rows(menu: Menu, scores: np.ndarray, losses: Losses, share: float) -> list[str]:
    """One row for every kind at a budget: what it costs, and what it costs more than the mixed allocation."""
    rises: dict[str, dict[int, np.ndarray]] = {}
    rows = []
    for kind in (MIXED, *dict.fromkeys(menu.kinds)):
        allocations = menu.allocations(scores, None if kind == MIXED else kind)
        step = allocations.within(share * menu.original_bytes)
        if step is None:
            continue
        rises[kind] = losses.rises(allocations, step, rises.get(MIXED, {}))
        cells = []
        for length in rises[MIXED]:
            if length not in rises[kind]:
                cells.append("")
                continue
            rise = rises[kind][length]
            more = rise - rises[MIXED][length]
            interval = interval_of(more, rng=np.random.default_rng(0))
            behind = "" if kind == MIXED else f" ({interval.low:+.3f} to {interval.high:+.3f})"
            cells.append(f"{rise.mean():+.3f}{behind}")
        kept = allocations.nbytes(step) / menu.original_bytes
        rows.append(f"| {share:.0%} | {kind} | {kept:.1%} | {' | '.join(cells)} | {counts_of(allocations, step)} |")
        say(rows[-1])
    return rows


def write(rows: Sequence[str], options: argparse.Namespace, texts: dict[int, Sequences]) -> None:
    """The section of the findings."""
    lengths = ", ".join(f"{len(x)} of {length:,}" for length, x in texts.items())
    budgets = " ".join(map(str, options.budgets))
    command = f"python experiments/mixed_plans.py --fit FILE --text FILE --calibration FITTED --budgets {budgets}"
    columns = " | ".join(f"{length:,} tokens" for length in texts)
    header = f"| budget | kinds | bytes | {columns} | KV groups |\n|---|---|---|{'---|' * len(texts)}---|\n"
    write_section(
        "mixed_plans",
        "Mixed plans against pure ones",
        f"`{command}` on the embedded model, calibrated on the text of the fit with the default recipe; {machine()}. "
        "KV groups of a budget (share of the model's KV cache at 8,192 tokens) are allocated among all kinds, or among "
        f"one kind alone with no more bytes, by the Fisher curvature over {FIT_TEXTS} sequences of {FIT_LENGTH:,} "
        f"tokens; no output is corrected. Rise in loss in nats per token on unseen text (sequences: {lengths} tokens), "
        "and in parentheses the 95 % interval over texts of how much more it is than that of the mixed plan. A kind "
        f"that costs more than {HOPELESS} times as much as the mixed plan is not read at longer lengths.\n\n"
        + header
        + "\n".join(rows),
        page=FINDINGS,
    )


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.25, 0.12])
    parser.add_argument("--parts", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model("smollm2-135m")
    calibration = Calibration.load(options.calibration)
    fit_ids, ids = (token_ids(tokenizer, [Path(x).read_text(encoding="utf-8")]) for x in (options.fit, options.text))
    fit = cut_sequences(model, fit_ids, FIT_LENGTH, FIT_TEXTS)
    menu = Menu.of(model, calibrated_options(model, calibration.mechanism, FIT_LENGTH // 2))
    texts = {length: cut_sequences(model, ids, length, n) for length, n in LENGTHS.items()}
    settings = {"calibration": calibration.digest, "fit": digest_of_sequences(fit), "seed": 0}
    checkpoints = Checkpoints(options.parts, settings)
    scores = scored(model, fit, menu, checkpoints)
    losses = Losses(model, texts, checkpoints)
    rows: list[str] = []
    for share in options.budgets:
        rows += budget_rows(menu, scores, losses, share)
        write(rows, options, texts)


if __name__ == "__main__":
    main()
