"""What brings back the loss of many swapped heads: the ridge repair, and tuning after it, into docs/findings.md.

Run: python experiments/repair.py --text FILE --calibration CAL [--shares 0.5 0.75] [--steps 96] [--dry]

The first half of the file is what the calibration was fitted on; scores and repairs use passages of 512 tokens of it,
tuning passages of each of `--tune-lengths`. Every number is measured on the second half, at all `--lengths`. Finished
readings are kept in `--parts`. `--dry` prints the table and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np

from harness import FINDINGS, machine, write_section
from held_out import halves
from softgap.checkpoints import Checkpoints
from softgap.intervene.swap import Head, Substitute
from softgap.linearize import (
    distil_substitute,
    fit_output_correction,
    head_scores,
    recall_sequences,
    split_sequences,
    substitute,
)
from softgap.linearize.frontier import Unit, first_heads, order_units, units_of
from softgap.linearize.impact import mean_outputs
from softgap.linearize.scores import add_recall_scores
from softgap.linearize.sequences import Reading, Sequences, digest_of_sequences, read_swapped
from softgap.models import load_model

SCORE = "gradient+fisher"
# What a half-width of .02 takes in the embedded model (softgap.linearize.recall); tables of version 0.1 had 16.
LOOKUPS = 192
SHARES = [0.5, 0.75]


def say(stage: str, share: float) -> None:
    """Progress, a line a step."""
    print(f"{time.strftime('%H:%M:%S')} {stage}: {share:.0%}", flush=True)


class Bench:
    """A model, its calibration, passages to fit, tune and measure on, and what was measured before."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model, tokenizer = load_model()
        first, second = halves(Path(options.text).read_text())
        self.fit = split_sequences(self.model, tokenizer, [first], tokens=options.fit_tokens)
        self.long = {
            length: split_sequences(self.model, tokenizer, [first], length=length, tokens=options.tune_tokens)
            for length in options.tune_lengths
        }
        self.held = {
            length: split_sequences(self.model, tokenizer, [second], length=length, tokens=options.tokens)
            for length in options.lengths
        }
        self.recall: Sequences = recall_sequences(self.model, tokenizer, LOOKUPS)
        self.trained = recall_sequences(self.model, tokenizer, options.lookups, seed=1) if options.lookups else None
        self.tag = [] if self.trained is None else [f"{options.lookups} lookups"]
        self.substitute = substitute(f"fitted@{options.calibration}", self.model, window=options.window)
        digest = digest_of_sequences(self.fit, *self.held.values(), self.recall)
        about = {"text": digest, "cal": self.substitute.mechanism.origin}
        self.checkpoints = Checkpoints(
            options.parts, about if options.window is None else {**about, "window": options.window}
        )
        self.original = self.readings("original", [], lambda: None)

    def order(self) -> list[Unit]:
        """All heads, cheapest first: by the text, or by the text and the lookups."""
        heads, score = self._scores("scores", self.fit)
        if self.trained is not None:
            score = add_recall_scores(score[:, None], self._scores(["scores", *self.tag], self.trained)[1])[:, 0]
        return order_units(units_of(self.model, "heads"), heads, score)

    def _scores(self, name: Any, read: Sequences) -> tuple[list[Head], np.ndarray]:
        def scored() -> dict[str, Any]:
            scores = head_scores(self.model, read, self.substitute, names=[SCORE], progress=say)
            return {"heads": scores.heads, "score": scores.mean(SCORE).tolist()}

        stored = self.checkpoints.find_or_make(name, scored)
        return [(int(layer), int(head)) for layer, head in stored["heads"]], np.asarray(stored["score"])

    def readings(self, name: Any, heads: list[Head], make: Callable[[], Substitute | None]) -> dict[int, Reading]:
        """What the model gets right with these heads swapped, by length; lookups are asked once."""

        def read() -> dict[str, Any]:
            swapped = make()
            by_length = {}
            for place, (length, held) in enumerate(self.held.items()):
                recall = None if place else self.recall
                by_length[str(length)] = read_swapped(self.model, held, recall, heads, swapped).to_json()
            return by_length

        stored = self.checkpoints.find_or_make([name, heads] if heads else name, read)
        return {int(length): Reading.from_json(values) for length, values in stored.items()}

    def ways(
        self, heads: list[Head], options: argparse.Namespace
    ) -> Iterator[tuple[str, list[str], Callable[[], Substitute]]]:
        """Every repair: its name, what else it depends on, and how to make it.

        Each begins with the ridge, which is computed once and only if it is needed.
        """
        found: list[Substitute] = []

        def ridge() -> Substitute:
            if not found:
                found.append(fit_output_correction(self.model, self.fit, heads, self.substitute, progress=say))
            return found[0]

        yield "mean output instead", [], lambda: substitute(mean_outputs(self.model, self.fit), self.model)
        yield "none", [], lambda: self.substitute
        yield "ridge", [], ridge
        settings = product(options.what, self.long, options.steps, options.rates)
        for what, length, steps, rate in settings:

            def tune(what: str = what, length: int = length, steps: int = steps, rate: float = rate) -> Substitute:
                maps = what == "maps"
                return distil_substitute(
                    self.model, self.long[length], heads, ridge(), asked=self.trained, steps=steps, learning_rate=rate,
                    maps=maps, progress=say,
                )  # fmt: skip

            name = f"ridge, then {what} tuned by {steps} steps of {rate:g} on {length:,} tokens each"
            yield name, [digest_of_sequences(self.long[length])], tune


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration", required=True, help="fitted on the first half of the text")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--fit-tokens", type=int, default=4096, help="tokens that scores and the ridge come from")
    parser.add_argument("--tune-tokens", type=int, default=65536)
    parser.add_argument("--tokens", type=int, default=8192, help="held-out tokens")
    parser.add_argument("--tune-lengths", type=int, nargs="+", default=[512], help="of the passages to tune on")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="of the passages to measure on")
    parser.add_argument("--lookups", type=int, default=0, help="also score and tune on so many lookups")
    parser.add_argument("--window", type=int, default=None)
    parser.add_argument("--steps", type=int, nargs="+", default=[96])
    parser.add_argument("--rates", type=float, nargs="+", default=[6e-4])
    parser.add_argument("--what", nargs="+", choices=("readouts", "maps"), default=["maps"])
    parser.add_argument("--parts", type=Path, default=Path("runs/repair"))
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    bench = Bench(options)
    order = bench.order()
    rows = []
    for share in options.shares:
        heads = first_heads(order, round(share * len(order)))
        for name, seen, make in bench.ways(heads, options):
            found = bench.readings([share, name, *seen, *bench.tag], heads, make)
            changes = [found[length].change_from(bench.original[length]) for length in found]
            rises = " | ".join(str(change["loss"]) for change in changes)
            rows.append(f"| {share:.0%} | {name} | {rises} | {changes[0]['recall']} |")
            print(rows[-1], flush=True)
    if options.dry:
        return
    write(bench, rows, options)


