"""Tensor files: tensors and one JSON document, checked by a hash; a model's calibration, found by its fingerprint."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from softgap.attention import Mechanism, resolve
from softgap.attention.catalogue import ALIASES
from softgap.attention.memory import SINKS, split_keys
from softgap.checkpoints import written_whole
from softgap.errors import StoreError, UnsupportedError
from softgap.intervals import Interval
from softgap.kinds import letters_of_kinds, numbers_of_counts
from softgap.models.cache import cache_dir
from softgap.models.fingerprint import model_fingerprint
from softgap.trajectories.validation import BASELINE

__all__ = [
    "StoredCalibration",
    "calibrated_mechanisms",
    "calibration_path",
    "check_shapes",
    "default_mechanisms",
    "digest_of",
    "equip_mechanism",
    "find_calibration",
    "held_out_summary",
    "load_calibration",
    "quick_calibration_note",
    "save_calibration",
]


FORMAT = 1


BLOCK = "softgap_calibration"


# What numpy, which the hash goes through, and the attention of the instrument both take.
_DTYPES = (torch.float32, torch.float64)


_SOFTMAX_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")


@dataclass(frozen=True, eq=False)
class StoredCalibration:
    """A calibration as it was read: its tensors by ``mechanism.parameter``, its metadata, and a hash of the tensors.

    ``rounded`` is True for a model whose weights are those of the calibration, rounded to a shorter dtype.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    digest: str
    rounded: bool = False

    def equip(self, mechanism: str | Mechanism) -> Mechanism:
        """The mechanism with the parameters that this calibration holds for it."""
        mechanism = resolve(mechanism)
        parameters = self._parameters_of(mechanism)
        if mechanism.tail is not None:
            tail = self._parameters_of(mechanism.tail)
            shared = mechanism.name == f"{mechanism.tail.name}+window"
            # Maps that were fitted as a tail are others than those of the same mechanism alone.
            parameters = {key: x for key, x in tail.items() if shared or key in mechanism.tail.accepts} | parameters
        if mechanism.name == "hybrid" and mechanism.options == resolve("hybrid").options:
            mechanism = mechanism.configure(**self.metadata.get("hybrid", {}))
        missing = [name for name in mechanism.needs if name not in parameters]
        if missing:
            raise UnsupportedError(
                f"the calibration has no {', '.join(missing)} for mechanism '{mechanism.name}'; calibrate again"
            )
        held_out: dict[str, Any] = held_out_summary(self.metadata.get("held_out", {})) | _kinds_summary(self.metadata)
        if self.rounded:
            held_out["calibrated_in"] = self.metadata["dtype"]
        if self.metadata.get("quick"):
            held_out["quick"] = True
        return replace(mechanism.with_parameters(**parameters), origin=self.digest, held_out=held_out)

    def _parameters_of(self, mechanism: Mechanism) -> dict[str, Tensor]:
        """The tensors stored under a mechanism's name, or under one that it had before."""
        names = {mechanism.name, *(old for old, new in ALIASES.items() if new == mechanism.name)}
        stored = ((*key.partition("."), tensor) for key, tensor in self.tensors.items())
        return {parameter: tensor for name, _, parameter, tensor in stored if name in names}


def _kinds_summary(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """How many heads need which kind, and the kind of each, by the calibration's report; nothing where it has none."""
    report = metadata.get("sufficiency")
    if not report:
        return {}
    try:
        counts = {kind: Interval(**count) for kind, count in report["counts"].items()}
        numbers = numbers_of_counts(counts, report["keys_worth"].get("window"))
        return {**numbers, "kinds": letters_of_kinds(report["labels"])}
    except (LookupError, TypeError, AttributeError):
        return {}


def held_out_summary(held_out: Mapping[str, Any]) -> dict[str, float]:
    """The few numbers of a calibration's held-out report that stand beside every share of the gap.

    Parameters
    ----------
    held_out
        The report as plain data; what it lacks (files of earlier versions) is left out.
    """
    places = {
        "gap_closed": ("gap_closed", "fitted", "value"),
        "against_profile": ("against", "profile", "value"),
        "explained": ("explained",),
        "explained_uniform": ("explained_by", "uniform"),
        "rank_correlation": ("rank_correlation",),
    }
    summary = {}
    for name, place in places.items():
        value: Any = held_out
        for key in place:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int | float) and math.isfinite(value):
            summary[name] = float(value)
    return summary


