"""What a calibration of the embedded model reaches on held-out text, what it takes, and what swapping by it costs.

Run: python experiments/calibration.py --text FILE [--features 128 256] [--steps 300] [--only reach|cost|elsewhere]

The first half of the file is fitted on, the second half is held out: give text whose halves share no article. Fits are
kept in `--fits` and found there again; only what is timed is always fitted anew.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np
import torch

from harness import FINDINGS, machine, peak_memory, peak_of_process, require_quiet_machine, write_section
from held_out import halves, sequences
from softgap.attention import Mechanism
from softgap.calibration import Calibration, HeldOut, Ladders, Recipe, calibrate, evaluate_held_out, ladders
from softgap.calibration.conditions import evaluate_conditions
from softgap.calibration.texts import corpus_of
from softgap.linearize import swap
from softgap.models import load_model
from softgap.models.tensor_files import equip_mechanism
from softgap.models.tokens import token_ids
from softgap.probe import read_ids
from softgap.probe.layout import visit_layers

POSITIONS = 8192
# Held-out sequences by length: short ones for the mean, long ones for far positions.
HELD_OUT = {2048: 8, 8192: 2}
SWAPPED = {512: 8, 2048: 4}
LADDER = 1024
SHARES = (0.10, 0.25, 0.50, 0.75, 1.00)


def fit_calibration(file: str | None, features: int, steps: int, path: Path) -> tuple[Calibration, float]:
    """A calibration of the embedded model on the first half of a file, or on its own text, and its minutes."""
    model, tokenizer = load_model()
    start = time.perf_counter()
    recipe = Recipe(features=features, steps=steps)
    texts, positions = (None, None) if file is None else ([halves(Path(file).read_text())[0]], POSITIONS)
    calibration = calibrate(model, tokenizer, texts, recipe=recipe, positions=positions, out=path)
    return calibration, (time.perf_counter() - start) / 60


def fit_path(options: argparse.Namespace, file: str | None, features: int) -> Path:
    """Where a fit is kept."""
    options.fits.mkdir(parents=True, exist_ok=True)
    text = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:8] if file else "own"
    return Path(options.fits) / f"{text}-{features}-{options.steps}.safetensors"


def gaps(calibration: Calibration, model: Any, ids: Sequence[int]) -> HeldOut:
    """What held-out text says, at positions up to 8,192."""
    texts = sequences(ids, HELD_OUT)
    controls = [calibration.mechanism(name) for name in ("constant", "profile")]
    first = calibration.tensors["profile.first"].numpy()
    return evaluate_held_out(
        model, texts[2048], [calibration.mechanism(), "uniform", "elu1", *controls], far=texts[8192], first=first
    )


def loss(model: Any, texts: Sequence[Sequence[int]]) -> float:
    """Mean negative log-probability in nats."""
    total = 0.0
    with torch.inference_mode():
        for ids in texts:
            inputs = torch.tensor([list(ids)])
            total += float(model(input_ids=inputs, labels=inputs).loss)
    return total / len(texts)


def order_by_divergence(
    calibration: Calibration, model: Any, tokenizer: Any, ids: Sequence[int]
) -> list[tuple[int, int]]:
    """Heads from the smallest calibrated divergence on the text of the fit to the largest."""
    runs = [
        read_ids(model, [text], tokenizer=tokenizer, mechanisms=[calibration.mechanism()])[0]
        for text in sequences(ids, {2048: 4})[2048]
    ]
    mean = np.mean([run.divergence[..., 64:].mean(axis=-1) for run in runs], axis=0)
    return [(int(i) // mean.shape[1], int(i) % mean.shape[1]) for i in np.argsort(mean, axis=None)]


def swaps(calibration: Calibration, model: Any, tokenizer: Any, fit: Sequence[int], held: Sequence[int]) -> list[str]:
    """Rows of the swap table: the rise in loss by share of heads, mechanism and length."""
    order = order_by_divergence(calibration, model, tokenizer, fit)
    shuffled = [order[i] for i in np.random.default_rng(0).permutation(len(order))]
    sides: dict[str, tuple[list[tuple[int, int]], str | Mechanism]] = {
        "fitted, by calibrated divergence": (order, calibration.mechanism()),
        "fitted, random order": (shuffled, calibration.mechanism()),
        "constant, same order": (order, calibration.mechanism("constant")),
        "elu1, same order": (order, "elu1"),
    }
    rows = []
    for length, texts in sequences(held, SWAPPED).items():
        plain = loss(model, texts)
        for name, (heads, mechanism) in sides.items():
            rises = []
            for share in SHARES if name.startswith("fitted, by") else (0.50,):
                with swap(model, heads[: round(share * len(heads))], mechanism):
                    rises.append(f"{share:.0%}: +{loss(model, texts) - plain:.3f}")
            rows.append(f"| {name} | {length} | {len(texts)} | {', '.join(rises)} |")
            print(rows[-1], flush=True)
    return rows


def report_peak(file: str, features: int, side: str) -> None:
    """Do one side and print this process's peak memory."""
    if side == "forward":
        model, tokenizer = load_model()
        ids = token_ids(tokenizer, halves(Path(file).read_text())[0]).sequence(0, POSITIONS)
        visit_layers(model, ids, lambda layer: None)
    else:
        with tempfile.TemporaryDirectory() as folder:
            fit_calibration(file, features, 5, Path(folder) / "calibration.safetensors")
    print(peak_of_process())


