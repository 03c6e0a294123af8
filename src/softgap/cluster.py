"""A Ray cluster: the one place that speaks to it. Tasks go to workers, and a task whose worker dies to another."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from softgap.errors import SoftgapError, StoreError, UnsupportedError, ValueInputError, unknown_name
from softgap.models.fingerprint import model_fingerprint
from softgap.models.loading import Loaded, Model, load_model, quiet_transformers

__all__ = [
    "ENGINES",
    "LEAST_MEMORY",
    "ClusterLimits",
    "ModelSource",
    "Workers",
    "check_engine",
    "refuse_on_worker",
    "require_ray",
    "run_tasks",
    "workers_of",
]

ENGINES = ("local", "ray")
"""Where work is computed."""
# How often a task is given to another worker after one has died with it.
_RETRIES = 4
# How often a cluster is started on this machine before that is given up.
_STARTS = 2
# Tasks that wait with their arguments for every processor of the cluster.
_WAITING = 2

# Set in the environment of every worker.
_ON_WORKER = "SOFTGAP_WORKER"
# Of a node's memory, the share that its workers may take together.
_SHARE = 0.9
LEAST_MEMORY = 2**30
"""Bytes that a worker needs at least: the libraries alone take half of it."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class ClusterLimits:
    """What the workers of a command may take.

    Attributes
    ----------
    workers
        How many tasks run at the same time; None for as many as the cluster has processors for.
    memory
        Bytes that a worker may allocate, after which its task fails with a sentence; None for its equal share of the
        smallest node's memory.
    """

    workers: int | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueInputError(f"the number of workers must be at least 1, got {self.workers}")
        if self.memory is not None and self.memory < LEAST_MEMORY:
            raise ValueInputError(
                f"a worker needs at least {LEAST_MEMORY / 1e9:.1f} GB of memory, got {self.memory / 1e9:.2g} GB; "
                "allow more"
            )


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


def refuse_on_worker(what: str) -> None:
    """Refuse to start work inside of a task: workers that start workers end when the machine is out of memory."""
    if os.environ.get(_ON_WORKER):
        raise UnsupportedError(
            f"{what} cannot be started from inside a worker; if a module of yours starts one when it is imported, put "
            "that behind: if __name__ == '__main__'"
        )


def run_tasks(
    function: Callable[..., Any],
    tasks: Mapping[Key, Callable[[], tuple[Any, ...]]],
    *,
    address: str | None = None,
    threads: int = 1,
    limits: ClusterLimits | None = None,
    current_folder: bool = False,
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
    limits
        How many workers there may be, and how much memory each may take.
    current_folder
        Whether workers may import modules from the folder this process was started in, after all other places.
    name, advice
        What a task is called, and what to do, where all of its workers died.
    """
    refuse_on_worker(f"a {name} of a cluster")
    ray = require_ray()
    limits = limits or ClusterLimits()
    with _joined(ray, address, limits.workers and limits.workers * threads, current_folder):
        most, memory = _bounds(ray, limits, threads)
        remote = ray.remote(num_cpus=threads, max_retries=_RETRIES)(_on_worker)
        left: list[Key] = list(tasks)
        waiting: dict[Any, Key] = {}
        while left or waiting:
            while left and len(waiting) < most:
                key = left.pop(0)
                waiting[remote.remote(function, threads, memory, str(Path.cwd()), *tasks[key]())] = key
            (ready,), _ = ray.wait(list(waiting), num_returns=1)
            key = waiting.pop(ready)
            with _told(ray, f"{name} {key}", memory, advice):
                result = ray.get(ready)
            del ready
            yield key, result


@contextmanager
def _told(ray: Any, task: str, memory: int, advice: str) -> Iterator[None]:
    """Say in a sentence what befell a task."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MemoryError):
            raise StoreError(
                f"{task} needs more than the {memory / 1e9:.1f} GB that a worker may take; allow more, or make batches "
                f"smaller, and {advice.rpartition('; ')[2]}"
            ) from error
        raise cause if isinstance(cause, SoftgapError) else error from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError) as error:
        raise StoreError(f"{task} was given to {_RETRIES + 1} workers and all of them died; {advice}") from error
    except ray.exceptions.OutOfMemoryError as error:
        raise StoreError(f"{task} was ended because its machine ran out of memory; {advice}") from error


