"""What `softgap.linearize.impact` saves: activations below a swapped layer once, the heads of a layer side by side.

Run: python benchmarks/impact.py [--pairs 5] [--length 256] [--layers 0 10 20 29]

The rival is the obvious loop: for every head one whole forward of the model under `swap`, and from its logits the loss,
the KL divergence and the top token. Both run on the embedded model; some layers stand for all (evenly spread ones, so
that what lies below them is half of the model on average).
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch.nn import functional

from harness import interleaved, machine, ratio, require_quiet_machine, write_section
from softgap.linearize import heads_of_layer, swap
from softgap.linearize.impact import impact_on
from softgap.linearize.sequences import Sequences
from softgap.models import load_model

MOST = 0.6
SAME = 1e-5


def plain_loop(model: Any, read: Sequences, heads: list[tuple[int, int]]) -> dict[str, np.ndarray]:
    """Change in loss, KL and accuracy for every head, by whole forwards."""
    ids, targets = read.ids[:, :-1], read.ids[:, 1:]
    rows: dict[str, list[float]] = {"loss": [], "kl": [], "accuracy": []}
    with torch.inference_mode():
        base = model(ids, use_cache=False).logits.log_softmax(-1)
        base_loss = functional.nll_loss(base.flatten(0, 1), targets.flatten())
        for head in heads:
            with swap(model, [head], "elu1"):
                logs = model(ids, use_cache=False).logits.log_softmax(-1)
            rows["loss"].append(float(functional.nll_loss(logs.flatten(0, 1), targets.flatten()) - base_loss))
            rows["kl"].append(float(functional.kl_div(logs, base, reduction="sum", log_target=True)) / targets.numel())
            right = (logs.argmax(-1) == targets).float().mean() - (base.argmax(-1) == targets).float().mean()
            rows["accuracy"].append(float(right))
    return {name: np.array(values) for name, values in rows.items()}


def main() -> None:
    """Compare, measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 10, 20, 29])
    parser.add_argument("--loaded", action="store_true", help="measure on a busy machine; nothing is written")
    options = parser.parse_args()
    if not options.loaded:
        require_quiet_machine()
    model, _ = load_model(progress=False)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 40000, (1, options.length), generator=generator)
    read = Sequences(ids, torch.ones(1, options.length - 1, dtype=torch.bool))
    heads = [head for layer in options.layers for head in heads_of_layer(model, layer)]
    impact = impact_on(model, read, None, "elu1", baselines=[], heads=heads)
    truth = plain_loop(model, read, heads)
    apart = max(float(np.abs(impact.change[name][0, :, 0] - values).max()) for name, values in truth.items())
    if apart > SAME:
        raise SystemExit(f"the two sides must agree to {SAME:g}, got a difference of {apart:g}")
    sides = (
        lambda: impact_on(model, read, None, "elu1", baselines=[], heads=heads),
        lambda: plain_loop(model, read, heads),
    )
    reused, plain = interleaved(sides, options.pairs, warm_up=0)
    found_ratio = ratio(reused, plain)
    row = (
        f"| {options.length} | {len(heads)} | {statistics.median(plain):.1f} | {statistics.median(reused):.1f} | "
        f"{found_ratio} | {apart:.1e} | {'yes' if found_ratio.median <= MOST else 'no'} |"
    )
    print(row)
    if options.loaded:
        return
    write_section(
        "impact",
        "What measuring every head's impact costs",
        f"`python benchmarks/impact.py --pairs {options.pairs} --length {options.length} --layers "
        f"{' '.join(map(str, options.layers))}` on the embedded model; {machine()}. `softgap.linearize.impact` with "
        "elu1 against the obvious loop of whole forwards, both with loss, KL divergence and top token of every head of "
        f"these layers. Medians of {options.pairs} interleaved pairs; the ratio is that of the pairs, with its "
        "range.\n\n| tokens | heads | loop, s | impact, s | time, impact / loop | largest difference | at most 0.6 |\n"
        f"|---|---|---|---|---|---|---|\n{row}",
    )


if __name__ == "__main__":
    main()
