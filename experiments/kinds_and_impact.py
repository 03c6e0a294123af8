"""Does the kind of a head predict what its swap costs, beyond the divergence of a window? On the embedded model.

Run: python experiments/kinds_and_impact.py --text FILE --calibration FITTED --parts FOLDER [--texts 2] [--heads 270]

The text must be one that the calibration was not fitted on. Heads are swapped one at a time by each substitute, and
saved in ``--parts`` block by block: an interrupted run goes on, and a longer one begins with what there is.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np
import torch

from harness import FINDINGS, machine, write_section
from head_statistics import layer_interval, normal_scores, spearman, squared_errors
from softgap.attention import Mechanism, resolve
from softgap.calibration import Calibration
from softgap.intervals import Interval
from softgap.kinds import KINDS
from softgap.linearize import Impact, Sequences, head_scores
from softgap.linearize.impact import impact_on
from softgap.linearize.scores import split_half
from softgap.linearize.sequences import cut_sequences, digest_of_sequences
from softgap.models import load_model
from softgap.models.tokens import token_ids

LENGTH = 512
# Every 40th sequence is measured on; two sequences in the middle between such ones give the scores.
SPREAD, SCORED = 40, 2
BLOCK = 30
Mechanisms = Mapping[str, Mechanism]
SWAPS = ("window", "fitted", "hybrid")
SCORES = ("divergence", "output_l2", "fisher", "gradient+fisher")
DIVERGENCES = tuple(f"{swap} divergence" for swap in SWAPS)
BOTH = "kind and divergences"
FURTHER = {"kind": ("kind",), "divergences": DIVERGENCES, BOTH: ("kind", *DIVERGENCES)}


def say(*words: object) -> None:
    """A line of progress."""
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def measure_impact(model: Any, sequences: Sequences, mechanisms: Mechanisms, options: Any) -> Impact:
    """Heads in random order swapped one at a time, saved block by block."""
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    order = [divmod(int(i), heads) for i in np.random.default_rng(0).permutation(layers * heads)][: options.heads]
    first, *others = mechanisms.values()
    texts = []
    for number in range(len(sequences)):
        text, parts = sequences.part(slice(number, number + 1)), []
        for start in range(0, len(order), BLOCK):
            block = order[start : start + BLOCK]
            path = options.parts / f"impact-{digest_of_sequences(text)[:8]}-{start}-{len(block)}.npz"
            if not path.exists():
                impact_on(model, text, None, first, baselines=others, heads=block).save(path)
                say(f"swapped {start + len(block)} of {len(order)} heads in text {number + 1}")
            parts.append(Impact.load(path))
        texts.append({name: np.concatenate([part.change[name] for part in parts], axis=1) for name in parts[0].change})
    change = {name: np.concatenate([text[name] for text in texts], axis=2) for name in texts[0]}
    return Impact(tuple(mechanisms), tuple(head for part in parts for head in part.heads), {}, change)


def measure_scores(model: Any, sequences: Sequences, mechanisms: Mechanisms, options: Any) -> dict[str, np.ndarray]:
    """Scores of every head by ``swap score``."""
    scores: dict[str, np.ndarray] = {}
    for swap in SWAPS:
        path = options.parts / f"scores-{digest_of_sequences(sequences)[:8]}-{swap}.npy"
        if not path.exists():
            found = head_scores(model, sequences, mechanisms[swap], names=SCORES)
            np.save(path, np.stack([found.mean(name) for name in SCORES]))
            say(f"scored every head for {swap}")
        scores |= {f"{swap} {name}": row for name, row in zip(SCORES, np.load(path), strict=True)}
    return scores


@dataclass(frozen=True, eq=False)
class Heads:
    """What is known of each measured head: its kind, its layer, its scores, and the KL of every swap."""

    kinds: np.ndarray
    layers: np.ndarray
    scores: Mapping[str, np.ndarray]
    kl: Mapping[str, np.ndarray]

    def predictors(self, swap: str) -> dict[str, np.ndarray]:
        """What might predict the cost of a swap, by name."""
        values = {"kind": np.array([KINDS.index(kind) for kind in self.kinds], dtype=float)}
        values |= {name: self.scores[name] for name in DIVERGENCES}
        return values | {name: self.scores[f"{swap} {name}"] for name in SCORES[1:]}

    def columns(self, swap: str, names: Collection[str]) -> list[np.ndarray]:
        """Predictors as columns of a regression, one for each kind."""
        values = self.predictors(swap)
        kinds = [(self.kinds == kind).astype(float) for kind in np.unique(self.kinds)] if "kind" in names else []
        return kinds + [normal_scores(values[name]) for name in values if name in names and name != "kind"]


def regression_table(heads: Heads) -> tuple[str, dict[tuple[str, str, str], Interval]]:
    """Cross-validated R^2 of log KL on a baseline, and what further predictors add to it."""
    target = {swap: np.log(heads.kl[swap]) for swap in SWAPS}
    gains, rows = {}, []
    for base in (DIVERGENCES[0], *SCORES[1:]):
        errors = {swap: squared_errors(heads.layers, heads.columns(swap, [base]), target[swap]) for swap in SWAPS}
        shares = [f"{1 - errors[swap].mean() / target[swap].var():.3f}" for swap in SWAPS]
        rows.append([base, *shares])
        for label, names in FURTHER.items():
            for swap in SWAPS:
                columns = heads.columns(swap, [base, *names])
                gain = errors[swap] - squared_errors(heads.layers, columns, target[swap])
                gains[base, label, swap] = layer_interval(
                    heads.layers,
                    lambda at, g=gain, y=target[swap]: float(g[at].mean() / y[at].var()),  # type: ignore[misc]
                )
            rows.append([f"+ {label}", *(str(gains[base, label, swap]) for swap in SWAPS)])
    return table(["predictors", *SWAPS], rows), gains


def rank_table(heads: Heads) -> str:
    """Each predictor's rank correlation with the cost of each swap, alone and beyond the window's divergence."""
    rows, given = [], heads.scores[DIVERGENCES[0]]
    for name in heads.predictors("window"):
        pairs = [(heads.predictors(swap)[name], heads.kl[swap]) for swap in SWAPS]
        cells = [str(spearman(heads.layers, *pair)) for pair in pairs]
        cells += ["" if name == DIVERGENCES[0] else str(spearman(heads.layers, *pair, given)) for pair in pairs]
        rows.append([name, *cells])
    return table(["predictor", *SWAPS, *(f"{swap}, partial" for swap in SWAPS)], rows)


def kind_table(heads: Heads) -> str:
    """Median cost of every swap by kind, also as a share of what the constant costs in the same head."""
    rows = []
    for kind in KINDS:
        kl = {swap: values[heads.kinds == kind] for swap, values in heads.kl.items()}
        if len(kl["constant"]):
            cells = [f"{1000 * np.median(kl[swap]):.2f}" for swap in ("constant", *SWAPS)]
            cells += [f"{np.median(kl[swap] / kl['constant']):.3f}" for swap in SWAPS]
            rows.append([kind, str(len(kl["constant"])), *cells])
    return table(["kind", "heads", "constant", *SWAPS, *(f"{swap} / constant" for swap in SWAPS)], rows)


def choice_table(heads: Heads) -> str:
    """What heads cost if a rule chooses among window, fitted and hybrid."""
    costs = 1000 * np.stack([heads.kl[swap] for swap in SWAPS])
    best, everywhere, hybrid = costs.argmin(axis=0), np.arange(costs.shape[1]), SWAPS.index("hybrid")
    named = np.array([SWAPS.index(kind) if kind in SWAPS else hybrid for kind in heads.kinds])
    rules = {"the kind, hybrid where it is none of the three": named}
    rules |= {f"always {swap}": np.full(len(best), i) for i, swap in enumerate(SWAPS)}
    for name in SCORES:
        rules[f"the smallest {name}"] = np.argmin([heads.scores[f"{swap} {name}"] for swap in SWAPS], axis=0)
    rules["the smallest measured cost"] = best
    labelled, rows = np.isin(heads.kinds, SWAPS), []
    for name, choice in rules.items():
        right, cost = choice == best, costs[choice, everywhere]
        change = layer_interval(heads.layers, lambda at, c=cost - costs[hybrid]: float(c[at].mean()))  # type: ignore[misc]
        rows.append([name, f"{right[labelled].mean():.2f}", f"{right.mean():.2f}", f"{cost.mean():.2f}", str(change)])
    shares = [f"right in {labelled.sum()} heads of these kinds", "right in all"]
    return table(["rule", *shares, "mean KL", "difference from always hybrid"], rows)


def write(heads: Heads, costs: Mapping[str, np.ndarray], options: argparse.Namespace) -> None:
    """The section of the findings."""
    regressions, gains = regression_table(heads)
    window = DIVERGENCES[0]
    sure = Counter(key[:2] for key, gain in gains.items() if gain.sign > 0)
    loss, kl = (split_half(costs[name][2], rng=np.random.default_rng(0))[0] for name in ("loss", "kl"))
    why = f"hybrid: ranks in two halves of the texts agree to {kl:.2f}, of the rise in loss to {loss:.2f}"
    why = why if options.texts > 1 else "the rise in loss is too noisy to rank heads by in so little text"
    text = f"""\
