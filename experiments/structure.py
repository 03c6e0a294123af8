"""How the source is laid out: modules, lines, who imports whom, and how many files a command passes through.

    python experiments/structure.py [--json] [--no-traces]

A module's importers are the other modules of softgap that import it or a name from it, anywhere in their code;
imports under ``TYPE_CHECKING`` are counted apart. A trace runs a command on a tiny model and notes every function of
softgap in the order of first entry; code that runs because a module is imported does not count. Its files are
the distinct ones, its package changes the places where one function and the next lie in different packages.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from golden import make_models, write_inputs

SOURCE = Path(__file__).resolve().parent.parent / "src"
PACKAGE = "softgap"

MODEL = "models/llama"
QUICK = ["--features", "8", "--steps", "2", "--positions", "128"]
SMALL = ["--length", "64", "--tokens", "1024", "--budget", "9", "--window", "8"]
STUDY = ["study", "run", "labelled.jsonl", "--model", MODEL, "--mechanism", "elu1", "--raw", "--out", "study"]
TRACES: dict[str, list[list[str]]] = {
    "run": [["run", "The old miller", "--model", MODEL, "--max-new-tokens", "8", "--raw", "--out", "run"]],
    "calibrate": [["calibrate", MODEL, "--text", "long.txt", *QUICK, "--out", "fitted.safetensors"]],
    "linearize": [["linearize", MODEL, "--text", "long.txt", *SMALL, "--out", "plan.json"]],
    "study + compare": [STUDY, ["compare", "study", "--permutations", "99", "--refits", "19", "--out", "compared"]],
}


# The import graph.


@dataclass(frozen=True)
class Imports:
    """What one module imports of its own package, and how many of its lines say so."""

    modules: frozenset[str]
    only_for_types: frozenset[str]
    lines: int
    import_lines: int


def module_names(root: Path) -> dict[str, Path]:
    """Every module of the package below ``root`` by its dotted name."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imports_of(name: str, path: Path, names: dict[str, Path]) -> Imports:
    """Read one module."""
    text = path.read_text(encoding="utf-8")
    syntax = ast.parse(text)
    for_types = {
        id(inner)
        for node in ast.walk(syntax)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    at_run_time: set[str] = set()
    only_for_types: set[str] = set()
    lines: set[int] = set()
    for node in ast.walk(syntax):
        targets = _targets(node, name, path, names)
        (only_for_types if id(node) in for_types else at_run_time).update(targets)
        if isinstance(node, ast.stmt) and (isinstance(node, ast.Import | ast.ImportFrom) or _is_surface(node)):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    at_run_time.discard(name)
    return Imports(frozenset(at_run_time), frozenset(only_for_types - at_run_time), len(text.splitlines()), len(lines))


def _targets(node: ast.AST, name: str, path: Path, names: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in names)
    elif isinstance(node, ast.ImportFrom):
        base = name.split(".")
        climb = node.level - (path.name == "__init__.py")
        start = base[: len(base) - climb] if node.level else []
        source = ".".join([*start, *([node.module] if node.module else [])])
        for alias in node.names:
            full = f"{source}.{alias.name}"
            if full in names:
                yield full
            elif source in names:
                yield source


def _is_surface(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


@dataclass(frozen=True)
class Layout:
    """The numbers of the import graph."""

    modules: int
    lines: int
    one_importer: int
    one_importer_below_80_lines: int
    one_importer_with_types: int
    no_importer: int
    import_share: float
    over_450_lines: int


def layout(root: Path) -> Layout:
    """Read the source below ``root``."""
    names = module_names(root)
    read = {name: imports_of(name, path, names) for name, path in names.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    with_types: dict[str, set[str]] = defaultdict(set)
    for name, imports in read.items():
        for target in imports.modules:
            importers[target].add(name)
        for target in imports.modules | imports.only_for_types:
            with_types[target].add(name)
    single = [name for name in names if len(importers[name]) == 1]
    lines = sum(imports.lines for imports in read.values())
    return Layout(
        modules=len(names),
        lines=lines,
        one_importer=len(single),
        one_importer_below_80_lines=sum(read[name].lines < 80 for name in single),
        one_importer_with_types=sum(len(with_types[name]) == 1 for name in names),
        no_importer=sum(not with_types[name] for name in names),
        import_share=sum(imports.import_lines for imports in read.values()) / lines,
        over_450_lines=sum(imports.lines > 450 for imports in read.values()),
    )


# Traces.


class Trace:
    """Functions of the package in the order in which they are first entered."""

    def __init__(self) -> None:
        self.order: list[tuple[str, str]] = []
        self._seen: set[Any] = set()
        self._importing: dict[int, int] = defaultdict(int)
        self._prefix = str(SOURCE / PACKAGE) + os.sep

    def __enter__(self) -> Trace:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self._prefix):
            return
        thread = threading.get_ident()
        # Bodies of modules and classes, and whatever they call, run because something is imported.
        if not code.co_flags & inspect.CO_OPTIMIZED:
            self._importing[thread] += 1 if event == "call" else -1
        elif event == "call" and not self._importing[thread] and code not in self._seen:
            self._seen.add(code)
            self.order.append((code.co_filename.removeprefix(self._prefix), code.co_qualname))

    @property
    def files(self) -> list[str]:
        """The distinct files, in the order of first entry."""
        return list(dict.fromkeys(file for file, _ in self.order))

    @property
    def package_changes(self) -> int:
        """How often a function and the next lie in different packages."""
        packages = [str(Path(file).parent).partition(os.sep)[0] for file, _ in self.order]
        return sum(a != b for a, b in pairwise(packages))


def trace(commands: Sequence[Sequence[str]]) -> Trace:
    """Run commands in this process and note where they pass."""
    from softgap.cli import main

    noted = Trace()
    for command in commands:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors, noted:
            code = main(list(command))
        if code:
            sys.exit(f"'softgap {' '.join(command)}' ended with exit code {code}: {errors.getvalue()}")
    return noted


def traces() -> dict[str, dict[str, Any]]:
    """Every trace, on a tiny model in a folder of its own."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    by_name = {}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SOFTGAP_CALIBRATIONS"] = str(Path(folder, "calibrations"))
        os.chdir(folder)
        try:
            write_inputs(Path(folder))
            make_models(Path(folder, "models"))
            for name, commands in TRACES.items():
                noted = trace(commands)
                by_name[name] = {
                    "files": len(noted.files),
                    "package_changes": noted.package_changes,
                    "functions": len(noted.order),
                    "order": noted.files,
                }
        finally:
            os.chdir(before)
    return by_name


def main() -> None:
    """Parse the command line and print a table or one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document, with the files of each trace")
    parser.add_argument("--no-traces", action="store_true", help="only read the source")
    options = parser.parse_args()
    numbers = layout(SOURCE)
    passed = {} if options.no_traces else traces()
    if options.json:
        print(json.dumps({**asdict(numbers), "traces": passed}, indent=1))
        return
    rows = [
        ("modules", f"{numbers.modules}"),
        ("lines", f"{numbers.lines}"),
        ("modules with exactly one importer", f"{numbers.one_importer}"),
        ("  of these below 80 lines", f"{numbers.one_importer_below_80_lines}"),
        ("  with TYPE_CHECKING imports counted too", f"{numbers.one_importer_with_types}"),
        ("modules without an importer", f"{numbers.no_importer}"),
        ("modules over 450 lines", f"{numbers.over_450_lines}"),
        ("lines that are imports or __all__", f"{100 * numbers.import_share:.1f} %"),
    ]
    for name, noted in passed.items():
        counts = f"{noted['files']} files, {noted['package_changes']} package changes, {noted['functions']} functions"
        rows.append((f"trace: {name}", counts))
    for label, value in rows:
        print(f"{label:42s} {value}")


if __name__ == "__main__":
    main()
