"""The batches of a study as tasks of a Ray cluster, each worker with a model of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from softgap.cluster import ClusterLimits, ModelSource, run_tasks
from softgap.models.loading import quiet_transformers
from softgap.study.batches import Batch, BatchResult, FinishedBatch, StudySettings, measure_batch, write_failures
from softgap.tasks import Prompt, resolve_scorer
from softgap.trajectories.folder import Folder
from softgap.trajectories.locks import lease_fence
from softgap.trajectories.writer import publish_batch, published_ids

if TYPE_CHECKING:
    from softgap.study.measurement import Planned

__all__ = ["publish", "ray_batches"]


def ray_batches(
    planned: Planned,
    left: Sequence[Batch],
    out: str,
    address: str | None,
    limits: ClusterLimits | None = None,
    *,
    lease: str | None = None,
) -> Iterator[FinishedBatch]:
    """Each batch, as it is finished; a batch whose worker dies is given to another.

    Parameters
    ----------
    lease
        The file of the writer's lease: workers publish only while it is held.
    """
    place = out if "://" in out else Folder.at(out).root
    settings = planned.settings
    source = ModelSource(settings.model, settings.dtype, settings.device, settings.attn, planned.manifest.weights)

    def arguments(batch: Batch) -> tuple[Any, ...]:
        prompts = [planned.prompts[i] for i in batch.indices]
        alone = Batch(batch.number, tuple(range(len(prompts))), batch.seed, batch.replay)
        return prompts, alone, settings, source, place, lease

    tasks: dict[int, Callable[[], tuple[Any, ...]]] = {batch.number: partial(arguments, batch) for batch in left}
    advice = "the other batches are saved; run the same command again to resume"
    for _, finished in run_tasks(
        _measure_on_worker,
        tasks,
        address=address,
        threads=settings.threads or 1,
        limits=limits,
        current_folder=":" in (settings.scoring or ""),  # a scorer of the user's own, as module:function
        name="batch",
        advice=advice,
    ):
        yield finished


def _measure_on_worker(
    prompts: Sequence[Prompt],
    batch: Batch,
    settings: StudySettings,
    source: ModelSource,
    out: str,
    lease: str | None = None,
) -> FinishedBatch:
    """On a worker: measure a batch and write it straight into the study."""
    folder = lease_fence(Folder.at(out), lease)
    known = published_ids(folder, batch.number)
    if known is not None:  # the last worker died after it had written all
        return FinishedBatch(batch.number, known, None)
    loaded = source.load()
    scorer = None if settings.scoring is None else resolve_scorer(settings.scoring)
    with quiet_transformers(downloads=False):
        return publish(folder, batch.number, measure_batch(loaded, prompts, batch, settings, scorer))


def publish(folder: Folder, number: int, measured: BatchResult) -> FinishedBatch:
    """Write a batch with its failures."""
    write_failures(folder, number, measured.failures)
    publish_batch(folder, number, measured.runs)
    return FinishedBatch(number, tuple(run.sample_id for run in measured.runs), measured.non_finite)
