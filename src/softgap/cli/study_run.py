"""`softgap study run` and `softgap study task`: prompts from a file or made from a seed, measured in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from softgap.cli import _output
from softgap.cli._options import Attn, Device, DropSinks, Dtype, Focus, Json, Mechanisms, Model
from softgap.cli._task import check_mechanisms, with_control
from softgap.errors import ValueInputError

if TYPE_CHECKING:
    from softgap.study import Estimate, StudyResult, StudySettings
    from softgap.tasks import Prompt

__all__ = ["run_command", "task_command"]

_MOST_LISTED = 5

StudyOut = Annotated[
    str | None,
    typer.Option("--out", help="Folder (or URI) of the study; the same command goes on there.", show_default=False),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N prompts.", show_default=False)]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Samples that are computed together.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="Sample at this temperature, not greedily.", show_default=False)
]
Raw = Annotated[bool, typer.Option("--raw", help="Give prompts as they are, without chat template.")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=1024, help="Threads of torch; they are recorded.", show_default=False),
]
NoPrompt = Annotated[bool, typer.Option("--no-prompt-steps", help="Do not store the steps of the prompts.")]
Engine = Annotated[Literal["local", "ray"], typer.Option("--engine", help="This machine, or a Ray cluster.")]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", help="Default: the running cluster, or a new one here.", show_default=False),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only check everything and estimate the cost.")]


def run_command(
    prompts: Annotated[str, typer.Argument(help="A .jsonl or .csv file, or a dataset as org/name:config@split.")],
    out: StudyOut = None,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", help="Our field = theirs, as prompt=question; may be repeated.", show_default=False),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(help="Judge answers: exact, contains, numeric, choice or module:function.", show_default=False),
    ] = None,
    answer: Annotated[
        bool, typer.Option("--answer", help="Let the model answer prompts that come with a completion, too.")
    ] = False,
    limit: Limit = None,
    model: Model = None,
    mechanism: Mechanisms = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    batch_size: BatchSize = 8,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Sample with this seed, not greedily.")] = None,
    temperature: Temperature = None,
    raw: Raw = False,
    threads: Threads = None,
    no_prompt_steps: NoPrompt = False,
    engine: Engine = "local",
    ray_address: RayAddress = None,
    dry_run: DryRun = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    attn: Attn = None,
    focus: Focus = False,
    drop_sinks: DropSinks = 0,
    as_json: Json = False,
) -> None:
    """Measure every head on many prompts: answered by the model, or read where a completion is given."""
    from softgap.study import StudySettings
    from softgap.tasks import read_prompts, resolve_scorer
    from softgap.trajectories.names import slug

    found = read_prompts(prompts, renamed=_renamed(field or ()))[:limit]
    if answer:
        found = _answered(found)
    if score is not None:
        resolve_scorer(score).check(found, f"'{prompts}'")
    settings = StudySettings(
        model=model, mechanisms=with_control(mechanism), max_new_tokens=max_new_tokens, batch_size=batch_size,
        chat=False if raw else None, seed=seed, temperature=temperature, scoring=score, focus=focus,
        drop_sinks=drop_sinks, keep_prompt=not no_prompt_steps, dtype=dtype, device=device, attn=attn, threads=threads,
    )  # fmt: skip
    place = f"runs/{slug(Path(prompts).stem)}" if out is None else out
    _carried_out(found, place, settings, engine, ray_address, dry_run=dry_run, as_json=as_json)


def task_command(
    task: Annotated[str, typer.Argument(help="lookup, arithmetic, copying or statements.")],
    n: Annotated[int, typer.Option("--n", min=1, help="Number of prompts.")] = 400,
    out: StudyOut = None,
    difficulty: Annotated[
        list[int] | None,
        typer.Option(help="Taken in turn; may be repeated: pairs, digits or words.", show_default=False),
    ] = None,
    limit: Limit = None,
    model: Model = None,
    mechanism: Mechanisms = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; default: what the task needs.", show_default=False)
    ] = None,
    batch_size: BatchSize = 8,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the prompts, and of sampling.")] = 0,
    temperature: Temperature = None,
    raw: Raw = False,
    threads: Threads = None,
    no_prompt_steps: NoPrompt = False,
    engine: Engine = "local",
    ray_address: RayAddress = None,
    dry_run: DryRun = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    attn: Attn = None,
    focus: Focus = False,
    drop_sinks: DropSinks = 0,
    as_json: Json = False,
) -> None:
    """Make prompts with known answers from a seed, let the model answer, and label the answers right or wrong."""
    from softgap.study import StudySettings
    from softgap.tasks import TASKS, generate_prompts

    found = generate_prompts(task, n, seed=seed, difficulties=difficulty)[:limit]
    settings = StudySettings(
        model=model, mechanisms=with_control(mechanism), max_new_tokens=max_new_tokens or TASKS[task].max_new_tokens,
        batch_size=batch_size, chat=False if raw else None, seed=None if temperature is None else seed,
        temperature=temperature, scoring=TASKS[task].scoring, focus=focus, drop_sinks=drop_sinks,
        keep_prompt=not no_prompt_steps, dtype=dtype, device=device, attn=attn, threads=threads,
    )  # fmt: skip
    place = f"runs/{task}" if out is None else out
    _carried_out(found, place, settings, engine, ray_address, dry_run=dry_run, as_json=as_json)


def _renamed(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for entry in given:
        own, sign, other = entry.partition("=")
        if not (own and sign and other):
            raise ValueInputError(f"--field must say our field = theirs, got '{entry}'; write prompt=question")
        found[own] = other
    return found


def _answered(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Every different question once."""
    seen: dict[tuple[str, str | None], Prompt] = {}
    for prompt in prompts:
        seen.setdefault((prompt.prompt, prompt.group), prompt.asked())
    return list(seen.values())


