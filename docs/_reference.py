"""Writes the pages of the command line and of the public names while MkDocs builds, from the code itself."""

from __future__ import annotations

import inspect
import textwrap
from types import ModuleType
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.core import TyperGroup

import softgap
from softgap.cli._app import app


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
    rooms = [name for name in softgap.__all__ if isinstance(getattr(softgap, name), ModuleType)]
    lines += _entries("softgap", softgap, [name for name in softgap.__all__ if name not in rooms and name[0] != "_"])
    for room in rooms:
        module = getattr(softgap, room)
        lines += ["", f"## softgap.{room}", "", _plain((module.__doc__ or "").strip())]
        lines += _entries(f"softgap.{room}", module, getattr(module, "__all__", ()))
    return "\n".join(lines) + "\n"


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
        else:
            lines += [f"`{type(value).__name__}`"]
    return lines


def _signature(name: str, value: Any) -> str:
    try:
        return f"{name}{inspect.signature(value)}"
    except (TypeError, ValueError):
        return f"{name}(...)"


def _plain(text: str) -> str:
    """Docstrings speak reStructuredText where Markdown would do."""
    return text.replace("``", "`")
