"""How the prompts of a study are measured and where: options of `softgap study run` and `softgap study task`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from softgap.cli._options import Attn, Device, DropSinks, Dtype, Focus, Json, Mechanisms, Model
from softgap.cli._task import with_control

if TYPE_CHECKING:
    from softgap.study import StudySettings

__all__ = ["Limit", "Measuring", "StudyOut"]

StudyOut = Annotated[
    str | None,
    typer.Option("--out", help="Folder (or URI) of the study; the same command goes on there.", show_default=False),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N prompts.", show_default=False)]


@dataclass(frozen=True)
class Measuring:
    """What both commands take beside their prompts; the fields are options."""

    model: Model = None
    mechanism: Mechanisms = None
    batch_size: Annotated[int, typer.Option(min=1, help="Samples that are computed together.")] = 8
    temperature: Annotated[
        float | None, typer.Option(help="Sample at this temperature, not greedily.", show_default=False)
    ] = None
    raw: Annotated[bool, typer.Option("--raw", help="Give prompts as they are, without chat template.")] = False
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads of torch; they are recorded.", show_default=False)
    ] = None
    no_prompt_steps: Annotated[
        bool, typer.Option("--no-prompt-steps", help="Do not store the steps of the prompts.")
    ] = False
    engine: Annotated[Literal["local", "ray"], typer.Option(help="This machine, or a Ray cluster.")] = "local"
    ray_address: Annotated[
        str | None, typer.Option(help="Default: the running cluster, or a new one here.", show_default=False)
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check everything and estimate the cost.")] = False
    dtype: Dtype = "auto"
    device: Device = "cpu"
    attn: Attn = None
    focus: Focus = False
    drop_sinks: DropSinks = 0
    as_json: Json = False

    def settings(self, *, max_new_tokens: int, seed: int | None, scoring: str | None) -> StudySettings:
        """The settings of a study that the model answers at such length, seed and scoring."""
        from softgap.study import StudySettings

        return StudySettings(
            model=self.model,
            mechanisms=with_control(self.mechanism),
            max_new_tokens=max_new_tokens,
            batch_size=self.batch_size,
            chat=False if self.raw else None,
            seed=seed,
            temperature=self.temperature,
            scoring=scoring,
            focus=self.focus,
            drop_sinks=self.drop_sinks,
            keep_prompt=not self.no_prompt_steps,
            dtype=self.dtype,
            device=self.device,
            attn=self.attn,
            threads=self.threads,
        )
