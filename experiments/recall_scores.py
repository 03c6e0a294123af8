"""Which score finds the KV groups that recall needs, and which order keeps both loss and recall? On the embedded model.

Run: python experiments/recall_scores.py --fit FILE --text FILE --parts FOLDER [--lists 2] [--texts 2]

Scores come from recall lists across 200 tokens of the one text (--fit). What they should predict is measured with lists
across 600 tokens and with sequences of the other (--text): each KV group alone keeps 4 sinks and 32 recent keys. Orders
made of the scores are compared by swapping 70 of 90 groups. Finished parts are saved in ``--parts``: an interrupted run
goes on, and a longer one begins with what there is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np
import torch
from scipy.stats import rankdata

from harness import FINDINGS, machine, write_section
from softgap.attention import resolve
from softgap.intervals import interval_of
from softgap.intervene.substitute import Substitute
from softgap.linearize import Sequences, rank_agreement, recall_sequences
from softgap.linearize.frontier import units_of
from softgap.linearize.recall_scores import RECALL_SCORES, impact_of_units, recall_scores
from softgap.linearize.scores import SAMPLES, unit_scores
from softgap.linearize.sequences import cut_sequences, read_swapped
from softgap.models import load_model
from softgap.models.tokens import TokenStream, token_ids

SWAP, PLAN = "window:w=32,sinks=4", "window:w=124,sinks=4"
SCORE_LISTS, SCORE_DISTANCE, SCORE_TEXTS, SCORE_LENGTH = 2, 200, 3, 512
DISTANCE, LENGTH = 600, 1024
# Tokens of a sequence in which groups are swapped alone: every group reads it.
ALONE_LENGTH = 512
FREED, PLAN_LISTS, PLAN_TEXTS = 70, 24, 4
GATE_STEPS = 24
TOP = 10
TEXT_SCORE = "fisher on text"


def say(*words: object) -> None:
    """A line of progress."""
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def found_or_made(path: Path, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What an earlier run saved in the file, or what ``make`` gives now, with its CPU seconds."""
    if not path.exists():
        begin = time.process_time()
        made = {**make(), "seconds": time.process_time() - begin}
        path.write_text(json.dumps(made), encoding="utf-8")
        say(f"{path.stem}: {made['seconds']:.0f} s")
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def measure_scores(model: Any, lists: Sequences, sequences: Sequences, folder: Path) -> dict[str, dict[str, Any]]:
    """Every score with its cost in forward passes over one list or sequence, and in CPU seconds."""
    scores = {}
    for name in RECALL_SCORES:

        def make(name: str = name) -> dict[str, Any]:
            found = recall_scores(model, lists, SWAP, names=[name], steps=GATE_STEPS)
            return {"score": found.mean(name).tolist(), "passes": found.passes[name] * len(lists)}

        scores[name] = found_or_made(folder / f"score-{name}.json", make)

    def by_text() -> dict[str, Any]:
        substitutes = [Substitute(resolve(SWAP))]
        _, curvature = unit_scores(model, sequences, substitutes, units_of(model, "groups"))
        return {"score": curvature[0].mean(axis=-1).tolist(), "passes": (3 + 2 * SAMPLES) * len(sequences)}

    scores[TEXT_SCORE] = found_or_made(folder / "score-text.json", by_text)
    return scores


def measure_impact(model: Any, lists: Sequences, sequences: Sequences, folder: Path) -> dict[str, np.ndarray]:
    """What the swap of each group alone costs, ``[group, text]``: log-probability and recall of lists, loss and KL."""

    def measured(part: Sequences) -> dict[str, Any]:
        found = impact_of_units(model, part, SWAP)
        return {name: values[:, 0].tolist() for name, values in found.change.items()}

    columns: dict[str, list[list[float]]] = {"log-probability": [], "recall": [], "loss": [], "kl": []}
    for number in range(max(len(lists), len(sequences))):
        row = slice(number, number + 1)
        if number < len(lists):
            part = found_or_made(folder / f"impact-list-{number}.json", lambda row=row: measured(lists.part(row)))  # type: ignore[misc]
            columns["log-probability"].append(part["loss"])
            columns["recall"].append([-x for x in part["accuracy"]])
        if number < len(sequences):
            part = found_or_made(folder / f"impact-text-{number}.json", lambda row=row: measured(sequences.part(row)))  # type: ignore[misc]
            columns["loss"].append(part["loss"])
            columns["kl"].append(part["kl"])
    return {name: np.array(values).T for name, values in columns.items() if values}


