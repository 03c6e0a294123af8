"""`softgap run`: a model answers a prompt, and every head is measured on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

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
    given_prompt,
)

if TYPE_CHECKING:
    from softgap.trajectories import Trajectories

__all__ = ["run_command"]


def run_command(
    prompt: Annotated[str, typer.Argument(help="What to ask the model; - reads it from standard input.")],
    model: Model = None,
    mechanism: Mechanisms = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    out: Out = None,
    overwrite: Overwrite = False,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Sample with this seed, not greedily.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sample at this temperature (with seed 0 unless --seed is given).")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without chat template.")] = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    attn: Attn = None,
    focus: Focus = False,
    drop_sinks: DropSinks = 0,
    as_json: Json = False,
) -> None:
    """Let a model answer a prompt, measure every head at every token, save the run and summarise it."""
    text = given_prompt(prompt)
    seed, sampling = _sampling(seed, temperature)
    task = Task(
        texts=(text,),
        out=default_out(text) if out is None else out,
        overwrite=overwrite,
        model=model,
        mechanisms=with_control(mechanism),
        dtype=dtype,
        device=device,
        attn=attn,
        focus=focus,
        drop_sinks=drop_sinks,
        seed=seed,
    )
    from softgap.cli.render.run import present_run

    present_run(_generated(task, text, max_new_tokens, raw, sampling), task.out, as_json=as_json)


def _sampling(seed: int | None, temperature: float | None) -> tuple[int | None, dict[str, Any]]:
    """The seed, None for greedy search, and the settings of sampling."""
    if temperature is None:
        return seed, {"do_sample": seed is not None}
    from softgap.probe.capture import check_temperature

    return seed or 0, {"do_sample": True, "temperature": check_temperature(temperature, "--temperature")}


def _generated(task: Task, text: str, max_new_tokens: int, raw: bool, sampling: dict[str, Any]) -> Trajectories:
    """Check, load, generate and save."""
    task.check()
    from softgap.cli.render.output import waiting
    from softgap.models.fingerprint import live_options
    from softgap.probe import Interrupted, generate

    loaded = task.load()
    task = task.for_model(loaded)
    chat = not raw and bool(getattr(loaded[1], "chat_template", None))
    options = live_options(loaded[0], max_new_tokens=max_new_tokens, chat=chat, focus=task.focus, settings=sampling)
    with task.writer(loaded, options) as writer, waiting("generating and measuring"):
        model, tokenizer = loaded
        settings: dict[str, Any] = {"chat": chat, "seed": task.seed, **task.recorded, **sampling}
        try:
            run = generate(model, tokenizer, text, max_new_tokens, **settings)
        except Interrupted as stop:
            if stop.runs:
                writer.append(stop.runs)
            raise KeyboardInterrupt(_so_far(stop.runs, task.out)) from None
        writer.append([run])
    return run


def _so_far(runs: Sequence[Trajectories], out: str) -> str:
    steps = sum(run.n_steps for run in runs)
    return f"interrupted; the {steps} tokens so far can be read in '{out}'" if steps else "interrupted"
