"""Measure prompts or texts and write them as a study: one function for `run`, `read`, `study` and the live server."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from softgap.attention import Mechanism, resolve
from softgap.cluster import ENGINES, ClusterLimits, check_engine, refuse_on_worker
from softgap.errors import SoftgapError, StoreError, ValueInputError
from softgap.inputs import refuse_string
from softgap.models.fingerprint import manifest_of
from softgap.models.loading import quiet_transformers
from softgap.models.tensor_files import DEFAULT_MECHANISMS, default_mechanisms, load_calibration
from softgap.probe import Interrupted, Recording, run_anatomy
from softgap.probe.anatomy import check_heads
from softgap.progress import Progress, silent
from softgap.study.batches import (
    Batch,
    BatchResult,
    Failure,
    FinishedBatch,
    Mode,
    Observer,
    StudySettings,
    measure_batch,
    plan_batches,
    plan_singles,
    read_failures,
    token_count,
    write_failures,
    write_prompts,
)
from softgap.tasks import Prompt, Scorer, resolve_scorer
from softgap.tasks.prompts import check_ids
from softgap.tasks.sources import PROMPTS, UNPLANNED, stored_prompts
from softgap.trajectories import Manifest, NonFinite, StudyWriter, inputs_digest, open_study
from softgap.trajectories.folder import Folder
from softgap.trajectories.locks import locked
from softgap.trajectories.reader import accept_edited, refuse_edited
from softgap.trajectories.writer import check_new_study, check_target

if TYPE_CHECKING:
    from softgap.models.loading import Loaded

__all__ = [
    "ENGINES",
    "Planned",
    "StudyResult",
    "check_mechanisms",
    "check_run",
    "measure",
    "plan_study",
    "run_study",
    "torch_threads",
]


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
    mode: Mode = "study"


@dataclass(frozen=True)
class StudyResult:
    """What a call of ``run_study`` has done.

    ``measured`` samples of ``samples`` are in the study, of which ``resumed`` were there before. ``non_finite`` counts
    the numbers of the whole study that are not finite.
    """

    out: str
    samples: int
    measured: int
    resumed: int
    failures: tuple[Failure, ...]
    seconds: float
    non_finite: NonFinite = field(default_factory=NonFinite)


def run_study(
    prompts: Sequence[Prompt],
    out: str,
    settings: StudySettings | None = None,
    *,
    engine: str = "local",
    address: str | None = None,
    limits: ClusterLimits | None = None,
    progress: Progress | None = None,
) -> StudyResult:
    """Measure every prompt and write the study to ``out``, a folder or URI.

    Called again with the same arguments it goes on where it stopped, and the finished study equals an unbroken one, the
    times in its manifest aside.

    Parameters
    ----------
    prompts
        Each is answered by the model, or read where it has a completion.
    out
        A folder or URI.
    settings
        The model, the mechanisms, and all else that the numbers depend on; None takes the defaults.
    engine
        "local", or "ray": the same batches as tasks of a Ray cluster.
    address
        Of the Ray cluster; None joins the one that is running, or starts one on this machine.
    limits
        How many workers there may be, and how much memory each may take.
    progress
        Called with the stage and the share of samples that are done.

    Returns
    -------
    StudyResult
        How many samples were measured, resumed and failed.

    Examples
    --------
    ``tiny-llama`` is a folder with a small random model:

    >>> import softgap
    >>> from softgap.study import StudySettings, run_study
    >>> from softgap.tasks import Prompt
    >>> prompts = [Prompt(f"count-{n}", f"Count to {n}.") for n in (3, 5)]
    >>> settings = StudySettings(model="./tiny-llama", mechanisms=("elu1",), max_new_tokens=4)
    >>> result = run_study(prompts, "runs/two", settings)
    >>> result.measured, result.failures
    (2, ())
    >>> run_study(prompts, "runs/two", settings).resumed
    2
    """
    observer = Observer(on_progress=progress or silent)
    return measure(
        prompts, out, settings or StudySettings(), engine=engine, address=address, limits=limits, observer=observer
    )


def measure(
    prompts: Sequence[Prompt],
    out: str,
    settings: StudySettings,
    *,
    mode: Mode = "study",
    loaded: Loaded | None = None,
    source: str = "",
    overwrite: bool = False,
    reserve: bool = True,
    engine: str = "local",
    address: str | None = None,
    limits: ClusterLimits | None = None,
    anatomy: Sequence[tuple[int, int]] = (),
    observer: Observer | None = None,
) -> StudyResult:
    """Measure prompts or texts and write them as a study to ``out``, a folder or URI.

    Parameters
    ----------
    prompts
        Each is answered by the model, or read where it has a completion.
    out
        A folder or URI.
    settings
        The model, the mechanisms, and all else that the numbers depend on.
    mode
        "study" measures in batches, records what fails, and resumes the study that is there. "live" lets the model
        answer every prompt, "replay" reads every prompt with its completion, or as it stands without one; both measure
        one sample after the other and raise the first error.
    loaded
        The model and its tokenizer; None loads what the settings name.
    source
        The file that the prompts come from, for messages about one of its lines.
    overwrite
        Replace the study that is there, if it asks the same question; not for a study that resumes.
    reserve
        Whether the folder is there before the first sample is measured, or only once that sample can be written; a
        study is always there before.
    engine, address, limits
        As ``run_study`` takes them, for a study.
    anatomy
        Heads, as layer and head, whose attended keys are stored for every sample; each text is read once more for
        them. Not for a study.
    observer
        Follows the measurement: steps, finished runs and progress.

    Returns
    -------
    StudyResult
        How many samples were measured, resumed and failed.

    Examples
    --------
    ``tiny-llama`` is a folder with a small random model:

    >>> import softgap
    >>> from softgap.study import StudySettings, measure
    >>> from softgap.tasks import Prompt
    >>> settings = StudySettings(model="./tiny-llama", mechanisms=("elu1",), max_new_tokens=4)
    >>> measure([Prompt("fox", "A fox went out.")], "runs/one", settings, mode="live").measured
    1
    >>> softgap.load("runs/one").n_steps
    4
    """
    refuse_string("prompts", prompts, "softgap.tasks.Prompt objects")
    refuse_on_worker("a study")
    check_engine(engine)
    if engine == "ray" and mode != "study":
        raise ValueInputError(f"the engine 'ray' measures studies, got the mode '{mode}'; use the engine 'local'")
    if anatomy and mode == "study":
        raise ValueInputError("the anatomy of heads is stored for single runs, got the mode 'study'; leave anatomy out")
    folder = Folder.at(out)
    if mode == "study":
        check_new_study(folder)
    observer = observer or Observer()
    with ExitStack() as stack:
        stack.enter_context(torch_threads(settings.threads))
        loaded = settings.load() if loaded is None else loaded
        stack.enter_context(quiet_transformers(downloads=False))
        planned = plan_study(prompts, loaded, settings, mode=mode, source=source)
        if anatomy:
            check_heads(loaded[0], anatomy)
        done: set[int] = set()
        measured = _measure_batches(planned, loaded, done, observer)
        if not reserve and mode != "study":
            measured = chain([next(measured)], measured)
        writer = stack.enter_context(_open_writer(out, planned, overwrite))
        if mode == "study":
            _fix_batches(writer.folder, planned)
            writer.seal()
        done.update(writer.batches)
        total = sum(len(batch.indices) for batch in planned.batches)
        resumed = sum(len(batch.indices) for batch in planned.batches if batch.number in done)
        if engine == "ray":
            from softgap.study.ray_engine import ray_batches

            left = [batch for batch in planned.batches if batch.number not in done]
            finished = ray_batches(planned, left, out, address, limits, lease=writer.lease)
        else:
            finished = _write_batches(measured, writer, observer)
            if anatomy:
                finished = _with_anatomy(finished, writer, loaded, planned, anatomy, observer)
        seconds, counts = _follow(finished, writer, out, planned, resumed, total, observer)
        count = sum(len(ids) for ids in writer.ids.values())
    if counts is None:
        counts = sum((run.non_finite for run in open_study(out)), NonFinite())
    return StudyResult(out, len(prompts), count, resumed, tuple(read_failures(folder)), seconds, counts)


def plan_study(
    prompts: Sequence[Prompt], loaded: Loaded, settings: StudySettings, *, mode: Mode = "study", source: str = ""
) -> Planned:
    """Settle what depends on the model, count tokens, and decide on the batches and the manifest."""
    check_ids(prompts, source or "the prompts")
    scorer = None if settings.scoring is None else resolve_scorer(settings.scoring)
    if scorer is not None:
        scorer.check(prompts, source or "the prompts")
    mechanisms = settings.mechanisms or default_mechanisms(loaded[0])
    recording = Recording(loaded[0], mechanisms)  # refuses a mechanism that this model has no parameters for
    chat = bool(getattr(loaded[1], "chat_template", None)) if settings.chat is None else settings.chat
    settled = replace(settings, mechanisms=mechanisms, chat=chat, threads=torch.get_num_threads())
    replay = [mode == "replay" or (mode == "study" and prompt.completion is not None) for prompt in prompts]
    lengths, failures = [], []
    for prompt, reads in zip(prompts, replay, strict=True):
        try:
            lengths.append(token_count(loaded, prompt, settled, replay=reads))
        except SoftgapError as error:
            if mode != "study":
                if not source:
                    raise
                raise ValueInputError(f"{source}, line {prompt.line}: {error}") from error
            lengths.append(0)
            failures.append(Failure(prompt.sample_id, "measuring", str(error)))
    if len(failures) == len(prompts):
        raise SoftgapError(
            f"a study needs a prompt that the model can read, got none; the first one: {failures[0].reason}"
        )
    if mode == "study":
        batches = _batches_that_fit(prompts, lengths, replay, failures, settings)
    else:
        batches = plan_singles(len(prompts), mode == "replay", settings.seed or 0)
    manifest = manifest_of(
        loaded[0],
        recording.mechanisms,
        drop_sinks=settings.drop_sinks,
        seed=settings.seed,
        inputs=_digest(prompts, mode),
        options=settled.options(loaded, mode),
    )
    return Planned(tuple(prompts), batches, tuple(lengths), tuple(failures), settled, manifest, scorer, mode)


def check_run(
    prompts: Sequence[Prompt], out: str, settings: StudySettings, *, mode: Mode, overwrite: bool = False
) -> None:
    """Refuse, without loading a model, unknown mechanisms and a folder that cannot take these runs.

    The folder is tried by writing to it, and left as it was.
    """
    mechanisms = check_mechanisms(settings.mechanisms)
    folder = Folder.at(out)
    has_study = folder.kind() == "folder" and folder.kind("manifest.json") == "file"
    with accept_edited() if overwrite else nullcontext():  # what is replaced may have been edited
        stored = open_study(out).manifest if has_study else Manifest()
    # A model may set options of a mechanism, so before it is loaded only the names can be compared; by default it may
    # also bring those of its calibration.
    names = tuple(mechanism.label for mechanism in mechanisms)
    stored_names = tuple(stored.mechanisms)
    same = stored_names == names or (
        settings.mechanisms is None and stored_names[: len(names) + 1] == (*names, "fitted")
    )
    # The manifest as far as it is known without a model; the rest is that of the study that is there.
    expected = replace(
        stored,
        mechanisms=stored.mechanisms
        if same
        else {mechanism.label: dict(mechanism.options) for mechanism in mechanisms},
        seed=settings.seed,
        dropped_sinks=settings.drop_sinks,
        inputs=_digest(prompts, mode),
    )
    check_target(folder, expected, overwrite=overwrite, resume=False)
    folder.try_writing()
    with locked(folder):
        pass


def check_mechanisms(names: Sequence[str] | None) -> list[Mechanism]:
    """The mechanisms by these names, the defaults for None; a name or a calibration that is none is refused."""
    for name in names or ():
        _, sign, file = name.partition("@")
        if sign:
            load_calibration(Path(file).expanduser())
    return [resolve(name.partition("@")[0]) for name in names or DEFAULT_MECHANISMS]


def _batches_that_fit(
    prompts: Sequence[Prompt],
    lengths: Sequence[int],
    replay: Sequence[bool],
    failures: Sequence[Failure],
    settings: StudySettings,
) -> tuple[Batch, ...]:
    """The batches of a study, without the prompts that the model's context does not hold."""
    failed = {failure.sample_id for failure in failures}
    fit = [i for i, prompt in enumerate(prompts) if prompt.sample_id not in failed]
    batches = plan_batches([lengths[i] for i in fit], [replay[i] for i in fit], settings.batch_size, settings.seed or 0)
    return tuple(replace(batch, indices=tuple(fit[i] for i in batch.indices)) for batch in batches)