`python experiments/kinds_and_impact.py --text FILE --calibration FITTED --parts FOLDER --texts {options.texts} \
--heads {len(heads.kinds)}` on the embedded model, calibrated on other text with the default recipe; {machine()}. \
{len(heads.kinds)} of 270 heads, drawn at random, each swapped alone: KL divergence of the next token in 10^-3 nats, \
over {options.texts} x {LENGTH} tokens ({why}). Kinds come from the calibration, scores from \
{SCORED} other sequences. The window has 4 sinks and 63 recent keys. Intervals are 95 % over resampled layers.

**Over the window's divergence, the kind improves the prediction of what a swap costs for {sure[window, "kind"]} of 3 \
substitutes, the divergences of fitted and hybrid for {sure[window, "divergences"]}. Over output_l2, kind and \
divergences together do for {sure["output_l2", BOTH]}, over fisher for {sure["fisher", BOTH]}** (intervals above 0). \
R^2 of log KL in layers that the regression has not seen; below each baseline, what others add to it:

{regressions}

Spearman's correlation with KL, alone and given the window's divergence. Kinds are ranked from cheap to dear. \
The scores at the end are those of the swap itself; fisher is the curvature of KL along it:

{rank_table(heads)}

Median KL of each swap by kind, and median share of what the constant costs in the same head:

