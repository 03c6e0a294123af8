"""`softgap models`: the models on this machine, and those that packages carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from softgap.cli.options import Json
from softgap.cli.render import output

if TYPE_CHECKING:
    from softgap.models import ModelInfo

__all__ = ["models_command"]


def models_command(as_json: Json = False) -> None:
    """List the models on this machine: name, type, size and origin, and how to get the packaged ones.

    Any other causal model on the Hugging Face hub is downloaded when you first use it.
    """
    from softgap.models import available_models

    models = available_models()
    if as_json:
        output.write_json({"default": models[0].name, "models": [_describe(info) for info in models]})
        return
    table = Table(title="Models", title_justify="left")
    for heading in ("name", "type"):
        table.add_column(heading, overflow="fold")
    for heading in ("parameters", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("origin", no_wrap=True)
    table.add_column("path", overflow="fold")
    for info in models:
        parameters = "" if info.parameters is None else _format_count(info.parameters)
        size = "" if info.size_bytes is None else f"{_format_count(info.size_bytes)}B"
        place = "" if info.path is None else str(info.path)
        table.add_row(info.name, info.model_type, parameters, size, info.origin, place)
    output.console().print(table)
    for info in models:
        if info.install is not None and info.origin == "absent":
            output.console().print(f"\n{info.name} is not installed. To get it:\n  {info.install}", soft_wrap=True)
        if info.terms is not None:
            output.console().print(
                f"Terms of {info.name}: {info.terms}. Using it means accepting them.", soft_wrap=True
            )


def _describe(info: ModelInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "model_type": info.model_type,
        "parameters": info.parameters,
        "size_bytes": info.size_bytes,
        "origin": info.origin,
        "path": None if info.path is None else str(info.path),
        "install": info.install,
        "terms": info.terms,
    }


def _format_count(number: int) -> str:
    """A count with three digits and a decimal prefix: 134,515,008 is 135 M."""
    value, prefixes = float(number), ["", "k", "M", "G", "T"]
    while value >= 999.5 and len(prefixes) > 1:
        value, prefixes = value / 1000, prefixes[1:]
    return f"{value:.3g} {prefixes[0]}".rstrip() if prefixes[0] else f"{number} "
