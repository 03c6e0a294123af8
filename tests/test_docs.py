"""The documentation builds without a warning, and its generated pages name every command and every public name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import softgap

REPOSITORY = Path(__file__).parents[1]
PYTHON = Path(sys.executable)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    built = subprocess.run(
        [PYTHON.with_name("mkdocs"), "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")
    return folder


def test_every_command_is_in_the_reference(site: Path) -> None:
    from softgap.cli.app import app

    page = (site / "reference" / "cli" / "index.html").read_text(encoding="utf-8")
    names = [command.name for command in app.registered_commands]
    assert len(names) >= 8
    assert all(f"softgap {name}" in page for name in names)
    assert "softgap lab focus" in page


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    missing = [name for name in softgap.__all__ if not name.startswith("_") and f"softgap.{name}" not in page]
    assert missing == []


def test_every_page_is_in_the_navigation() -> None:
    listed = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    pages = sorted(path.relative_to(REPOSITORY / "docs").as_posix() for path in (REPOSITORY / "docs").rglob("*.md"))
    assert [page for page in pages if f": {page}" not in listed] == []


@pytest.mark.parametrize("page", ["README.md", "docs/howto/models.md"])
def test_how_many_model_types_can_be_measured_is_said_as_the_gates_found_it(page: str) -> None:
    rows = [line.split(" | ") for line in (REPOSITORY / "docs" / "coverage.md").read_text("utf-8").splitlines()]
    verdicts: dict[str, set[str]] = {}
    for row in rows:
        if len(row) > 3 and row[2].startswith("**"):
            verdicts.setdefault(row[0].removeprefix("| "), set()).add(row[2].strip("*"))
    whole = [name for name, found in verdicts.items() if found == {"pass"}]
    unjudged = [name for name, found in verdicts.items() if "model" in found]
    text = " ".join((REPOSITORY / page).read_text(encoding="utf-8").split())
    assert "Of the 183 causal model types in transformers 5.22, " in text
    if page == "README.md":
        assert f"{len(whole)} pass [every gate](docs/coverage.md)" in text
        return
    assert f"each of the other {len(verdicts)} went through every gate" in text
    assert f"| {len(whole)} | pass every gate |" in text
    assert f"| {len(unjudged)} | pass every gate but" in text
    assert f"| {len(verdicts) - len(whole) - len(unjudged)} | were not measured" in text
    assert f" {183 - len(verdicts)} do not send their attention through" in text
