"""Every file that softgap reads: its sound content beside others, and who reads it; for tests and fuzzing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from softgap.analysis.preregistration import ComparisonLog, Preregistration, read_preregistration
from softgap.attention import resolve
from softgap.evaluation import Evaluation, Row
from softgap.intervals import Interval
from softgap.intervene.substitute import Substitute
from softgap.linearize.exchange import _read_pattern
from softgap.linearize.impact import Impact
from softgap.linearize.plan import Plan, load_plan
from softgap.models.gguf import gguf_metadata
from softgap.report.columns import calibration_columns, read_columns
from softgap.report.documents import Document, Picture, Table, read_documents, read_lab, save_document, sections
from softgap.report.evaluation_page import read_evaluation
from softgap.report.live.requests import Limits, parse_requests
from softgap.study.batches import read_failures
from softgap.tasks import read_labels, read_prompts
from softgap.tasks.long_context import read_questions
from softgap.tasks.sources import TRUTHFULQA, stored_prompts
from softgap.trajectories import StudyWriter, open_study
from softgap.trajectories.anatomy import Anatomy
from softgap.trajectories.folder import Folder
from support.fire_examples import LAB, calibration
from support.fuzz_cases import Reader, json_bytes
from support.model_examples import tiny_llama, write_gguf
from support.trajectory_examples import example_run

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True, repr=False)
class Target:
    """A file that is read: its sound content beside others, and who reads it."""

    name: str
    files: dict[str, bytes]
    read: Reader


def study_files(root: Path) -> dict[str, bytes]:
    example_run(prompt_steps=2, steps=3).save(root / "study")
    found = {path.relative_to(root / "study").as_posix(): path for path in (root / "study").rglob("*")}
    files = {name: path.read_bytes() for name, path in found.items() if path.is_file()}
    prompt = {"id": "fox", "prompt": "a", "reference": ["b"], "label": "x", "group": "g", "hard": 3, "batch": 0}
    failure = {"sample_id": "cat", "stage": "measuring", "reason": "too long"}
    plan = {"event": "plan", "time": "2026-01-01", "hash": "0" * 64, "source": "p.toml", "plan": {}}
    locked = {"event": "locked", "time": "2026-01-01", "hash": "0" * 64, "fraction": 0.3, "samples": 3}
    files["prompts.jsonl"] = json_bytes(prompt) + b"\n"
    files["failures/part-00000.jsonl"] = json_bytes(failure) + b"\n"
    files["comparisons/log.jsonl"] = json_bytes(plan) + b"\n" + json_bytes(locked) + b"\n"
    return files


def read_study(place: Path) -> None:
    study = open_study(place)
    study.samples()
    for run in study:
        assert run.n_steps >= 0
    stored_prompts(Folder.at(place))
    read_failures(Folder.at(place))
    log = ComparisonLog(Folder.at(place))
    log.status(Preregistration(), "labels", from_file=True)
    assert log.locked_share is None or 0 < log.locked_share < 1


def read_plan_of_heads(place: Path) -> None:
    plan = load_plan(place / "plan.json")
    assert all(layer >= 0 and head >= 0 for layer, head in plan.heads)
    plan.substitute.name.encode()


def plan_files(root: Path) -> dict[str, bytes]:
    fitted = {"mean": calibration().tensors["fitted.query_bias"]}
    one = resolve("constant").with_parameters(**fitted)
    Plan("tiny", "0" * 32, ((0, 0), (0, 1)), ((0, 0),), (0,), Substitute(one), {"loss": 2.0}).save(
        root / "p" / "plan.json"
    )
    return {path.name: path.read_bytes() for path in (root / "p").iterdir()}


def read_calibration(place: Path) -> None:
    calibration_columns(place / "c.safetensors", example_run())


def calibration_files(root: Path) -> dict[str, bytes]:
    return {"c.safetensors": calibration().save(root / "c.safetensors").read_bytes()}


def findings_files(root: Path) -> dict[str, bytes]:
    table = Table(("a", "b"), ((1, "x"), (None, 0.5)), "Numbers")
    document = Document("Title", "Verdict.", (table,), (Picture("f.svg", b"<svg/>"),), (("note", "words"),))
    save_document(document, root / "f")
    return {path.name: path.read_bytes() for path in (root / "f").iterdir()}


def gguf_files(root: Path) -> dict[str, bytes]:
    return {"m.gguf": write_gguf(root / "m.gguf", tiny_llama(num_hidden_layers=1)).read_bytes()[:6000]}


def anatomy_files(root: Path) -> dict[str, bytes]:
    run = example_run(steps=3)
    with StudyWriter(root / "study", run.manifest) as writer:
        writer.append([run])
        keys, weights = np.zeros((1, 3, 4), np.int32), np.full((1, 3, 4), 0.25, np.float32)
        heads = [Anatomy(0, 1, ("softmax",), keys, weights, np.zeros((1, 3), np.float32), run.sample_id, "<s>")]
        writer.append_anatomy(heads, batch=0)
    found = {path.relative_to(root / "study").as_posix(): path for path in (root / "study").rglob("*")}
    return {name: path.read_bytes() for name, path in found.items() if path.is_file()}


def read_anatomy_of(place: Path) -> None:
    study = open_study(place)
    for name in study.ids:
        for entry in study.anatomy(name):
            assert entry.keys.shape == entry.weights.shape


def evaluation_files(root: Path) -> dict[str, bytes]:
    row = Row("recall", "", 512, (128, 256), "first", 2, 8, 0.1, Interval(0.8, 0.7, 0.9), margin=0.05)
    return {"e.json": Evaluation("tiny", "0" * 32, "", 3, 64, (row,), ("x",)).save(root / "e.json").read_bytes()}


def impact_files(root: Path) -> dict[str, bytes]:
    found = Impact(("elu1",), ((0, 0), (0, 1)), {"loss": np.zeros(2)}, {"loss": np.zeros((1, 2, 2))}, {"seed": 0})
    return {"i.npz": found.save(root / "i.npz").read_bytes()}


PATTERN = {"full_attention_heads.tsv": b"0.0\t1.0\n0.5\t0.25\n", "config.json": b'{"sink_size": 4, "recent_size": 60}'}
QUESTIONS = b'{"prompt": "The capital of France is", "answer": "Paris"}\n'
PROMPTS = b'{"prompt": "a", "completion": "b", "id": "c", "label": "d", "reference": ["e", 1], "group": 2, "x": {}}\n'
ANSWERS = ",".join(TRUTHFULQA) + '\n"Why, oh why?",Because,Never,Because; So,Never; Ever\n'
TOML = b'by = "label"\nbetween = ["a", "b"]\nmargin = 0.5\norders = [3, 4]\ncollapse = true\nconfirm = 0.3\nseed = 1\n'
HEADS = b"layer,head,cost\n0,0,1.5\n1,1,\n4,3,nan\n"

TARGETS: dict[str, tuple[str, Callable[[Path], dict[str, bytes]], Reader]] = {
    "manifest": ("manifest.json", study_files, read_study),
    "samples": ("samples/part-00000.parquet", study_files, read_study),
    "trajectories": ("trajectories/part-00000.parquet", study_files, read_study),
    "stored prompts": ("prompts.jsonl", study_files, read_study),
    "failures": ("failures/part-00000.jsonl", study_files, read_study),
    "log": ("comparisons/log.jsonl", study_files, read_study),
    "plan": ("plan.json", plan_files, read_plan_of_heads),
    "parameters": ("plan.safetensors", plan_files, read_plan_of_heads),
    "calibration": ("c.safetensors", calibration_files, read_calibration),
    "findings": ("findings.json", findings_files, lambda place: sections(read_documents(place))),
    "lab": ("result.json", lambda _: {"result.json": json_bytes(LAB)}, lambda place: sections([read_lab(place)])),
    "prompts": ("p.jsonl", lambda _: {"p.jsonl": PROMPTS}, lambda place: read_prompts(str(place / "p.jsonl"))),
    "labels": (
        "l.jsonl",
        lambda _: {"l.jsonl": b'{"id": "a", "label": "b"}\n'},
        lambda place: read_labels(str(place / "l.jsonl")),
    ),
    "table": (
        "p.csv",
        lambda _: {"p.csv": b'prompt,id,label\n"a,b",1,x\nc,2,\n'},
        lambda place: read_prompts(str(place / "p.csv")),
    ),
    "TruthfulQA": (
        "t.csv",
        lambda _: {"t.csv": ANSWERS.encode()},
        lambda place: read_prompts(str(place / "t.csv")),
    ),
    "heads": (
        "h.csv",
        lambda _: {"h.csv": HEADS},
        lambda place: [json.dumps(column.to_json(example_run())) for column in read_columns(place / "h.csv")],
    ),
    "comparison plan": (
        "p.toml",
        lambda _: {"p.toml": TOML},
        lambda place: read_preregistration(str(place / "p.toml")).hash,
    ),
    "GGUF": ("m.gguf", gguf_files, lambda place: gguf_metadata(place / "m.gguf")),
    "anatomy": ("anatomy/part-00000.parquet", anatomy_files, read_anatomy_of),
    "evaluation": ("e.json", evaluation_files, lambda place: read_evaluation(place / "e.json")),
    "impact": ("i.npz", impact_files, lambda place: Impact.load(place / "i.npz").mean()),
    "pattern": ("full_attention_heads.tsv", lambda _: PATTERN, _read_pattern),
    "pattern's sizes": ("config.json", lambda _: PATTERN, _read_pattern),
    "questions": (
        "q.jsonl",
        lambda _: {"q.jsonl": QUESTIONS},
        lambda place: read_questions(str(place / "q.jsonl")),
    ),
    "request": (
        "r.json",
        lambda _: {"r.json": b'{"prompts": ["a"], "mechanisms": ["elu1"], "temperature": 0.7, "seed": 3}'},
        lambda place: parse_requests((place / "r.json").read_bytes(), ("elu1", "uniform"), Limits()),
    ),
}
