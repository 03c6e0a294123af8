"""Writes the pages of the command line and of the public names while MkDocs builds, from the code itself."""

from __future__ import annotations

import functools
import inspect
import textwrap
from types import ModuleType
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.core import TyperGroup

import softgap
from softgap.cli.app import app


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the two generated pages."""
    for name, content in (("reference/cli.md", cli_page()), ("reference/api.md", api_page())):
        files.append(File.generated(config, name, content=content))
    return files


def cli_page() -> str:
    """Every command with its help, arguments, options and example."""
    root = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "Every command also takes `--help`. Exit codes: 0 done, 1 a check failed, 2 wrong input.",
    ]
    for name, command in _commands(root, "softgap"):
        lines += ["", f"## {name}", "", _plain(command.help or ""), ""]
        rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            lines += ["| argument or option | meaning |", "|---|---|", *rows, ""]
        if command.epilog:
            lines += ["```bash", command.epilog.removeprefix("Example: "), "```"]
    return "\n".join(lines) + "\n"


def _commands(command: Any, name: str) -> list[tuple[str, Any]]:
    if not isinstance(command, TyperGroup):
        return [(name, command)]
    found = []
    for one, inner in command.commands.items():
        found += _commands(inner, f"{name} {one}")
    return found


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{one}`" for one in (parameter.opts if parameter.param_type_name == "option" else ()))
    shown = names or f"`{(parameter.metavar or parameter.name).upper()}`"
    meaning = " ".join((getattr(parameter, "help", None) or "").split())
    default = getattr(parameter, "show_default", None)
    if isinstance(default, str):
        meaning += f" Default: {default}."
    elif default and parameter.default not in (None, False, ()) and not callable(parameter.default):
        meaning += f" Default: {parameter.default}."
    return f"| {shown} | {_plain(meaning).replace('|', '&#124;')} |"


def api_page() -> str:
    """Every public name of softgap and of its rooms, with signature and docstring."""
    lines = ["# Python", "", "The names of `softgap`, then those of its rooms."]
    lines += _entries("softgap", softgap, [name for name in softgap.__all__ if name[0] != "_"])
    for where, module in _rooms("softgap", softgap):
        lines += ["", f"## {where}", "", _plain((module.__doc__ or "").strip())]
        lines += _entries(where, module, getattr(module, "__all__", ()))
    return "\n".join(lines) + "\n"


def _rooms(where: str, module: ModuleType) -> list[tuple[str, ModuleType]]:
    """The modules among the public names of a module, and those among theirs."""
    found = []
    for name in getattr(module, "__all__", ()):
        inner = getattr(module, name)
        if isinstance(inner, ModuleType):
            found += [(f"{where}.{name}", inner), *_rooms(f"{where}.{name}", inner)]
    return found


def _entries(where: str, module: ModuleType, names: Any) -> list[str]:
    lines: list[str] = []
    for name in names:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            continue
        lines += ["", f"### {where}.{name}", ""]
        if callable(value):
            lines += ["```python", _signature(name, value), "```", ""]
            lines += ["```text", textwrap.dedent(inspect.getdoc(value) or "").strip(), "```"]
            lines += _members(value) if inspect.isclass(value) else []
        else:
            lines += [f"`{type(value).__name__}`"]
    return lines


def _members(kind: type) -> list[str]:
    """The methods and properties of a class that have a docstring of their own, each with its first line."""
    rows = []
    for name, member in inspect.getmembers(kind):
        described = inspect.isroutine(member) or isinstance(member, (property, functools.cached_property))
        if name.startswith("_") or not described or not member.__doc__:
            continue
        shown = _signature(name, member).replace("(self, ", "(").replace("(self)", "()") if callable(member) else name
        rows.append(f"| `{shown.replace('|', 'or')}` | {_plain(member.__doc__.strip().splitlines()[0])} |")
    return ["", "| member | |", "|---|---|", *rows] if rows else []


def _signature(name: str, value: Any) -> str:
    try:
        return f"{name}{inspect.signature(value)}"
    except (TypeError, ValueError):
        return f"{name}(...)"


def _plain(text: str) -> str:
    """Docstrings speak reStructuredText where Markdown would do."""
    return text.replace("``", "`")
