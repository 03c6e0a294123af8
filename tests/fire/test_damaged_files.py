"""No file makes a reader fall over: whatever is in it, there is an answer or a sentence, in time, and in its place."""

from __future__ import annotations

import importlib
import json
import pkgutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from softgap import analysis, report, theory
from softgap.errors import SoftgapError
from softgap.trajectories.folder import slug
from support.fuzz_cases import DAMAGES, Damage, check_reader, damaged_bytes, damaged_document, json_bytes
from support.fuzz_targets import TARGETS, Target

QUICK = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
LONG = settings(QUICK, max_examples=300)


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
