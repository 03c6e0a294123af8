"""What the pages print can be typed: Python blocks run on a tiny model, commands parse, links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typer.core import TyperGroup

import softgap
from softgap.attention import resolve
from softgap.calibration import Recipe, calibrate
from softgap.cli.app import app
from softgap.linearize import Plan, Substitute
from softgap.models import model_fingerprint
from support.model_examples import CHAT_TEMPLATE, byte_tokenizer, tiny_llama

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
RUNNABLE = [
    "README.md",
    "docs/calibration.md",
    *(page.relative_to(REPOSITORY).as_posix() for page in sorted((REPOSITORY / "docs" / "howto").glob("*.md"))),
]
# What a page supposes to be there: a text, logs of another engine, prompts with answers.
BOOK = " ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(90))
REQUEST = {"custom_id": "1", "body": {"messages": [{"role": "user", "content": "Name a colour."}]}}
RESULT = {"custom_id": "1", "response": {"body": {"choices": [{"message": {"content": " Blue."}}]}}}
QUESTIONS = [{"prompt": "The capital of France?", "reference": "Paris"}, {"prompt": "Two and two?", "reference": "4"}]

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """Lines of a page's shell blocks that call softgap."""
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(r"(?:\S+/)?softgap\b", line)]


def parse(line: str) -> str:
    """Read a command as the shell and the program would, without running it; its name."""
    words = shlex.split(line, comments=True)[1:]
    command: Any = typer.main.get_command(app)
    name = "softgap"
    while isinstance(command, TyperGroup) and words:
        name, words = words[0], words[1:]
        command = command.commands[name]
    command.make_context(name, words)
    return name


def dead_links(page: Path) -> list[str]:
    """Links of a page to files that are not there."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    made = {"reference/api.md", "reference/cli.md"}  # while the site is built
    return [
        target
        for target in targets
        if "://" not in target
        and not (page.parent / target).exists()
        and os.path.relpath(page.parent / target, REPOSITORY / "docs") not in made
    ]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """A tiny model with the layers and heads that the pages name."""
    model = tiny_llama(
        num_hidden_layers=19, hidden_size=36, num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=512
    )
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return model, tokenizer


@pytest.fixture
def desk(loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A folder with the files that pages speak of, the tiny model by default, and a quick calibration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOFTGAP_CALIBRATIONS", str(tmp_path / "calibrations"))
    monkeypatch.setattr(softgap, "load_model", lambda *_: loaded)
    monkeypatch.setattr("softgap.models.load_model", lambda *_, **__: loaded)
    monkeypatch.setattr(softgap, "calibrate", partial(calibrate, recipe=Recipe(features=4, steps=1), positions=128))
    Path("book.txt").write_text(BOOK, encoding="utf-8")
    Path("requests.jsonl").write_text(json.dumps(REQUEST) + "\n", encoding="utf-8")
    Path("results.jsonl").write_text(json.dumps(RESULT) + "\n", encoding="utf-8")
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS), encoding="utf-8")
    model, tokenizer = loaded
    heads = tuple((layer, head) for layer in (0, 18) for head in range(3))
    groups = ((0, 0), (18, 0))
    Plan("tiny", model_fingerprint(model), heads, groups, (), Substitute(resolve("elu1"))).save("plan.json")
    inputs = tokenizer("Hello.", return_tensors="pt", return_token_type_ids=False)
    return {"model": model, "tokenizer": tokenizer, "inputs": inputs}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # pages open files as people do
@pytest.mark.parametrize("name", RUNNABLE)
def test_the_python_of_a_page_runs(name: str, desk: dict[str, Any]) -> None:
    for block in blocks((REPOSITORY / name).read_text(encoding="utf-8"), "python"):
        exec(compile(block, name, "exec"), desk)


def test_the_pages_that_should_run_have_something_to_run() -> None:
    without = [name for name in RUNNABLE if not blocks((REPOSITORY / name).read_text(encoding="utf-8"), "python")]
    assert without == ["docs/howto/labelled_study.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_the_commands_of_a_page_parse(page: Path) -> None:
    for line in commands(page.read_text(encoding="utf-8")):
        parse(line)


def test_commands_are_found_and_wrong_ones_refused() -> None:
    assert commands("```bash\nmake demo\n.venv/bin/softgap models  # all\nsoftgap run \\\n  x\n```\nsoftgap lab") == [
        ".venv/bin/softgap models  # all",
        "softgap run    x",
    ]
    assert parse("softgap lab focus --keys 64") == "focus"
    with pytest.raises(Exception, match="No such option"):
        parse("softgap run hello --modell x")
    with pytest.raises(KeyError):
        parse("softgap wrun hello")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](page.md#b) [c](none.md) [d](https://e.f/g)", encoding="utf-8")
    assert dead_links(page) == ["none.md"]


# Lines of the quick start that a command printed, as the code says them; numbers of the run are left out.
PRINTED = {
    "src/softgap/cli/report.py": ["MB. Open it in any browser:"],
    "src/softgap/cli/render/findings.py": [
        "Median permutation entropy of ",
        "). White noise of the same lengths: ",
        " below noise and ",
    ],
    "src/softgap/gates/model.py": [
        "largest difference of logits, greedy and sampling",
        "largest difference from the float64 reference",
        "live with the dynamic cache against replay",
    ],
}


@pytest.mark.parametrize("name", PRINTED)
def test_what_the_quick_start_shows_is_still_what_is_printed(name: str) -> None:
    source = (REPOSITORY / name).read_text(encoding="utf-8")
    shown = "\n".join(blocks((REPOSITORY / "docs" / "quickstart.md").read_text(encoding="utf-8"), "text"))
    for words in PRINTED[name]:
        assert words in shown
        assert words in source
