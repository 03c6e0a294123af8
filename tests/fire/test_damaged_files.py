"""No file makes a reader fall over: whatever is in it, there is an answer or a sentence, in time, and in its place."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from softgap import analysis, report, theory
from softgap.analysis.preregistration import ComparisonLog, Preregistration, read_preregistration
from softgap.attention import resolve
from softgap.errors import SoftgapError
from softgap.intervene.substitute import Substitute
from softgap.linearize.plan import Plan, load_plan
from softgap.models.gguf import gguf_metadata
from softgap.report.columns import calibration_columns, read_columns
from softgap.report.documents import Document, Picture, Table, read_documents, read_lab, save_document, sections
from softgap.report.live.requests import Limits, parse_requests
from softgap.study.batches import read_failures
from softgap.tasks import read_labels, read_prompts
from softgap.tasks.sources import TRUTHFULQA, stored_prompts
from softgap.trajectories import open_study
from softgap.trajectories.folder import Folder, slug
from support.fire_examples import LAB, calibration
from support.fuzz_cases import DAMAGES, Damage, Reader, check_reader, damaged_bytes, damaged_document, json_bytes
from support.model_examples import tiny_llama, write_gguf
from support.trajectory_examples import example_run

QUICK = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
LONG = settings(QUICK, max_examples=300)


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
    "request": (
        "r.json",
        lambda _: {"r.json": b'{"prompts": ["a"], "mechanisms": ["elu1"], "temperature": 0.7, "seed": 3}'},
        lambda place: parse_requests((place / "r.json").read_bytes(), ("elu1", "uniform"), Limits()),
    ),
}
DOCUMENTS = ("manifest", "stored prompts", "failures", "log", "plan", "findings", "lab", "prompts", "labels", "request")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    """Every target with its sound files; those must be read, or the fuzz would prove nothing."""
    # No example may import anything: hypothesis draws from the constants of the modules that are loaded.
    for package in (analysis, report, theory):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    found = {}
    made: dict[Any, dict[str, bytes]] = {}
    for name, (file, make, read) in TARGETS.items():
        if make not in made:
            made[make] = make(tmp_path_factory.mktemp("sound"))
        found[name] = Target(file, made[make], read)
        refused = name == "calibration"  # of another model
        with pytest.raises(SoftgapError) if refused else nullcontext():
            check_sound(tmp_path_factory.mktemp("whole"), found[name])
    return found


def check_sound(place: Path, target: Target) -> None:
    for name, content in target.files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    target.read(place)


def fuzz_bytes(damages: list[Damage], target: Target, root: Path) -> None:
    content = damaged_bytes(target.files[target.name], damages)
    check_reader(root, {**target.files, target.name: content}, target.read)


def fuzz_document(data: st.DataObject, target: Target, root: Path) -> None:
    lines = [json.loads(line) for line in target.files[target.name].decode().split("\n") if line]
    damaged = [data.draw(damaged_document(line)) for line in lines] if len(lines) < 9 else []
    document = b"\n".join(map(json_bytes, damaged))
    check_reader(root, {**target.files, target.name: document}, target.read)


@pytest.mark.parametrize("name", TARGETS)
@QUICK
@given(damages=DAMAGES)
def test_damaged_bytes(targets: dict[str, Target], tmp_path: Path, name: str, damages: list[Damage]) -> None:
    fuzz_bytes(damages, targets[name], tmp_path)


@pytest.mark.parametrize("name", DOCUMENTS)
@QUICK
@given(data=st.data())
def test_damaged_documents(targets: dict[str, Target], tmp_path: Path, name: str, data: st.DataObject) -> None:
    fuzz_document(data, _flat(targets[name]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@LONG
@given(damages=DAMAGES)
def test_many_damaged_bytes(targets: dict[str, Target], tmp_path: Path, name: str, damages: list[Damage]) -> None:
    fuzz_bytes(damages, targets[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
@LONG
@given(data=st.data())
def test_many_damaged_documents(targets: dict[str, Target], tmp_path: Path, name: str, data: st.DataObject) -> None:
    fuzz_document(data, _flat(targets[name]), tmp_path)


def _flat(target: Target) -> Target:
    """The target with its JSON documents on one line each."""
    content = target.files[target.name].decode()
    lines = content.split("\n") if target.name.endswith(".jsonl") else [content]
    flat = "\n".join(json.dumps(json.loads(line)) for line in lines if line.strip())
    return Target(target.name, {**target.files, target.name: flat.encode()}, target.read)


@pytest.mark.parametrize("name", ["manifest", "plan", "findings", "lab", "prompts", "labels", "log", "failures"])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_without_end(targets: dict[str, Target], tmp_path: Path, name: str, opening: str) -> None:
    target = targets[name]
    check_reader(tmp_path, {**target.files, target.name: opening.encode() * 50_000}, target.read)


@given(st.text())
def test_a_name_made_of_a_text_stays_in_its_folder(text: str) -> None:
    name = slug(text)
    assert name
    assert not set(name) & set('/\\\0:*?"<>|')
    assert not name.startswith(".")
    assert len(name.encode()) < 200
