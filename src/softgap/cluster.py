"""A Ray cluster: the one place that speaks to it. Tasks go to workers, and a task whose worker dies to another."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from softgap.errors import SoftgapError, StoreError, UnsupportedError, unknown_name
from softgap.models.fingerprint import model_fingerprint
from softgap.models.loading import Loaded, Model, load_model

__all__ = ["ENGINES", "ModelSource", "check_engine", "require_ray", "run_tasks"]

ENGINES = ("local", "ray")
"""Where work is computed."""
# How often a task is given to another worker after one has died with it.
_RETRIES = 4
# How often a cluster is started on this machine before that is given up.
_STARTS = 2
# Tasks that wait with their arguments for every processor of the cluster.
_WAITING = 2

Key = TypeVar("Key", bound=Hashable)


def require_ray() -> Any:
    """Ray is an extra: say so where it is missing."""
    try:
        import ray
    except ImportError as error:
        raise UnsupportedError("the engine 'ray' needs Ray; install it with: pip install 'softgap[ray]'") from error
    return ray


def check_engine(engine: str) -> None:
    """Refuse an engine that is none, or whose package is missing."""
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    if engine == "ray":
        require_ray()


def run_tasks(
    function: Callable[..., Any],
    tasks: Mapping[Key, Callable[[], tuple[Any, ...]]],
    *,
    address: str | None = None,
    threads: int = 1,
    name: str = "task",
    advice: str = "run the same command again",
) -> Iterator[tuple[Key, Any]]:
    """Run a function once per task on the workers of a cluster; yield key and result of each as it ends.

    Parameters
    ----------
    function
        Of a module, since every worker imports it. It is called again, on another worker, where one has died.
    tasks
        Makes the arguments of a task, just before it is handed out.
    address
        Of the cluster; None joins the one that is running, or starts one on this machine.
    threads
        Processors that a task takes; a worker's torch is given as many.
    name, advice
        What a task is called, and what to do, where all of its workers died.
    """
    ray = require_ray()
    with _joined(ray, address):
        remote = ray.remote(num_cpus=threads, max_retries=_RETRIES)(_on_worker)
        most = _WAITING * max(1, int(ray.cluster_resources().get("CPU", 1)))
        left: list[Key] = list(tasks)
        waiting: dict[Any, Key] = {}
        while left or waiting:
            while left and len(waiting) < most:
                key = left.pop(0)
                waiting[remote.remote(function, threads, *tasks[key]())] = key
            (ready,), _ = ray.wait(list(waiting), num_returns=1)
            key = waiting.pop(ready)
            try:
                result = ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, SoftgapError) else error from None
            except ray.exceptions.WorkerCrashedError as error:
                raise StoreError(
                    f"{name} {key} was given to {_RETRIES + 1} workers and all of them died; {advice}"
                ) from error
            del ready
            yield key, result


def _on_worker(function: Callable[..., Any], threads: int, *arguments: Any) -> Any:
    torch.set_num_threads(threads)
    return function(*arguments)


@contextmanager
def _joined(ray: Any, address: str | None) -> Iterator[None]:
    """Be in a cluster while the block runs; one that this process had joined before is left as it is."""
    if ray.is_initialized():
        yield
        return
    join(ray, address)
    try:
        yield
    finally:
        ray.shutdown()


def join(ray: Any, address: str | None) -> None:
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


@dataclass(frozen=True)
class ModelSource:
    """Where a worker loads the very model of the driver from.

    Attributes
    ----------
    name, dtype, device, attn
        As ``softgap.load_model`` takes them.
    weights
        The fingerprint that the model must have.
    """

    name: str | None
    dtype: str
    device: str
    attn: str | None
    weights: str

    @classmethod
    def of(cls, model: Model) -> ModelSource:
        """Of a model that this process has loaded by name."""
        attn = getattr(model.config, "_attn_implementation", None)
        name, dtype = model.name_or_path or None, str(model.dtype).removeprefix("torch.")
        return cls(name, dtype, str(model.device), attn, model_fingerprint(model))

    def load(self) -> Loaded:
        """The model and its tokenizer, loaded once per worker and source."""
        return _load(self)


@functools.lru_cache(maxsize=1)
def _load(source: ModelSource) -> Loaded:
    loaded = load_model(source.name, dtype=source.dtype, device=source.device, attn=source.attn, progress=False)
    fingerprint = model_fingerprint(loaded[0])
    if fingerprint != source.weights:
        raise StoreError(
            f"every worker must use the model of the study, whose weights are {source.weights}, got {fingerprint} for "
            f"'{source.name}'; give all machines the same files"
        )
    return loaded
