"""`softgap read`: measure every head of a model while it reads texts, whoever wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from softgap.cli.measurement import Task, default_out, with_control
from softgap.cli.options import (
    Attn,
    Device,
    DropSinks,
    Dtype,
    Focus,
    Json,
    Mechanisms,
    Model,
    Out,
    Overwrite,
    given_text,
    plain_text,
)
from softgap.errors import ValueInputError
from softgap.tasks.sources import json_prompts

if TYPE_CHECKING:
    from softgap.cli.render.summary import Summary
    from softgap.models.loading import Loaded
    from softgap.tasks import Prompt
    from softgap.trajectories import Trajectories

__all__ = ["read_command"]


def read_command(
    file: Annotated[str, typer.Argument(help="A text file, a .jsonl file with samples, or - for standard input.")],
    jsonl: Annotated[
        bool,
        typer.Option(
            "--jsonl", help="Every line is a JSON object with prompt and completion, and optionally label and id."
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
    attn: Attn = None,
    focus: Focus = False,
    drop_sinks: DropSinks = 0,
    as_json: Json = False,
) -> None:
    """Read a text, or many prompts with completions, measure every head at every token, save and summarise it."""
    name, text = given_text(file)
    wanted = ("prompt", "completion")
    samples = json_prompts(name, text, needs=wanted) if jsonl or file.endswith(".jsonl") else None
    if samples is None:
        texts: tuple[str, ...] = (plain_text(name, text),)
    else:
        texts = (*(sample.prompt for sample in samples), *(sample.completion or "" for sample in samples))
    if samples is None and chat:
        raise ValueInputError("--chat goes with prompts and completions, got a plain text; give a .jsonl file")
    task = Task(
        texts=texts,
        out=default_out(texts[0] if file == "-" else Path(file).stem) if out is None else out,
        overwrite=overwrite,
        model=model,
        mechanisms=with_control(mechanism),
        dtype=dtype,
        device=device,
        attn=attn,
        focus=focus,
        drop_sinks=drop_sinks,
    )
    task.check()
    if samples is None:
        from softgap.cli.render.run import present_run

        present_run(_read_text(task, text), task.out, as_json=as_json)
    else:
        summaries = _read_samples(task, samples, name, chat)
        from softgap.cli.render.run import present_study

        present_study(summaries, task.stored(), task.out, as_json=as_json)


def _read_text(task: Task, text: str) -> Trajectories:
    """Load, read and save one text."""
    from softgap.models.fingerprint import replay_options
    from softgap.probe import read
    from softgap.progress import show_waiting

    loaded = task.load()
    task = task.for_model(loaded)
    options = replay_options(chat=False, focus=task.focus)
    with task.writer(loaded, options) as writer, show_waiting("reading and measuring"):
        run = read(*loaded, text, **task.recorded)
        writer.append([run])
    return run


def _read_samples(task: Task, samples: Sequence[Prompt], name: str, chat: bool) -> list[Summary]:
    """Load, then read and save one sample after the other; what is finished stays, whatever comes after."""
    from softgap.cli.render.summary import summarise
    from softgap.models.fingerprint import replay_options
    from softgap.progress import show_progress

    loaded = task.load()
    task = task.for_model(loaded)
    summaries: list[Summary] = []
    with (
        task.writer(loaded, replay_options(chat=chat, focus=task.focus)) as writer,
        show_progress("reading and measuring", items=len(samples)) as report,
    ):
        _require_room(loaded, samples, name, chat)
        try:
            for sample in samples:
                run = _read_sample(task, loaded, sample, chat)
                writer.append([run])
                summaries.append(summarise(run))
                report("reading and measuring", len(summaries) / len(samples))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_finished(len(summaries), len(samples), task.out)) from None
    return summaries


def _read_sample(task: Task, loaded: Loaded, sample: Prompt, chat: bool) -> Trajectories:
    from softgap.probe import read

    run = read(*loaded, sample.prompt, sample.completion or "", chat=chat, **task.recorded)
    return replace(run, sample_id=sample.sample_id, label=sample.label)


def _require_room(loaded: Loaded, samples: Sequence[Prompt], name: str, chat: bool) -> None:
    """Refuse a sample that the model cannot read before the first one is read."""
    from softgap.probe.capture import check_lengths, completion_ids, prompt_ids

    model, tokenizer = loaded
    for sample in samples:
        try:
            ids = [
                *prompt_ids(tokenizer, sample.prompt, chat),
                *completion_ids(tokenizer, sample.completion or "")[:-1],
            ]
            check_lengths(model, [ids], 0)
        except ValueInputError as error:
            raise ValueInputError(f"{name}, line {sample.line}: {error}") from error


def _finished(done: int, total: int, out: str) -> str:
    return f"interrupted; {done} of {total} samples can be read in '{out}'" if done else "interrupted"
