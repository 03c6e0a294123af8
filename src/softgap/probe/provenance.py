"""What a manifest says about a model and the settings it was measured with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from softgap import __version__
from softgap.attention import Mechanism
from softgap.probe.fingerprint import model_fingerprint
from softgap.trajectories import Manifest

__all__ = ["manifest_of"]


def manifest_of(
    model: PreTrainedModel,
    mechanisms: Sequence[Mechanism],
    *,
    drop_sinks: int = 0,
    seed: int | None = None,
    inputs: str = "",
    options: dict[str, Any] | None = None,
) -> Manifest:
    """The manifest of a measurement of this model, on this machine, now."""
    return Manifest(
        model=model.name_or_path or model.config.model_type,
        weights=model_fingerprint(model),
        mechanisms={mechanism.name: dict(mechanism.options) for mechanism in mechanisms},
        versions={
            "softgap": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
        },
        dtype=str(model.dtype).removeprefix("torch."),
        backend=str(model.config._attn_implementation),
        threads=torch.get_num_threads(),
        seed=seed,
        dropped_sinks=drop_sinks,
        inputs=inputs,
        options=options or {},
        command=" ".join(sys.argv),
    )
