"""Fit all layers of a model at once, one thread each, and keep the finished ones on disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from softgap.attention import ExactSet, Visible, attend, divergence, resolve
from softgap.calibration.activations import Activations, LayerSample, LayerSite
from softgap.calibration.fit import LayerText, Maps, Recipe, fit_maps
from softgap.checkpoints import checkpoint_folder, settings_key, write_whole
from softgap.cluster import run_tasks
from softgap.errors import StoreError
from softgap.models.tensor_files import load_calibration, save_calibration
from softgap.progress import Progress
from softgap.trajectories.validation import BASELINE

__all__ = ["FEWEST_STEPS", "MOST_STEPS", "FittedLayers", "fit_layers", "single_threaded_torch", "steps_within"]


PROBE_STEPS = 12


FEWEST_STEPS, MOST_STEPS = 50, 5000


class FittedLayers:
    """Layers of an unfinished calibration, on disk beside its target.

    Parameters
    ----------
    target
        Where the finished calibration goes.
    settings
        Everything the layers depend on: those fitted under other settings are not used.
    name
        What is fitted, as the layers' files call it.
    """

    def __init__(self, target: Path, settings: Mapping[str, Any], name: str = "layer") -> None:
        self._folder = checkpoint_folder(target)
        self._key = settings_key(settings)
        self._name = name

    def load(self, layer: int) -> Maps | None:
        """A layer that was fitted before under the same settings."""
        try:
            stored = load_calibration(self._path(layer))
        except StoreError:  # not there, or cut off by a crash: fitted again
            return None
        return Maps(**stored.tensors) if stored.metadata.get("key") == self._key else None

    def save(self, layer: int, maps: Maps) -> None:
        """Write a fitted layer."""
        save_calibration(self._path(layer), maps.tensors(), {"key": self._key})

    def steps(self, choose: Callable[[], int]) -> int:
        """The number of steps, chosen once so that a resumed fit uses the same."""
        path = self._folder / f"steps-{self._key}"
        try:
            return int(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or cut off by a crash: chosen again
            n_steps = choose()
        write_whole(path, str(n_steps))
        return n_steps

    def _path(self, layer: int) -> Path:
        return self._folder / f"{self._name}-{layer:04d}.safetensors"


def steps_within(minutes: float, gathered: Activations, recipe: Recipe) -> int:
    """How many steps fit into the time, by the speed of a few in the first layer."""
    site, texts = gathered.sites[0], gathered.layer(0)
    times: list[float] = []
    with single_threaded_torch() as workers:
        fit_maps(
            texts,
            replace(recipe, steps=PROBE_STEPS),
            scale=site.scale,
            window=site.window,
            softcap=site.softcap,
            rotation=site.rotation,
            report=lambda step, kl: times.append(time.perf_counter()),
        )
    half = len(times) // 2
    per_step = (times[-1] - times[half]) / (len(times) - 1 - half)
    rounds = -(-len(gathered.sites) // workers)
    return max(FEWEST_STEPS, min(MOST_STEPS, int(60 * minutes / (per_step * rounds))))


def fit_layers(
    gathered: Activations,
    recipe: Recipe,
    stored: FittedLayers,
    progress: Progress,
    *,
    exact: ExactSet | None = None,
    engine: str = "local",
    address: str | None = None,
) -> list[Maps]:
    """Every layer's map, as many layers at a time as torch has threads; with ``exact`` the tail of a hybrid.

    Each fit runs on one thread: its tensors are too small to share, and its numbers then do not depend on the machine.
    With the engine "ray" every layer is a task of the cluster at ``address``.
    """
    layers = len(gathered.sites)
    state = _FitProgress(layers, recipe.steps, progress, "layers" if exact is None else "hybrid layers")
    if engine == "ray":
        return _fit_on_cluster(gathered, recipe, stored, exact, state, address)

    def fitted(layer: int) -> Maps:
        maps, site = stored.load(layer), gathered.sites[layer]
        if maps is not None:
            state.skip(recipe.steps)
            state.layer_done(*_gap(gathered.sample(layer), site, maps, exact))
            return maps
        maps = fit_layer(gathered.layer(layer), site, layer, recipe, exact, state.step)
        stored.save(layer, maps)
        state.layer_done(*_gap(gathered.sample(layer), site, maps, exact))
        return maps

    with single_threaded_torch() as workers, ThreadPoolExecutor(workers) as pool:
        waiting = [pool.submit(fitted, layer) for layer in range(layers)]
        try:
            return [future.result() for future in waiting]
        except BaseException:
            state.stop()
            pool.shutdown(cancel_futures=True)
            raise


def fit_layer(
    texts: Sequence[LayerText],
    site: LayerSite,
    layer: int,
    recipe: Recipe,
    exact: ExactSet | None,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Maps:
    """The map of one layer."""
    return fit_maps(
        texts,
        recipe,
        scale=site.scale,
        window=site.window,
        softcap=site.softcap,
        rotation=site.rotation,
        layer=layer,
        exact=exact,
        report=report,
    )


def _fit_on_cluster(
    gathered: Activations,
    recipe: Recipe,
    stored: FittedLayers,
    exact: ExactSet | None,
    state: _FitProgress,
    address: str | None,
) -> list[Maps]:
    """Every layer that is not on disk as a task of a cluster; each is written here as it comes back."""
    maps: dict[int, Maps] = {}

    def keep(layer: int, found: Maps) -> None:
        maps[layer] = found
        state.skip(recipe.steps)
        state.layer_done(*_gap(gathered.sample(layer), gathered.sites[layer], found, exact))

    tasks: dict[int, Callable[[], tuple[Any, ...]]] = {}
    for layer, site in enumerate(gathered.sites):
        known = stored.load(layer)
        if known is None:
            tasks[layer] = partial(_task_of_layer, gathered, site, layer, recipe, exact)
        else:
            keep(layer, known)
    advice = "the other layers are saved; run the same command again to resume"
    for layer, found in run_tasks(fit_layer, tasks, address=address, name="layer", advice=advice):
        stored.save(layer, found)
        keep(layer, found)
    return [maps[layer] for layer in range(len(gathered.sites))]


def _task_of_layer(
    gathered: Activations, site: LayerSite, layer: int, recipe: Recipe, exact: ExactSet | None
) -> tuple[Any, ...]:
    """What a worker is given: the layer's queries and keys, read from disk only now."""
    return gathered.layer(layer), site, layer, recipe, exact