def _carried_out(
    prompts: list[Prompt],
    out: str,
    settings: StudySettings,
    engine: str,
    address: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    if address is not None and engine != "ray":
        raise ValueInputError(f"--ray-address goes with --engine ray, got '{address}' without it; add it")
    check_mechanisms(settings.mechanisms)
    if dry_run:
        _show_estimate(_estimated(prompts, out, settings), out, as_json=as_json)
        return
    from softgap.cli._waiting import waiting
    from softgap.study import run_study

    with waiting("measuring", len(prompts), rate="samples") as show:
        result = run_study(
            prompts,
            out,
            settings,
            engine=engine,
            address=address,
            progress=lambda done, total, seconds: show("measuring", done),
        )
    _show_result(result, as_json=as_json)
    if not result.measured:
        raise typer.Exit(1)


def _estimated(prompts: list[Prompt], out: str, settings: StudySettings) -> Estimate:
    from softgap.cli._waiting import waiting
    from softgap.probe.progress import quiet_transformers
    from softgap.study import estimate_study, plan_study
    from softgap.trajectories.folder import Folder
    from softgap.trajectories.writer import check_new_study

    check_new_study(Folder.at(out))
    loaded = settings.load()
    with waiting("timing a batch"), quiet_transformers(downloads=False):
        return estimate_study(plan_study(prompts, loaded, settings), loaded)


def _show_estimate(estimate: Estimate, out: str, *, as_json: bool) -> None:
    if as_json:
        _output.write_json({"out": out, "dry_run": True, **asdict(estimate)})
        return
    console = _output.console()
    console.print(
        f"{estimate.samples:,} samples in {estimate.batches:,} batches: {estimate.prompt_tokens:,} tokens to read and "
        f"at most {estimate.new_tokens:,} to write"
    )
    if estimate.unmeasurable:
        console.print(f"{estimate.unmeasurable:,} prompts are too long for the model and would be recorded as failed")
    console.print(
        f"about {_duration(estimate.seconds)} and at most {estimate.bytes / 1e6:,.0f} MB on this machine; nothing was "
        "written"
    )


def _show_result(result: StudyResult, *, as_json: bool) -> None:
    labels = _labels(result.out)
    if as_json:
        document: dict[str, Any] = {**asdict(result), "labels": labels}
        document["failures"] = [failure.to_json() for failure in result.failures]
        _output.write_json(document)
        return
    console = _output.console()
    before = f", {result.resumed:,} of them before" if result.resumed else ""
    new = result.measured - result.resumed
    speed = f"; {60 * new / result.seconds:,.1f} samples a minute" if new > 0 and result.seconds > 0 else ""
    console.print(f"{result.measured:,} of {result.samples:,} samples measured{before}{speed}")
    if labels:
        console.print("labels: " + ", ".join(f"{name} {count:,}" for name, count in labels.items()))
    for failure in result.failures[:_MOST_LISTED]:
        console.print(f"failed in {failure.stage}: {failure.sample_id}: {failure.reason}", soft_wrap=True)
    if len(result.failures) > _MOST_LISTED:
        console.print(f"and {len(result.failures) - _MOST_LISTED:,} more; see failures/ in the study")
    console.print(result.out, soft_wrap=True)


def _labels(out: str) -> dict[str, int]:
    from softgap.trajectories import open_study

    counts = open_study(out).samples()["label"].value_counts()
    return {str(name): int(count) for name, count in counts.items()}


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
