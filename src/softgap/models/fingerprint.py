"""The fingerprint of a model, and what a manifest says about a model and its settings."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedModel

from softgap import __version__
from softgap.attention import Mechanism
from softgap.errors import ModelError
from softgap.models.placement import (
    OffloadedWeight,
    describe_placement,
    execution_devices,
    offloaded_weights,
)
from softgap.models.quantisation import packed_parts, quantisation_of
from softgap.models.support import attention_modules, in_training, layer_numbers
from softgap.trajectories import Manifest

__all__ = [
    "display_name",
    "dropout_options",
    "library_versions",
    "live_options",
    "manifest_of",
    "model_fingerprint",
    "replay_options",
    "rounded_fingerprints",
]


# Settings that do not change what the model computes from its weights, or that the weights' own dtype says.
_INESSENTIAL = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "name_or_path",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)


_SAMPLES = 64


_State = tuple[Any, ...]


@dataclass(frozen=True)
class _Hashed:
    """What one look at all weights has told, and the state of the model then."""

    state: _State
    fingerprint: str
    non_finite: tuple[str, ...]


_HASHED: weakref.WeakKeyDictionary[PreTrainedModel, _Hashed] = weakref.WeakKeyDictionary()


def model_fingerprint(model: PreTrainedModel, *, fresh: bool = False) -> str:
    """Hash of every weight and of the essential configuration, 32 hexadecimal digits.

    SHA-256 over names, shapes, dtypes and all bytes of the parameters and saved buffers, and over those settings of
    the configuration that differ from their defaults and bear on the function. It does not depend on the device, on
    the attention implementation or on where the model came from. It does depend on the dtype: the same weights in
    bfloat16 compute other numbers and have another fingerprint.

    Offloaded weights are hashed where they lie, one by one. Quantised weights are hashed as they are packed.

    Parameters
    ----------
    model
        A model with its weights loaded.
    fresh
        Hash again even if this object was hashed before. Otherwise the known value is kept as long as the
        configuration, every tensor's place and version counter, and a sample of its values are the same. Only an edit
        behind autograd's back (through ``.data``) that misses the sample goes unseen, and an edit of weights that are
        offloaded to disk.

    Raises
    ------
    ModelError
        If a weight is NaN or infinite: no measurement of such a model means anything.
    """
    hashed = _hashed(model, fresh=fresh)
    if hashed.non_finite:
        raise ModelError(_non_finite_sentence(model, hashed.non_finite))
    return hashed.fingerprint


def _hashed(model: PreTrainedModel, *, fresh: bool = False) -> _Hashed:
    tensors = _tensors(model)
    settings = _settings(model)
    state = (settings, tuple(_state(name, tensor) for name, tensor in tensors.items()))
    known = _HASHED.get(model)
    if known is not None and known.state == state and not fresh:
        return known
    non_finite: list[str] = []
    hashed = _HASHED[model] = _Hashed(state, _hash(settings, tensors, non_finite=non_finite), tuple(sorted(non_finite)))
    return hashed


def _non_finite_sentence(model: PreTrainedModel, names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more tensors" if len(names) > 2 else f" and '{names[1]}'" if len(names) > 1 else ""
    remedy = (
        "load it in float32, where the numbers may fit, or take another copy of the model"
        if model.dtype == torch.float16
        else "the file is damaged or was converted badly, so take another copy of the model"
    )
    return f"the weights of a model must be finite numbers, got NaN or infinity in '{names[0]}'{more}; {remedy}"


def rounded_fingerprints(model: PreTrainedModel) -> dict[str, str]:
    """The fingerprints that a float32 model has once it is loaded in bfloat16 or float16; none for another model.

    They tell that a model in half precision has the same weights, rounded. One tensor at a time is cast.
    """
    if model.dtype != torch.float32 or getattr(model, "hf_quantizer", None) is not None:
        return {}
    settings, tensors = _settings(model), _tensors(model)
    return {
        str(dtype).removeprefix("torch."): _hash(settings, tensors, partial(_dtype_of, model, dtype))
        for dtype in (torch.bfloat16, torch.float16)
    }


def _dtype_of(model: PreTrainedModel, dtype: torch.dtype, name: str) -> torch.dtype:
    """What a weight is loaded in: some types keep a few of theirs in float32."""
    kept = [*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())]
    if dtype == torch.float16:
        kept += getattr(model, "_keep_in_fp32_modules", None) or ()
    return torch.float32 if set(name.split(".")) & set(kept) else dtype


def _hash(
    settings: str,
    tensors: Mapping[str, Tensor | OffloadedWeight],
    cast_to: Callable[[str], torch.dtype | None] = lambda name: None,
    non_finite: list[str] | None = None,
) -> str:
    """The hash; names of tensors that hold NaN or infinity are appended to ``non_finite`` on the way."""

    def digest_of(name: str) -> bytes:
        weight = tensors[name]
        # Loaded once, also where it is offloaded to disk.
        tensor = weight.load() if isinstance(weight, OffloadedWeight) else weight
        if non_finite is not None and not _is_finite(tensor):
            non_finite.append(name)
        return _digest(name, tensor, cast_to(name))

    hasher = hashlib.sha256(settings.encode())
    # hashlib lets go of the interpreter lock, so threads hash side by side.
    with ThreadPoolExecutor() as pool:
        for digest in pool.map(digest_of, tensors):
            hasher.update(digest)
    return hasher.hexdigest()[:32]


def _tensors(model: PreTrainedModel) -> dict[str, Tensor | OffloadedWeight]:
    """Parameters and saved buffers under sorted names, each storage once however many names are tied to it."""
    offloaded = offloaded_weights(model)
    stored = sorted(model.state_dict(keep_vars=True).items())
    for name, tensor in stored:
        if isinstance(tensor, Tensor) and tensor.is_meta and name not in offloaded:
            raise ModelError(f"the weight '{name}' is not loaded (device 'meta'); load the model before using it")
    spread = bool(offloaded) or len(execution_devices(model)) > 1
    # Tied weights share no storage where they lie on several devices or on disk.
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {}) if spread else {}
    sources = set(tied.values())
    seen: set[object] = set()
    tensors: dict[str, Tensor | OffloadedWeight] = {}
    for name, tensor in stored:
        if not isinstance(tensor, Tensor):
            continue
        weight = offloaded.get(name, tensor)
        held = weight.in_memory if isinstance(weight, OffloadedWeight) else weight
        if name in tied or name in sources:
            key: object = tied.get(name, name)
        else:
            key = name if held is None or held.numel() == 0 else _place(held)
        if key not in seen:
            seen.add(key)
            tensors[name] = weight
    return tensors


def _place(tensor: Tensor) -> object:
    """What two tensors share that are one."""
    parts = packed_parts(tensor)
    if parts:
        return tuple(_place(part) for part in parts.values())
    # A tensor without a storage of its own is known by itself.
    return (tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride())


def _settings(model: PreTrainedModel) -> str:
    config = model.config
    try:
        defaults = type(config)().to_dict()
    except (TypeError, ValueError, StrictDataclassError):
        # A few types have no valid default.
        defaults = {}
    essential = {"model_type": config.model_type, **_essential(config.to_dict(), defaults)}
    return json.dumps(essential, sort_keys=True, default=str)


def _essential(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """What differs from the defaults and bears on the function, at every depth: composite configurations are nested.

    Defaults are left out so that a setting which a later transformers adds does not change the fingerprint.
    """
    essential = {}
    for name, value in settings.items():
        default = defaults.get(name)
        if name in _INESSENTIAL or value == default:
            continue
        essential[name] = _essential(value, default) if isinstance(value, dict) and isinstance(default, dict) else value
    return essential


def _state(name: str, weight: Tensor | OffloadedWeight) -> _State:
    """What tells cheaply that a tensor was replaced or edited."""
    tensor = weight.in_memory if isinstance(weight, OffloadedWeight) else weight
    if tensor is None:
        # On disk: to look at it would be to load it.
        return name, id(weight.weights) if isinstance(weight, OffloadedWeight) else 0
    parts = packed_parts(tensor)
    if parts:
        return name, *(_state(part, inner) for part, inner in parts.items())
    # Inference tensors count no versions.
    version = -1 if tensor.is_inference() else tensor._version
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    step = max(1, flat.numel() // _SAMPLES)
    sample = _bytes(flat[::step])
    return name, tensor.data_ptr(), version, tensor.shape, tensor.dtype, sample


def _is_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite; a bias may be -inf, which rules a token out."""
    parts = packed_parts(tensor)
    if parts:
        return all(map(_is_finite, parts.values()))
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    values = tensor.detach()
    # 8-bit floats have no reductions of their own.
    least, greatest = torch.aminmax(values if values.element_size() > 1 else values.float())
    return bool(greatest.isfinite()) and (bool(least.isfinite()) or (values.dim() == 1 and not bool(least.isnan())))