def write(bench: Bench, rows: list[str], options: argparse.Namespace) -> None:
    """The section of the findings."""
    kept = f", softmax kept on the nearest {options.window} keys" if options.window else ""
    beside = f", with {bench.tag[0]} beside the text" if bench.tag else ""
    longer = f", tuned on {' and '.join(f'{n:,}' for n in options.tune_lengths)} tokens" * (
        options.tune_lengths != [512]
    )
    name = "repair" + "-lookups" * bool(bench.tag) + f"-window-{options.window}" * bool(kept)
    name += f"-tuned-{'-'.join(map(str, options.tune_lengths))}" * bool(longer)
    asked = f" --window {options.window}" * bool(kept) + f" --lookups {options.lookups}" * bool(beside)
    asked += f" --tune-lengths {' '.join(map(str, options.tune_lengths))} --steps {' '.join(map(str, options.steps))}"
    asked += f" --shares {' '.join(f'{share:g}' for share in options.shares)}" * (options.shares != SHARES)
    recall = np.mean(next(iter(bench.original.values())).recall)
    held = next(iter(bench.held.values())).tokens
    write_section(
        name,
        f"What brings back the loss of swapped heads{kept}{beside}{longer}",
        f"`python experiments/repair.py --text FILE --calibration CAL{asked}`, {machine()}. The embedded model, heads "
        f"in the order of {SCORE}; scores and the ridge from {bench.fit.tokens:,} tokens, tuning from "
        f"{next(iter(bench.long.values())).tokens:,}, one passage a step; every number from {held:,} held-out "
        f"tokens and {LOOKUPS} lookups, with 95 % over texts. Rise in loss in nats per token; the model as it is gets "
        f"{recall:.2f} of the lookups right."
        "\n\n| share of heads | repair | "
        + " | ".join(f"at {length:,} tokens" for length in bench.held)
        + " | change in recall |\n"
        + "|---" * (3 + len(bench.held))
        + "|\n"
        + "\n".join(rows),
        page=FINDINGS,
    )


if __name__ == "__main__":
    main()
