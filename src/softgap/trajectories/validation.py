"""Check the fields of a Trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from softgap.errors import ShapeError, ValueInputError, unknown_name
from softgap.inputs import is_whole, refuse_string
from softgap.trajectories.manifest import Manifest

if TYPE_CHECKING:
    from softgap.trajectories.run import Trajectories

__all__ = ["BASELINE", "FOCUS", "PARTS", "QUANTITIES", "check_fields", "check_prompt"]

BASELINE = "uniform"
"""The mean of the visible values, measured beside every mechanism: without this baseline a divergence says little."""

QUANTITIES = ("divergence", "relative_l2", "norm_ratio")
"""Measured per mechanism, layer, head and step."""

FOCUS = ("sparsity", "attention_entropy", "largest_weight")
"""Measured per layer, head and step, whatever the mechanism."""

PARTS = ("prompt", "completion")

_INT32 = np.iinfo(np.int32)


def check_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Trajectories in their exact types, or the error that says which one does not fit."""
    mechanisms = _names("mechanisms", value["mechanisms"])
    layers = _increasing("layers", value["layers"])
    kv_group = _integers("kv_group", value["kv_group"], (len(layers), None))
    heads = kv_group.shape[1]
    positions = _integers("positions", value["positions"], (None,))
    steps = len(positions)
    per_head = (len(layers), heads, steps)
    heads_per_layer = _heads_per_layer(value["heads_per_layer"], len(layers), heads)
    quantities = _named_arrays("quantities", value["quantities"], QUANTITIES, (len(mechanisms), *per_head))
    missing = [name for name in QUANTITIES if name not in quantities]
    if missing:
        raise ValueInputError(f"quantities must hold {', '.join(QUANTITIES)}, got no {missing[0]}; measure it too")
    focus = _named_arrays("focus", value["focus"], FOCUS, per_head)
    _check_padding(heads_per_layer, kv_group, {**quantities, **focus})
    refuse_string("tokens", value["tokens"], "the text of each token")
    tokens = tuple(value["tokens"])
    if len(tokens) != steps:
        raise ShapeError(f"tokens must have one entry per step, {steps} as positions has, got {len(tokens)}")
    return {
        "mechanisms": mechanisms,
        "layers": layers,
        "kv_group": kv_group,
        "quantities": quantities,
        "focus": focus,
        "heads_per_layer": heads_per_layer,
        "positions": positions,
        "token_ids": _integers("token_ids", value["token_ids"], (steps,)),
        "tokens": tuple(_text("tokens", token) for token in tokens),
        "logprob": _floats("logprob", value["logprob"], (steps,)),
        "entropy": _floats("entropy", value["entropy"], (steps,)),
        **_sample_fields(value),
    }


def check_prompt(run: Trajectories, prompt: Trajectories) -> None:
    """Raise unless ``prompt`` is the prompt part of a run measured in the same way."""
    if run.part != "completion" or prompt.part != "prompt" or prompt.prompt is not None:
        raise ValueInputError(
            "only a completion has a prompt, and the prompt's part is 'prompt', "
            f"got a {run.part} with a prompt whose part is '{prompt.part}'"
        )
    for name in ("mechanisms", "layers", "heads_per_layer"):
        if getattr(run, name) != getattr(prompt, name):
            raise ShapeError(
                f"a prompt must have the {name} of its run, {getattr(run, name)}, got {getattr(prompt, name)}"
            )
    if not np.array_equal(run.kv_group, prompt.kv_group):
        raise ShapeError("a prompt must have the kv_group of its run, got another; measure both on one model")
    if run.focus.keys() != prompt.focus.keys():
        raise ShapeError(f"a prompt must have the focus of its run, {sorted(run.focus)}, got {sorted(prompt.focus)}")