def _digest(name: str, tensor: Tensor, dtype: torch.dtype | None) -> bytes:
    header = [name, list(tensor.shape), str(tensor.dtype)]
    parts = packed_parts(tensor)
    if parts:
        digest = hashlib.sha256(json.dumps([*header, type(tensor).__name__]).encode())
        for part, inner in parts.items():
            digest.update(_digest(part, inner, None))
        return digest.digest()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.detach().to(dtype)
        header[-1] = str(dtype)
    digest = hashlib.sha256(json.dumps(header).encode())
    digest.update(_view(tensor))
    return digest.digest()


def _bytes(tensor: Tensor) -> bytes:
    return bytes(_view(tensor))


def _view(tensor: Tensor) -> memoryview:
    """The tensor's bytes in row-major order, without a copy where it lies so on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


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
        model=display_name(model),
        weights=model_fingerprint(model),
        mechanisms={mechanism.label: _describe_mechanism(mechanism) for mechanism in mechanisms},
        versions={**library_versions(), "python": sys.version.split()[0]},
        dtype=str(model.dtype).removeprefix("torch."),
        backend=str(model.config._attn_implementation),
        threads=torch.get_num_threads(),
        seed=seed,
        dropped_sinks=drop_sinks,
        inputs=inputs,
        options=options or {},
        extra={**_loading_report(model), **_held_out_report(model, mechanisms)},
        command=shlex.join(sys.argv),
    )


def display_name(model: PreTrainedModel) -> str:
    """Where a model came from, or its type."""
    return str(model.name_or_path or model.config.model_type)


def library_versions() -> dict[str, str]:
    """Versions of what computes the numbers."""
    return {"softgap": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def _describe_mechanism(mechanism: Mechanism) -> dict[str, Any]:
    """Its numbers, and which calibration its parameters come from."""
    return {**mechanism.options, **({"calibration": mechanism.origin} if mechanism.origin else {})}


def _loading_report(model: PreTrainedModel) -> dict[str, str]:
    """How the weights are packed and where they lie, for the reader; nothing for a plain model on one device."""
    about = {"placement": describe_placement(model), "quantisation": quantisation_of(model)}
    return {name: words for name, words in about.items() if words}


def _held_out_report(model: PreTrainedModel, mechanisms: Sequence[Mechanism]) -> dict[str, Any]:
    """What held-out text said of the calibration in use, for the reader; kinds of heads by the number of the layer."""
    report = next((dict(mechanism.held_out) for mechanism in mechanisms if mechanism.held_out), None)
    if report is None:
        return {}
    if "kinds" in report:
        rows = report["kinds"]
        modules = [entry.layer for entry in attention_modules(model)]
        numbers = layer_numbers(modules if len(modules) == len(rows) else [None] * len(rows))
        report["kinds"] = {str(number): row for number, row in zip(numbers, rows, strict=True)}
    return {"held_out": report}


def dropout_options(model: PreTrainedModel, allow_dropout: bool) -> dict[str, Any]:
    """What a manifest says about dropout: nothing, unless the model was measured in training mode."""
    return {"allow_dropout": True} if allow_dropout and in_training(model) else {}


def live_options(
    model: PreTrainedModel, *, max_new_tokens: int, chat: bool, focus: bool, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What a recorded generation depends on: the settings given, and the model's own where it samples."""
    plain_settings = {key: value for key, value in settings.items() if isinstance(value, str | int | float | bool)}
    named: dict[str, Any] = {}
    if settings.get("do_sample"):
        names = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
        values = {name: getattr(model.generation_config, name, None) for name in names}
        named = {name: value for name, value in values.items() if value is not None}
    return {"mode": "live", "max_new_tokens": max_new_tokens, "chat": chat, "focus": focus, **named, **plain_settings}


def replay_options(*, chat: bool, focus: bool) -> dict[str, Any]:
    """What a reading depends on besides the text."""
    return {"mode": "replay", "chat": chat, "focus": focus}
