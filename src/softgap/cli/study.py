"""``softgap study``: measure many prompts, score and label them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softgap.cli.options import Json, Limit, StudyOptions, StudyOut, check_ray_address, expand_option_groups
from softgap.cli.render import output
from softgap.cli.render.cost import present_cost
from softgap.errors import ValueInputError

if TYPE_CHECKING:
    from softgap.study import StudyResult, StudySettings
    from softgap.tasks import Prompt

__all__ = ["study"]


def label_command(
    study: Annotated[str, typer.Argument(help="Folder (or URI) of a study.")],
    labels: Annotated[
        str,
        typer.Argument(help="File (.jsonl or .csv) with the columns id and label; an empty label removes the old one."),
    ],
    force: output.Force = False,
    as_json: Json = False,
) -> None:
    """Change the labels of a study without measuring it again."""
    from softgap.study import label_study
    from softgap.tasks import read_labels

    with output.overriding(force):
        counts = label_study(study, read_labels(labels), source=labels)
    if as_json:
        output.write_json({"study": study, **counts.to_json()})
        return
    output.console().print(
        f"read {counts.labels} labels, {counts.new} of them new; {counts.unlabelled} samples have no label",
        soft_wrap=True,
    )


_MOST_LISTED = 5


def carry_out(
    prompts: list[Prompt], out: str, settings: StudySettings, options: StudyOptions, source: str = ""
) -> None:
    """Measure the prompts and print the result; with --dry-run only estimate the cost.

    ``source`` says where the prompts come from and how they were read.
    """
    check_ray_address(options.engine, options.ray_address)
    limits = options.limits()
    from softgap.study.measurement import check_mechanisms

    check_mechanisms(settings.mechanisms)
    if options.dry_run:
        _show_cost(prompts, out, settings, as_json=options.as_json)
        return
    from softgap.progress import show_progress
    from softgap.study import run_study

    with show_progress("measuring", items=len(prompts), unit="samples") as report:
        result = run_study(
            prompts,
            out,
            settings,
            engine=options.engine,
            address=options.ray_address,
            limits=limits,
            progress=report,
        )
    answered = {prompt.sample_id for prompt in prompts if prompt.completion is None}
    read = f"{source}: {len(prompts):,} prompts" if source else ""
    _show_result(result, answered, settings.max_new_tokens, read, as_json=options.as_json)
    if not result.measured:
        raise typer.Exit(1)


def _show_cost(prompts: list[Prompt], out: str, settings: StudySettings, *, as_json: bool) -> None:
    from softgap.costs import measurement_cost
    from softgap.study import plan_study
    from softgap.study.measurement import torch_threads
    from softgap.trajectories.folder import Folder
    from softgap.trajectories.writer import check_new_study

    check_new_study(Folder.at(out))
    with torch_threads(settings.threads):
        present_cost(
            settings.load,
            lambda loaded, probe: measurement_cost(plan_study(prompts, loaded, settings), loaded, probe),
            as_json=as_json,
            out=out,
        )


def _show_result(result: StudyResult, answered: set[str], most: int, read: str, *, as_json: bool) -> None:
    from softgap.trajectories import open_study

    samples = open_study(result.out).samples()
    labels = {str(name): int(count) for name, count in samples["label"].value_counts().items()}
    answers = samples[samples["sample_id"].isin(answered)]
    ended = [_cut_off(*answer, most) for answer in zip(answers["completion"], answers["tokens"], strict=True)]
    if as_json:
        document: dict[str, Any] = {**asdict(result), "labels": labels, "cut_off": sum(ended)}
        document["failures"] = [failure.to_json() for failure in result.failures]
        output.write_json(document)
        return
    console = output.console()
    if result.non_finite:
        console.print(result.non_finite.sentence, soft_wrap=True)
    if read:
        console.print(read, soft_wrap=True)
    before = f", {result.resumed:,} of them earlier" if result.resumed else ""
    new = result.measured - result.resumed
    speed = f"; {60 * new / result.seconds:,.1f} samples per minute" if new > 0 and result.seconds > 0 else ""
    console.print(f"{result.measured:,} of {result.samples:,} samples measured{before}{speed}")
    if labels:
        console.print("labels: " + ", ".join(f"{name} {count:,}" for name, count in labels.items()))
    if any(ended):
        console.print(
            f"{sum(ended):,} of {len(ended):,} answers were cut off at {most:,} tokens, the limit of --max-new-tokens",
            soft_wrap=True,
        )
    for failure in result.failures[:_MOST_LISTED]:
        console.print(f"failed in {failure.stage}: {failure.sample_id}: {failure.reason}", soft_wrap=True)
    if len(result.failures) > _MOST_LISTED:
        console.print(f"and {len(result.failures) - _MOST_LISTED:,} more failures; see failures/ in the study")
    console.print(result.out, soft_wrap=True)


def _cut_off(completion: str, tokens: Sequence[str], most: int) -> bool:
    """Whether an answer ended at the limit: its last token is text, and not the token that ends a turn."""
    return len(tokens) >= most and completion.endswith(tokens[-1])


@expand_option_groups
def run_command(
    prompts: Annotated[
        str, typer.Argument(help="File with prompts (.jsonl or .csv), or a dataset as org/name:config@split.")
    ],
    *,
    out: StudyOut = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--field", help="Rename a field of the file, as in prompt=question; may be repeated.", show_default=False
        ),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            help="Score the answers: exact, contains, numeric, choice, or module:function, which runs your code.",
            show_default=False,
        ),
    ] = None,
    answer: Annotated[
        bool, typer.Option("--answer", help="Generate answers even for prompts that come with a completion.")
    ] = False,
    limit: Limit = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 128,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="Sample with this seed instead of decoding greedily.")
    ] = None,
    force: output.Force = False,
    options: StudyOptions,
) -> None:
    """Measure every head on many prompts. The model answers a prompt, or reads its completion where one is given."""
    from softgap.tasks import read_prompts, resolve_scorer
    from softgap.tasks.sources import layout_of
    from softgap.trajectories.folder import slug

    renamed = _parse_renames(field or ())
    samples = read_prompts(prompts, renamed=renamed)[:limit]
    layout = layout_of(prompts, renamed=renamed)
    if answer:
        samples = _without_completions(samples)
    if score is not None:
        resolve_scorer(score).check(samples, f"'{prompts}'")
    settings = options.settings(max_new_tokens=max_new_tokens, seed=seed, scoring=score)
    place = f"runs/{slug(Path(prompts).stem)}" if out is None else out
    with output.overriding(force):
        carry_out(samples, place, settings, options, f"{prompts}: {layout}")


def _parse_renames(entries: Sequence[str]) -> dict[str, str]:
    renames = {}
    for entry in entries:
        field, sign, column = entry.partition("=")
        if not (field and sign and column):
            raise ValueInputError(f"--field must have the form ours=theirs, got '{entry}'; for example prompt=question")
        renames[field] = column
    return renames


def _without_completions(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Every different question once."""
    questions: dict[tuple[str, str | None], Prompt] = {}
    for prompt in prompts:
        questions.setdefault((prompt.prompt, prompt.group), prompt.without_completion())
    return list(questions.values())


