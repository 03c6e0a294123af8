"""The layers of docs/architecture.md hold in the source, and each check can fail.

A check is a function of a source tree that returns sentences, none if all is well. Its companion test feeds it a
small broken tree.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import softgap
from support.source_tree import declared_all, exported, imported, is_ours, modules, room_of

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src"

# A layer may import only layers that stand before it.
LAYERS = [
    "errors",
    "deprecation",
    "inputs",
    "progress",
    "intervals",
    "kinds",
    "checkpoints",
    "attention",
    "trajectories",
    "signal",
    "stats",
    "tasks",
    "models",
    "cluster",
    "probe",
    "intervene",
    "gates",
    "calibration",
    "evaluation",
    "linearize",
    "theory",
    "study",
    "costs",
    "analysis",
    "report",
    "cli",
    "__main__",
]
WITHOUT_TORCH = {
    "errors",
    "deprecation",
    "inputs",
    "progress",
    "intervals",
    "kinds",
    "checkpoints",
    "trajectories",
    "signal",
    "stats",
    "tasks",
    "analysis",
}
WITH_TRANSFORMERS = {"gates", "intervene", "models", "probe"}


def layer_violations(root: Path) -> list[str]:
    """Imports that point down the list of layers, layers that are not in it, and ways around it."""
    found = []
    for module in modules(root):
        if not module.package:  # the package's own __init__ names the surface of all layers
            continue
        if module.package not in LAYERS:
            found.append(f"{module.name} belongs to no layer")
            continue
        above = LAYERS[: LAYERS.index(module.package) + 1]
        for name in filter(is_ours, imported(module)):
            if room_of(name) not in above and name != "softgap.__version__":
                found.append(f"{module.name} imports {name}")
    return found


def dependency_violations(root: Path) -> list[str]:
    """Imports of transformers, and of torch, even by way of another layer, where they may be absent."""
    found = []
    for module in modules(root):
        for name in imported(module):
            top = name.split(".")[0]
            outside = top == "transformers" and module.package not in WITH_TRANSFORMERS
            needs_torch = top == "torch" or (is_ours(name) and room_of(name) not in WITHOUT_TORCH | {"", "__version__"})
            if outside or (needs_torch and module.package in WITHOUT_TORCH):
                found.append(f"{module.name} imports {name}")
    return found


def undeclared_imports(root: Path, declared: set[str]) -> list[str]:
    """Third-party modules that no dependency in ``declared`` (canonical names) provides."""
    providers = importlib.metadata.packages_distributions()
    found = []
    for module in modules(root):
        for top in {name.split(".")[0] for name in imported(module)}:
            if top in sys.stdlib_module_names or is_ours(top):
                continue
            # An extra that is not installed is known by its own name.
            if not {canonicalize_name(dist) for dist in providers.get(top, [top])} & declared:
                found.append(f"{module.name} imports {top}")
    return found


def surface_violations(root: Path) -> list[str]:
    """Packages whose ``__all__`` is missing or differs from what they export, sub-modules aside."""
    every = modules(root)
    submodules = {module.name for module in every}
    found = []
    for module in every:
        if not module.is_package:
            continue
        listed = declared_all(module)
        if listed is None:
            found.append(f"{module.name} has no __all__")
            continue
        for name in sorted(set(listed) ^ exported(module)):
            if f"{module.name}.{name}" not in submodules and name != "__version__":
                where = "__all__ only" if name in listed else "the code only"
                found.append(f"{module.name}: {name} is in {where}")
    return found


def import_error(root: Path, statement: str, *, absent: tuple[str, ...]) -> str:
    """The error of an import in a fresh interpreter where some packages cannot be found, or ''."""
    program = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ImportError(f"{{name}} is absent")
sys.meta_path.insert(0, Absent())
sys.path.insert(0, {str(root)!r})
{statement}
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return run.stderr.strip().rpartition("\n")[2]


def heavy_imports(root: Path, statement: str) -> list[str]:
    """Heavy packages that an import pulls in, in a fresh interpreter where they can be found."""
    heavy = ("torch", "transformers", "numba", "pandas", "scipy", "xarray", "pyarrow")
    program = f"import sys\nsys.path.insert(0, {str(root)!r})\n{statement}\nprint(*set({heavy!r}) & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return sorted(run.stdout.split())


def declared_dependencies() -> set[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines]
    return {canonicalize_name(Requirement(line).name) for line in [*project["dependencies"], *extras]}


def plant(root: Path, files: Mapping[str, str]) -> Path:
    """Write a small source tree."""
    for name, text in {"softgap/__init__.py": "__all__ = []\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def documented_layers(page: str) -> list[str]:
    """The layers named by the first column of the first table of a page."""
    table = page.split("| layer |")[1].split("\n\n")[0]
    return re.findall(r"^\| \*?`(\w+)`", table, flags=re.MULTILINE)


def test_the_documentation_names_the_same_layers() -> None:
    assert documented_layers((REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")) == LAYERS


def test_documented_layers_are_read_from_the_table() -> None:
    page = "| layer | what |\n|---|---|\n| `errors` | a |\n| *`probe`* | `b` |\n\n| `axis` | c |"
    assert documented_layers(page) == ["errors", "probe"]


def test_imports_follow_the_layers() -> None:
    assert layer_violations(SOURCE) == []


@pytest.mark.parametrize(
    ("files", "violation"),
    [
        ({"softgap/signal/a.py": "import softgap.probe"}, "softgap.signal.a imports softgap.probe"),
        ({"softgap/signal/a.py": "from softgap import probe"}, "softgap.signal.a imports softgap.probe"),
        ({"softgap/signal/a.py": "from ..probe import tap"}, "softgap.signal.a imports softgap.probe.tap"),
        ({"softgap/signal/__init__.py": "from .. import probe"}, "softgap.signal imports softgap.probe"),
        (
            {"softgap/signal/a.py": "def f():\n    from softgap.cli import main"},
            "softgap.signal.a imports softgap.cli.main",
        ),
        (
            {"softgap/signal/a.py": "import importlib\nimportlib.import_module('softgap.cli')"},
            "softgap.signal.a imports softgap.cli",
        ),
        (
            {"softgap/signal/a.py": "from importlib import import_module\nimport_module('..cli', __package__)"},
            "softgap.signal.a imports softgap.cli",
        ),
        ({"softgap/analysis.py": "import softgap.report.html"}, "softgap.analysis imports softgap.report.html"),
        ({"softgap/cli/a.py": "import softgap"}, "softgap.cli.a imports softgap"),
        ({"softgap/cli/a.py": "from softgap import attend"}, "softgap.cli.a imports softgap.attend"),
        ({"softgap/helpers/__init__.py": ""}, "softgap.helpers belongs to no layer"),
        ({"softgap/helpers.py": ""}, "softgap.helpers belongs to no layer"),
    ],
)
def test_imports_against_the_layers_are_found(tmp_path: Path, files: dict[str, str], violation: str) -> None:
    assert layer_violations(plant(tmp_path, files)) == [violation]


def test_imports_along_the_layers_are_accepted(tmp_path: Path) -> None:
    text = "import softgap.errors\nfrom softgap import __version__, attention\nfrom .b import c\n"
    assert layer_violations(plant(tmp_path, {"softgap/probe/a.py": text})) == []


def test_transformers_and_torch_stay_in_their_layers() -> None:
    assert dependency_violations(SOURCE) == []


@pytest.mark.parametrize(
    ("files", "violation"),
    [
        ({"softgap/attention/a.py": "import transformers"}, "softgap.attention.a imports transformers"),
        (
            {"softgap/cli/a.py": "def f():\n    from transformers.models import gpt2"},
            "softgap.cli.a imports transformers.models",
        ),
        ({"softgap/signal/a.py": "from torch import Tensor"}, "softgap.signal.a imports torch"),
        (
            {"softgap/stats/a.py": "from softgap.attention import attend"},
            "softgap.stats.a imports softgap.attention.attend",
        ),
    ],
)
def test_misplaced_dependencies_are_found(tmp_path: Path, files: dict[str, str], violation: str) -> None:
    assert dependency_violations(plant(tmp_path, files)) == [violation]


def test_every_import_is_a_declared_dependency() -> None:
    assert undeclared_imports(SOURCE, declared_dependencies()) == []


def test_undeclared_imports_are_found(tmp_path: Path) -> None:
    tree = plant(tmp_path, {"softgap/stats/a.py": "import os\nimport numpy\nimport yaml\nimport nowhere"})
    assert sorted(undeclared_imports(tree, {"numpy"})) == [
        "softgap.stats.a imports nowhere",
        "softgap.stats.a imports yaml",
    ]


def test_packages_export_their_all() -> None:
    assert surface_violations(SOURCE) == []


@pytest.mark.parametrize(
    ("text", "violation"),
    [
        ("from softgap.stats.a import f", "softgap.stats has no __all__"),
        ("from softgap.stats.a import f\n__all__ = []", "softgap.stats: f is in the code only"),
        ("from .a import f as g\n__all__ = []", "softgap.stats: g is in the code only"),
        ("def f(): ...\n__all__: list[str] = []", "softgap.stats: f is in the code only"),
        ("__all__ = ['f']", "softgap.stats: f is in __all__ only"),
    ],
)
def test_surfaces_that_differ_are_found(tmp_path: Path, text: str, violation: str) -> None:
    tree = plant(tmp_path, {"softgap/stats/__init__.py": text, "softgap/stats/a.py": "def f(): ..."})
    assert surface_violations(tree) == [violation]


@pytest.mark.parametrize("package", ["signal", "stats", "tasks"])
def test_packages_import_with_torch_absent(package: str) -> None:
    assert import_error(SOURCE, f"import softgap.{package}", absent=("torch", "transformers")) == ""


@pytest.mark.parametrize("package", ["signal", "stats"])
def test_packages_that_need_torch_are_found(tmp_path: Path, package: str) -> None:
    tree = plant(tmp_path, {f"softgap/{package}/__init__.py": "import torch.nn", "torch/__init__.py": ""})
    assert import_error(tree, f"import softgap.{package}", absent=("torch",)) == "ImportError: torch is absent"


def test_softgap_alone_imports_nothing_heavy() -> None:
    assert heavy_imports(SOURCE, "import softgap") == []


def test_the_command_line_starts_without_anything_heavy() -> None:
    # numpy comes with the options; the rest waits for a command that needs it.
    assert heavy_imports(SOURCE, "import softgap.cli.app") == []


def test_heavy_imports_are_found(tmp_path: Path) -> None:
    tree = plant(tmp_path, {"softgap/__init__.py": "import torch", "torch/__init__.py": ""})
    assert heavy_imports(tree, "import softgap") == ["torch"]


def test_lazy_names_resolve() -> None:
    assert dir(softgap) == sorted(softgap.__all__)
    for name in softgap.__all__:
        assert getattr(softgap, name) is not None
    with pytest.raises(AttributeError, match="module 'softgap' has no attribute 'attendd'"):
        softgap.attendd  # type: ignore[attr-defined]  # noqa: B018


PAGE = REPOSITORY / "docs" / "architecture.md"


def missing_files(page: str, root: Path) -> list[str]:
    """Python files that a page names and that are neither in the package nor in the repository below ``root``."""
    named = set(re.findall(r"`([a-z0-9_]+(?:/[a-z0-9_]+)*\.py)`", page))
    folders = (root / "src" / "softgap", root / "src", root)
    return sorted(name for name in named if not any((folder / name).is_file() for folder in folders))


def unlisted_modules(page: str, source: Path) -> list[str]:
    """Modules that the list of a page lacks, and lines of the list that are no module."""
    block = page.partition("<!-- modules: ")[2].partition("<!-- end of modules -->")[0]
    listed = {line.split()[0] for line in block.splitlines() if re.match(r"[a-z0-9_/]+(?:\.py|/) ", line)}
    there = {path.relative_to(source).as_posix().removesuffix("__init__.py") for path in source.rglob("*.py")}
    return sorted(listed ^ (there - {""}))


def test_the_page_names_files_that_are_there() -> None:
    assert missing_files(PAGE.read_text(encoding="utf-8"), REPOSITORY) == []


def test_the_page_lists_every_module() -> None:
    wrong = unlisted_modules(PAGE.read_text(encoding="utf-8"), SOURCE / "softgap")
    assert wrong == [], "run: python docs/make/module_list.py"


PATHS = ("One token", "One calibration", "One plan")


def files_of_path(page: str, title: str) -> list[str]:
    """The files that the table under a heading names, each once."""
    section = page.partition(f"### {title}")[2].partition("\n##")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return sorted(set(re.findall(r"`([a-z0-9_/]+\.(?:py|js))`", "\n".join(rows))))


@pytest.mark.parametrize("title", PATHS)
def test_a_path_through_the_code_names_at_most_thirty_files(title: str) -> None:
    assert 10 <= len(files_of_path(PAGE.read_text(encoding="utf-8"), title)) <= 30


def test_the_files_of_a_path_are_counted_once() -> None:
    page = "### One token\n`no.py`\n| `a/b.py`, `c.js` | `a/b.py` |\n### Two\n| `d.py` |"
    assert files_of_path(page, "One token") == ["a/b.py", "c.js"]


def test_a_page_that_is_out_of_date_is_found(tmp_path: Path) -> None:
    source = tmp_path / "src" / "softgap"
    (source / "stats").mkdir(parents=True)
    for name in ("__init__.py", "stats/__init__.py", "stats/effects.py", "stats/design.py"):
        (source / name).touch()
    listing = "<!-- modules: -->\nstats/  A.\nstats/effects.py  B.\nold.py  C.\n<!-- end of modules -->"
    page = f"`stats/effects.py` and `stats/gone.py`\n{listing}"
    assert missing_files(page, tmp_path) == ["stats/gone.py"]
    assert unlisted_modules(page, source) == ["old.py", "stats/design.py"]
