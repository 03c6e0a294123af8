"""A study on its way from the command line: measured or only estimated, and what came of it, in words or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from softgap.cli import _output
from softgap.cli._task import check_mechanisms
from softgap.errors import ValueInputError

if TYPE_CHECKING:
    from softgap.cli._study_options import Measuring
    from softgap.study import Estimate, StudyResult, StudySettings
    from softgap.tasks import Prompt

__all__ = ["carry_out"]

_MOST_LISTED = 5


def carry_out(prompts: list[Prompt], out: str, settings: StudySettings, measuring: Measuring) -> None:
    """Measure the prompts and say what came of it; with --dry-run only what it would cost."""
    if measuring.ray_address is not None and measuring.engine != "ray":
        raise ValueInputError(f"--ray-address goes with --engine ray, got '{measuring.ray_address}' without it; add it")
    check_mechanisms(settings.mechanisms)
    if measuring.dry_run:
        _show_estimate(_estimated(prompts, out, settings), out, as_json=measuring.as_json)
        return
    from softgap.cli._waiting import waiting
    from softgap.study import run_study

    with waiting("measuring", len(prompts), rate="samples") as show:
        result = run_study(
            prompts,
            out,
            settings,
            engine=measuring.engine,
            address=measuring.ray_address,
            progress=lambda done, total, seconds: show("measuring", done),
        )
    _show_result(result, as_json=measuring.as_json)
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
