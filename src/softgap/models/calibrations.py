"""Mechanisms with the parameters fitted to a model, found by its fingerprint."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PreTrainedModel

from softgap.attention import Mechanism, resolve
from softgap.errors import UnsupportedError
from softgap.models.cache import cache_dir
from softgap.models.fingerprint import model_fingerprint
from softgap.models.tensor_files import StoredCalibration, load_calibration
from softgap.trajectories.validation import BASELINE

__all__ = ["calibrated_mechanisms", "calibration_path", "default_mechanisms", "equip_mechanism"]


DEFAULT_MECHANISMS = ("elu1", BASELINE)


def calibration_path(fingerprint: str) -> Path:
    """Where the calibration of the model with this fingerprint is kept.

    In ``$SOFTGAP_CALIBRATIONS``, or else in the folder ``calibrations`` of softgap's cache.
    """
    override = os.environ.get("SOFTGAP_CALIBRATIONS")
    folder = Path(override).expanduser().absolute() if override else cache_dir() / "calibrations"
    return folder / f"{fingerprint}.safetensors"


def equip_mechanism(mechanism: str | Mechanism, model: PreTrainedModel) -> Mechanism:
    """A mechanism ready for a model: by name, as ``name@file``, or itself; parameters come from its calibration."""
    if isinstance(mechanism, str) and "@" in mechanism:
        name, _, file = mechanism.partition("@")
        return _check_fingerprint(load_calibration(Path(file).expanduser()), model, Path(file)).equip(name)
    resolved = resolve(mechanism)
    if not resolved.missing:
        return resolved
    path = calibration_path(model_fingerprint(model))
    if not path.is_file():
        raise UnsupportedError(
            f"mechanism '{resolved.name}' needs the parameters {', '.join(resolved.missing)}, and there is no "
            f"calibration for this model; make one with 'softgap calibrate', or name a file as in {resolved.name}@FILE"
        )
    return _check_fingerprint(load_calibration(path), model, path).equip(resolved)


def default_mechanisms(model: PreTrainedModel) -> tuple[str, ...]:
    """What a model is compared with unless told otherwise: elu1, uniform, and fitted where it has a calibration."""
    return (*DEFAULT_MECHANISMS, *calibrated_mechanisms(model))


def calibrated_mechanisms(model: PreTrainedModel) -> tuple[str, ...]:
    """``fitted`` where the model has a calibration, else nothing."""
    return ("fitted",) if calibration_path(model_fingerprint(model)).is_file() else ()


def _check_fingerprint(stored: StoredCalibration, model: PreTrainedModel, path: Path) -> StoredCalibration:
    fingerprint = model_fingerprint(model)
    if stored.metadata.get("fingerprint") != fingerprint:
        raise UnsupportedError(
            f"the calibration '{path}' was fitted to the model {stored.metadata.get('fingerprint')} "
            f"({stored.metadata.get('model')}), and this one is {fingerprint}; calibrate this model"
        )
    return stored
