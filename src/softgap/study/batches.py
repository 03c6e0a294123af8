"""The batches of a study: which samples go together, and how one is measured and stored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from softgap import probe
from softgap.errors import SoftgapError, StoreError, ValueInputError
from softgap.inputs import as_items
from softgap.models.fingerprint import live_options, replay_options
from softgap.probe import Interrupted
from softgap.probe.capture import check_lengths, check_temperature
from softgap.probe.prompts import completion_ids, prompt_ids
from softgap.progress import Progress, silent
from softgap.tasks import Prompt, Scorer
from softgap.tasks.sources import BATCH, PROMPTS, UNPLANNED
from softgap.trajectories import NonFinite, Trajectories
from softgap.trajectories.folder import Folder, json_lines, read_lines

if TYPE_CHECKING:
    from softgap.models.loading import Loaded
    from softgap.models.placement import DeviceMap, MaxMemory
    from softgap.probe import Step

__all__ = [
    "Batch",
    "BatchResult",
    "Failure",
    "FinishedBatch",
    "Mode",
    "Observer",
    "StudySettings",
    "measure_batch",
    "plan_batches",
    "plan_singles",
    "read_failures",
    "token_count",
    "write_failures",
    "write_prompts",
]


Mode = Literal["study", "live", "replay"]


"""What a manifest calls a measurement: a resumable study, generations, or texts that are read."""


@dataclass(frozen=True)
class Batch:
    """Samples that are computed together.

    ``indices`` are those of the study's prompts, ``seed`` is for sampling, ``replay`` for texts that are read: a
    completion after its prompt, or a prompt without one as it stands.
    """

    number: int
    indices: tuple[int, ...]
    seed: int
    replay: bool


def plan_batches(lengths: Sequence[int], replay: Sequence[bool], batch_size: int, seed: int) -> tuple[Batch, ...]:
    """Batches of neighbours in length, so that little is padded; the longest come first.

    A machine too small for a study says so in the first minute and not in the last. Prompts that are read and prompts
    that are answered are never in one batch; of equal lengths, the first given comes first.
    """
    batches: list[Batch] = []
    for kind in (False, True):
        order = sorted((i for i in range(len(lengths)) if replay[i] == kind), key=lambda i: (-lengths[i], i))
        for start in range(0, len(order), batch_size):
            number = len(batches)
            batches.append(Batch(number, tuple(order[start : start + batch_size]), batch_seed(seed, number), kind))
    return tuple(batches)


def plan_singles(count: int, replay: bool, seed: int) -> tuple[Batch, ...]:
    """One batch per sample, in the order given and with the seed itself: a run is a study with one sample."""
    return tuple(Batch(number, (number,), seed, replay) for number in range(count))


def batch_seed(seed: int, number: int) -> int:
    """A seed of 32 bits for a batch of a study."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big")


