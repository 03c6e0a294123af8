"""`softgap run`: measures every head of a model while it answers a prompt, or lets the model answer under a plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    PlanFile,
    default_out,
    expand_option_groups,
    read_prompt_argument,
    with_baseline,
)
from softgap.cli.render import output
from softgap.cli.render.cost import present_cost
from softgap.errors import ValueInputError

if TYPE_CHECKING:
    from softgap.linearize import GenerationStep
    from softgap.progress import Progress
    from softgap.study import StudySettings
    from softgap.trajectories import Trajectories

__all__ = ["run_command"]

_MEASURING = ("mechanism", "out", "overwrite", "focus", "drop_sinks", "anatomy", "map_of", "dry_run")
"""Options that say what to measure or where to save it."""


@expand_option_groups
def run_command(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="Prompt for the model; - reads it from standard input.")],
    model: Model = None,
    plan: PlanFile = None,
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
    anatomy: Anatomy = None,
    map_of: Map = "kinds",
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Generate an answer to a prompt and measure every head at every token; save and summarise the run.

    With --plan, the model answers under a plan of softgap linearize with the plan's small cache, and the last line
    says what that saves. Heads are not measured then, because the cache keeps no keys to measure with.
    """
    if plan is not None:
        _refuse_measuring(context)
    text = read_prompt_argument(prompt)
    if temperature is not None:
        from softgap.probe.capture import check_temperature

        check_temperature(temperature, "--temperature")
        seed = seed or 0
    if plan is not None:
        options = {"dtype": dtype, "device": device, "attn": attn, **placement.loading}
        under: dict[str, Any] = {"max_new_tokens": max_new_tokens, "chat": False if raw else None, "seed": seed}
        if temperature is not None:
            under["temperature"] = temperature
        _run_under_plan(text, plan, model, options, under, as_json=as_json)
        return
    from softgap.study import StudySettings
    from softgap.trajectories.anatomy import parse_heads

    heads = () if anatomy is None else parse_heads(anatomy)
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
    if dry_run:
        _show_cost(text, place, settings, overwrite=overwrite, as_json=as_json)
        return
    run = _generate(text, place, settings, overwrite=overwrite, anatomy=heads)
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


def _generate(
    text: str, out: str, settings: StudySettings, *, overwrite: bool, anatomy: Sequence[tuple[int, int]] = ()
) -> Trajectories:
    """Check, load, generate and save."""
    from softgap.progress import show_progress
    from softgap.study import Observer, check_run, measure
    from softgap.tasks import Prompt

    prompts = [Prompt("0", text)]
    runs: list[Trajectories] = []
    check_run(prompts, out, settings, mode="live", overwrite=overwrite)
    loaded = settings.load()
    with show_progress(_tokens_stage(0, settings.max_new_tokens)) as report:
        measure(
            prompts,
            out,
            settings,
            mode="live",
            loaded=loaded,
            overwrite=overwrite,
            anatomy=anatomy,
            observer=Observer(on_run=runs.append, stop=_TokenCount(settings.max_new_tokens, report)),
        )
    return runs[0]


def _tokens_stage(done: int, most: int) -> str:
    return f"generating and measuring: {done} of {most} tokens"


class _TokenCount:
    """Counts the tokens of a generation, which asks after each whether to stop."""

    def __init__(self, most: int, report: Progress) -> None:
        self._most, self._report, self._done = most, report, 0

    def __call__(self) -> bool:
        self._done += 1
        self._report(_tokens_stage(self._done, self._most), self._done / self._most)
        return False


def _refuse_measuring(context: typer.Context) -> None:
    named = [parameter for parameter in context.command.params if parameter.name in _MEASURING]
    sources = [context.get_parameter_source(str(parameter.name)) for parameter in named]
    given = [p.opts[0] for p, source in zip(named, sources, strict=True) if source and source.name == "COMMANDLINE"]
    if given:
        raise ValueInputError(
            f"--plan only generates text, because a plan's cache keeps no keys to measure heads with, got it together "
            f"with {', '.join(given)}; leave {'it' if len(given) == 1 else 'them'} out, or leave --plan out to measure "
            "the original model"
        )


def _run_under_plan(
    text: str, file: Path, model: str | None, options: dict[str, Any], settings: dict[str, Any], *, as_json: bool
) -> None:
    """Generate under a plan and show the text while it is written, then what the plan saved."""
    from softgap.linearize import generate, load_plan
    from softgap.linearize.attached import plan_and_model
    from softgap.models import load_model
    from softgap.models.loading import quiet_transformers
    from softgap.progress import show_waiting

    file, model = plan_and_model(file, model)
    plan = load_plan(file)
    loaded, tokenizer = load_model(model, **options)
    plan.check(loaded)
    typist = None if as_json else _Typist(tokenizer)
    # On a terminal the text itself shows the progress.
    silent = typist is not None and sys.stderr.isatty()
    with nullcontext() if silent else show_waiting("generating under the plan"), quiet_transformers(downloads=False):
        try:
            made = generate(loaded, tokenizer, plan, text, listener=typist, **settings)
        finally:
            if typist is not None:
                typist.end()
    if as_json:
        output.write_json({"model": loaded.name_or_path, "plan": str(file), **made.to_json()})
    else:
        output.console().print(f"\n{made.sentence()}", soft_wrap=True)


class _Typist:
    """Writes the text to standard output while tokens arrive."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._written = 0

    def __call__(self, step: GenerationStep) -> None:
        self._ids.append(step.token_ids[0])
        text = str(self._tokenizer.decode(self._ids, skip_special_tokens=True))
        if not text.endswith("\ufffd"):  # half a character, which the next token completes
            self._write(text)

    def end(self) -> None:
        """Write what is left, and end the line: an interrupted text stays readable."""
        if self._ids:
            self._write(str(self._tokenizer.decode(self._ids, skip_special_tokens=True)) + "\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(output.strip_control_characters(text[self._written :]))
        sys.stdout.flush()
        self._written = len(text)
