"""`softgap run`: measures every head of a model while it answers a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from softgap.cli.options import (
    Attn,
    Device,
    DropSinks,
    DryRun,
    Dtype,
    Focus,
    Json,
    Map,
    Mechanisms,
    Model,
    Out,
    Overwrite,
    default_out,
    read_prompt_argument,
    with_baseline,
)
from softgap.cli.render.cost import present_cost

if TYPE_CHECKING:
    from softgap.study import StudySettings
    from softgap.trajectories import Trajectories

__all__ = ["run_command"]


def run_command(
    prompt: Annotated[str, typer.Argument(help="Prompt for the model; - reads it from standard input.")],
    model: Model = None,
    mechanism: Mechanisms = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 128,
    out: Out = None,
    overwrite: Overwrite = False,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="Sample with this seed instead of decoding greedily.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sample at this temperature (seed 0 unless --seed is given).")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Pass the prompt to the model without a chat template.")] = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    attn: Attn = None,
    focus: Focus = False,
    drop_sinks: DropSinks = 0,
    map_of: Map = "kinds",
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Generate an answer to a prompt and measure every head at every token; save and summarise the run."""
    text = read_prompt_argument(prompt)
    if temperature is not None:
        from softgap.probe.capture import check_temperature

        check_temperature(temperature, "--temperature")
        seed = seed or 0
    from softgap.study import StudySettings

    settings = StudySettings(
        model=model,
        mechanisms=with_baseline(mechanism),
        max_new_tokens=max_new_tokens,
        chat=False if raw else None,
        seed=seed,
        temperature=temperature,
        focus=focus,
        drop_sinks=drop_sinks,
        dtype=dtype,
        device=device,
        attn=attn,
    )
    place = default_out(text) if out is None else out
    if dry_run:
        _show_cost(text, place, settings, overwrite=overwrite, as_json=as_json)
        return
    run = _generate(text, place, settings, overwrite=overwrite)
    from softgap.cli.render.run import present_run

    present_run(run, place, as_json=as_json, map_of=map_of)


def _show_cost(text: str, out: str, settings: StudySettings, *, overwrite: bool, as_json: bool) -> None:
    from softgap.costs import measurement_cost
    from softgap.study import check_run, plan_study
    from softgap.tasks import Prompt

    prompts = [Prompt("0", text)]
    check_run(prompts, out, settings, mode="live", overwrite=overwrite)
    present_cost(
        settings.load,
        lambda loaded, probe: measurement_cost(plan_study(prompts, loaded, settings, mode="live"), loaded, probe),
        as_json=as_json,
        out=out,
    )


def _generate(text: str, out: str, settings: StudySettings, *, overwrite: bool) -> Trajectories:
    """Check, load, generate and save."""
    from softgap.progress import show_waiting
    from softgap.study import Observer, check_run, measure
    from softgap.tasks import Prompt

    prompts = [Prompt("0", text)]
    runs: list[Trajectories] = []
    check_run(prompts, out, settings, mode="live", overwrite=overwrite)
    loaded = settings.load()
    with show_waiting("generating and measuring"):
        measure(
            prompts,
            out,
            settings,
            mode="live",
            loaded=loaded,
            overwrite=overwrite,
            observer=Observer(on_run=runs.append),
        )
    return runs[0]