def orders(scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Scores and combinations that a search could rank groups by."""
    text = scores[TEXT_SCORE]

    def added(name: str) -> np.ndarray:
        recall = np.maximum(scores[name], 0)
        return np.asarray(text / text.sum() + recall / recall.sum())

    def ranks(name: str) -> np.ndarray:
        return np.maximum(rankdata(text), rankdata(scores[name]))

    return {
        TEXT_SCORE: text,
        "fisher": scores["fisher"],
        "ablation": scores["ablation"],
        "fisher on text + fisher, equal sums": added("fisher"),
        "fisher on text + ablation, equal sums": added("ablation"),
        "the larger rank of fisher on text and ablation": ranks("ablation"),
        "the larger rank of fisher on text and fisher (in use)": ranks("fisher"),
    }


def compare_orders(
    model: Any, ranked: Mapping[str, np.ndarray], lists: Sequences, sequences: Sequences, folder: Path
) -> list[str]:
    """Rows: what it costs to swap the groups that each order puts first."""
    units, rows = units_of(model, "groups"), []
    original = found_or_made(
        folder / "order-original.json", lambda: read_swapped(model, sequences, lists, [], None).to_json()
    )
    for number, (name, score) in enumerate(ranked.items()):
        chosen = [head for unit in np.argsort(score, kind="stable")[:FREED] for head in units[unit]]
        found = found_or_made(
            folder / f"order-{number}.json",
            lambda chosen=chosen: read_swapped(model, sequences, lists, chosen, Substitute(resolve(PLAN))).to_json(),  # type: ignore[misc]
        )
        changes = [
            str(interval_of(np.array(found[x]) - np.array(original[x]), rng=np.random.default_rng(0)))
            for x in ("loss", "recall")
        ]
        rows.append(f"| {name} | {' | '.join(changes)} |")
    own = f"loss {np.mean(original['loss']):.3f}, recall {np.mean(original['recall']):.2f}"
    return [f"| the original model | {own} | |", *rows]


def agreement_rows(scores: Mapping[str, dict[str, Any]], costs: Mapping[str, np.ndarray]) -> list[str]:
    """Rows: each score's correlation with the measured costs, its top groups, and what it took."""
    rows = []
    for name, found in scores.items():
        score = np.array(found["score"])
        cells = []
        for quantity in ("log-probability", "loss", "kl"):
            cells.append(_correlation(score, costs[quantity]) if quantity in costs else "")
        for quantity in ("log-probability", "kl"):
            if quantity not in costs:
                cells.append("")
                continue
            top = set(np.argsort(-score)[:TOP]) & set(np.argsort(-costs[quantity].mean(axis=-1))[:TOP])
            cells.append(str(len(top)))
        rows.append(f"| {name} | {' | '.join(cells)} | {found['passes']:.0f} | {found['seconds']:.0f} |")
    return rows


def _correlation(score: np.ndarray, costs: np.ndarray) -> str:
    return str(rank_agreement(score, costs, rng=np.random.default_rng(0)).correlation)


def most_missed(model: Any, costs: Mapping[str, np.ndarray]) -> str:
    """The groups that recall misses most, in words."""
    units, mean = units_of(model, "groups"), costs["log-probability"].mean(axis=-1)
    shared = model.config.num_attention_heads // model.config.num_key_value_heads
    names = [f"{units[i][0][0]}.{units[i][0][1] // shared} ({mean[i]:.2f})" for i in np.argsort(-mean)[:8]]
    return ", ".join(names)


def write(model: Any, scores: Any, costs: Mapping[str, np.ndarray], order_rows: Sequence[str]) -> None:
    """The section of the findings."""
    ceilings = {x: rank_agreement(costs[x].mean(axis=-1), costs[x], rng=np.random.default_rng(0)).half for x in costs}
    lists, texts = costs["recall"].shape[1], costs["loss"].shape[1] if "loss" in costs else 0
    halves = ", ".join(f"{x} {value:.2f}" for x, value in ceilings.items() if np.isfinite(value))
    text = f"""\
`python experiments/recall_scores.py --fit FILE --text FILE --parts FOLDER --lists {lists} --texts {texts}` on the \
embedded model; {machine()}. Scores come from {SCORE_LISTS} recall lists across {SCORE_DISTANCE} tokens of one half of \
WikiText ({TEXT_SCORE}: from {SCORE_TEXTS} sequences of {SCORE_LENGTH} tokens; gate: {GATE_STEPS} steps). They are \
compared with what the swap of each of 90 KV groups alone for `{SWAP}` costs on the other half: log-probability of the \
answers of recall lists ({lists}, across {DISTANCE} tokens), loss and KL divergence of sequences ({texts}, of \
{ALONE_LENGTH} tokens). \
Spearman's correlation with 95 % over resampled groups; how many of the {TOP} costliest groups are among the score's \
own {TOP}; cost in forward passes over one list or sequence and in CPU seconds. Ranks in two halves of the \
measurements agree to: {halves or "one text each, so there are no halves"}.

| score | recall (log p) | loss | KL of text | top {TOP}, recall | top {TOP}, KL | passes | s |
|---|---|---|---|---|---|---|---|
{chr(10).join(agreement_rows(scores, costs))}

Recall misses most, in nats per answer: {most_missed(model, costs)}.

{FREED} of 90 groups swapped for `{PLAN}` in the order of a score, the cheapest first, without output correction: \
change in loss on {PLAN_TEXTS} sequences of {LENGTH:,} tokens and in recall on {PLAN_LISTS} lists across {DISTANCE} \
tokens of text that no score saw, with 95 % over sequences and lists.

| order | loss | recall |
|---|---|---|
{chr(10).join(order_rows)}"""
    write_section("recall_scores", "Which KV groups recall needs", text, page=FINDINGS)
    print(text)


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--lists", type=int, default=3)
    parser.add_argument("--texts", type=int, default=2)
    options = parser.parse_args()
    options.parts.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    model, tokenizer = load_model("smollm2-135m")
    fit, text = (token_ids(tokenizer, Path(name).read_text(encoding="utf-8")) for name in (options.fit, options.text))
    scored = recall_sequences(model, tokenizer, SCORE_LISTS, seed=1, filler=fit, distance=SCORE_DISTANCE)
    found = measure_scores(model, scored, cut_sequences(model, fit, SCORE_LENGTH, SCORE_TEXTS), options.parts)
    unseen = recall_sequences(model, tokenizer, options.lists, seed=2, filler=text, distance=DISTANCE)
    ranked = orders({name: np.array(x["score"]) for name, x in found.items()})
    lists = recall_sequences(model, tokenizer, PLAN_LISTS, seed=5, filler=text, distance=DISTANCE)
    rows = compare_orders(model, ranked, lists, cut_sequences(model, text, LENGTH, PLAN_TEXTS), options.parts)
    costs = measure_impact(model, unseen, _spread(model, text, options.texts), options.parts)
    write(model, found, costs, rows)


def _spread(model: Any, ids: TokenStream, texts: int) -> Sequences:
    """Sequences apart from those of the orders, the first ones the same for any number."""
    starts = [(7 + 20 * i) * LENGTH for i in range(texts)]
    rows = torch.tensor([ids.sequence(start, ALONE_LENGTH) for start in starts]).view(texts, ALONE_LENGTH)
    return Sequences(rows, torch.ones(texts, ALONE_LENGTH - 1, dtype=torch.bool))


if __name__ == "__main__":
    main()