def _measure_batches(
    planned: Planned, loaded: Loaded, done: set[int], observer: Observer
) -> Iterator[tuple[int, BatchResult]]:
    """The number of each batch that is not done, and what was measured in it."""
    for batch in planned.batches:
        if batch.number not in done:
            yield (
                batch.number,
                measure_batch(
                    loaded,
                    planned.prompts,
                    batch,
                    planned.settings,
                    planned.scorer,
                    observer=observer,
                    strict=planned.mode != "study",
                ),
            )


def _write_batches(
    measured: Iterator[tuple[int, BatchResult]], writer: StudyWriter, observer: Observer
) -> Iterator[FinishedBatch]:
    """Write each batch with its failures."""
    for number, batch in measured:
        write_failures(writer.folder, number, batch.failures)
        writer.append(batch.runs, batch=number)
        if observer.on_run is not None:
            for run in batch.runs:
                observer.on_run(run)
        yield FinishedBatch(number, tuple(run.sample_id for run in batch.runs), batch.non_finite)


def _with_anatomy(
    finished: Iterator[FinishedBatch],
    writer: StudyWriter,
    loaded: Loaded,
    planned: Planned,
    heads: Sequence[tuple[int, int]],
    observer: Observer,
) -> Iterator[FinishedBatch]:
    """Read the text of every batch that is written once more, and store where some heads look in it."""
    for batch in finished:
        observer.on_progress("listing the keys of heads", len(writer.ids) / max(1, len(planned.batches)))
        runs = [writer.sample(sample_id) for sample_id in batch.ids]
        parts = [run_anatomy(*loaded, run, heads, planned.settings.mechanisms) for run in runs if run.n_steps]
        writer.append_anatomy([entry for part in parts for entry in part], batch=batch.number)
        yield batch


