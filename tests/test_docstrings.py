"""What a user calls first is explained: every argument, what comes back, and an example that runs."""

from __future__ import annotations

import doctest
import inspect
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import softgap
from softgap.attention import resolve
from softgap.calibration import Recipe
from softgap.linearize import Plan, Substitute
from softgap.models import model_fingerprint
from softgap.study import StudySettings, run_study
from softgap.tasks import Prompt
from support.model_examples import attending_llama, save_folder
from support.public_names import EXPLAINED, resolve_name

BOOK = " ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(90))


def sections(docstring: str) -> dict[str, str]:
    """The sections of a NumPy docstring by title."""
    parts = re.split(r"^(\w[\w ]*)\n-{3,}\n", docstring, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def unexplained(function: Callable[..., Any]) -> list[str]:
    """Arguments that the docstring does not list, listed ones that are no arguments, and sections that are missing."""
    found = sections(inspect.getdoc(function) or "")
    listed = re.findall(r"^(\S.*)$", found.get("Parameters", ""), flags=re.MULTILINE)
    names = {name.strip().lstrip("*") for line in listed for name in line.split(" : ")[0].split(",")}
    arguments = inspect.signature(function).parameters.values()
    keywords = {argument.name for argument in arguments if argument.kind is argument.VAR_KEYWORD}
    wanted = {argument.name for argument in arguments} - {"self"}
    missing = sorted(wanted - names - (keywords if names - wanted else set()))
    strange = [] if keywords else sorted(names - wanted)
    silent = inspect.signature(function).return_annotation in (None, "None")
    ends = ["Examples"] if silent or "Yields" in found else ["Returns", "Examples"]
    return [*missing, *strange, *(title for title in ends if title not in found)]


def failures_of(docstring: str, name: str) -> str:
    """What the examples of a docstring print wrongly, or ''."""
    reported: list[str] = []
    example = doctest.DocTestParser().get_doctest(docstring, {}, name, None, None)
    doctest.DocTestRunner(verbose=False).run(example, out=reported.append)
    return "".join(reported)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that examples name: a tiny model, a text, a run, a study, a calibration and a plan."""
    folder = tmp_path_factory.mktemp("examples")
    name = str(save_folder(folder / "tiny-llama", attending_llama(max_position_embeddings=512)))
    model, tokenizer = softgap.load_model(name)
    (folder / "book.txt").write_text(BOOK, encoding="utf-8")
    softgap.generate(model, tokenizer, "A fox went out.", max_new_tokens=8).save(folder / "runs" / "fox")
    prompts = [Prompt(f"count-{n}", f"Count to {n}.", label=("even", "odd")[n % 2]) for n in range(16)]
    settings = StudySettings(model=name, mechanisms=("elu1",), max_new_tokens=8)
    run_study(prompts, str(folder / "runs" / "counts"), settings)
    recipe = Recipe(features=4, steps=1)
    softgap.calibrate(model, tokenizer, [BOOK], recipe=recipe, positions=128, out=folder / "fitted.safetensors")
    heads, groups = ((0, 0), (0, 1)), ((0, 0),)
    Plan(name, model_fingerprint(model), heads, groups, (), Substitute(resolve("elu1"))).save(folder / "plan.json")
    return folder


@pytest.fixture
def desk(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder of one example."""
    monkeypatch.chdir(shutil.copytree(files, tmp_path / "desk"))


@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize("name", EXPLAINED)
def test_the_example_runs(name: str) -> None:
    assert failures_of(inspect.getdoc(resolve_name(name)) or "", name) == ""


@pytest.mark.parametrize("name", EXPLAINED)
def test_every_argument_is_explained(name: str) -> None:
    assert unexplained(resolve_name(name)) == []


def test_every_public_function_of_softgap_is_in_the_list() -> None:
    functions = [name for name in softgap.__all__ if inspect.isfunction(getattr(softgap, name))]
    assert {f"softgap.{name}" for name in functions} <= set(EXPLAINED)
    assert len(functions) >= 12


def test_what_is_not_explained_is_found() -> None:
    def half(a: int, b: int) -> int:
        """Half.

        Parameters
        ----------
        a, c
            Numbers.

        Examples
        --------
        >>> 1 + 1
        3
        """
        return a + b

    assert unexplained(half) == ["b", "c", "Returns"]
    assert "Expected:\n    3\nGot:\n    2" in failures_of(inspect.getdoc(half) or "", "half")
