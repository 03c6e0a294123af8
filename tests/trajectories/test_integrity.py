"""A study that somebody edited says so, and no link leads out of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from softgap.cli import main
from softgap.errors import StoreError
from softgap.tasks.sources import BATCH, stored_prompts
from softgap.trajectories import StudyWriter, open_study
from softgap.trajectories.folder import Folder
from softgap.trajectories.reader import accept_edited
from support.cli_examples import failure, loads_once, tiny_folder
from support.trajectory_examples import MANIFEST, example_run

EDITED = r"^manifest.json in '.*' was edited after softgap wrote it: it does not match its hash; restore the file"


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study of two prompts, measured by the command, with fields that have names of ours."""
    loads_once(monkeypatch)
    monkeypatch.chdir(tmp_path)
    tiny_folder(tmp_path / "tiny")
    rows = [{"id": f"p{i}", "prompt": "ab" * (i + 1), "batch": f"b{i}", "steps": 90 + i} for i in range(2)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert main(COMMAND) == 0
    return tmp_path / "a"


COMMAND = [
    "study",
    "run",
    "p.jsonl",
    "--model",
    "tiny",
    "--raw",
    "--max-new-tokens",
    "3",
    "--threads",
    "1",
    "--out",
    "a",
]


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_edited_manifest_is_refused_or_overridden(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(study / "manifest.json", model="another")
    with pytest.raises(StoreError, match=EDITED):
        open_study(study)
    with accept_edited() as overridden:
        assert open_study(study).manifest.model == "another"
    assert overridden == [f"manifest.json in '{study}' was edited after softgap wrote it: it does not match its hash"]
    capsys.readouterr()
    assert "was edited after softgap wrote it" in failure(["report", "a"], capsys)
    assert main(["report", "a", "--force"]) == 0
    said = capsys.readouterr().err
    assert (
        "manifest.json in 'a' was edited after softgap wrote it: it does not match its hash; --force overrides" in said
    )


def test_a_resume_refuses_what_was_edited(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (study / "manifest.json").read_text()
    edit(study / "manifest.json", started="1999-01-01T00:00:00+00:00")
    capsys.readouterr()
    assert "manifest.json in 'a' was edited" in failure(COMMAND, capsys)
    (study / "manifest.json").write_text(content)
    assert main(COMMAND) == 0
    capsys.readouterr()
    prompts = study / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("abab", "abba"))
    assert failure(COMMAND, capsys) == (
        "prompts.jsonl in 'a' was edited after softgap wrote it: it does not match its hash; restore the file from a "
        "copy, or read it as it is with --force"
    )
    assert main([*COMMAND, "--force"]) == 0
    assert "prompts.jsonl in 'a' was edited" in capsys.readouterr().err


def test_missing_prompts_are_said(study: Path) -> None:
    (study / "prompts.jsonl").unlink()
    with pytest.raises(StoreError, match=r"has no prompts.jsonl, which its manifest names; restore it from a copy$"):
        open_study(study)


def test_a_study_without_hashes_is_one_of_version_0_1(study: Path) -> None:
    document = json.loads((study / "manifest.json").read_text())
    for name in ("hash", "files"):
        del document[name]
    (study / "manifest.json").write_text(json.dumps(document))
    assert len(open_study(study)) == 2


def test_fields_of_a_user_are_kept_whatever_their_name(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = stored_prompts(Folder.at(study))
    assert stored is not None
    assert {name: dict(prompt.fields) for name, (prompt, _) in stored.items()} == {
        "p0": {"batch": "b0", "steps": 90},
        "p1": {"batch": "b1", "steps": 91},
    }
    assert [number for _, number in stored.values()] == [0, 0]
    assert all(BATCH in json.loads(line) for line in (study / "prompts.jsonl").read_text().splitlines())
    # The file of a study is a file of prompts, and what softgap wrote into it is not a field.
    assert main(["study", "run", "a/prompts.jsonl", *COMMAND[3:-1], "b"]) == 0
    assert (study.parent / "b" / "prompts.jsonl").read_bytes() == (study / "prompts.jsonl").read_bytes()
    capsys.readouterr()
    sentence = failure(["compare", "a", "--by", "batch", "--match", "steps", "--feature", "mean"], capsys)
    assert sentence.startswith("the prompts have a field 'steps', which is also the name of something that softgap")


def test_a_link_in_a_study_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "study"
    with StudyWriter(path, MANIFEST) as writer:
        writer.append([example_run()])
    part = path / "samples" / "part-00000.parquet"
    part.rename(tmp_path / "elsewhere.parquet")
    part.symlink_to(tmp_path / "elsewhere.parquet")
    sentence = r"contains the symbolic link 'samples/part-00000.parquet', which softgap does not follow; put a copy of"
    with pytest.raises(StoreError, match=sentence):
        open_study(path)
    assert "contains the symbolic link" in failure(["report", str(path)], capsys)
    with pytest.raises(StoreError, match=sentence):
        StudyWriter(path, MANIFEST, resume=True)
