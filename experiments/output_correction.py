"""What brings back the loss of many swapped heads: the ridge correction of their outputs, and distillation after it.

Run: python experiments/output_correction.py --text FILE --calibration CAL [--shares 0.5 0.75] [--steps 96] [--dry]

The first half of the file is what the calibration was fitted on; scores and output corrections use sequences of 512
tokens of it, distillation sequences of each of `--distil-lengths`. Every number is measured on the second half, at all
`--lengths`, and written into docs/findings.md. Finished readings are saved in `--parts`. `--dry` prints the table and
writes nothing.
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
from softgap.intervene.substitute import Head, Substitute
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
RECALL_PROMPTS = 192
SHARES = [0.5, 0.75]


def say(stage: str, share: float) -> None:
    """Progress, a line a step."""
    print(f"{time.strftime('%H:%M:%S')} {stage}: {share:.0%}", flush=True)


class Bench:
    """A model, its calibration, sequences to fit, distil and measure on, and what was measured before."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model, tokenizer = load_model()
        first, second = halves(Path(options.text).read_text())
        self.fit = split_sequences(self.model, tokenizer, [first], tokens=options.fit_tokens)
        self.long = {
            length: split_sequences(self.model, tokenizer, [first], length=length, tokens=options.distil_tokens)
            for length in options.distil_lengths
        }
        self.held = {
            length: split_sequences(self.model, tokenizer, [second], length=length, tokens=options.tokens)
            for length in options.lengths
        }
        self.recall: Sequences = recall_sequences(self.model, tokenizer, RECALL_PROMPTS)
        self.trained = recall_sequences(self.model, tokenizer, options.recall, seed=1) if options.recall else None
        self.tag = [] if self.trained is None else [f"{options.recall} recall prompts"]
        self.substitute = substitute(f"fitted@{options.calibration}", self.model, window=options.window)
        digest = digest_of_sequences(self.fit, *self.held.values(), self.recall)
        about = {"text": digest, "cal": self.substitute.mechanism.origin}
        self.checkpoints = Checkpoints(
            options.parts, about if options.window is None else {**about, "window": options.window}
        )
        self.original = self.readings("original", [], lambda: None)

    def order(self) -> list[Unit]:
        """All heads, cheapest first: by the text, or by the text and the recall prompts."""
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
        """What the model gets right with these heads swapped, by length; recall is measured once."""

        def read() -> dict[str, Any]:
            swapped = make()
            by_length = {}
            for place, (length, held) in enumerate(self.held.items()):
                recall = None if place else self.recall
                by_length[str(length)] = read_swapped(self.model, held, recall, heads, swapped).to_json()
            return by_length

        stored = self.checkpoints.find_or_make([name, heads] if heads else name, read)
        return {int(length): Reading.from_json(values) for length, values in stored.items()}

    def corrections(
        self, heads: list[Head], options: argparse.Namespace
    ) -> Iterator[tuple[str, list[str], Callable[[], Substitute]]]:
        """Every correction: its name, what else it depends on, and how to make it.

        Each begins with the ridge, which is computed once and only if it is needed.
        """
        ridges: list[Substitute] = []

        def ridge() -> Substitute:
            if not ridges:
                ridges.append(fit_output_correction(self.model, self.fit, heads, self.substitute, progress=say))
            return ridges[0]

        yield "mean output instead", [], lambda: substitute(mean_outputs(self.model, self.fit), self.model)
        yield "none", [], lambda: self.substitute
        yield "ridge", [], ridge
        settings = product(options.train, self.long, options.steps, options.rates)
        for weights, length, steps, rate in settings:

            def distil(
                weights: str = weights, length: int = length, steps: int = steps, rate: float = rate
            ) -> Substitute:
                maps = weights == "maps"
                return distil_substitute(
                    self.model, self.long[length], heads, ridge(), recall_lists=self.trained, steps=steps,
                    learning_rate=rate, maps=maps, progress=say,
                )  # fmt: skip

            name = f"ridge, then {weights} distilled for {steps} steps of {rate:g} on {length:,} tokens each"
            yield name, [digest_of_sequences(self.long[length])], distil


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration", required=True, help="fitted on the first half of the text")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--fit-tokens", type=int, default=4096, help="tokens that scores and the ridge come from")
    parser.add_argument("--distil-tokens", "--tune-tokens", type=int, default=65536)
    parser.add_argument("--tokens", type=int, default=8192, help="held-out tokens")
    parser.add_argument(
        "--distil-lengths", "--tune-lengths", type=int, nargs="+", default=[512], help="of the sequences to distil on"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="of the sequences to measure on")
    parser.add_argument(
        "--recall", "--lookups", type=int, default=0, help="also score and distil on so many recall prompts"
    )
    parser.add_argument("--window", type=int, default=None)
    parser.add_argument("--steps", type=int, nargs="+", default=[96])
    parser.add_argument("--rates", type=float, nargs="+", default=[6e-4])
    parser.add_argument("--train", "--what", nargs="+", choices=("corrections", "maps"), default=["maps"])
    parser.add_argument("--parts", type=Path, default=Path("runs/output_correction"))
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    bench = Bench(options)
    order = bench.order()
    rows = []
    for share in options.shares:
        heads = first_heads(order, round(share * len(order)))
        for name, seen, make in bench.corrections(heads, options):
            readings = bench.readings([share, name, *seen, *bench.tag], heads, make)
            changes = [reading.change_from(bench.original[length]) for length, reading in readings.items()]
            rises = " | ".join(str(change["loss"]) for change in changes)
            rows.append(f"| {share:.0%} | {name} | {rises} | {changes[0]['recall']} |")
            print(rows[-1], flush=True)
    if options.dry:
        return
    write(bench, rows, options)


