"""`softgap study label`: add or replace labels without measuring again."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from softgap.cli import _output
from softgap.cli._options import Json

__all__ = ["label_command"]


def label_command(
    study: Annotated[str, typer.Argument(help="Folder (or URI) of a study.")],
    labels: Annotated[str, typer.Argument(help="A .jsonl or .csv file with id and label; an empty label removes one.")],
    as_json: Json = False,
) -> None:
    """Give samples of a study other labels; nothing is measured again."""
    from softgap.study import label_study
    from softgap.tasks import read_labels

    found = label_study(study, read_labels(labels), source=labels)
    if as_json:
        _output.write_json({"study": study, **asdict(found)})
        return
    _output.console().print(
        f"{found.given} labels read, {found.changed} of them new; {found.without} samples have none", soft_wrap=True
    )
