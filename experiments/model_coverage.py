"""Every causal-LM type of the installed transformers, tiny and random, through every gate.

Run: python experiments/model_coverage.py [TYPE ...]   (all types: minutes; writes docs/coverage.md)
"""

from __future__ import annotations

import argparse
import collections
import logging
import os
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import transformers

from softgap.errors import SoftgapError
from softgap.gates import Gate, doctor
from softgap.gates.model import GATES
from support.tiny_models import attention_names, causal_types, goes_through_registry, tiny_model

DOCS = Path(__file__).resolve().parent.parent / "docs" / "coverage.md"
SECONDS = 120
REPEATS = 10


@dataclass(frozen=True)
class Row:
    """What became of one type under one attention implementation."""

    model_type: str
    attn: str
    verdict: str
    gates: tuple[Gate, ...]
    reason: str


def examine(model_type: str, attn: str) -> Row:
    """Build the type's tiny model and run every gate on it."""
    try:
        model = tiny_model(model_type, attn=attn)
    except Exception as error:
        return Row(model_type, attn, "not built", (), _sentence(error))
    try:
        gates = doctor(model, repeats=REPEATS).gates
    except SoftgapError as error:
        return Row(model_type, attn, "refused", (), _sentence(error))
    except Exception as error:
        return Row(model_type, attn, "error", (), _sentence(error))
    bad = [gate for gate in gates if gate.verdict in ("fail", "model")]
    verdict = "pass" if not bad else "fail" if any(gate.verdict == "fail" for gate in bad) else "model"
    return Row(model_type, attn, verdict, gates, "; ".join(f"{gate.name}: {_measure(gate)}" for gate in bad))


def page(rows: list[Row]) -> str:
    """The table for the docs."""
    counts = collections.Counter(row.verdict for row in rows)
    types = {row.model_type for row in rows}
    whole = {t for t in types if all(row.verdict == "pass" for row in rows if row.model_type == t)}
    lines = [
        "# Coverage",
        "",
        f"`python experiments/model_coverage.py`: a tiny random model of each of the {len(types)} causal-LM types of "
        f"transformers {transformers.__version__} that go through the attention registry, in float32, under every "
        f"attention implementation it has, through every gate of `softgap doctor` "
        f"(torch {torch.__version__.split('+')[0]}, stability with {REPEATS} generations). "
        f"**{len(whole)} types pass every gate.** Rows: "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        + ". `model` means that the model's own outputs differ between the two sides of a gate, so that the instrument "
        "cannot be evaluated by it; the reason gives its difference.",
        "",
        "| type | attention | verdict | " + " | ".join(GATES) + " | reason |",
        "|---|---|---|" + "---|" * len(GATES) + "---|",
    ]
    for row in rows:
        marks = {gate.name: gate.verdict for gate in row.gates}
        cells = " | ".join(marks.get(name, "") for name in GATES)
        lines.append(f"| {row.model_type} | {row.attn} | **{row.verdict}** | {cells} | {row.reason} |")
    return "\n".join(lines) + "\n"


def _measure(gate: Gate) -> str:
    if gate.measured is None:
        return gate.detail.replace("|", "/")
    return f"{gate.measured:.2g} ({gate.detail.replace('|', '/')})"


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    return f"{type(error).__name__}: {text[:160]}"


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"took more than {SECONDS} s")


def main() -> None:
    """Examine, print a line each, and write the page when all types were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    types = parser.parse_args().types
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGALRM, _too_long)
    rows = []
    for model_type in types or [t for t in causal_types() if goes_through_registry(t)]:
        for attn in attention_names(model_type):
            start = time.perf_counter()
            signal.alarm(SECONDS)
            row = examine(model_type, attn)
            signal.alarm(0)
            rows.append(row)
            seconds = time.perf_counter() - start
            print(
                f"{model_type:24} {attn:6} {row.verdict:9} {seconds:5.1f} s  {row.reason}", file=sys.stderr, flush=True
            )
    if not types:
        DOCS.write_text(page(rows))
        print(DOCS.relative_to(DOCS.parent.parent))


if __name__ == "__main__":
    main()