@dataclass(frozen=True)
class StudySettings:
    """How prompts are measured.

    Attributes
    ----------
    model, dtype, device, device_map, max_memory, quantise, attn
        As ``softgap.load_model`` takes them.
    mechanisms
        None for the defaults of the model.
    max_new_tokens, chat, seed, temperature
        Of generations; with a seed or a temperature the model samples, each batch with a seed of its own. ``chat`` is
        None for the template where there is one.
    batch_size
        Samples that are computed together.
    scoring
        How answers are judged, by name or import path; None leaves the labels of the prompts.
    keep_prompt
        Whether the prompt's own steps are stored too.
    threads
        Of torch; None takes what it is set to. On a cluster every worker uses as many.
    """

    model: str | None = None
    mechanisms: tuple[str, ...] | None = None
    max_new_tokens: int = 128
    batch_size: int = 8
    chat: bool | None = None
    seed: int | None = None
    temperature: float | None = None
    scoring: str | None = None
    focus: bool = False
    drop_sinks: int = 0
    keep_prompt: bool = True
    dtype: str = "auto"
    device: str = "cpu"
    device_map: DeviceMap | None = None
    max_memory: MaxMemory | None = None
    quantise: str | None = None
    attn: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.mechanisms is not None:
            object.__setattr__(self, "mechanisms", as_items(self.mechanisms))
        for name in ("max_new_tokens", "batch_size", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueInputError(f"{name} must be at least 1, got {value}")
        if self.temperature is not None:
            check_temperature(self.temperature)

    @property
    def sampling(self) -> dict[str, Any]:
        """What a generation is told about sampling."""
        if self.seed is None and self.temperature is None:
            return {"do_sample": False}
        return {"do_sample": True, **({} if self.temperature is None else {"temperature": self.temperature})}

    @property
    def recorded(self) -> dict[str, Any]:
        """What a measurement is told."""
        if self.mechanisms is None:
            raise ValueInputError("a study must name its mechanisms before it is measured, got None")
        return {"mechanisms": self.mechanisms, "focus": self.focus, "drop_sinks": self.drop_sinks}

    def load(self) -> Loaded:
        """The model and its tokenizer."""
        from softgap.models import load_model

        return load_model(
            self.model,
            dtype=self.dtype,
            device=self.device,
            device_map=self.device_map,
            max_memory=self.max_memory,
            quantise=self.quantise,
            attn=self.attn,
        )

    def options(self, loaded: Loaded, mode: Mode) -> dict[str, Any]:
        """For the manifest: all that the data depend on."""
        if mode == "replay":
            return replay_options(chat=bool(self.chat), focus=self.focus)
        generation = live_options(
            loaded[0],
            max_new_tokens=self.max_new_tokens,
            chat=bool(self.chat),
            focus=self.focus,
            settings=self.sampling,
        )
        if mode == "live":
            return generation
        batches = {"batch_size": self.batch_size, "scoring": self.scoring, "keep_prompt": self.keep_prompt}
        return {**generation, "mode": "study", **batches}


@dataclass(frozen=True)
class Observer:
    """Who follows a measurement.

    Attributes
    ----------
    on_step
        Called with each step while the model writes.
    stop
        Asked after every token; once it says True the generation ends there.
    on_run
        Called with each run after it was written.
    on_progress
        Called with the stage and the share of samples that are done.
    """

    on_step: Callable[[Step], None] | None = None
    stop: Callable[[], bool] | None = None
    on_run: Callable[[Trajectories], None] | None = None
    on_progress: Progress = silent


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
class BatchResult:
    """What came of a batch."""

    runs: tuple[Trajectories, ...]
    failures: tuple[Failure, ...]

    @property
    def non_finite(self) -> NonFinite:
        """How many of its numbers are not finite."""
        return sum((run.non_finite for run in self.runs), NonFinite())


@dataclass(frozen=True)
class FinishedBatch:
    """A batch that is in the study.

    Attributes
    ----------
    ids
        Names of its samples.
    non_finite
        How many of its numbers are not finite; None for a batch that an earlier worker had published.
    """

    number: int
    ids: tuple[str, ...]
    non_finite: NonFinite | None


def token_count(loaded: Loaded, prompt: Prompt, settings: StudySettings, *, replay: bool) -> int:
    """Tokens that are fed for a prompt, new ones aside; an error where the model's context does not hold it all."""
    model, tokenizer = loaded
    ids = prompt_ids(tokenizer, prompt.prompt, settings.chat)
    if replay and prompt.completion is not None:
        ids = [*ids, *completion_ids(tokenizer, prompt.completion)[:-1]]
    check_lengths(model, [ids], 0 if replay else settings.max_new_tokens)
    embedding: Any = model.get_input_embeddings()
    rows = int(embedding.weight.shape[0])
    if ids and max(ids) >= rows:
        raise ValueInputError(
            f"a tokenizer must fit its model, whose vocabulary has {rows:,} tokens, got the token {max(ids):,}; load "
            "the tokenizer that the model was trained with"
        )
    return len(ids)


def measure_batch(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    batch: Batch,
    settings: StudySettings,
    scorer: Scorer | None,
    *,
    observer: Observer | None = None,
    strict: bool = False,
) -> BatchResult:
    """Measure the samples of a batch together, or one by one if that fails: then only the culprits are left out.

    Parameters
    ----------
    strict
        Raise what goes wrong, rather than record it as a failure of its sample.
    """
    members = [prompts[i] for i in batch.indices]
    try:
        runs = _runs(loaded, members, batch, settings, observer or Observer())
        return _score_answers(members, runs, scorer, settings)
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        if strict:
            raise
        if len(members) == 1 and _out_of_memory(error):
            raise MemoryError(str(error)) from None
        if len(members) == 1:
            return BatchResult((), (Failure(members[0].sample_id, "measuring", _reason(error)),))
    singles = [replace(batch, indices=(i,)) for i in batch.indices]
    parts = [measure_batch(loaded, prompts, single, settings, scorer) for single in singles]
    return BatchResult(
        tuple(run for part in parts for run in part.runs), tuple(failure for part in parts for failure in part.failures)
    )


def _runs(
    loaded: Loaded, members: Sequence[Prompt], batch: Batch, settings: StudySettings, observer: Observer
) -> list[Trajectories]:
    texts = [prompt.prompt for prompt in members]
    if batch.replay:
        completions = [prompt.completion for prompt in members if prompt.completion is not None] or None
        return probe.read(*loaded, texts, completions, chat=bool(settings.chat), **settings.recorded)
    sampling = settings.sampling
    seed = batch.seed if sampling["do_sample"] else None
    options = {"chat": settings.chat, "seed": seed, **settings.recorded, **sampling}
    options |= {"listener": observer.on_step, "stop": observer.stop}
    try:
        return probe.generate(*loaded, texts, settings.max_new_tokens, **options)
    except Interrupted as stop:
        named = [_stored_run(run, prompt, settings) for run, prompt in zip(stop.runs, members, strict=False)]
        raise Interrupted(named) from None


def _score_answers(
    members: Sequence[Prompt], runs: Sequence[Trajectories], scorer: Scorer | None, settings: StudySettings
) -> BatchResult:
    scored, failures = [], []
    for prompt, run in zip(members, runs, strict=True):
        named = _stored_run(run, prompt, settings)
        if scorer is not None:
            label = prompt.label
            try:
                label = scorer.judge(run.completion_text, prompt)
            except MemoryError:  # of the machine, and no fault of the sample
                raise
            except Exception as error:
                failures.append(Failure(prompt.sample_id, "scoring", _reason(error)))
            named = replace(named, label=label)
        scored.append(named)
    return BatchResult(tuple(scored), tuple(failures))


def _stored_run(run: Trajectories, prompt: Prompt, settings: StudySettings) -> Trajectories:
    """The run as the study stores it."""
    prompt_steps = run.prompt if settings.keep_prompt else None
    return replace(run, sample_id=prompt.sample_id, label=prompt.label, prompt=prompt_steps)


def _out_of_memory(error: Exception) -> bool:
    """Whether torch could not allocate: no fault of the sample, which a larger machine can measure."""
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _reason(error: Exception) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if isinstance(error, SoftgapError) else f"{type(error).__name__}: {line}"


_FAILURES = "failures"


def write_prompts(folder: Folder, prompts: Sequence[Prompt], batches: Sequence[Batch]) -> None:
    """Write down what is asked and which samples go together, before the first is measured."""
    number = {i: batch.number for batch in batches for i in batch.indices}
    lines = [{**prompt.to_json(), BATCH: number.get(i, UNPLANNED)} for i, prompt in enumerate(prompts)]
    folder.replace(PROMPTS, json_lines(lines))


def write_failures(folder: Folder, batch: int, failures: Sequence[Failure]) -> None:
    """Write the failures of a batch, if there are any; before the batch itself, so that none is ever lost."""
    if failures:
        folder.create(_FAILURES)
        folder.replace(_failures(batch), json_lines([failure.to_json() for failure in failures]))


def read_failures(folder: Folder) -> list[Failure]:
    """All failures of a study, by batch."""
    names = [name for name in folder.names(_FAILURES) if name.startswith("part-")]
    try:
        return [Failure(**entry) for name in names for entry in read_lines(folder, f"{_FAILURES}/{name}")]
    except TypeError as error:
        raise StoreError(
            f"{_FAILURES} in '{folder.address}' is damaged ({error}); restore the folder from a copy"
        ) from error


def _failures(batch: int) -> str:
    return f"{_FAILURES}/part-{'none' if batch == UNPLANNED else f'{batch:05d}'}.jsonl"