def save_calibration(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    """Write a calibration, whole or not at all; the hash of its tensors."""
    digest = digest_of(tensors)
    block = json.dumps({**metadata, "format": FORMAT, "digest": digest}, sort_keys=True)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    try:
        with written_whole(path) as partial:
            save_file(contiguous, partial, metadata={BLOCK: block})
            partial.chmod(0o644)
    except SafetensorError as error:
        raise StoreError(
            f"cannot write the calibration to '{path}' ({error}); choose a file that you may write to"
        ) from None
    return digest


def load_calibration(path: Path) -> StoredCalibration:
    """Read a calibration and check that it is whole."""
    if not path.is_file():
        raise StoreError(f"there is no calibration at '{path}'; make one with 'softgap calibrate --out {path}'")
    try:
        with safe_open(path, framework="pt") as file:
            block = (file.metadata() or {}).get(BLOCK)
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
    except (OSError, SafetensorError) as error:
        raise StoreError(f"'{path}' is no whole safetensors file ({error}); calibrate the model again") from None
    if block is None:
        raise StoreError(f"'{path}' is a safetensors file but no calibration of softgap; give another file")
    try:
        metadata = json.loads(block)
        version = metadata.get("format", 0)
        newer = version > FORMAT
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"'{path}' is damaged: its description is no JSON object ({error}); calibrate again") from None
    if newer:
        raise StoreError(
            f"'{path}' has calibration format {version}, newer than {FORMAT}, which this softgap reads; update softgap"
        )
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or tensor.numel() == 0:
            raise StoreError(
                f"'{path}' must hold float32 or float64 tensors with at least one number, got '{name}' with shape "
                f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}; calibrate the model again"
            )
        if not bool(tensor.isfinite().all()):
            raise StoreError(
                f"'{path}' must hold finite numbers, got NaN or infinity in '{name}', with which nothing can be "
                "measured; calibrate the model again"
            )
    digest = digest_of(tensors)
    if digest != metadata.get("digest"):
        raise StoreError(f"'{path}' is damaged: its tensors do not match their hash; calibrate the model again")
    return StoredCalibration(tensors, metadata, digest)


# Axes of the tensors that a calibration or a plan holds, by parameter; ``for_layers`` takes one layer for all.
_AXES = {
    "query_weight": ("layers", "heads", "features", "inputs"),
    "query_bias": ("layers", "heads", "features"),
    "key_weight": ("layers", "KV heads", "features", "inputs"),
    "key_bias": ("layers", "KV heads", "features"),
    "rate": ("layers", "KV heads", "features"),
    "tail_factor": ("layers", "heads"),
    "mean": ("layers", "heads", "values"),
    "first": ("layers", "heads"),
    "by_distance": ("layers", "heads", "distances"),
    "frequency": ("layers or 1", "1", "turned"),
    "turn": ("layers or 1", "1", "turned", "turned"),
    "readout.weight": ("layers", "heads", "values", "values"),
    "readout.bias": ("layers", "heads", "values"),
}
# Axes that one mechanism has for itself; the others are those of the model.
_OWN = ("features", "inputs", "values", "distances", "turned")


def check_shapes(tensors: Mapping[str, Tensor], model: PreTrainedModel, subject: str, remedy: str) -> None:
    """Refuse tensors that do not fit the model or each other; what they mean is known by their names."""
    sizes = _model_sizes(model)
    dim = sizes.pop("dim", None)
    for name, tensor in sorted(tensors.items()):
        mechanism, _, parameter = name.partition(".")
        axes = _AXES.get(name, _AXES.get(parameter))
        if axes is None:
            continue
        keys = [f"{mechanism} {axis}" if axis in _OWN else axis for axis in axes]
        fits = tensor.dim() == len(axes)
        for axis, size in zip(keys, tensor.shape, strict=False):
            if axis == "layers or 1" and size != 1:
                axis = "layers"
            if axis == "KV heads":  # a mechanism may also have a key map for each head that asks
                maps = sizes.setdefault(f"{mechanism} key maps", size)
                fits = fits and size == maps and size in (sizes.get("KV heads", size), sizes.get("heads", size))
                continue
            fits = fits and size == (1 if axis in ("1", "layers or 1") else sizes.setdefault(axis, size))
        if "inputs" in axes and dim and fits:
            fits = tensor.shape[-1] in (dim, 2 * dim)  # vectors after rotary embedding, or before and after
        if not fits:
            expected = ", ".join(
                f"{axis} ({sizes[key]})" if key in sizes else axis for axis, key in zip(axes, keys, strict=True)
            )
            raise StoreError(
                f"{subject} does not fit the model: its tensor '{name}' must have the axes [{expected}], got shape "
                f"{list(tensor.shape)}; {remedy}"
            )


