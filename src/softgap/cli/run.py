"""`softgap run`: measures every head of a model while it answers a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from softgap.cli.options import (
    WHOLE,
    Attn,
    Device,
    DropSinks,
    Dtype,
    Focus,
    Json,
    Map,
    Mechanisms,
    Model,
    Out,
    Overwrite,
    PlacementOptions,
    default_out,
    expand_option_groups,
    read_prompt_argument,
    with_baseline,
)

if TYPE_CHECKING:
    from softgap.study import StudySettings
    from softgap.trajectories import Trajectories

__all__ = ["run_command"]


@expand_option_groups
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
    placement: PlacementOptions = WHOLE,
    attn: Attn = None,
    focus: Focus = False,
    drop_sinks: DropSinks = 0,
    map_of: Map = "kinds",
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
        **placement.loading,
    )
    place = default_out(text) if out is None else out
    run = _generate(text, place, settings, overwrite=overwrite)
    from softgap.cli.render.run import present_run

    present_run(run, place, as_json=as_json, map_of=map_of)


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