def _follow(
    finished: Iterator[FinishedBatch],
    writer: StudyWriter,
    out: str,
    planned: Planned,
    before: int,
    total: int,
    observer: Observer,
) -> tuple[float, NonFinite | None]:
    """Count the batches as they are finished; the seconds they took, and numbers that are not finite, None if unknown.

    Ctrl-C keeps what is done and says so.
    """
    start, count = time.monotonic(), before
    counts = None if before else NonFinite()
    tell = observer.on_progress
    tell("measuring", count / max(total, 1))
    try:
        for batch in finished:
            writer.adopt(batch.number, batch.ids)
            count += len(batch.ids)
            counts = None if counts is None or batch.non_finite is None else counts + batch.non_finite
            tell("measuring", count / max(total, 1))
    except KeyboardInterrupt as stop:
        place = f"are saved in '{out}'"
        partial = stop.runs if isinstance(stop, Interrupted) and planned.mode == "live" else []
        if planned.mode == "study":  # half a batch is no batch: it is measured again on resume
            message = f"; {count} of {total} samples are done; run the same command again to resume"
        elif partial:
            writer.append(partial)
            steps = sum(run.n_steps for run in partial)
            message = f"; the first {steps} tokens {place}" if steps else ""
        else:
            message = f"; {count} of {total} samples {place}" if count else ""
        raise KeyboardInterrupt(f"interrupted{message}") from None
    return time.monotonic() - start, counts