def described(source: str, features: int, steps: int, held_out: HeldOut) -> str:
    """One row of the table of gaps."""
    bins = ("64-512", "512-1024", "1024-2048", "2048-4096", "4096-8192")
    cells = [f"{held_out.by_position[name].value:.3f}" if name in held_out.by_position else "" for name in bins]
    sinks = " / ".join(f"{closed.value:.3f}" for closed in held_out.by_sink.values())
    whole, profile, mean = held_out.gap_closed["fitted"], held_out.against["profile"], held_out.against["constant"]
    return (
        f"| {source} | {features} | {steps} | {whole.value:.3f} ({whole.low:.3f} to {whole.high:.3f}) | "
        f"{' | '.join(cells)} | {profile.value:.3f} | {mean.value:.3f} | {sinks} | {held_out.explained:.3f} |"
    )


def ladder_tables(ladders: Ladders) -> str:
    """The ladders as a table, and the capacity exponent."""
    rows = [
        f"| {rung.mechanism} | {rung.features or ''} | {rung.divergence:.3f} | {rung.weight_error:.3f} | "
        f"{'' if rung.floor is None else f'{rung.floor:.3f}'} |"
        for rung in ladders.rungs
    ]
    sizes = " | ".join(f"block of {size}" for size in ladders.sizes)
    grown = []
    for growth in ladders.growth:
        # Adding 0 turns a rounded -0 into 0.
        low, middle, high = (round(x, 2) + 0.0 for x in growth.exponent or (float("nan"),) * 3)
        cells = " | ".join(f"{rank:.0f}" for rank in growth.ranks)
        sink = "with" if growth.sink else "without"
        grown.append(f"| {sink} | {growth.energy:.1%} | {cells} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
    return (
        "| mechanism | features | divergence | weight error | floor with so many features |\n|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n\nRank that holds a share of the energy of softmax's off-diagonal blocks, without the column of the first "
        "key (the sink) and with it: median over heads, and the exponent in the length (10 % to 90 % of the heads).\n\n"
        + f"| sink | energy | {sizes} | exponent |\n|---|---|{'---|' * len(ladders.sizes)}---|\n"
        + "\n".join(grown)
    )


def write_reach(options: argparse.Namespace) -> None:
    """Fit, evaluate and swap: numbers that do not depend on how busy the machine is."""
    model, tokenizer = load_model()
    fit, held = (token_ids(tokenizer, part) for part in halves(Path(options.text).read_text()))
    rows: list[str] = []
    tables: list[str] = []
    model_text = [] if options.no_own_text else [(None, options.features[0])]
    for number, (file, features) in enumerate([*((options.text, n) for n in options.features), *model_text]):
        path = fit_path(options, file, features)
        calibration = (
            Calibration.load(path) if path.exists() else fit_calibration(file, features, options.steps, path)[0]
        )
        source = "the file" if file else "the model's own"
        rows.append(described(source, features, options.steps, gaps(calibration, model, held)))
        print(rows[-1], flush=True)
        if number == 0:
            tables = swaps(calibration, model, tokenizer, fit, held)
    write_section(
        "calibration-reach",
        "What a calibration reaches",
        f"{command(options, 'reach')} on the embedded model, float32; {machine()}. Gap closed on held-out text by "
        f"positions, {HELD_OUT[2048]} sequences of 2,048 tokens and {HELD_OUT[8192]} of 8,192.\n\n"
        "| text of the fit | features | steps | gap closed (95 % over texts) | 64-512 | 512-1024 | 1024-2048 | "
        "2048-4096 | 4096-8192 | against profile | against mean output | sink heads / others | explained energy |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n\n"
        f"Rise of the loss in nats when heads are swapped ({options.features[0]} features), on held-out text:\n\n"
        "| mechanism and order | tokens | texts | rise by share of heads |\n|---|---|---|---|\n" + "\n".join(tables),
        page=FINDINGS,
    )


def write_elsewhere(options: argparse.Namespace) -> None:
    """The report of a calibration that is there already: other text and conditions, and the ladders."""
    model, tokenizer = load_model()
    fit, held = halves(Path(options.text).read_text())
    mechanism = equip_mechanism(f"fitted@{options.calibration}", model)
    corpus = corpus_of(model, tokenizer, [fit], positions=POSITIONS)
    rows = []
    for name, closed in evaluate_conditions(model, tokenizer, corpus, mechanism).items():
        spread = "one text" if closed.low == closed.high else f"{closed.low:.3f} to {closed.high:.3f}"
        rows.append(f"| {name} | {closed.value:.3f} | {spread} |")
    tables = ladder_tables(ladders(model, token_ids(tokenizer, held).sequence(0, LADDER), mechanism))
    write_section(
        "calibration-elsewhere",
        "A calibration elsewhere",
        "`python experiments/calibration.py --text FILE --only elsewhere --calibration FITTED` on the embedded model, "
        f"calibrated on the first half of the file with the default recipe; {machine()}. Share of the gap closed on "
        f"sequences of 512 tokens.\n\n| condition | gap closed | 95 % over texts |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\nTwo ladders over {LADDER} held-out tokens, in means over heads:\n\n{tables}",
        page=FINDINGS,
    )
    print("\n".join(rows), tables, sep="\n")


def write_cost(options: argparse.Namespace) -> None:
    """Minutes and memory of one calibration, on a quiet machine."""
    require_quiet_machine()
    features = options.features[0]
    path = fit_path(options, options.text, features)
    path.unlink(missing_ok=True)
    _, minutes = fit_calibration(options.text, features, options.steps, path)
    common = ("--text", options.text, "--features", str(features), "--peak")
    used, plain = (peak_memory(__file__, *common, side) for side in ("calibrate", "forward"))
    ratio = f"{used / plain:.2f} ({used / 1e6:.0f} MB / {plain / 1e6:.0f} MB)" if used and plain else "not known here"
    line = (
        f"{features} features, {options.steps} steps: {minutes:.1f} minutes from loaded model to saved file, reading "
        f"and evaluation included. Peak memory, calibration / plain forward over {POSITIONS} tokens: {ratio}."
    )
    print(line)
    write_section(
        "calibration-cost",
        "What a calibration takes",
        f"{command(options, 'cost')} on the embedded model, float32; {machine()}.\n\n{line}",
        page=FINDINGS,
    )


def command(options: argparse.Namespace, only: str) -> str:
    """The command that writes a section."""
    features = " ".join(map(str, options.features))
    extra = " --no-own-text" * (options.no_own_text and only == "reach")
    return f"`python experiments/calibration.py --text FILE --features {features} --only {only}{extra}`"


def main() -> None:
    """Fit, evaluate, swap, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--features", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    parser.add_argument("--no-own-text", action="store_true", help="leave out the calibration on the model's own text")
    parser.add_argument("--fits", type=Path, default=Path("runs/fits"), help="a folder for finished fits")
    parser.add_argument("--calibration", help="of the first half of the text, for --only elsewhere")
    parser.add_argument("--only", choices=["reach", "cost", "elsewhere"])
    parser.add_argument("--peak", choices=["calibrate", "forward"])
    options = parser.parse_args()
    if options.peak:
        report_peak(options.text, options.features[0], options.peak)
        return
    if options.only == "elsewhere":
        write_elsewhere(options)
        return
    if options.only != "reach":
        write_cost(options)
    if options.only != "cost":
        write_reach(options)


if __name__ == "__main__":
    main()
