"""Writes the pages of the reference while MkDocs builds: the command line, and what mkdocstrings renders of Python.

mkdocstrings reads signatures and docstrings from the source. The pages written here list the public names for it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.core import TyperGroup

import softgap
from softgap.cli.app import app


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    files.append(File.generated(config, "reference/cli.md", content=cli_page()))
    for where, module in [("softgap", softgap), *_packages("softgap", softgap)]:
        files.append(File.generated(config, page_of(where), content=python_page(where, module)))
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


def page_of(where: str) -> str:
    """The page of a package: of ``softgap.theory.focus``, reference/theory.focus.md."""
    return f"reference/{where.removeprefix('softgap.') if where != 'softgap' else 'api'}.md"


def python_page(where: str, module: ModuleType) -> str:
    """The docstring of a package, links to the packages inside, and a block of mkdocstrings for each public name."""
    options = ["    options:", "      members: false", "      show_root_heading: false"]
    lines = [f"# {where}", "", f"::: {where}", *options, ""]
    inner = [(name, part) for name, part in _packages(where, module) if name.rpartition(".")[0] == where]
    for name, part in inner:
        first = _plain((part.__doc__ or "").strip().splitlines()[0])
        lines.append(f"- [`{name}`]({page_of(name).removeprefix('reference/')}): {first}")
    for name in module.__all__:
        value = getattr(module, name)
        if not isinstance(value, ModuleType) and not name.startswith("_"):
            lines += ["", *_block(where, name, value)]
    return "\n".join(lines) + "\n"


def _block(where: str, name: str, value: Any) -> list[str]:
    """What mkdocstrings is to render for one name."""
    if f"{where}.{name}" not in sys.modules:
        return [f"::: {where}.{name}"]
    # A module of the same name hides the function from mkdocstrings, which reads files.
    heading = ["    options:", f"      heading: {where}.{name}", f"      toc_label: {name}"]
    return [f'<a id="{where}.{name}"></a>', "", f"::: {value.__module__}.{name}", *heading]


def _packages(where: str, module: ModuleType) -> list[tuple[str, ModuleType]]:
    """The packages among the public names of a module, and those among theirs."""
    packages = []
    for name in getattr(module, "__all__", ()):
        inner = getattr(module, name)
        if isinstance(inner, ModuleType):
            packages += [(f"{where}.{name}", inner), *_packages(f"{where}.{name}", inner)]
    return packages


def _plain(text: str) -> str:
    """Docstrings speak reStructuredText where Markdown would do."""
    return text.replace("``", "`")
