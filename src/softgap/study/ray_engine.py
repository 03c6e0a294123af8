"""The batches of a study as tasks of a Ray cluster, each worker with a model of its own."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from softgap.errors import SoftgapError, StoreError, UnsupportedError
from softgap.models import model_fingerprint
from softgap.models.loading import quiet_transformers
from softgap.study.batches import Batch, BatchResult, StudySettings, measure_batch, write_failures
from softgap.tasks import Prompt, resolve_scorer
from softgap.trajectories.folder import Folder
from softgap.trajectories.writer import publish_batch, published_ids

if TYPE_CHECKING:
    from softgap.models.loading import Loaded
    from softgap.study.measurement import Planned

__all__ = ["publish", "ray_batches", "require_ray"]

# How often a batch is given to another worker after one has died with it.
_RETRIES = 4
# How often a cluster is started on this machine before that is given up.
_STARTS = 2


def require_ray() -> Any:
    """Ray is an extra: say so where it is missing."""
    try:
        import ray
    except ImportError as error:
        raise UnsupportedError("the engine 'ray' needs Ray; install it with: pip install 'softgap[ray]'") from error
    return ray


def ray_batches(
    planned: Planned, left: Sequence[Batch], out: str, address: str | None
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Number and sample names of each batch, as they are finished; a batch whose worker dies is given to another."""
    ray = require_ray()
    place = out if "://" in out else Folder.at(out).root
    starts_ray = not ray.is_initialized()
    if starts_ray:
        _join(ray, address)
    try:
        settings, weights = planned.settings, planned.manifest.weights
        task = ray.remote(num_cpus=settings.threads or 1, max_retries=_RETRIES)(_measure_on_worker)
        waiting = {}
        for batch in left:
            prompts = [planned.prompts[i] for i in batch.indices]
            alone = Batch(batch.number, tuple(range(len(prompts))), batch.seed, batch.replay)
            waiting[task.remote(prompts, alone, settings, weights, place)] = batch.number
        while waiting:
            (ready,), _ = ray.wait(list(waiting), num_returns=1)
            number = waiting.pop(ready)
            try:
                yield number, tuple(ray.get(ready))
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, SoftgapError) else error from None
            except ray.exceptions.WorkerCrashedError as error:
                raise StoreError(
                    f"batch {number} was given to {_RETRIES + 1} workers and all of them died; the other batches are "
                    "saved; run the same command again to resume"
                ) from error
    finally:
        if starts_ray:
            ray.shutdown()


def _join(ray: Any, address: str | None) -> None:
    """Join the cluster at an address, or the running one, or start one here."""
    # Workers look for softgap, and for a user's scoring, where this process does.
    paths = os.pathsep.join(path for path in (str(Path.cwd()), *sys.path) if path)
    options: dict[str, Any] = {
        "runtime_env": {"env_vars": {"PYTHONPATH": paths}},
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    named = address or os.environ.get("RAY_ADDRESS")
    try:
        if named is not None:
            ray.init(address=named, **options)
            return
        with suppress(ConnectionError):
            ray.init(address="auto", **options)
            return
    except Exception as error:
        raise UnsupportedError(
            f"cannot reach a Ray cluster at '{named or 'this machine'}' ({_reason(error)}); check --ray-address or use "
            "--engine local"
        ) from error
    _start(ray, options)


def _start(ray: Any, options: dict[str, Any]) -> None:
    """Start a cluster here: once more if that fails, since a busy machine may miss the half minute Ray waits for it."""
    for attempt in range(_STARTS):
        try:
            ray.init(include_dashboard=False, **options)
            return
        except Exception as error:
            ray.shutdown()  # of what did start
            if attempt + 1 == _STARTS:
                raise UnsupportedError(
                    f"a Ray cluster did not start on this machine in {_STARTS} attempts ({_reason(error)}); try again "
                    "when the machine is less busy, name a running one with --ray-address, or use --engine local"
                ) from error


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _measure_on_worker(
    prompts: Sequence[Prompt], batch: Batch, settings: StudySettings, weights: str, out: str
) -> tuple[str, ...]:
    """On a worker: measure a batch and write it straight into the study."""
    folder = Folder.at(out)
    known = published_ids(folder, batch.number)
    if known is not None:  # the last worker died after it had written all
        return known
    loaded = _model(settings, weights)
    scorer = None if settings.scoring is None else resolve_scorer(settings.scoring)
    with quiet_transformers(downloads=False):
        return publish(folder, batch.number, measure_batch(loaded, prompts, batch, settings, scorer))


def publish(folder: Folder, number: int, measured: BatchResult) -> tuple[str, ...]:
    """Write a batch with its failures, and return the names of its samples."""
    write_failures(folder, number, measured.failures)
    publish_batch(folder, number, measured.runs)
    return tuple(run.sample_id for run in measured.runs)


@functools.lru_cache(maxsize=1)
def _model(settings: StudySettings, weights: str) -> Loaded:
    """The model of this worker, the very one of the study."""
    torch.set_num_threads(settings.threads or 1)
    loaded = settings.load()
    fingerprint = model_fingerprint(loaded[0])
    if fingerprint != weights:
        raise StoreError(
            f"every worker must use the model of the study, whose weights are {weights}, got {fingerprint} for "
            f"'{settings.model}'; give all machines the same files"
        )
    return loaded
