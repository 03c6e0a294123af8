"""Read a tree of Python source without running it: what each module imports and what each package exports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "softgap"


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, whether it is a package's ``__init__``, and its syntax tree."""

    name: str
    is_package: bool
    syntax: ast.Module

    @property
    def package(self) -> str:
        """The layer it belongs to: the name below the package, or '' for the package's own ``__init__``."""
        return room_of(self.name)


def room_of(name: str) -> str:
    """The layer of a dotted name inside the package."""
    return [*name.split("."), ""][1]


def is_ours(name: str) -> bool:
    """Whether a dotted name lies inside the package."""
    return name.split(".")[0] == PACKAGE


def modules(root: Path) -> list[Module]:
    """Every module of the package below ``root`` (the folder that holds the package)."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found.append(Module(name, is_package, ast.parse(path.read_text(encoding="utf-8"))))
    return found


def imported(module: Module) -> Iterator[str]:
    """Dotted names of all that a module imports: anywhere in the file, relative, or by a literal at run time.

    ``from a import b`` yields ``a.b`` for our own package, since b may be a module, and ``a`` for others.
    """
    for node in ast.walk(module.syntax):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, "." * node.level + (node.module or ""))
            yield from (f"{source}.{alias.name}" for alias in node.names) if is_ours(source) else [source]
        elif isinstance(node, ast.Call) and (literal := _run_time_import(node)) is not None:
            yield _absolute(module, literal)


def exported(module: Module) -> set[str]:
    """Public names that a package's ``__init__`` binds from our own modules, or defines itself."""
    names: set[str] = set()
    for node in _top_level(module.syntax.body):
        if isinstance(node, ast.ImportFrom):
            if node.level or is_ours(node.module or ""):
                names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def declared_all(module: Module) -> list[str] | None:
    """The literal ``__all__`` of a module, or None if it has none."""
    for node in module.syntax.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            names: list[str] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            return names
    return None


def _absolute(module: Module, name: str) -> str:
    level = len(name) - len(name.lstrip("."))
    if level == 0:
        return name
    climb = level - 1 if module.is_package else level
    base = module.name.split(".")
    return ".".join([*base[: len(base) - climb], name[level:]]).rstrip(".")


def _run_time_import(call: ast.Call) -> str | None:
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    argument = call.args[0] if call.args else None
    if function not in {"import_module", "__import__"} or not isinstance(argument, ast.Constant):
        return None
    return argument.value if isinstance(argument.value, str) else None


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If):
            yield from _top_level([*node.body, *node.orelse])
        else:
            yield node