{kind_table(heads)}

A rule chooses window, fitted or hybrid for each head. It is right where its choice costs least (chance: 0.33):

{choice_table(heads)}"""
    write_section("kinds_and_impact", "Kinds of heads and what their swaps cost", text, page=FINDINGS)


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--heads", type=int, default=270)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model("smollm2-135m")
    calibration = Calibration.load(options.calibration)
    if calibration.sufficiency is None:
        sys.exit("the calibration must have the kinds of heads, got one without; calibrate again")
    options.parts /= calibration.digest[:8]
    options.parts.mkdir(parents=True, exist_ok=True)
    ids = token_ids(tokenizer, Path(options.text).read_text(encoding="utf-8"))
    rows = cut_sequences(model, ids, LENGTH, len(ids)).ids
    measured, scored = (
        Sequences(x, torch.ones(len(x), LENGTH - 1, dtype=torch.bool))
        for x in (rows[::SPREAD][: options.texts], rows[SPREAD // 2 :: SPREAD][:SCORED])
    )
    mechanisms = {"window": resolve("window:w=63,sinks=4")}
    mechanisms |= {name: calibration.mechanism(name) for name in ("fitted", "hybrid", "constant")}
    impact = measure_impact(model, measured, mechanisms, options)
    scores = measure_scores(model, scored, mechanisms, options)
    layers, numbers = np.array(impact.heads).T
    places = layers * model.config.num_attention_heads + numbers
    kinds = np.array(calibration.sufficiency.labels)[layers, numbers]
    kl = {swap: impact.mean("kl", swap) for swap in mechanisms}
    write(Heads(kinds, layers, {name: x[places] for name, x in scores.items()}, kl), impact.change, options)


if __name__ == "__main__":
    main()
