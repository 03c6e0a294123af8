"""Small runs with known numbers, for the tests of the trajectories and their store."""

from __future__ import annotations

from typing import Any

import numpy as np

from softgap.trajectories import FOCUS, QUANTITIES, Manifest, Trajectories

MANIFEST = Manifest(
    model="tiny",
    weights="sha256:0",
    mechanisms={"elu1": {}, "uniform": {}},
    versions={"softgap": "0.1.0", "torch": "2.13.0", "transformers": "5.22.2"},
    dtype="float32",
    backend="sdpa",
    threads=2,
    seed=7,
    inputs="sha256:1",
    options={"max_new_tokens": 5},
    command="softgap run",
    extra={"host": "here"},
)


def example_fields(
    *,
    mechanisms: tuple[str, ...] = ("elu1", "uniform"),
    layers: tuple[int, ...] = (0, 1, 4),
    heads_per_layer: tuple[int, ...] = (4, 2, 4),
    steps: int = 5,
    focus: tuple[str, ...] = FOCUS,
    seed: int = 0,
    missing: float = 0.1,
) -> dict[str, Any]:
    """Arguments of a Trajectories with random values, a share of them NaN."""
    rng = np.random.default_rng(seed)
    heads = max(heads_per_layer)
    padding = np.arange(heads) >= np.array(heads_per_layer)[:, None]

    def values(*shape: int) -> np.ndarray:
        array = rng.normal(size=shape).astype(np.float32)
        array[rng.random(shape) < missing] = np.nan
        return array

    def padded(*leading: int) -> np.ndarray:
        array = values(*leading, len(layers), heads, steps)
        array[..., padding, :] = np.nan
        return array

    return {
        "mechanisms": mechanisms,
        "layers": layers,
        "kv_group": np.where(padding, -1, np.arange(heads) // 2).astype(np.int32),
        "quantities": {name: padded(len(mechanisms)) for name in QUANTITIES},
        "positions": np.arange(3, 3 + steps, dtype=np.int32),
        "token_ids": rng.integers(-1, 50_000, size=steps).astype(np.int32),
        "tokens": tuple(f"ä{index % 3}" for index in range(steps)),
        "logprob": values(steps),
        "entropy": values(steps),
        "heads_per_layer": heads_per_layer,
        "focus": {name: padded() for name in focus},
        "sample_id": "fox",
        "prompt_text": "The quick\n",
        "completion_text": " brown fox",
        "label": "animal",
        "n_prompt": 4,
        "manifest": MANIFEST,
    }


def example_run(*, prompt_steps: int | None = None, seed: int = 0, **changes: Any) -> Trajectories:
    """A run; changes are arguments of ``example_fields`` or fields of a Trajectories."""
    choices = {
        name: changes.pop(name)
        for name in ("mechanisms", "layers", "heads_per_layer", "steps", "focus", "missing")
        if name in changes
    }
    run = Trajectories(**{**example_fields(seed=seed, **choices), **changes})
    if prompt_steps is None:
        return run
    choices["steps"] = prompt_steps
    prompt = Trajectories(**{**example_fields(seed=seed + 1000, **choices), **changes, "part": "prompt"})
    return Trajectories(
        **{**example_fields(seed=seed, **choices | {"steps": run.n_steps}), **changes, "prompt": prompt}
    )