def _sample_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    if value["part"] not in PARTS:
        raise ValueInputError(f"part must be 'prompt' or 'completion', got {value['part']!r}")
    n_prompt = value["n_prompt"]
    if not is_whole(n_prompt) or not 0 <= n_prompt <= _INT32.max:
        raise ValueInputError(f"n_prompt must be a whole number from 0, got {n_prompt!r}; count the prompt's tokens")
    if not isinstance(value["manifest"], Manifest):
        raise ValueInputError(f"manifest must be a Manifest, got {type(value['manifest']).__name__}")
    if not value["sample_id"]:
        raise ValueInputError(f"sample_id must be a name, got {value['sample_id']!r}; number the samples if need be")
    texts = {name: _text(name, value[name]) for name in ("sample_id", "prompt_text", "completion_text")}
    label = None if value["label"] is None else _text("label", value["label"])
    return {**texts, "label": label, "n_prompt": int(n_prompt)}


def _names(field: str, value: Iterable[Any]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ValueInputError(f"{field} must be a list of names, got the text {value!r}; use [{value!r}]")
    names = tuple(_text(field, name) for name in value)
    if not names or len(set(names)) != len(names):
        raise ValueInputError(f"{field} must be one or more different names, got {list(names)}")
    return names


def _increasing(field: str, indices: Iterable[Any]) -> tuple[int, ...]:
    values = tuple(int(value) for value in indices)
    if not values or values[0] < 0 or any(b <= a for a, b in pairwise(values)):
        raise ValueInputError(f"{field} must be one or more increasing indices from 0, got {values}")
    return values


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueInputError(f"{field} must be text, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueInputError(
            f"{field} must be text that UTF-8 can hold, got {value[:80]!r}; decode it with errors='replace'"
        ) from error
    return value


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(w is None or s == w for s, w in zip(shape, expected, strict=True))


def _describe(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _floats(field: str, value: Any, shape: tuple[int | None, ...]) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise ValueInputError(f"{field} must hold real numbers, got an array of {array.dtype}")
    if not _fits(array.shape, shape):
        raise ShapeError(f"{field} must have shape {_describe(shape)}, got {list(array.shape)}")
    return _read_only(array.astype(np.float32, copy=False))


def _integers(field: str, value: Any, shape: tuple[int | None, ...]) -> np.ndarray:
    array = np.asarray(value)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise ValueInputError(f"{field} must hold whole numbers, got an array of {array.dtype}")
    if not _fits(array.shape, shape):
        raise ShapeError(f"{field} must have shape {_describe(shape)}, got {list(array.shape)}")
    if array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
        raise ValueInputError(f"{field} must fit into 32 bits, got {array.min()} to {array.max()}")
    return _read_only(array.astype(np.int32, copy=False))


def _heads_per_layer(value: Iterable[Any], layers: int, heads: int) -> tuple[int, ...]:
    counts = tuple(int(count) for count in value) or (heads,) * layers
    if len(counts) != layers:
        raise ShapeError(f"heads_per_layer must have one entry for each of {layers} layers, got {len(counts)}")
    if min(counts) < 1 or max(counts) != heads:
        raise ShapeError(
            f"heads_per_layer must be from 1 to the number of columns of kv_group, {heads}, and reach it, got {counts}"
        )
    return counts


def _named_arrays(
    field: str, value: Mapping[str, Any], allowed: tuple[str, ...], shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    for name in value:
        if name not in allowed:
            raise unknown_name(f"entry of {field}", name, allowed)
    return {name: _floats(name, value[name], shape) for name in allowed if name in value}


def _check_padding(heads_per_layer: tuple[int, ...], kv_group: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
    padding = np.arange(kv_group.shape[1]) >= np.array(heads_per_layer)[:, None]
    if (kv_group[padding] != -1).any() or (kv_group[~padding] < 0).any():
        raise ValueInputError("kv_group must be the index of a KV head, and -1 only for padding; got otherwise")
    for name, array in arrays.items():
        if not np.isnan(array[..., padding, :]).all():
            raise ValueInputError(f"{name} must be NaN where a layer has no such head, got numbers; pad with NaN")
