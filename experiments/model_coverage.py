"""Every causal-LM type of the installed transformers, tiny and random, through every gate.

Run: python experiments/model_coverage.py [TYPE ...]

All types take minutes. Named types are examined anew, and replace their rows in docs/coverage.md.
"""

from __future__ import annotations

import argparse
import collections
import logging
import os
import re
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
from support.tiny_models import attention_names, causal_types, goes_through_registry, modelling_source, tiny_model

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


_COUNTED = "position_ids = torch.arange(seq_length, device=inputs_embeds.device) + past_key_values_length"
_PADDING = "positions count padding, whatever the caller asks for"
_OWN = "the scores of queries and keys are computed in its own code"
_RECURRENT = "a recurrent state; there are no queries and keys to compare"
_MATMUL = "torch.matmul(query_layer, key_layer.transpose(-1, -2))"
_BORROWED = "inputs_embeds and shared_kv_states cannot be None"
BLOCKERS = {
    **dict.fromkeys(
        ["bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart"],
        (_COUNTED, _PADDING),
    ),
    "whisper": ("position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)", _PADDING),
    "moss_transcribe_diarize": ("outputs = self.language_model(", "its forward names no positions, so padding counts"),
    "deepseek_v4": ("chunk_kv.view(batch, n_windows, self.compress_rate, -1)", "padding shifts its windows"),
    "minimax_m3_vl_text": ("num_key_blocks, self.block_size)", "padding shifts its blocks"),
    "recurrent_gemma": ("x_branch = self.conv_1d(x_branch)[..., :seq_len]", "its recurrence reads padding"),
    **dict.fromkeys(
        ["qwen4_exp", "qwen4_exp_text"],
        (
            "attention_mask = attention_mask + selected_token_mask",
            "adds two masks, and overflows, with eager attention",
        ),
    ),
    "blt": ("patch_embeds.shape[1] * self.config.cross_attn_k", "attends from patches; its positions are not tokens"),
    **dict.fromkeys(
        ["musicgen", "musicgen_melody"],
        ("input_ids = input_ids.reshape(-1, self.num_codebooks", "a position holds a token of every codebook"),
    ),
    "gemma3n": (
        "self.vision_tower = AutoModel.from_config",
        "needs the library timm; its text part gemma3n_text passes",
    ),
    **dict.fromkeys(["gemma4_assistant", "gemma4_unified_assistant"], (_BORROWED, "reads keys of another model")),
    **dict.fromkeys(["big_bird", "git", "megatron-bert", "rembert", "roformer"], (_MATMUL, _OWN)),
    "bloom": ("attention_scores = alibi.baddbmm(", _OWN),
    **dict.fromkeys(
        ["codegen", "gpt_neo", "gptj"], ("attn_weights = torch.matmul(query, key.transpose(-1, -2))", _OWN)
    ),
    "cpmant": ("score = torch.matmul(query, key.transpose(-1, -2))", _OWN),
    "falcon": ("attention_scores = query_layer @ key_layer.transpose(-1, -2)", _OWN),
    "gpt_neox_japanese": ("attention_scores = torch.baddbmm(", _OWN),
    "mpt": ("attention_scores = torch.matmul(query_states, key_states.transpose(-1, -2))", _OWN),
    **dict.fromkeys(
        ["mvp", "trocr", "xglm"], ("attn_weights = torch.bmm(query_states, key_states.transpose(1, 2))", _OWN)
    ),
    "openai-gpt": ("w = torch.matmul(q, k)", _OWN),
    "prophetnet": ("main_attn_weights = torch.einsum(", _OWN),
    "reformer": ("query_key_dots = torch.matmul(query_vectors, key_vectors.transpose(-1, -2))", _OWN),
    "xlm": ("scores = torch.matmul(q, k.transpose(2, 3))", _OWN),
    "xlnet": ('ac = torch.einsum("ibnd,jbnd->bnij"', _OWN),
    "falcon_mamba": ("class FalconMambaMixer(nn.Module)", _RECURRENT),
    "mamba": ("class MambaMixer(nn.Module)", _RECURRENT),
    "mamba2": ("class Mamba2Mixer(nn.Module)", _RECURRENT),
    "rwkv": ("class RwkvSelfAttention(nn.Module)", _RECURRENT),
    "xlstm": ("key[:, :, :, None] @ value[:, :, None, :]", _RECURRENT),
}
"""What prevents a type from passing: a piece of the line of its modelling file, and in words."""