def write(bench: Bench, rows: list[str], options: argparse.Namespace) -> None:
    """The section of the findings."""
    window = f", softmax kept on the nearest {options.window} keys" if options.window else ""
    beside = f", with {bench.tag[0]} beside the text" if bench.tag else ""
    longer = f", distilled on {' and '.join(f'{n:,}' for n in options.distil_lengths)} tokens" * (
        options.distil_lengths != [512]
    )
    name = "output_correction" + "-recall" * bool(bench.tag) + f"-window-{options.window}" * bool(window)
    name += f"-distilled-{'-'.join(map(str, options.distil_lengths))}" * bool(longer)
    arguments = f" --window {options.window}" * bool(window) + f" --recall {options.recall}" * bool(beside)
    arguments += (
        f" --distil-lengths {' '.join(map(str, options.distil_lengths))} --steps {' '.join(map(str, options.steps))}"
    )
    arguments += f" --shares {' '.join(f'{share:g}' for share in options.shares)}" * (options.shares != SHARES)
    recall = np.mean(next(iter(bench.original.values())).recall)
    held = next(iter(bench.held.values())).tokens
    write_section(
        name,
        f"What brings back the loss of swapped heads{window}{beside}{longer}",
        f"`python experiments/output_correction.py --text FILE --calibration CAL{arguments}`, {machine()}. The "
        f"embedded model, heads in the order of {SCORE}; scores and the ridge from {bench.fit.tokens:,} tokens, "
        f"distillation from {next(iter(bench.long.values())).tokens:,}, one sequence a step; every number from "
        f"{held:,} held-out tokens and {RECALL_PROMPTS} recall prompts, with 95 % over texts. Rise in loss in nats per "
        f"token; the model as it is gets {recall:.2f} of the recall prompts right."
        "\n\n| share of heads | correction | "
        + " | ".join(f"at {length:,} tokens" for length in bench.held)
        + " | change in recall |\n"
        + "|---" * (3 + len(bench.held))
        + "|\n"
        + "\n".join(rows),
        page=FINDINGS,
    )


if __name__ == "__main__":
    main()
