"""`softgap read`: measures every head of a model while it reads texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from softgap.cli.options import (
    WHOLE,
    Anatomy,
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
    PlacementOptions,
    default_out,
    expand_option_groups,
    plain_text,
    read_text_argument,
    with_baseline,
)
from softgap.cli.render.cost import present_cost
from softgap.errors import ValueInputError
from softgap.tasks.sources import json_prompts

if TYPE_CHECKING:
    from softgap.cli.render.summary import Summary
    from softgap.study import StudySettings
    from softgap.tasks import Prompt
    from softgap.trajectories import Trajectories

__all__ = ["read_command"]


@expand_option_groups
def read_command(
    file: Annotated[str, typer.Argument(help="Text file, .jsonl file with samples, or - for standard input.")],
    jsonl: Annotated[
        bool,
        typer.Option(
            "--jsonl", help="Read each line as a JSON object with prompt and completion, and optionally label and id."
        ),
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap each prompt of a .jsonl file in the model's chat template.")
    ] = False,
    model: Model = None,
    mechanism: Mechanisms = None,
    out: Out = None,
    overwrite: Overwrite = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    placement: PlacementOptions = WHOLE,
    attn: Attn = None,
    focus: Focus = False,
    drop_sinks: DropSinks = 0,
    anatomy: Anatomy = None,
    map_of: Map = "kinds",
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Measure every head at every token of a text, or of many prompts with completions; save and summarise it."""
    name, text = read_text_argument(file)
    fields = ("prompt", "completion")
    samples = json_prompts(name, text, needs=fields) if jsonl or file.endswith(".jsonl") else None
    if samples is None and chat:
        raise ValueInputError("--chat needs prompts and completions, got a plain text; give a .jsonl file")
    from softgap.study import StudySettings
    from softgap.trajectories.anatomy import parse_heads

    heads = () if anatomy is None else parse_heads(anatomy)
    settings = StudySettings(
        model=model,
        mechanisms=with_baseline(mechanism),
        chat=chat,
        focus=focus,
        drop_sinks=drop_sinks,
        dtype=dtype,
        device=device,
        attn=attn,
        **placement.loading,
    )
    from softgap.cli.render.run import present_run, present_study
    from softgap.tasks import Prompt
    from softgap.trajectories import open_study

    if samples is None:
        text = plain_text(name, text)
        place = default_out(text if file == "-" else Path(file).stem) if out is None else out
        if dry_run:
            _show_cost([Prompt("0", text)], place, settings, source="", overwrite=overwrite, as_json=as_json)
            return
        run = _read_text(text, place, settings, overwrite=overwrite, anatomy=heads)
        present_run(run, place, as_json=as_json, map_of=map_of)
    else:
        place = default_out(samples[0].prompt if file == "-" else Path(file).stem) if out is None else out
        if dry_run:
            _show_cost(samples, place, settings, source=name, overwrite=overwrite, as_json=as_json)
            return
        summaries = _read_samples(samples, place, settings, source=name, overwrite=overwrite, anatomy=heads)
        present_study(summaries, open_study(place).manifest, place, as_json=as_json, map_of=map_of)


def _show_cost(
    prompts: Sequence[Prompt], out: str, settings: StudySettings, *, source: str, overwrite: bool, as_json: bool
) -> None:
    from softgap.costs import measurement_cost
    from softgap.study import check_run, plan_study

    check_run(prompts, out, settings, mode="replay", overwrite=overwrite)
    present_cost(
        settings.load,
        lambda loaded, probe: measurement_cost(
            plan_study(prompts, loaded, settings, mode="replay", source=source), loaded, probe
        ),
        as_json=as_json,
        out=out,
    )


def _read_text(
    text: str, out: str, settings: StudySettings, *, overwrite: bool, anatomy: Sequence[tuple[int, int]]
) -> Trajectories:
    """Measure one text."""
    from softgap.tasks import Prompt

    runs: list[Trajectories] = []
    _read([Prompt("0", text)], out, settings, overwrite=overwrite, anatomy=anatomy, on_run=runs.append)
    return runs[0]


def _read_samples(
    samples: Sequence[Prompt],
    out: str,
    settings: StudySettings,
    *,
    source: str,
    overwrite: bool,
    anatomy: Sequence[tuple[int, int]],
) -> list[Summary]:
    """Measure many prompts with completions."""
    from softgap.cli.render.summary import summarise

    summaries: list[Summary] = []
    _read(
        samples,
        out,
        settings,
        source=source,
        overwrite=overwrite,
        anatomy=anatomy,
        on_run=lambda run: summaries.append(summarise(run)),
    )
    return summaries


def _read(
    prompts: Sequence[Prompt],
    out: str,
    settings: StudySettings,
    *,
    on_run: Callable[[Trajectories], None],
    source: str = "",
    overwrite: bool,
    anatomy: Sequence[tuple[int, int]] = (),
) -> None:
    """Check, load, then read and save one sample after the other; what is finished stays, whatever comes after."""
    from softgap.progress import show_progress
    from softgap.study import Observer, check_run, measure

    check_run(prompts, out, settings, mode="replay", overwrite=overwrite)
    loaded = settings.load()
    stage = "reading and measuring"
    with show_progress(stage, items=len(prompts)) as report:
        measure(
            prompts,
            out,
            settings,
            mode="replay",
            loaded=loaded,
            source=source,
            overwrite=overwrite,
            anatomy=anatomy,
            observer=Observer(on_run=on_run, on_progress=lambda _, share: report(stage, share)),
        )
