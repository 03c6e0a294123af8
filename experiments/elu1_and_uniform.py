"""How near elu1 is to the mean of values in the embedded model, by its divergence and by its output.

Run: python experiments/elu1_and_uniform.py --text FILE [--sequences 4] [--tokens 1024]

Two numbers were once confused: how far the *divergences* of elu1 and uniform lie apart, |D(elu1) - D(uniform)|, and how
far their *outputs* do, 1 - cos(elu1, uniform). Sequences are spread evenly over the file; the four short texts
that come with softgap are read too.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np
from jaxtyping import Float
from scipy.stats import spearmanr

from harness import FINDINGS, machine, write_section
from held_out import sequences
from softgap.attention import attend, divergence
from softgap.calibration.conditions import DOMAINS
from softgap.models import load_model
from softgap.models.tokens import token_ids
from softgap.probe.layout import LayerTensors, visit_layers

FEWEST = 3


@dataclass(frozen=True)
class Nearness:
    """One text: means over heads and tokens, and over the tokens of the worst head.

    Attributes
    ----------
    divergences
        Of |D(elu1) - D(uniform)|, each D being 1 - cos from softmax's output.
    outputs
        Of 1 - cos(elu1, uniform).
    ranks
        Spearman's correlation, over heads, of their mean divergences from elu1 and from uniform.
    """

    text: str
    tokens: int
    elu1: float
    uniform: float
    divergences: tuple[float, float]
    outputs: tuple[float, float]
    ranks: float


def nearness(model: Any, name: str, ids: Sequence[int]) -> Nearness:
    """Read one text; every head counts, every token but the first, which sees only itself."""
    by_layer = visit_layers(model, ids, _layer_divergences)
    elu1, uniform, outputs = (np.concatenate([layer[i] for layer in by_layer])[:, 1:] for i in range(3))
    apart = np.abs(elu1 - uniform).mean(axis=1)
    between = outputs.mean(axis=1)
    return Nearness(
        name,
        len(ids),
        float(elu1.mean()),
        float(uniform.mean()),
        (float(apart.mean()), float(apart.max())),
        (float(between.mean()), float(between.max())),
        float(spearmanr(elu1.mean(axis=1), uniform.mean(axis=1)).statistic),
    )


def _layer_divergences(layer: LayerTensors) -> list[Float[np.ndarray, "head token"]]:
    q, k, v = (x[None] for x in (layer.query, layer.key, layer.value))
    elu1, uniform = (
        attend(name, q, k, v, visible=layer.visible, scale=layer.scale).output[0] for name in ("elu1", "uniform")
    )
    pairs = ((layer.output, elu1), (layer.output, uniform), (elu1, uniform))
    return [divergence(output, other).double().numpy() for output, other in pairs]


def table(rows: Sequence[Nearness]) -> str:
    """One line per text."""
    lines = [
        "| text | tokens | D(elu1) | D(uniform) | mean difference of D | worst head | 1 − cos of the outputs "
        "| worst head | rank correlation of heads |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = (row.elu1, row.uniform, *row.divergences, *row.outputs, row.ranks)
        cells = (row.text, f"{row.tokens:,}", *(f"{number:.4f}" for number in numbers))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def span(values: Sequence[float], digits: int = 3) -> str:
    """The least and the greatest."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def words(rows: Sequence[Nearness]) -> str:
    """What was measured, and what came out over all texts."""
    outputs, divergences = ([getattr(row, name) for row in rows] for name in ("outputs", "divergences"))
    return (
        "D is the divergence from softmax, 1 − cos of the two outputs. Means are over heads and all tokens but the "
        "first; the worst head is the one with the largest mean over tokens.\n\n"
        f"**The divergences of elu1 and uniform differ by {span([mean for mean, _ in divergences])} in the mean and by "
        f"{span([worst for _, worst in divergences], 2)} in the worst head of a text.** Their *outputs* are nearer to "
        f"each other: 1 − cos is {span([mean for mean, _ in outputs], 4)} in the mean and "
        f"{span([worst for _, worst in outputs])} in the worst head. The two are not the same statement: the outputs "
        "stand at an angle of √(2 (1 − cos)), and D may change by that angle times the sine of the angle to softmax's "
        "output."
    )


def main() -> None:
    """Measure and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a text file")
    parser.add_argument("--sequences", "--passages", type=int, default=4, help="sequences of the file")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each")
    options = parser.parse_args()
    if options.sequences < FEWEST:
        parser.error(f"--sequences must be at least {FEWEST}, got {options.sequences}: one text says little")
    model, tokenizer = load_model()
    ids = token_ids(tokenizer, Path(options.text).read_text(encoding="utf-8"))
    if len(ids) < options.sequences * options.tokens:
        parser.error(
            f"the file must hold at least {options.sequences * options.tokens:,} tokens, got {len(ids):,}; ask for "
            "fewer or shorter sequences"
        )
    parts = sequences(ids, {options.tokens: options.sequences})[options.tokens]
    texts = {f"sequence {number + 1}": part for number, part in enumerate(parts)}
    texts |= {name: tokenizer(text)["input_ids"] for name, text in DOMAINS.items()}
    rows = [nearness(model, name, text) for name, text in texts.items()]
    command = f"--sequences {options.sequences} --tokens {options.tokens}"
    text = f"`python experiments/elu1_and_uniform.py --text FILE {command}` on the embedded model; {machine()}. "
    text += f"{words(rows)}\n\n{table(rows)}"
    title = "How near elu1 is to the mean of values"
    write_section("elu1_and_uniform", title, text, FINDINGS)


if __name__ == "__main__":
    main()
