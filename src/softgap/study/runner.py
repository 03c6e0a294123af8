"""Run a study of many prompts in fixed batches, resume it, or estimate its cost."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from softgap.errors import SoftgapError, StoreError, unknown_name
from softgap.inputs import refuse_string
from softgap.models.calibrations import default_mechanisms
from softgap.models.fingerprint import manifest_of
from softgap.models.verbosity import quiet_transformers
from softgap.probe import Recording
from softgap.progress import Progress, silent
from softgap.study.files import read_failures, write_failures, write_prompts
from softgap.study.measurement import Batch, Failure, Measured, StudySettings, measure_batch, plan_batches, token_count
from softgap.tasks import Prompt, Scorer, resolve_scorer
from softgap.tasks.prompts import check_ids
from softgap.tasks.stored import PROMPTS, UNPLANNED, stored_prompts
from softgap.trajectories import QUANTITIES, Manifest, StudyWriter
from softgap.trajectories.folder import Folder
from softgap.trajectories.writer import check_new_study, publish_batch

if TYPE_CHECKING:
    from softgap.models.loading import Loaded

__all__ = ["ENGINES", "Estimate", "Planned", "StudyResult", "estimate_study", "plan_study", "run_study"]


ENGINES = ("local", "ray")


"""Where batches are computed."""


@dataclass(frozen=True, eq=False)
class Planned:
    """A study that is ready to run: everything that can be refused has been."""

    prompts: tuple[Prompt, ...]
    batches: tuple[Batch, ...]
    lengths: tuple[int, ...]
    unmeasurable: tuple[Failure, ...]
    settings: StudySettings
    manifest: Manifest
    scorer: Scorer | None


@dataclass(frozen=True)
class StudyResult:
    """What a call of :func:`run_study` has done.

    ``measured`` samples of ``samples`` are in the study, of which ``resumed`` were there before.
    """

    out: str
    samples: int
    measured: int
    resumed: int
    failures: tuple[Failure, ...]
    seconds: float


def run_study(
    prompts: Sequence[Prompt],
    out: str,
    settings: StudySettings | None = None,
    *,
    engine: str = "local",
    address: str | None = None,
    progress: Progress | None = None,
) -> StudyResult:
    """Measure every prompt and write the study to ``out``, a folder or URI.

    Called again with the same arguments it goes on where it stopped, and the finished study equals an unbroken one, the
    times in its manifest aside.

    Parameters
    ----------
    prompts
        Each is answered by the model, or read where it has a completion.
    engine
        "local", or "ray": the same batches as tasks of a Ray cluster.
    address
        Of the Ray cluster; None joins the one that is running, or starts one on this machine.
    progress
        Called with the stage and the share of samples that are done.
    """
    refuse_string("prompts", prompts, "softgap.tasks.Prompt objects")
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    if engine == "ray":
        from softgap.study.ray_engine import require_ray

        require_ray()
    folder = Folder.at(out)
    check_new_study(folder)
    given = settings or StudySettings()
    with ExitStack() as stack:
        stack.enter_context(_threads(given.threads))
        loaded = given.load()
        stack.enter_context(quiet_transformers(downloads=False))
        planned = plan_study(prompts, loaded, given)
        writer = stack.enter_context(_Withdrawing(out, planned.manifest))
        batches = _fixed(folder, planned)
        left = [batch for batch in batches if batch.number not in writer.batches]
        resumed = sum(len(batch.indices) for batch in batches) - sum(len(batch.indices) for batch in left)
        if engine == "ray":
            from softgap.study.ray_engine import ray_batches

            done = ray_batches(planned, left, out, address)
        else:
            done = _local_batches(planned, left, folder, loaded)
        seconds = _followed(done, writer, resumed, sum(len(batch.indices) for batch in batches), progress or silent)
        measured = sum(len(ids) for ids in writer.ids.values())
    return StudyResult(out, len(prompts), measured, resumed, tuple(read_failures(folder)), seconds)


def plan_study(prompts: Sequence[Prompt], loaded: Loaded, settings: StudySettings) -> Planned:
    """Settle what depends on the model, count tokens, and decide on the batches."""
    check_ids(prompts, "the prompts")
    scorer = None if settings.scoring is None else resolve_scorer(settings.scoring)
    if scorer is not None:
        scorer.check(prompts, "the prompts")
    mechanisms = settings.mechanisms or default_mechanisms(loaded[0])
    chat = bool(getattr(loaded[1], "chat_template", None)) if settings.chat is None else settings.chat
    settled = replace(settings, mechanisms=mechanisms, chat=chat, threads=torch.get_num_threads())
    lengths, failures = [], []
    for prompt in prompts:
        try:
            lengths.append(token_count(loaded, prompt, settled))
        except SoftgapError as error:
            lengths.append(0)
            failures.append(Failure(prompt.sample_id, "measuring", str(error)))
    if len(failures) == len(prompts):
        raise SoftgapError(f"a study needs prompts that the model can read, got none; the first: {failures[0].reason}")
    failed = {failure.sample_id for failure in failures}
    fit = [i for i, prompt in enumerate(prompts) if prompt.sample_id not in failed]
    cut = plan_batches(
        [lengths[i] for i in fit],
        [prompts[i].completion is not None for i in fit],
        settings.batch_size,
        settings.seed or 0,
    )
    batches = tuple(replace(batch, indices=tuple(fit[i] for i in batch.indices)) for batch in cut)
    manifest = manifest_of(
        loaded[0],
        Recording(loaded[0], mechanisms).mechanisms,
        drop_sinks=settings.drop_sinks,
        seed=settings.seed,
        inputs=_digest(prompts),
        options=settled.options(loaded),
    )
    return Planned(tuple(prompts), batches, tuple(lengths), tuple(failures), settled, manifest, scorer)


def _local_batches(
    planned: Planned, left: Sequence[Batch], folder: Folder, loaded: Loaded
) -> Iterator[tuple[int, tuple[str, ...]]]:
    for batch in left:
        found = measure_batch(loaded, planned.prompts, batch, planned.settings, planned.scorer)
        yield batch.number, written(folder, batch.number, found)


def written(folder: Folder, number: int, found: Measured) -> tuple[str, ...]:
    """Publish a batch with its failures, and return the names of its samples."""
    write_failures(folder, number, found.failures)
    publish_batch(folder, number, found.runs)
    return tuple(run.sample_id for run in found.runs)


def _followed(
    done: Iterator[tuple[int, tuple[str, ...]]], writer: StudyWriter, before: int, total: int, progress: Progress
) -> float:
    start, count = time.monotonic(), before
    progress("measuring", count / max(total, 1))
    try:
        for number, ids in done:
            writer.adopt(number, ids)
            count += len(ids)
            progress("measuring", count / max(total, 1))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; {count} of {total} samples are done, and the same command goes on from there"
        ) from None
    return time.monotonic() - start


def _fixed(folder: Folder, planned: Planned) -> tuple[Batch, ...]:
    """The batches as they were written down; those of this plan where nothing was yet."""
    stored = stored_prompts(folder)
    if stored is None:
        write_failures(folder, UNPLANNED, planned.unmeasurable)
        write_prompts(folder, planned.prompts, planned.batches)
        return planned.batches
    for batch in planned.batches:
        ids = [planned.prompts[i].sample_id for i in batch.indices]
        if any(stored.get(sample_id, (None, None))[1] != batch.number for sample_id in ids):
            raise StoreError(
                f"{PROMPTS} in '{folder.given}' puts sample '{ids[0]}' into another batch than this softgap would; "
                "finish the study with the version that began it, or choose another folder"
            )
    return planned.batches


class _Withdrawing(StudyWriter):
    """A resuming writer that also takes back the prompts of a study that never got a batch."""

    def __init__(self, out: str, manifest: Manifest) -> None:
        super().__init__(out, manifest, resume=True)

    def _withdraw(self) -> None:
        self._folder.discard(PROMPTS)
        for name in self._folder.names("failures"):
            self._folder.discard(f"failures/{name}")
        self._folder.discard_empty([self._folder.path("failures")])
        super()._withdraw()


def _digest(prompts: Sequence[Prompt]) -> str:
    lines = [json.dumps(prompt.to_json(), sort_keys=True, ensure_ascii=False) for prompt in prompts]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class _threads:
    """Torch with so many threads in the block; None leaves them."""

    def __init__(self, count: int | None) -> None:
        self._count, self._before = count, torch.get_num_threads()

    def __enter__(self) -> None:
        if self._count is not None:
            torch.set_num_threads(self._count)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


_SHORT, _LONG = 2, 8


@dataclass(frozen=True)
class Estimate:
    """Seconds and bytes at most: answers that end early cost less, and stored numbers are compressed."""

    samples: int
    unmeasurable: int
    batches: int
    prompt_tokens: int
    new_tokens: int
    seconds: float
    bytes: int


def estimate_study(planned: Planned, loaded: Loaded) -> Estimate:
    """Time the middle batch, and scale by tokens: those that are fed at once and those that come one by one."""
    settings, batches = planned.settings, planned.batches
    middle = batches[len(batches) // 2]
    fed = sum(planned.lengths)
    live = [batch for batch in batches if not batch.replay]
    longest = min(_LONG, settings.max_new_tokens)
    shortest = min(_SHORT, longest)
    here = sum(planned.lengths[i] for i in middle.indices)

    def seconds(new: int) -> float:
        start = time.perf_counter()
        measure_batch(loaded, planned.prompts, middle, replace(settings, max_new_tokens=new), None)
        return time.perf_counter() - start

    seconds(shortest)  # the first call of a model is slower than the others
    short = seconds(shortest)
    step = max(0.0, seconds(longest) - short) / max(1, longest - shortest) if live and longest > shortest else 0.0
    feeding = max(0.0, short - shortest * step) / max(1, here)
    samples = sum(len(batch.indices) for batch in batches)
    new = settings.max_new_tokens * sum(len(batch.indices) for batch in live)
    config = loaded[0].config.get_text_config()
    heads = config.num_hidden_layers * config.num_attention_heads
    stored = (fed if settings.keep_prompt else 0) + new
    return Estimate(
        samples=samples,
        unmeasurable=len(planned.unmeasurable),
        batches=len(batches),
        prompt_tokens=fed,
        new_tokens=new,
        seconds=feeding * fed + step * settings.max_new_tokens * len(live),
        bytes=stored * heads * len(settings.mechanisms or ()) * len(QUANTITIES) * 4,
    )