def blocking_line(model_type: str) -> tuple[int, str]:
    """Number and text of the line that prevents a type from passing, in the installed transformers."""
    code, _ = BLOCKERS[model_type]
    lines = modelling_source(model_type).splitlines()
    number = next(number for number, line in enumerate(lines, start=1) if code in line)
    return number, lines[number - 1].strip()


def blockers(failing: list[str]) -> list[str]:
    """The table of what prevents types from passing."""
    table = [
        "",
        f"## What prevents the other {len(failing)}",
        "",
        "The line of the type's modelling file, and what follows from it. `model` in the table above is the gate of "
        "padded batches, and in `recurrent_gemma` also that of a static cache.",
        "",
        "| type | line | what follows |",
        "|---|---|---|",
    ]
    for model_type in failing:
        number, code = blocking_line(model_type)
        table.append(f"| {model_type} | {number}: `{code.replace('|', '/')}` | {BLOCKERS[model_type][1]} |")
    return table


def known_rows() -> list[str]:
    """The rows of the page as it is; gates that it does not have stay empty."""
    lines = DOCS.read_text().splitlines() if DOCS.exists() else []
    header = next((line for line in lines if line.startswith("| type | attention")), "").strip("| ").split(" | ")
    rows = []
    for line in lines:
        if re.match(r"\| [^|]+ \| (sdpa|eager) \|", line):
            cells = dict(zip(header, line.removeprefix("|").removesuffix("|").split("|"), strict=True))
            named = [cells.get(name, "").strip() for name in ("type", "attention", "verdict", *GATES, "reason")]
            rows.append(f"| {' | '.join(named)} |")
    return rows


def render(row: Row) -> str:
    """A row of the table."""
    marks = {gate.name: gate.verdict for gate in row.gates}
    cells = " | ".join(marks.get(name, "") for name in GATES)
    return f"| {row.model_type} | {row.attn} | **{row.verdict}** | {cells} | {row.reason} |"


def page(rows: list[str]) -> str:
    """The tables for the docs, of rendered rows."""
    rows = sorted(rows, key=lambda row: row.split(" | ")[0])  # stable: the attention of a type stays in its order
    verdicts = [(cells[0].removeprefix("| "), cells[2].strip("*")) for cells in (row.split(" | ") for row in rows)]
    counts = collections.Counter(verdict for _, verdict in verdicts)
    types = {model_type for model_type, _ in verdicts}
    whole = types - {model_type for model_type, verdict in verdicts if verdict != "pass"}
    everything = causal_types()
    lines = [
        "# Coverage",
        "",
        f"`python experiments/model_coverage.py`: a tiny random model of each of the {len(types)} causal-LM types of "
        f"transformers {transformers.__version__} that go through the attention registry (of {len(everything)} types "
        f"in all), in float32, under every attention implementation it has, through every gate of `softgap doctor` "
        f"(torch {torch.__version__.split('+')[0]}, stability with {REPEATS} generations). "
        f"**{len(whole)} types pass every gate.** Rows: "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        + ". `model` means that the model's own outputs differ between the two sides of a gate, so that the instrument "
        "cannot be evaluated by it; the reason gives its difference.",
        "",
        "| type | attention | verdict | " + " | ".join(GATES) + " | reason |",
        "|---|---|---|" + "---|" * len(GATES) + "---|",
    ]
    failing = [model_type for model_type in everything if model_type not in whole]
    return "\n".join([*lines, *rows, *blockers(failing)]) + "\n"


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
    examined = {row.model_type for row in rows}
    kept = [row for row in known_rows() if types and row.split(" | ")[0].removeprefix("| ") not in examined]
    DOCS.write_text(page([*kept, *map(render, rows)]))
    print(DOCS.relative_to(DOCS.parent.parent))


if __name__ == "__main__":
    main()