def _model_sizes(model: PreTrainedModel) -> dict[str, int]:
    """Layers, heads and KV heads by the model's configuration, as far as it says so for all layers at once."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    layers = config.num_hidden_layers if kinds is None else sum(kind in _SOFTMAX_LAYERS for kind in kinds)
    heads = getattr(config, "num_attention_heads", None)
    sizes = {"layers": layers, "heads": heads, "KV heads": getattr(config, "num_key_value_heads", None) or heads}
    sizes["dim"] = getattr(config, "head_dim", None)
    return {axis: size for axis, size in sizes.items() if isinstance(size, int) and size > 0}


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Hash of named tensors: names, shapes, dtypes and all bytes."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        hasher.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return hasher.hexdigest()[:32]


DEFAULT_MECHANISMS = ("elu1", BASELINE)


_QUICK = ".quick.safetensors"


def calibration_path(fingerprint: str, *, quick: bool = False) -> Path:
    """Where the calibration of the model with this fingerprint is kept, and a quick one beside it.

    In ``$SOFTGAP_CALIBRATIONS``, or else in the folder ``calibrations`` of softgap's cache.
    """
    override = os.environ.get("SOFTGAP_CALIBRATIONS")
    folder = Path(override).expanduser().absolute() if override else cache_dir() / "calibrations"
    return folder / f"{fingerprint}{_QUICK if quick else '.safetensors'}"


def find_calibration(fingerprint: str) -> Path | None:
    """The calibration of the model with this fingerprint, or of the same weights before they were rounded to it.

    A quick one only where there is no other.
    """
    files = sorted(calibration_path(fingerprint).parent.glob("*.safetensors"))
    for quick in (False, True):
        path = calibration_path(fingerprint, quick=quick)
        if path.is_file():
            return path
        others = (file for file in files if file.name.endswith(_QUICK) == quick and fingerprint in _rounded_to(file))
        other = next(others, None)
        if other is not None:
            return other
    return None


def _rounded_to(path: Path) -> tuple[str, ...]:
    """Fingerprints of the models whose weights are those of a calibration, rounded."""
    try:
        return tuple(map(str, _description(path).get("rounded", {}).values()))
    except AttributeError:
        return ()


def _description(path: Path) -> dict[str, Any]:
    """What a calibration says of itself; nothing for a file that is none."""
    try:
        with safe_open(path, framework="pt") as file:
            description = json.loads((file.metadata() or {}).get(BLOCK, "{}"))
    except (OSError, SafetensorError, ValueError):
        return {}
    return description if isinstance(description, dict) else {}


def equip_mechanism(mechanism: str | Mechanism, model: PreTrainedModel) -> Mechanism:
    """A mechanism ready for a model: by name, as ``name@file``, or itself; parameters come from its calibration."""
    if isinstance(mechanism, str) and "@" in mechanism:
        name, _, file = mechanism.partition("@")
        return _check_fingerprint(load_calibration(Path(file).expanduser()), model, Path(file)).equip(name)
    resolved = resolve(mechanism)
    if not resolved.missing:
        return resolved
    path = find_calibration(model_fingerprint(model))
    if path is None:
        raise UnsupportedError(
            f"mechanism '{resolved.name}' needs the parameters {', '.join(resolved.missing)}, and there is no "
            f"calibration for this model; make one with 'softgap calibrate', or name a file as in {resolved.name}@FILE"
        )
    return _check_fingerprint(load_calibration(path), model, path).equip(resolved)


def default_mechanisms(model: PreTrainedModel) -> tuple[str, ...]:
    """What a model is compared with unless told otherwise.

    elu1 and uniform; and where it has a calibration, the fitted map and the window that keeps as much.
    """
    path = find_calibration(model_fingerprint(model))
    return DEFAULT_MECHANISMS if path is None else (*DEFAULT_MECHANISMS, "fitted", *_equal_window(path))


def _equal_window(path: Path) -> tuple[str, ...]:
    """The window that the labels of a calibration are about; nothing where it has no labels."""
    try:
        description = _description(path)
        keys = description["sufficiency"]["keys_worth"]["window"]
        recent, sinks = split_keys(round(keys), sinks=int(description.get("division", {}).get("sinks", SINKS)))
    except (LookupError, TypeError, ValueError, AttributeError):
        return ()
    return (resolve(f"window:w={recent},sinks={sinks}").label,)


def calibrated_mechanisms(model: PreTrainedModel) -> tuple[str, ...]:
    """``fitted`` where the model has a calibration, else nothing."""
    return () if find_calibration(model_fingerprint(model)) is None else ("fitted",)


def quick_calibration_note(model: PreTrainedModel) -> str:
    """What a command says where the model's fitted maps come from a quick calibration; else nothing."""
    path = find_calibration(model_fingerprint(model))
    if path is None or not _description(path).get("quick"):
        return ""
    return (
        "the fitted maps and labels of this model come from a quick calibration; 'softgap calibrate' makes better ones"
    )


def _check_fingerprint(stored: StoredCalibration, model: PreTrainedModel, path: Path) -> StoredCalibration:
    fingerprint = model_fingerprint(model)
    if fingerprint in dict(stored.metadata.get("rounded") or {}).values():
        return replace(stored, rounded=True)
    if stored.metadata.get("fingerprint") != fingerprint:
        raise UnsupportedError(
            f"the calibration '{path}' was fitted to the model {stored.metadata.get('fingerprint')} "
            f"({stored.metadata.get('model')}), and this one is {fingerprint}; calibrate this model"
        )
    check_shapes(stored.tensors, model, f"'{path}'", "calibrate the model again")
    return stored
