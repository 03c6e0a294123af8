"""What needs no model runs where torch and transformers cannot be imported, and each check can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli_examples import without_progress
from support.explorer_examples import save_study, story

SOURCE = Path(__file__).parents[1] / "src"
HEAVY = ("torch", "transformers")
LIGHT = (
    "errors",
    "inputs",
    "intervals",
    "checkpoints",
    "trajectories",
    "signal",
    "stats",
    "tasks",
    "analysis",
)

# A finder, not sys.modules[name] = None: scipy looks for torch there and takes None for the package.
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Block())
sys.path.insert(0, {root!r})
"""
IMPORT_ALL = """
import importlib, pkgutil
for package in {packages!r}:
    module = importlib.import_module("softgap." + package)
    names = [found.name for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + ".")]
    for name in [module.__name__, *names]:
        try:
            for public in getattr(importlib.import_module(name), "__all__", ()):
                getattr(sys.modules[name], public)
        except ImportError as error:
            print(name, error, sep=": ")
"""
COMMAND = """
from softgap.cli import main
sys.exit(main({arguments!r}))
"""


def python(program: str, *, absent: tuple[str, ...] = HEAVY, root: Path = SOURCE) -> subprocess.CompletedProcess[str]:
    """A program in an interpreter of its own, where some packages cannot be imported."""
    whole = BLOCK.format(absent=absent, root=str(root)) + program
    return subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=False)


def heavy_modules(root: Path, packages: tuple[str, ...]) -> list[str]:
    """Modules of the packages that cannot be imported, or whose public names cannot be had."""
    done = python(IMPORT_ALL.format(packages=packages), root=root)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_module_of_the_light_packages_imports() -> None:
    assert heavy_modules(SOURCE, LIGHT) == []


def test_a_module_that_needs_torch_is_found(tmp_path: Path) -> None:
    package = tmp_path / "softgap" / "stats"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py"):
        path.touch()
    (package / "deep.py").write_text("import torch.nn\n")
    assert heavy_modules(tmp_path, ("stats",)) == ["softgap.stats.deep: torch is blocked"]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_study(tmp_path_factory.mktemp("studies") / "story", [story(steps=64)])


@pytest.mark.parametrize(
    ("line", "absent"),
    [
        ("--help", HEAVY),
        ("models --json", HEAVY),
        ("analyze --help", HEAVY),
        ("analyze STUDY --json", HEAVY),
        ("report STUDY --out OUT --json", HEAVY),
        # Mechanisms are functions of torch tensors; nothing else is needed to list them.
        ("mechanisms --json", ("transformers", "numba", "scipy", "pandas", "pyarrow")),
    ],
)
def test_a_command_without_a_model_loads_nothing_heavy(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, absent: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))  # a cached model is judged by transformers
    places = {"STUDY": str(study), "OUT": str(tmp_path / "report.html")}
    arguments = [places.get(word, word) for word in line.split()]
    done = python(COMMAND.format(arguments=arguments), absent=absent)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    assert json.loads(done.stdout) if "--json" in arguments else "Usage" in done.stdout


def test_a_command_that_needs_torch_is_found() -> None:
    done = python(COMMAND.format(arguments=["mechanisms"]))
    assert done.returncode == 70
    assert "torch is blocked" in done.stderr
