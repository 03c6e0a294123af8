"""A model of a server under a plan: it generates with the plan's cache, and tells what that saves token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softgap.linearize import GenerationStep, Plan, attach, generate
from softgap.linearize.attached import applied_plan
from softgap.linearize.generation import smaller_from
from softgap.models.loading import Loaded
from softgap.probe import read_ids
from softgap.probe.prompts import prompt_ids
from softgap.report.live.requests import RunRequest
from softgap.report.live.writer import Tell, Writer, Written
from softgap.trajectories.validation import BASELINE

__all__ = ["PlannedWriter"]

NOT_MEASURED = (
    "Heads are not measured under a plan, because its cache keeps no keys to measure with, and runs are not saved. "
    "Without --plan, softgap serve measures the original model."
)


@dataclass(frozen=True, eq=False)
class PlannedWriter(Writer):
    """A loaded model with a plan attached; it measures nothing and saves nothing.

    Attributes
    ----------
    notes
        Sentences for the page: what the plan does, from which length it saves memory, and what is not offered.
    """

    notes: tuple[str, ...] = ()

    @classmethod
    def under(cls, loaded: Loaded, plan: Plan, name: str) -> PlannedWriter:
        """Put a model under a plan, whose file has this name."""
        model, tokenizer = loaded
        layout = read_ids(model, [prompt_ids(tokenizer, "a b", chat=False)], mechanisms=[BASELINE])[0]
        attach(model, plan)
        with applied_plan(model, None) as (_, applied):
            if applied.streams:
                applied.cache()  # refuses what cannot generate before a visitor asks for it
        groups = sum(len(set(row[row >= 0].tolist())) for row in layout.kv_group)
        notes = [f"This server runs the model under the plan {name}.", plan.sentence(layout.n_heads, groups)]
        if applied.streams and plan.groups:
            notes.append(f"A text needs less cache than the original from {smaller_from(plan, model):,.0f} tokens on.")
        else:
            notes.append("The plan frees no cache, so the model keeps all keys and values.")
        return cls(model, tokenizer, layout, (), (), notes=(*notes, NOT_MEASURED))

    def write(self, request: RunRequest, out: Path, tell: Tell, stop: Callable[[], bool]) -> Written:
        """Generate: ``begin`` is told once, ``step`` for every token, with the bytes of the cache after it."""
        ids = prompt_ids(self.tokenizer, request.prompt, None)
        tell("begin", {"promptTokens": len(ids), "steps": request.max_new_tokens})
        sampling: dict[str, Any] = (
            {} if request.temperature is None else {"seed": request.seed, "temperature": request.temperature}
        )
        made = generate(
            self.model,
            self.tokenizer,
            None,
            request.prompt,
            request.max_new_tokens,
            listener=_Listener(self.tokenizer, tell),
            stop=stop,
            **sampling,
        )
        return Written(len(made.token_ids[0]), saved=False, at_end=lambda whole: {"sentence": made.sentence()})


class _Listener:
    """Makes events of steps; holds the text so far."""

    def __init__(self, tokenizer: Any, tell: Tell) -> None:
        self._tokenizer, self._tell = tokenizer, tell
        self._ids: list[int] = []
        self._text = ""

    def __call__(self, step: GenerationStep) -> None:
        self._ids.append(step.token_ids[0])
        text = str(self._tokenizer.decode(self._ids, skip_special_tokens=True))
        # A token may complete a character that the ones before began: from there on the text is new.
        pairs = zip(text, self._text, strict=False)
        same = next((i for i, (new, old) in enumerate(pairs) if new != old), min(len(text), len(self._text)))
        self._text = text
        self._tell(
            "step",
            {
                "step": step.index,
                "from": same,
                "text": text[same:],
                "seconds": round(step.seconds, 6),
                "bytes": step.cache_bytes,
                "original": step.original_bytes,
            },
        )