def _bounds(ray: Any, limits: ClusterLimits, threads: int) -> tuple[int, int]:
    """How many tasks are handed out at the same time, and the bytes that each may take."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= threads]
    if not nodes:
        raise UnsupportedError(
            f"a task needs {threads} processors of one machine, and no machine of the cluster has as many; lower "
            "--threads"
        )
    slots = [int(node["CPU"]) // threads for node in nodes]
    shares = [_SHARE * node.get("memory", 0) / count for node, count in zip(nodes, slots, strict=True)]
    memory = limits.memory or max(LEAST_MEMORY, int(min(shares)))
    # Some wait with their arguments, so that no worker does; with a bound there are never more tasks than workers.
    return limits.workers or _WAITING * sum(slots), memory


def _on_worker(function: Callable[..., Any], threads: int, memory: int, folder: str, *arguments: Any) -> Any:
    torch.set_num_threads(threads)
    with suppress(OSError):
        os.chdir(folder)  # relative names mean what they mean to the driver
    with _bounded_memory(memory):
        return function(*arguments)


@contextmanager
def _bounded_memory(size: int) -> Iterator[None]:
    """Let this process allocate so many bytes at most; what goes beyond is a MemoryError, and not the machine's end."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (size, before[1]))
    try:
        yield
    except RuntimeError as error:
        if "can't allocate memory" in str(error) or "not enough memory" in str(error):
            raise MemoryError(str(error)) from None
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextmanager
def _joined(ray: Any, address: str | None, processors: int | None, current_folder: bool) -> Iterator[None]:
    """Be in a cluster while the block runs; one that this process had joined before is left as it is."""
    if ray.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="softgap-workers-") as folder:
        (Path(folder) / "README").write_text("Workers of softgap start here, and not where the driver was started.\n")
        join(ray, address, processors, folder=folder, current_folder=current_folder)
        try:
            yield
        finally:
            ray.shutdown()


def module_paths(current_folder: bool) -> list[str]:
    """Where workers look for modules: where this process does, and the current folder last or not at all."""
    here = Path.cwd().resolve()
    paths = [path for path in sys.path if path and Path(path).resolve() != here]
    return [*paths, str(here)] if current_folder else paths


def join(
    ray: Any,
    address: str | None,
    processors: int | None = None,
    *,
    folder: str | None = None,
    current_folder: bool = False,
) -> None:
    """Join the cluster at an address, or the running one, or start one here with so many processors.

    ``folder`` is where workers start: Ray puts the driver's own folder at the head of every worker's module path unless
    they start elsewhere, and a file there with the name of a library would be imported in its place.
    """
    environment = {"PYTHONPATH": os.pathsep.join(module_paths(current_folder)), _ON_WORKER: "1"}
    options: dict[str, Any] = {
        "runtime_env": {"env_vars": environment, **({"working_dir": folder} if folder else {})},
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
    _start(ray, {**options, **({"num_cpus": processors} if processors else {})})


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


@dataclass(frozen=True)
class Workers:
    """Workers of a cluster that this process is in, each of which loads the model of this process once.

    Attributes
    ----------
    source
        Where they load the model from.
    address
        Of the cluster.
    threads
        Processors that a task takes. With as many threads as here, a task gives the bytes that it gives here.
    """

    source: ModelSource
    address: str | None
    threads: int

    def run(
        self, function: Callable[..., Any], tasks: Mapping[Key, tuple[Any, ...]], *, name: str, advice: str
    ) -> Iterator[tuple[Key, Any]]:
        """``function(model, *arguments)`` once for each task; yield key and result of each as it ends."""
        arguments = {key: partial(_task_of, function, self.source, given) for key, given in tasks.items()}
        return run_tasks(_with_model, arguments, address=self.address, threads=self.threads, name=name, advice=advice)

    def map(
        self,
        function: Callable[..., Any],
        tasks: Sequence[tuple[Any, ...]],
        *,
        name: str,
        advice: str = "run the same command again to resume",
        report: Callable[[int], None] = lambda done: None,
    ) -> list[Any]:
        """The results of all tasks, in their order; ``report`` is told how many have ended."""
        results: dict[int, Any] = {}
        for number, result in self.run(function, dict(enumerate(tasks)), name=name, advice=advice):
            results[number] = result
            report(len(results))
        return [results[number] for number in range(len(tasks))]


def _task_of(function: Callable[..., Any], source: ModelSource, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return function, source, *arguments


def _with_model(function: Callable[..., Any], source: ModelSource, *arguments: Any) -> Any:
    """On a worker: a task with the model of the driver."""
    with quiet_transformers(downloads=False):
        return function(source.load()[0], *arguments)


@contextmanager
def workers_of(model: Model, engine: str | Workers, address: str | None = None) -> Iterator[Workers | None]:
    """Workers with this model while the block runs; None for the engine "local", and workers that are given as is."""
    if isinstance(engine, Workers):
        yield engine
        return
    check_engine(engine)
    if engine == "local":
        yield None
        return
    refuse_on_worker("work on a cluster")
    source = ModelSource.of(model)
    with _joined(require_ray(), address, None, current_folder=False):
        yield Workers(source, address, torch.get_num_threads())
