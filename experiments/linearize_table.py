"""Which heads of a model can go without softmax: scores, output correction and the frontier.

Run: python experiments/linearize_table.py --text FILE --calibration CAL [--tokens 16384] [--heads 60] [--only scores]

The model is the embedded one, or that of --model.

The first half of the file is what the calibration was fitted on; scores and output corrections use
`--fit-tokens` of it. Every cost is measured on `--tokens` of the second half: 16384 for the final table. The tables go
into docs/findings.md. The work is saved in `--parts`, so an interrupted run goes on. An estimate of the time is printed
first.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np
import torch

from harness import FINDINGS, field_words, machine, write_section
from held_out import halves
from softgap.intervene.substitute import Head, Substitute
from softgap.linearize import frontier, head_scores, rank_agreement, recall_sequences, split_sequences, substitute
from softgap.linearize.frontier import Frontier
from softgap.linearize.impact import Impact, impact_on
from softgap.linearize.scores import Scores
from softgap.linearize.sequences import Sequences, digest_of_sequences
from softgap.models import load_model
from softgap.models.catalogue import EMBEDDED
from softgap.models.tokens import token_ids
from softgap.probe.layout import attention_layers
from softgap.report.figures import draw_frontier, save_figure

FITTED = "fitted"
FIT_LISTS = 8
ORDERS = ["gradient+fisher", "divergence", "random"]
# What one head of a sweep takes, in passes over its text: benchmarks/impact.py measures it.
REUSE = 0.53
IMAGES = FINDINGS.parent / "images"


def say(stage: str, share: float) -> None:
    """Progress on one line of its own every tenth."""
    tenth = int(10 * share)
    if (stage, tenth) != say.last:  # type: ignore[attr-defined]
        say.last = (stage, tenth)  # type: ignore[attr-defined]
        print(f"{time.strftime('%H:%M:%S')} {stage}: {share:.0%}", flush=True)


say.last = ("", -1)  # type: ignore[attr-defined]


def estimate(model: Any, options: argparse.Namespace) -> None:
    """Print what the run will take, from one forward."""
    ids = torch.arange(10, 110).repeat(6)[None, :512]
    with torch.inference_mode():
        model(ids, use_cache=False)
        begun = time.perf_counter()
        model(ids, use_cache=False)
    each = (time.perf_counter() - begun) / 512
    points = len(options.shares)
    each_sweep, each_scores = REUSE * options.heads * options.tokens, 40 * options.fit_tokens
    scoring = len(options.mechanisms) * (each_sweep + each_scores) * ("scores" in options.only)
    curve = points * (9 * options.tokens + 3 * 4 * options.fit_tokens) * len(options.lengths) * len(options.by)
    curve *= len(options.windows)
    total = each * (scoring + (curve if "frontier" in options.only else 0))
    print(f"about {total / 3600:.1f} hours on this machine as busy as it is now", flush=True)


def file_stem(read: Sequences, rival: Substitute) -> str:
    """A name for what was measured on sequences with a substitute."""
    return f"{rival.mechanism.name}-{rival.digest[:8]}-{digest_of_sequences(read)[:8]}"


def measured(
    model: Any, held: Sequences, rival: Substitute, heads: Sequence[Head], options: argparse.Namespace
) -> Impact:
    """Heads swapped one at a time over held-out text, saved sequence by sequence."""
    parts = []
    for number in range(len(held)):
        path = options.parts / f"impact-{file_stem(held, rival)}-{len(heads)}-{number}.npz"
        if not path.exists():
            impact_on(model, held.part(slice(number, number + 1)), None, rival, baselines=[], heads=heads).save(path)
            print(
                f"{time.strftime('%H:%M:%S')} {rival.mechanism.name}: sequence {number + 1} of {len(held)}", flush=True
            )
        parts.append(Impact.load(path))
    first = parts[0]
    change = {name: np.concatenate([x.change[name] for x in parts], axis=-1) for name in first.change}
    original = {name: np.concatenate([x.original[name] for x in parts], axis=-1) for name in first.original}
    return Impact(first.mechanisms, first.heads, original, change, first.settings)


def scored(model: Any, fit: Sequences, rival: Substitute, parts: Path) -> Scores:
    """All scores of one substitute, kept on disk."""
    path = parts / f"scores-{file_stem(fit, rival)}.npz"
    if not path.exists():
        scores = head_scores(model, fit, rival, progress=say)
        passes = np.array([scores.passes[name] for name in scores.values])
        np.savez(path, heads=np.array(scores.heads), names=np.array(list(scores.values)), passes=passes,
                 values=np.stack(list(scores.values.values())))  # fmt: skip
    stored = np.load(path)
    names = [str(name) for name in stored["names"]]
    heads = tuple((int(a), int(b)) for a, b in stored["heads"])
    return Scores(
        heads, dict(zip(names, stored["values"], strict=True)), dict(zip(names, stored["passes"], strict=True))
    )


def score_table(scores: Scores, impact: Impact, text: float) -> str:
    """Each score's rank correlation with the measured costs, over the heads that were measured.

    ``text`` is how long the text of the scores is, in lengths of the text that was measured on.
    """
    rng = np.random.default_rng(0)
    places = [scores.heads.index(head) for head in impact.heads]
    lines = [
        "| score | loss | disattenuated | KL | disattenuated | costliest tenth in top fifth | of the time of a sweep |",
        "|---|---|---|---|---|---|---|",
    ]
    top = max(1, len(impact.heads) // 10)
    costliest = set(np.argsort(impact.mean("loss"))[::-1][:top])
    rows = []
    for name in scores.values:
        score = scores.mean(name)[places]
        by_loss, by_kl = (rank_agreement(score, impact.change[q][0], rng=rng) for q in ("loss", "kl"))
        cost = scores.passes[name] * text / (REUSE * len(scores.heads))
        caught = len(costliest & set(np.argsort(score)[::-1][: 2 * top]))
        rows.append(
            (
                -by_loss.correlation.value,
                f"| {name} | {by_loss.correlation} | {by_loss.disattenuated:.3f} | {by_kl.correlation} | "
                f"{by_kl.disattenuated:.3f} | {caught} of {top} | {cost:.1%} |",
            )
        )
    ceiling = rank_agreement(impact.mean("loss"), impact.change["loss"][0], rng=rng)
    kl = rank_agreement(impact.mean("kl"), impact.change["kl"][0], rng=rng)
    note = (
        f"Two halves of the held-out sequences agree to {ceiling.half:.3f} in loss and {kl.half:.3f} in KL: the "
        f"ceilings are {ceiling.ceiling:.3f} and {kl.ceiling:.3f}."
    )
    return "\n".join([*lines, *(row for _, row in sorted(rows)), "", note])


def frontier_table(result: Frontier) -> str:
    """One row per order and substitute, one column per share."""
    shares = sorted({point.share for point in result.points})
    lines = [
        "| order | substitute | quantity | " + " | ".join(f"{share:.0%}" for share in shares) + " |",
        "|---|---|---|" + "---|" * len(shares),
    ]
    for key in dict.fromkeys((point.order, point.mechanism) for point in result.points):
        row = {p.share: p for p in result.points if (p.order, p.mechanism) == key}
        for quantity in ("loss", "recall"):
            if quantity not in result.original:
                continue
            cells = [str(row[share].change[quantity]) if share in row else "" for share in shares]
            lines.append(f"| {key[0]} | {field_words(key[1])} | {quantity} | " + " | ".join(cells) + " |")
    original = ", ".join(f"{name} {value:.3f}" for name, value in result.original.items())
    return "\n".join([*lines, "", f"Of the model as it is: {original}."])


def command(options: argparse.Namespace) -> str:
    """The beginning of the command that writes a section."""
    sizes = f"--tokens {options.tokens} --fit-tokens {options.fit_tokens}"
    of_model = "" if options.model == EMBEDDED else f" --model {options.model}"
    return f"python experiments/linearize_table.py --text FILE --calibration CAL{of_model} {sizes}"


def words(options: argparse.Namespace) -> tuple[str, str, str]:
    """What follows the name of a section, what follows its title, and the model in words."""
    if options.model == EMBEDDED:
        return "", "", "the embedded model"
    return f"-{options.model}", f": {options.model}", options.model


def write_scores(
    model: Any, fit: Sequences, held: Sequences, options: argparse.Namespace, rivals: list[Substitute]
) -> None:
    """The tables of scores."""
    everything = [(layer.number, head) for layer in attention_layers(model) for head in range(layer.heads)]
    suffix, title, name = words(options)
    sweep = REUSE * len(everything)
    drawn = np.random.default_rng(0).choice(len(everything), size=min(options.heads, len(everything)), replace=False)
    heads = [everything[i] for i in sorted(drawn)]
    for rival in rivals:
        scores = scored(model, fit, rival, options.parts)
        table = score_table(scores, measured(model, held, rival, heads, options), fit.tokens / held.tokens)
        write_section(
            f"linearize_table-scores-{rival.mechanism.name}{suffix}",
            f"Which score predicts what a head's swap costs: {rival.mechanism.name}{title}",
            f"`{command(options)} --only scores --mechanisms {rival.mechanism.name} --heads {len(heads)}` on "
            f"{name}; {machine()}. Spearman's correlation over {len(heads)} of {len(everything)} heads, drawn at "
            f"random, between a score from {fit.tokens:,} tokens and the rise in loss (and the KL divergence) measured "
            f"on {held.tokens:,} tokens of held-out text, one head swapped at a time, with 95 % over resampled heads; "
            f"disattenuated is divided by what the measurement allows. A sweep takes the time of {sweep:.0f} passes "
            "over the text that is measured on; a backward pass counts as two.\n\n" + table,
            page=FINDINGS,
        )


def write_frontier(model: Any, text: tuple[str, str], options: argparse.Namespace, rival: Substitute) -> None:
    """The frontier at every length, by heads and by groups, and with a window."""
    fit = split_sequences(model, options.tokenizer, text[:1], tokens=options.fit_tokens)
    fit_lists, lists = (
        recall_sequences(
            model, options.tokenizer, n, seed=seed, filler=token_ids(options.tokenizer, [part]),
            distance=options.distance,
        )
        for n, seed, part in ((FIT_LISTS, 1, text[0]), (options.lists, 5, text[1]))
    )  # fmt: skip
    suffix, title, in_words = words(options)
    flags = ("" if options.greedy else " --no-greedy") + ("" if options.correct else " --no-correct")
    flags += "" if options.orders == ORDERS else f" --orders {' '.join(options.orders)}"
    for length in options.lengths:
        held = split_sequences(model, options.tokenizer, text[1:], length=length, tokens=options.tokens)
        for by in options.by:
            for window in options.windows:
                used = substitute(rival, model, window=window or None)
                asked = lists if length == options.lengths[0] else None
                result = frontier(
                    model, fit, held, asked, used, by=by, shares=options.shares, orders=options.orders,
                    greedy=options.greedy, correct=options.correct, fit_recall_lists=fit_lists,
                    folder=options.parts / "frontier", progress=say,
                )  # fmt: skip
                name = f"frontier-{by}-{length}" + (f"-window-{window}" if window else "")
                name += ("" if options.swap == FITTED else f"-{options.swap}") + suffix
                save_figure(draw_frontier(result), IMAGES / f"{name}.svg")
                extra = f", softmax kept on the nearest {window} keys" if window else ""
                write_section(
                    f"linearize_table-{name}",
                    f"The frontier by {by}, {length:,} tokens, {rival.mechanism.name}{extra}{title}",
                    f"`{command(options)} --only frontier --lengths {length} --by {by} --windows {window} --swap "
                    f"{options.swap} --lists {options.lists}{flags}` on {in_words} with its calibration; {machine()}. "
                    f"Heads become {field_words(used.name)}; scores and output corrections come from "
                    f"{fit.tokens:,} tokens and {FIT_LISTS} recall lists, every number from "
                    f"{held.tokens:,} held-out tokens"
                    + (f" and {options.lists} other lists across {options.distance} tokens" if asked else "")
                    + ": rise in loss (nats per token)"
                    + (" and change in recall of first tokens" if asked else "")
                    + ", 95 % over texts. Beside it the mean outputs of the heads and "
                    "sinks with a window of the same bytes.\n\n"
                    f"![The frontier](images/{name}.svg)\n\n" + frontier_table(result),
                    page=FINDINGS,
                )


def main() -> None:
    """Measure, and write section by section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration", required=True, help="fitted on the first half of the text")
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--tokens", type=int, default=16384, help="held-out tokens")
    parser.add_argument(
        "--fit-tokens", type=int, default=4096, help="tokens that scores and output corrections come from"
    )
    parser.add_argument("--heads", type=int, default=270, help="heads whose cost is measured alone, drawn at random")
    parser.add_argument("--sequences", "--passages", type=int, help="stop after so many held-out sequences")
    parser.add_argument("--parts", type=Path, default=Path("runs/linearize-table"))
    parser.add_argument("--only", nargs="+", choices=("scores", "frontier"), default=["scores", "frontier"])
    parser.add_argument("--mechanisms", nargs="+", default=[FITTED, "elu1"], help="whose scores are evaluated")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--by", nargs="+", default=["heads", "groups"])
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 64])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--swap", choices=(FITTED, "hybrid"), default=FITTED, help="what a frontier swaps for")
    parser.add_argument("--lists", type=int, default=24, help="recall lists that every point of a frontier answers")
    parser.add_argument("--distance", type=int, default=600, help="tokens between a recall list and its questions")
    parser.add_argument("--greedy", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--correct", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--orders", nargs="+", default=ORDERS)
    options = parser.parse_args()
    options.parts.mkdir(parents=True, exist_ok=True)
    IMAGES.mkdir(parents=True, exist_ok=True)
    model, options.tokenizer = load_model(options.model)
    text = halves(Path(options.text).read_text())
    rival = substitute(f"{FITTED}@{options.calibration}", model)
    estimate(model, options)
    if "scores" in options.only:
        sizes = (options.fit_tokens, options.tokens)
        fit, held = (
            split_sequences(model, options.tokenizer, [part], tokens=n) for part, n in zip(text, sizes, strict=True)
        )
        rivals = [rival if name == FITTED else substitute(name, model) for name in options.mechanisms]
        write_scores(model, fit, held.part(slice(0, options.sequences)), options, rivals)
    if "frontier" in options.only:
        write_frontier(model, text, options, substitute(f"{options.swap}@{options.calibration}", model))


if __name__ == "__main__":
    main()
