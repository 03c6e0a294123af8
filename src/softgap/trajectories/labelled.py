"""Trajectories as labelled arrays (xarray) and as a tidy frame (pandas)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from softgap.trajectories.run import Trajectories

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

__all__ = ["to_frame", "to_xarray"]


def to_xarray(run: Trajectories) -> xr.Dataset:
    """The run as a Dataset.

    Dimensions and their coordinates are mechanism, layer, head and step; position, token, token_id and kv_group are
    further coordinates; logprob and entropy are variables over step. The sample and the manifest (as JSON) are in the
    attributes.
    """
    import xarray as xr

    variables: dict[str, Any] = {
        name: (("mechanism", "layer", "head", "step"), array) for name, array in run.quantities.items()
    }
    variables |= {name: (("layer", "head", "step"), array) for name, array in run.focus.items()}
    variables |= {"logprob": ("step", run.logprob), "entropy": ("step", run.entropy)}
    coordinates: dict[str, Any] = {
        "mechanism": list(run.mechanisms),
        "layer": list(run.layers),
        "head": np.arange(run.kv_group.shape[1]),
        "step": np.arange(run.n_steps),
        "position": ("step", run.positions),
        "token_id": ("step", run.token_ids),
        "token": ("step", np.array(run.tokens, dtype=object)),
        "kv_group": (("layer", "head"), run.kv_group),
    }
    attributes = {
        "sample_id": run.sample_id,
        "part": run.part,
        "prompt": run.prompt_text,
        "completion": run.completion_text,
        "n_prompt": run.n_prompt,
        "manifest": json.dumps(run.manifest.to_json()),
    }
    if run.label is not None:
        attributes["label"] = run.label
    return xr.Dataset(variables, coordinates, attributes)


def to_frame(run: Trajectories) -> pd.DataFrame:
    """The run as a tidy frame: one row per mechanism, layer, head and step, in this order; padding is left out.

    The columns of ``focus``, where measured, come last and repeat for every mechanism.
    """
    import pandas as pd

    real = np.arange(run.kv_group.shape[1]) < np.array(run.heads_per_layer)[:, None]
    layer, head = np.nonzero(real)
    times, steps, rows = len(run.mechanisms), run.n_steps, len(layer)

    def per_step(values: Any) -> np.ndarray:
        return np.tile(values, times * rows)

    def per_head(values: np.ndarray) -> np.ndarray:
        return np.tile(np.repeat(values, steps), times)

    columns = {
        "mechanism": np.repeat(np.array(run.mechanisms, dtype=object), rows * steps),
        "layer": per_head(np.array(run.layers)[layer]),
        "head": per_head(head),
        "step": per_step(np.arange(steps)),
        "position": per_step(run.positions),
        "token": per_step(np.array(run.tokens, dtype=object)),
        "logprob": per_step(run.logprob),
        "entropy": per_step(run.entropy),
    }
    columns |= {name: array[:, real].ravel() for name, array in run.quantities.items()}
    columns |= {name: np.tile(array[real].ravel(), times) for name, array in run.focus.items()}
    return pd.DataFrame(columns)
