"""`softgap serve`: a local page on which a model writes while its heads are watched."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from softgap.cli.options import Attn, Device, Dtype, Json, Model
from softgap.cli.render import output

__all__ = ["serve_command"]

_LOCAL = ("127.0.0.1", "localhost", "::1")


def serve_command(
    model: Model = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes any port that is free.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen at. Others than 127.0.0.1 let other machines use this one.")
    ] = "127.0.0.1",
    studies: Annotated[
        str, typer.Option(help="Folder that runs are saved to and saved studies are opened from.")
    ] = "runs",
    open_it: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    attn: Attn = None,
    as_json: Json = False,
) -> None:
    """Type a prompt in the browser and watch the heads while the model writes; Ctrl-C ends it."""
    from softgap.cli.render.output import find_browser, visit
    from softgap.models import load_model
    from softgap.report.live import serve

    browser = find_browser() if open_it else None
    if host not in _LOCAL:
        output.warn(
            f"--host {host} lets every machine that reaches this one run the model and read the studies in "
            f"'{studies}'; there is no password"
        )

    def started(address: str) -> None:
        if as_json:
            output.write_json({"address": address, "studies": studies})
        else:
            console = output.console()
            console.print("the live explorer is ready; Ctrl-C ends it:")
            # Last and alone on its line, so that a program can take it from there; never wrapped.
            console.print(address, soft_wrap=True)
        sys.stdout.flush()
        if browser is not None and not visit(browser, address):
            output.warn(f"the browser did not open {address}; open it yourself")

    serve(
        lambda: load_model(model, dtype=dtype, device=device, attn=attn),
        studies,
        host=host,
        port=port,
        started=started,
    )
