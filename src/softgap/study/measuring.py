"""One batch measured: the same on this machine and on a worker of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from softgap.errors import SoftgapError
from softgap.probe import Interrupted, generate, read
from softgap.probe.text_ids import check_lengths, completion_ids, prompt_ids
from softgap.study.batches import Batch
from softgap.study.settings import StudySettings
from softgap.tasks import Prompt, Scorer
from softgap.trajectories import Trajectories

if TYPE_CHECKING:
    from softgap.probe.models import Loaded

__all__ = ["Failure", "Measured", "measure_batch", "token_count"]


@dataclass(frozen=True)
class Failure:
    """Why a sample is missing (``measuring``) or has no label (``scoring``)."""

    sample_id: str
    stage: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Measured:
    """What came of a batch."""

    runs: tuple[Trajectories, ...]
    failures: tuple[Failure, ...]


def token_count(loaded: Loaded, prompt: Prompt, settings: StudySettings) -> int:
    """Tokens that are fed for a prompt, new ones aside; an error where the model's context does not hold it all."""
    model, tokenizer = loaded
    ids = prompt_ids(tokenizer, prompt.prompt, settings.chat)
    if prompt.completion is not None:
        ids = [*ids, *completion_ids(tokenizer, prompt.completion)[:-1]]
    check_lengths(model, [ids], 0 if prompt.completion is not None else settings.max_new_tokens)
    return len(ids)


def measure_batch(
    loaded: Loaded, prompts: Sequence[Prompt], batch: Batch, settings: StudySettings, scorer: Scorer | None
) -> Measured:
    """Measure the samples of a batch together, or one by one if that fails: then only the culprits are left out."""
    chosen = [prompts[i] for i in batch.indices]
    try:
        return _judged(chosen, _runs(loaded, chosen, batch, settings), scorer, settings)
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        if len(chosen) == 1:
            return Measured((), (Failure(chosen[0].sample_id, "measuring", _reason(error)),))
    alone = [replace(batch, indices=(i,)) for i in batch.indices]
    parts = [measure_batch(loaded, prompts, one, settings, scorer) for one in alone]
    return Measured(
        tuple(run for part in parts for run in part.runs), tuple(failure for part in parts for failure in part.failures)
    )


def _runs(loaded: Loaded, chosen: Sequence[Prompt], batch: Batch, settings: StudySettings) -> list[Trajectories]:
    texts = [prompt.prompt for prompt in chosen]
    if batch.replay:
        completions = [prompt.completion or "" for prompt in chosen]
        return read(*loaded, texts, completions, chat=bool(settings.chat), **settings.recorded)
    sampling = settings.sampling
    seed = batch.seed if sampling["do_sample"] else None
    options = {"chat": settings.chat, "seed": seed, **settings.recorded, **sampling}
    try:
        return generate(*loaded, texts, settings.max_new_tokens, **options)
    except Interrupted as stop:  # half a batch is no batch: it is measured again on resume
        raise KeyboardInterrupt(str(stop)) from None


def _judged(
    chosen: Sequence[Prompt], runs: Sequence[Trajectories], scorer: Scorer | None, settings: StudySettings
) -> Measured:
    named, failures = [], []
    for prompt, run in zip(chosen, runs, strict=True):
        label = prompt.label
        if scorer is not None:
            try:
                label = scorer.judge(run.completion_text, prompt)
            except Exception as error:
                failures.append(Failure(prompt.sample_id, "scoring", _reason(error)))
        kept = run.prompt if settings.keep_prompt else None
        named.append(replace(run, sample_id=prompt.sample_id, label=label, prompt=kept))
    return Measured(tuple(named), tuple(failures))


def _reason(error: Exception) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if isinstance(error, SoftgapError) else f"{type(error).__name__}: {line}"