def _gap(shown: LayerSample, site: LayerSite, maps: Maps, exact: ExactSet | None) -> tuple[float, float]:
    """Sums of the divergence of a layer's fitted map and of the mean of values, over the text for progress."""
    visible = Visible(window=site.window)
    q, k, v = (x[None] for x in (shown.query, shown.key, shown.value))
    fitted, uniform = (
        divergence(shown.output, attend(mechanism, q, k, v, visible=visible, scale=site.scale).output[0])
        for mechanism in (maps.mechanism(site.rotation, exact), resolve(BASELINE))
    )
    return fitted.sum().item(), uniform.sum().item()


class _FitProgress:
    """Steps of all layers told as one share, and the gap closed so far; raises in the workers once they are to stop."""

    def __init__(self, layers: int, steps: int, progress: Progress, words: str) -> None:
        self._layers, self._steps, self._progress, self._words = layers, layers * steps, progress, words
        self._done, self._finished = 0, 0
        self._fitted, self._uniform = 0.0, 0.0
        self._stopped = False
        self._lock = threading.Lock()

    def skip(self, steps: int) -> None:
        with self._lock:
            self._done += steps

    def stop(self) -> None:
        self._stopped = True

    def layer_done(self, fitted: float, uniform: float) -> None:
        with self._lock:
            self._finished += 1
            self._fitted += fitted
            self._uniform += uniform
            self._tell()

    def step(self, step: int, kl: float) -> None:
        if self._stopped:
            raise CancelledError
        with self._lock:
            self._done += 1
            self._tell()

    def _tell(self) -> None:
        closed = f", {1 - self._fitted / self._uniform:.2f} of the gap closed" if self._uniform else ""
        self._progress(f"fitted {self._finished} of {self._layers} {self._words}{closed}", self._done / self._steps)


@contextmanager
def single_threaded_torch() -> Iterator[int]:
    """Torch on one thread per caller; yields how many callers the machine was set up for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