@expand_option_groups
def task_command(
    task: Annotated[str, typer.Argument(help="Task: recall (associative recall), arithmetic, copying or statements.")],
    *,
    n: Annotated[int, typer.Option("--n", min=1, help="Number of prompts.")] = 400,
    out: StudyOut = None,
    difficulty: Annotated[
        list[int] | None,
        typer.Option(
            help="Difficulty (number of pairs, digits or words); repeat it to alternate between several.",
            show_default=False,
        ),
    ] = None,
    limit: Limit = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of new tokens. Default: set by the task.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed for prompts and sampling.")] = 0,
    force: output.Force = False,
    options: StudyOptions,
) -> None:
    """Generate prompts with known answers, let the model answer, and label each answer right or wrong."""
    from softgap.tasks import TASKS, generate_prompts

    prompts = generate_prompts(task, n, seed=seed, difficulties=difficulty)[:limit]
    settings = options.settings(
        max_new_tokens=max_new_tokens or TASKS[task].max_new_tokens,
        seed=None if options.temperature is None else seed,
        scoring=TASKS[task].scoring,
    )
    with output.overriding(force):
        carry_out(prompts, f"runs/{task}" if out is None else out, settings, options)


study = typer.Typer(
    name="study",
    help="Measure many prompts, score and label the answers, resume where a study stopped.",
    epilog="Example: softgap study task recall --n 400 --out runs/recall",
)


study.command("run", epilog="Example: softgap study run prompts.jsonl --out runs/mine --score contains")(run_command)


study.command("task", epilog="Example: softgap study task recall --n 400 --out runs/recall")(task_command)


study.command("label", epilog="Example: softgap study label runs/mine labels.csv")(label_command)
