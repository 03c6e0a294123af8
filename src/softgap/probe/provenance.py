"""What a manifest says about a model and the settings it was measured with."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from softgap import __version__
from softgap.attention import Mechanism
from softgap.probe.fingerprint import model_fingerprint
from softgap.trajectories import Manifest

__all__ = ["library_versions", "live_options", "manifest_of", "replay_options"]


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
        mechanisms={mechanism.name: _described(mechanism) for mechanism in mechanisms},
        versions={**library_versions(), "python": sys.version.split()[0]},
        dtype=str(model.dtype).removeprefix("torch."),
        backend=str(model.config._attn_implementation),
        threads=torch.get_num_threads(),
        seed=seed,
        dropped_sinks=drop_sinks,
        inputs=inputs,
        options=options or {},
        extra=_held_out(mechanisms),
        command=shlex.join(sys.argv),
    )


def library_versions() -> dict[str, str]:
    """Versions of what computes the numbers."""
    return {"softgap": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def _described(mechanism: Mechanism) -> dict[str, Any]:
    """Its numbers, and which calibration its parameters come from."""
    return {**mechanism.options, **({"calibration": mechanism.origin} if mechanism.origin else {})}


def _held_out(mechanisms: Sequence[Mechanism]) -> dict[str, Any]:
    """What held-out text said of the calibration in use, for the reader."""
    found = next((dict(mechanism.held_out) for mechanism in mechanisms if mechanism.held_out), None)
    return {} if found is None else {"held_out": found}


def live_options(
    model: PreTrainedModel, *, max_new_tokens: int, chat: bool, focus: bool, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What a recorded generation depends on: the settings given, and the model's own where it samples."""
    given = {key: value for key, value in settings.items() if isinstance(value, str | int | float | bool)}
    own: dict[str, Any] = {}
    if settings.get("do_sample"):
        names = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
        values = {name: getattr(model.generation_config, name, None) for name in names}
        own = {name: value for name, value in values.items() if value is not None}
    return {"mode": "live", "max_new_tokens": max_new_tokens, "chat": chat, "focus": focus, **own, **given}


def replay_options(*, chat: bool, focus: bool) -> dict[str, Any]:
    """What a reading depends on besides the text."""
    return {"mode": "replay", "chat": chat, "focus": focus}
