"""Substitutes at equal memory in the embedded model: what each leaves of the gap, and what swapping KV groups costs.

Run: python experiments/equal_memory.py --text FILE --calibration FITTED [--only gap|swap] [--fit FILE] [--groups 70]

The text must be one that the calibration was not fitted on. ``gap`` compares outputs head by head. ``swap`` orders the
KV groups as a search for a plan does, by the Fisher curvature of the hybrid on the text of ``--fit`` and on recall
lists from it; swaps those that matter least; and measures the rise in loss and the recall of lists across 600 tokens of
other text. No output is corrected.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np
import torch
from scipy.stats import spearmanr

from harness import FINDINGS, machine, write_section
from softgap.attention import ExactSet, Mechanism, add_window, resolve
from softgap.attention.memory import keys_worth
from softgap.calibration import Calibration
from softgap.calibration.sufficiency import LIMIT, KindErrors, measure_kinds
from softgap.intervals import Interval, interval_of
from softgap.intervene.substitute import Substitute
from softgap.intervene.swap import heads_of_group, swap
from softgap.linearize.frontier import units_of
from softgap.linearize.scores import unit_scores
from softgap.linearize.sequences import cut_sequences, recall_sequences
from softgap.models import load_model
from softgap.models.catalogue import EMBEDDED
from softgap.models.tokens import TokenStream, first_tokens, token_ids
from softgap.probe.layout import head_dim, visit_layers
from softgap.tasks.generators import draw_pairs

RANGES = (range(64, 512), range(512, 1024), range(1024, 2048))
FAR = range(4096, 8192)
SWAP_RANGES = (range(0, 512), range(0, 1024), range(0, 2048), range(1024, 2048))
SPREAD = 20_000
FIT_LENGTH = 2048
PAIRS = 12
FIT_TEXTS, FIT_LISTS = 2, 8
DISTANCES = (600,)


def say(*words: object) -> None:
    """A line of progress."""
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def substitutes(calibration: Calibration) -> dict[str, Mechanism]:
    """What is compared, from one unit of memory (64 keys' worth) to two."""
    fitted, hybrid = calibration.mechanism(), calibration.mechanism("hybrid")
    own, sinks = ExactSet.of(hybrid.options).recent, f"{ExactSet.of(hybrid.options).sinks} sinks"
    names = {
        "profile": calibration.mechanism("profile"),
        "64 recent keys": resolve("window:w=64,sinks=0"),
        "4 sinks + 63 recent": resolve("window:w=63,sinks=4"),
        "fitted": fitted,
        "hybrid": hybrid,
        "4 sinks + 124 recent": resolve("window:w=124,sinks=4"),
        "razor, 4 sinks + 124 recent": resolve("razor:w=124,sinks=4"),
        "64 recent / fitted": add_window(fitted, w=64, sinks=0),
        "4 sinks + 60 recent / fitted": add_window(fitted, w=60, sinks=4),
        "4 sinks + 60 recent / fitted, f = 0.7": add_window(fitted, w=60, sinks=4, f=0.7),
        f"hybrid, {sinks} + {own + 64} recent": hybrid.configure(w=own + 64),
        "4 sinks + 30 recent + 32 far": resolve("window:w=30,sinks=4,far=32"),
        "4 sinks + 60 recent + 62 far": resolve("window:w=60,sinks=4,far=62"),
        f"hybrid, {sinks} + {own + 32} recent + 32 far": hybrid.configure(w=own + 32, far=32),
        f"hybrid, {sinks} + {own} recent + 62 far": hybrid.configure(w=own, far=62),
    }
    return names


# Rows of the swap: what keeps every value is no substitute of equal memory, and some rows are only of interest by head.
SWAPPED_LESS = (
    "profile",
    "64 recent keys",
    "fitted",
    "4 sinks + 30 recent + 32 far",
    "razor, 4 sinks + 124 recent",
    "4 sinks + 60 recent / fitted, f = 0.7",
)


def memory(mechanism: Mechanism, dim: int) -> str:
    """Keys' worth per KV head of so many dimensions."""
    worth = keys_worth(mechanism, dim)
    return "all values" if worth == float("inf") else f"{worth:.0f}"


def write_gap(model: Any, ids: TokenStream, mechanisms: dict[str, Mechanism], options: argparse.Namespace) -> None:
    """The share of the gap closed by range of positions; far keys need every earlier query, and are left out."""
    mechanisms = {name: mechanism for name, mechanism in mechanisms.items() if not mechanism.options.get("far")}
    dim = head_dim(model)
    texts = [ids.sequence(i * SPREAD, RANGES[-1].stop) for i in range(options.texts)]
    near = measure_kinds(model, texts, mechanisms, positions=RANGES, report=lambda n: say(f"{n} of {len(texts)} texts"))
    streaming = {name: mechanism for name, mechanism in mechanisms.items() if name != "profile"}
    (far,) = measure_kinds(model, [ids.sequence(0, FAR.stop)], streaming, positions=[FAR])
    rows = []
    sliding = np.array(visit_layers(model, texts[0], lambda layer: layer.visible.window is not None))
    by_window = {"sliding layers": sliding, "full layers": ~sliding} if sliding.any() and not sliding.all() else {}
    for i, (name, mechanism) in enumerate(mechanisms.items()):
        shares = [_closed(errors, i) for errors in near]
        shares.append("" if name == "profile" else _closed(far, list(streaming).index(name)))
        shares += [_closed(near[-1], i, layers) for layers in by_window.values()]
        gap_left, energy_left = near[-1].left()
        half = int((gap_left[i] > 0.5).sum())
        suffices = int(((energy_left[i] <= LIMIT) & ~(gap_left[i] > LIMIT)).sum())
        rows.append(f"| {name} | {memory(mechanism, dim)} | {' | '.join(shares)} | {half} | {suffices} |")
    better = _head_by_head(near[-1], list(mechanisms), ("4 sinks + 63 recent", "fitted"))
    command = f"python experiments/equal_memory.py --text FILE --calibration FITTED --only gap --texts {options.texts}"
    command += options.of_model
    one, fitted = (mechanisms[name] for name in ("4 sinks + 63 recent", "fitted"))
    heads = "".join(f" {name}, 1024-2048 |" for name in by_window)
    write_section(
        f"equal_memory-gap{options.section}",
        f"Substitutes at equal memory{options.title}",
        f"`{command}` on {options.words}, calibrated on other text with the default recipe; {machine()}. Share of "
        f"the gap to the mean of values closed in {options.texts} texts of {RANGES[-1].stop:,} tokens, and in one of "
        f"{FAR.stop:,}; heads that keep more than half of their gap, and for which a kind suffices (at most a tenth of "
        f"gap and energy left), at positions 1024-2048. A key's worth is a key and a value; the window of 67 keys has "
        f"{memory(one, dim)} keys' worth, the state of 128 features {memory(fitted, dim)}.\n\n"
        f"| substitute | keys' worth per KV head | 64-512 | 512-1024 | 1024-2048 | 4096-8192 |{heads} heads that keep "
        f"half | heads it suffices for |\n|{'---|' * (8 + len(by_window))}\n" + "\n".join(rows) + f"\n\n{better}",
        page=FINDINGS,
    )
    print("\n".join(rows), better, sep="\n")


def _closed(errors: KindErrors, kind: int, layers: Any = slice(None)) -> str:
    return f"{1 - errors.divergence[kind][:, layers].sum() / errors.uniform[:, layers].sum():.3f}"


def _head_by_head(errors: KindErrors, names: list[str], pair: tuple[str, str]) -> str:
    """How window and fitted map share the heads among them."""
    first, second = (errors.divergence[names.index(name)].sum(axis=0) for name in pair)
    best = 1 - np.minimum(first, second).sum() / errors.uniform.sum()
    correlation = float(spearmanr(first.ravel(), second.ravel()).statistic)
    return (
        f"The better of the two one-unit kinds, {pair[0]} and {pair[1]}, head by head closes {best:.3f}; {pair[1]} is "
        f"better in {int((second < first).sum())} of {first.size} heads, and what they leave correlates "
        f"{correlation:.2f} (ranks over heads)."
    )


def recall_lists(tokenizer: Any, ids: Sequence[int], n: int, seed: int, filler: int) -> Iterator[tuple[list[int], Any]]:
    """Lists of pairs, other text, and the pairs again in another order; with the first token of each answer."""

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    for number in range(n):
        rng = np.random.default_rng([seed, number])
        pairs = draw_pairs(PAIRS, "words", rng=rng)
        sequence, answers = [*first_tokens(tokenizer), *tokens("Words and their partners.\n")], []
        for turn in range(2):
            for j in rng.permutation(PAIRS):
                key, value = pairs[j]
                answer = tokens(f" {value}")
                sequence += tokens(f"{key}:")
                if turn:
                    answers.append((len(sequence) - 1, answer[0]))
                sequence += [*answer, *tokens("\n")]
            if not turn:
                start = 3 * SPREAD + number * 1000
                sequence += [*ids[start : start + filler], *tokens("\nWords and their partners.\n")]
        yield sequence, answers


@torch.inference_mode()
def recall(model: Any, lists: Sequence[tuple[list[int], Any]]) -> tuple[np.ndarray, float]:
    """Share of first tokens right, list by list, and their mean log-probability."""
    right, logs = [], []
    for sequence, answers in lists:
        logits = model(torch.tensor([sequence]), use_cache=False).logits[0]
        right.append(np.mean([int(logits[place].argmax()) == token for place, token in answers]))
        logs += [float(logits[place].log_softmax(-1)[token]) for place, token in answers]
    return np.array(right), float(np.mean(logs))


@torch.inference_mode()
def losses(model: Any, ids: TokenStream, length: int, n: int) -> np.ndarray:
    """Loss of every token but the first, text by text."""
    rows = []
    for i in range(n):
        text = torch.tensor([ids.sequence(i * SPREAD, length)])
        logits = model(text, use_cache=False).logits[0, :-1]
        rows.append(torch.nn.functional.cross_entropy(logits, text[0, 1:], reduction="none").numpy())
    return np.stack(rows)


def write_swap(model: Any, tokenizer: Any, ids: TokenStream, mechanisms: dict[str, Mechanism], options: Any) -> None:
    """The cost of swapping the groups that recall misses least."""
    order = _order(model, tokenizer, mechanisms["hybrid"], options.fit)
    heads = [head for group in order[: options.groups] for head in heads_of_group(model, *group)]
    lists = {filler: list(recall_lists(tokenizer, ids, options.lists, 10 + filler, filler)) for filler in DISTANCES}
    rows, original = [], np.zeros(0)
    names = options.rows or [name for name in mechanisms if name not in SWAPPED_LESS]
    streaming = {name: mechanisms[name] for name in names}
    for name, mechanism in {"the original model": None, **streaming}.items():
        with nullcontext() if mechanism is None else swap(model, heads, mechanism):
            loss = losses(model, ids, SWAP_RANGES[-1].stop, options.texts)
            shares = [recall(model, lists[filler])[0] for filler in lists]
        original = loss if mechanism is None else original
        # Attention is causal: the first 511 losses are those of a text of 512 tokens.
        rises = [(loss - original)[:, part.start : part.stop - 1].mean(axis=1) for part in SWAP_RANGES]
        cells = ["" if mechanism is None else memory(mechanism, head_dim(model))]
        cells += [str(interval_of(rise, rng=np.random.default_rng(0))) for rise in rises]
        cells += [_plain(interval_of(share, rng=np.random.default_rng(0))) for share in shares]
        rows.append(f"| {name} | {' | '.join(cells)} |")
        say(rows[-1])
    command = (
        f"python experiments/equal_memory.py --text FILE --calibration FITTED --only swap --fit FILE "
        f"--groups {options.groups} --texts {options.texts} --lists {options.lists}{options.of_model}"
    )
    write_section(
        f"equal_memory-swap-{options.groups}{options.section}",
        f"{options.groups} KV groups swapped, at equal memory{options.title}",
        f"`{command}` on {options.words}; {machine()}. The {options.groups} of {len(order)} KV groups that text and "
        "recall lists of the fit miss least (Fisher curvature), without output correction: rise in loss (nats per "
        f"token) at 512, 1,024 and 2,048 tokens of unseen text, at positions 1024-2048 alone, with 95 % over "
        f"{options.texts} texts; recall (share of first tokens) across {DISTANCES[0]} tokens of other text, with 95 % "
        f"over {options.lists} lists of {PAIRS} pairs each.\n\n"
        f"| the groups become | keys' worth per group | 512 | 1,024 | 2,048 | 1024-2048 | recall, {DISTANCES[0]} |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(rows),
        page=FINDINGS,
    )


def _plain(share: Interval) -> str:
    return f"{share.value:.2f} ({share.low:.2f} to {share.high:.2f})"


def _order(model: Any, tokenizer: Any, hybrid: Mechanism, fit: str) -> list[tuple[int, int]]:
    """KV groups by what text and recall lists lose to second order if one becomes a hybrid, the smallest first."""
    ids = token_ids(tokenizer, [Path(fit).read_text(encoding="utf-8")])
    units, options = units_of(model, "groups"), [Substitute(hybrid)]
    tell = lambda stage, share: say(f"{stage}: {share:.0%}")  # noqa: E731
    _, by_text = unit_scores(model, cut_sequences(model, ids, FIT_LENGTH, FIT_TEXTS), options, units, progress=tell)
    lists = recall_sequences(model, tokenizer, FIT_LISTS, seed=1, filler=ids, distance=600)
    lists = lists if lists.first is None else replace(lists, scored=lists.first)
    _, by_recall = unit_scores(model, lists, options, units, progress=tell)
    text, recalled = by_text[0].mean(axis=-1), by_recall[0].mean(axis=-1)
    scores = text + recalled * text.sum() / recalled.sum()
    size = len(units[0])
    order = [(units[i][0][0], units[i][0][1] // size) for i in np.argsort(scores)]
    say("most missed:", order[::-1][:8])
    return order


def main() -> None:
    """Measure, and write the sections."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--fit", help="the text that orders the KV groups of a swap; it was not evaluated")
    parser.add_argument("--only", choices=("gap", "swap"))
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--groups", type=int, default=70)
    parser.add_argument("--rows", nargs="+", metavar="SUBSTITUTE", help="rows of the swap, by the names of the table")
    parser.add_argument("--lists", type=int, default=16)
    options = parser.parse_args()
    if options.only != "gap" and options.fit is None:
        parser.error("a swap needs --fit")
    torch.set_num_threads(1)
    embedded = options.model == EMBEDDED
    options.of_model, options.section = ("", "") if embedded else (f" --model {options.model}", f"-{options.model}")
    options.title, options.words = ("", "the embedded model") if embedded else (f", {options.model}", options.model)
    model, tokenizer = load_model(options.model)
    ids = token_ids(tokenizer, Path(options.text).read_text(encoding="utf-8"))
    mechanisms = substitutes(Calibration.load(options.calibration))
    if options.only != "swap":
        write_gap(model, ids, mechanisms, options)
    if options.only != "gap":
        write_swap(model, tokenizer, ids, mechanisms, options)


if __name__ == "__main__":
    main()