def _fix_batches(folder: Folder, planned: Planned) -> None:
    """Write down which samples go together, or refuse a study that was begun with other batches."""
    folder.discard_partial("failures")
    stored = stored_prompts(folder)
    if stored is None:
        write_failures(folder, UNPLANNED, planned.unmeasurable)
        write_prompts(folder, planned.prompts, planned.batches)
        return
    # The manifest asks the same, so that other prompts were put there by hand; a study of 0.1 has no hash to show it.
    if {name: _stored(prompt) for name, (prompt, _) in stored.items()} != {
        prompt.sample_id: _stored(prompt) for prompt in planned.prompts
    }:
        refuse_edited(folder, PROMPTS)
    for batch in planned.batches:
        ids = [planned.prompts[i].sample_id for i in batch.indices]
        if any(stored.get(sample_id, (None, None))[1] != batch.number for sample_id in ids):
            raise StoreError(
                f"{PROMPTS} in '{folder.address}' assigns sample '{ids[0]}' to a different batch than this version; "
                "finish the study with the version that started it, or choose another folder"
            )


def _stored(prompt: Prompt) -> dict[str, Any]:
    """A prompt as its file gives it back; version 0.1 lost a field of the name ``batch``."""
    given = json.loads(json.dumps(prompt.to_json()))
    return {name: value for name, value in given.items() if name != "batch"}


def _open_writer(out: str, planned: Planned, overwrite: bool) -> StudyWriter:
    if planned.mode == "study":
        return _ResumingWriter(out, planned.manifest, resume=True)
    return StudyWriter(out, planned.manifest, overwrite=overwrite)


class _ResumingWriter(StudyWriter):
    """A writer that also takes back the prompts of a study that never got a batch."""

    def _withdraw(self) -> None:
        self._folder.discard(PROMPTS)
        for name in self._folder.names("failures"):
            self._folder.discard(f"failures/{name}")
        self._folder.discard_empty([self._folder.path("failures")])
        super()._withdraw()


def _digest(prompts: Sequence[Prompt], mode: Mode) -> str:
    """A hash of all that is measured; of a study also what is known about its prompts."""
    if mode != "study":
        completions = [prompt.completion for prompt in prompts if prompt.completion is not None]
        return inputs_digest([*(prompt.prompt for prompt in prompts), *completions])
    lines = [json.dumps(prompt.to_json(), sort_keys=True, ensure_ascii=False) for prompt in prompts]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class torch_threads:
    """Torch with so many threads in the block; None leaves them."""

    def __init__(self, count: int | None) -> None:
        self._count, self._before = count, torch.get_num_threads()

    def __enter__(self) -> None:
        if self._count is not None:
            torch.set_num_threads(self._count)

    def __exit__(self, *_: object) -> None:
        if self._count is not None:
            torch.set_num_threads(self._before)
