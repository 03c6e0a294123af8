"""`softgap serve`: a local page that shows the heads of a model, or what a plan saves, while it writes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from softgap.cli.options import (
    WHOLE,
    Attn,
    Device,
    Dtype,
    Json,
    Model,
    PlacementOptions,
    PlanFile,
    expand_option_groups,
)
from softgap.cli.render import output

__all__ = ["serve_command"]

_LOCAL = ("127.0.0.1", "localhost", "::1")


@expand_option_groups
def serve_command(
    model: Model = None,
    plan: PlanFile = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free port.")] = 0,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on. Any address but 127.0.0.1 gives other machines access, with a token."),
    ] = "127.0.0.1",
    studies: Annotated[str, typer.Option(help="Folder for new runs and for the saved studies on offer.")] = "runs",
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    placement: PlacementOptions = WHOLE,
    attn: Attn = None,
    as_json: Json = False,
) -> None:
    """Type a prompt in the browser and watch the heads while the model writes. Ctrl-C stops the server.

    With --plan, the model writes under a plan, and the page shows what that saves instead of the heads.
    """
    from softgap.cli.render.output import find_browser, open_address
    from softgap.linearize import load_plan
    from softgap.linearize.attached import plan_and_model
    from softgap.models import load_model
    from softgap.report.live import serve

    browser = find_browser() if open_it else None
    planned = None
    if plan is not None:
        file, model = plan_and_model(plan, model)
        planned = load_plan(file), file.name
    if host not in _LOCAL:
        output.warn(
            f"with --host {host}, whoever has the address below, its token included, can run the model and read the "
            f"studies in '{studies}'; the connection is not encrypted"
        )

    def started(address: str) -> None:
        if as_json:
            output.write_json({"address": address, "studies": studies})
        else:
            console = output.console()
            console.print("The live explorer is ready. Press Ctrl-C to stop it:")
            # Last, alone on its line and never wrapped, so that a program can read it.
            console.print(address, soft_wrap=True)
        sys.stdout.flush()
        if browser is not None and not open_address(browser, address):
            output.warn(f"the browser did not open {address}; open it by hand")

    serve(
        lambda: load_model(model, dtype=dtype, device=device, attn=attn, **placement.loading),
        studies,
        host=host,
        port=port,
        plan=planned,
        started=started,
    )
