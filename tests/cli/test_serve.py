"""`softgap serve` refuses in one sentence, before it loads a model; and who may reach it is said by its address."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from softgap.cli import main
from softgap.report.live import Limits
from softgap.report.live.requests import allowed_names, refusal
from support.cli_examples import failure
from support.explorer_examples import save_study, story


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing here may come as far as a model."""

    def load(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("softgap.models.load_model", load)
    monkeypatch.chdir(tmp_path)


def test_a_study_is_no_folder_of_studies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    study = save_study(tmp_path / "runs" / "fox", [story(steps=3)])
    sentence = failure(["serve", "--studies", str(study)], capsys)
    assert sentence == f"--studies must be a folder of studies, but '{study}' is a study; give '{study.parent}'"


def test_a_file_is_no_folder_of_studies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("x")
    sentence = failure(["serve", "--studies", "notes"], capsys)
    assert sentence == "runs are written to a folder, but 'notes' is a file; choose another path, with --studies"


def test_no_browser(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    sentence = failure(["serve", "--open"], capsys)
    assert sentence.startswith("--open needs a browser, and none was found here")


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_port_that_is_none(capsys: pytest.CaptureFixture[str], port: str) -> None:
    assert port in failure(["serve", "--port", port], capsys)


def test_an_address_that_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "192.0.2.1"]) == 2
    warning, sentence = capsys.readouterr().err.splitlines()
    assert warning.startswith(
        "softgap: with --host 192.0.2.1, whoever has the address below, its token included, can run"
    )
    assert warning.endswith("the connection is not encrypted")
    assert sentence.startswith("softgap: cannot listen at 192.0.2.1:0: ")


def test_the_packages_are_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name == "uvicorn":
            raise ImportError("no", name="uvicorn")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    sentence = failure(["serve"], capsys)
    assert sentence == "the live explorer needs the package uvicorn; install it with: pip install 'softgap[serve]'"


@pytest.mark.parametrize(
    ("host", "name", "served"),
    [
        ("127.0.0.1", "localhost:8000", True),
        ("127.0.0.1", "box", False),
        ("127.0.0.1", "10.0.0.7", False),
        ("0.0.0.0", "10.0.0.7:80", True),
        ("0.0.0.0", "[fe80::1]:80", True),
        ("0.0.0.0", "box", True),
        ("0.0.0.0", "evil.example", False),
        ("box.lan", "BOX.lan:80", True),
        ("box.lan", "10.0.0.7", False),
    ],
)
def test_names_that_are_answered_to(host: str, name: str, served: bool) -> None:
    names = allowed_names(host, "box")
    wrong = refusal("GET", "/", Headers({"host": name}), names, "t", Limits())
    assert (wrong is None) == served
