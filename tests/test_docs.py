"""The documentation builds without a warning, and its generated pages name every command and every public name."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import softgap
from support.public_names import EXPLAINED, NAMES, resolve_name

REPOSITORY = Path(__file__).parents[1]
PYTHON = Path(sys.executable)
ROLES = re.compile(r":(?:func|class|meth|mod|data|attr|exc):")


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


def rendered(site: Path, where: str) -> str:
    """The page of a package in the reference."""
    page = "api" if where == "softgap" else where.removeprefix("softgap.")
    return (site / "reference" / page / "index.html").read_text(encoding="utf-8")


def unrendered(site: Path, where: str, module: ModuleType) -> list[str]:
    """Public names of a package, and of the packages inside, without an entry on its page."""
    page = rendered(site, where)
    missing = []
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            missing += [] if f">{where}.{name}</" in page else [f"{where}.{name}"]
            missing += unrendered(site, f"{where}.{name}", value)
        elif f'id="{where}.{name}"' not in page and not name.startswith("_"):
            missing.append(f"{where}.{name}")
    return missing


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    assert unrendered(site, "softgap", softgap) == []


def test_names_without_an_entry_are_found(site: Path) -> None:
    planted = ModuleType("softgap.errors")
    planted.__dict__.update(__all__=["ModelError", "Unheard"], ModelError=1, Unheard=2)
    assert unrendered(site, "softgap.errors", planted) == ["softgap.errors.Unheard"]


def page_with(name: str) -> str:
    """The package whose page has the entry of a name; a member stands on the page of its class."""
    owner = name.rpartition(".")[0]
    return owner.rpartition(".")[0] if inspect.isclass(resolve_name(owner)) else owner


def test_every_fixed_name_has_an_entry_of_its_own(site: Path) -> None:
    names = [*NAMES, *EXPLAINED]
    assert [name for name in names if f'id="{name}"' not in rendered(site, page_with(name))] == []


def test_no_page_of_the_reference_shows_markup(site: Path) -> None:
    pages = sorted((site / "reference").rglob("index.html"))
    assert len(pages) > 20
    shown = [role for page in pages for role in ROLES.findall(page.read_text(encoding="utf-8"))]
    assert shown == []


def test_docstrings_hold_no_sphinx_roles() -> None:
    source = sorted((REPOSITORY / "src").rglob("*.py"))
    assert [path.name for path in source if ROLES.search(path.read_text(encoding="utf-8"))] == []
    assert ROLES.findall("see :func:`read` and :class:`Step`") == [":func:", ":class:"]


def test_a_docstring_is_rendered_as_sections(site: Path) -> None:
    entry = rendered(site, "softgap").partition('id="softgap.generate"')[2].partition("<h2")[0]
    assert all(f">{section}:</" in entry for section in ("Parameters", "Returns", "Examples"))


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
    assert f"transformers 5.22, {len(whole)} pass every gate" in text
    assert f"| {len(whole)} | pass every gate |" in text
    assert f"| {len(unjudged)} | pass every gate but" in text
    assert f"| {len(verdicts) - len(whole) - len(unjudged)} | were not measured" in text
    assert f"| {183 - len(verdicts)} | do not send their attention through" in text
