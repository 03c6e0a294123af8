"""Where the weights of a model lie and where its forwards run: on one device, on several, or offloaded by accelerate.

accelerate's hooks bring an offloaded weight to the device that runs its module, and leave the weight on the device
"meta" between two forwards. Whoever makes inputs for a model asks ``input_device``; whoever reads a weight asks
``weight_of``.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
from torch import Tensor, nn

from softgap.errors import ModelError
from softgap.models.quantisation import packed_parts

__all__ = [
    "STRATEGIES",
    "DeviceMap",
    "MaxMemory",
    "OffloadedWeight",
    "available_devices",
    "bytes_of_limits",
    "check_device_map",
    "check_max_memory",
    "complete_device_map",
    "describe_placement",
    "execution_devices",
    "freeze_weights",
    "input_device",
    "offloaded_weights",
    "parse_device_map",
    "parse_max_memory",
    "random_devices",
    "resolve_device",
    "weight_of",
]

DeviceMap = str | Mapping[str, int | str | torch.device]
"""How weights are spread: "auto", "balanced", "balanced_low_0", "sequential", or a place for each part of the model."""
MaxMemory = Mapping[int | str, int | str]
"""The most memory that weights may take on each device: a number of bytes, or text such as "10GiB"."""
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True, eq=False)
class OffloadedWeight:
    """A weight that is in memory or on disk between two forwards, under a name in one of accelerate's mappings."""

    weights: Mapping[str, Tensor]
    key: str

    def load(self) -> Tensor:
        """The weight, read from disk where it lies there."""
        return self.weights[self.key]

    @property
    def in_memory(self) -> Tensor | None:
        """The weight where it is in memory; None where it must be read from disk."""
        if isinstance(self.weights, OffloadedWeightsLoader):
            held: Tensor | None = self.weights.state_dict.get(self.key)
            return held
        return self.weights[self.key] if isinstance(self.weights, dict) else None


def input_device(model: nn.Module) -> torch.device:
    """The device that inputs of a model go to, and that its logits come back on."""
    first = next(model.parameters(), None)
    if first is not None and not first.is_meta:
        return first.device
    for module in model.modules():
        for hook in _hooks(module):
            if hook.execution_device is not None:
                return torch.device(hook.execution_device)
    raise ModelError("the weights of the model are not loaded (device 'meta'); load them before using the model")


def execution_devices(model: nn.Module) -> tuple[torch.device, ...]:
    """Every device that runs a part of a model, in the order of its modules."""
    devices: dict[torch.device, None] = {input_device(model): None}
    for module in model.modules():
        for hook in _hooks(module):
            if hook.execution_device is not None:
                devices[torch.device(hook.execution_device)] = None
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta:
                devices[parameter.device] = None
    return tuple(devices)


def random_devices(model: nn.Module) -> list[torch.device]:
    """The devices whose random numbers a forward or a generation may draw, besides the CPU."""
    return [device for device in execution_devices(model) if device.type == "cuda"]


def offloaded_weights(model: nn.Module) -> dict[str, OffloadedWeight]:
    """Every weight that accelerate keeps off its device between two forwards, by its name in the model."""
    found = {}
    for place, module in model.named_modules():
        for hook in _hooks(module):
            if not hook.offload or hook.weights_map is None:
                continue
            for name, tensor in _own_tensors(module, recurse=hook.place_submodules):
                if tensor.is_meta:
                    found[f"{place}.{name}" if place else name] = _resolved(hook.weights_map, name)
    return found


def weight_of(module: nn.Module, name: str = "weight") -> Tensor | None:
    """A weight of a module as a plain floating-point tensor: loaded if it is offloaded, unpacked if it is quantised.

    None where the module has no weight of this name, or one whose packing only its own library can undo.
    """
    tensor = getattr(module, name, None)
    if not isinstance(tensor, Tensor):
        return None
    if tensor.is_meta:
        known = offloaded_weights(module).get(name)
        if known is None:
            return None
        tensor = known.load()
    if packed_parts(tensor):
        unpack = getattr(tensor, "dequantize", None)
        return unpack() if callable(unpack) else None
    return tensor if tensor.is_floating_point() else None


@contextmanager
def freeze_weights(model: nn.Module) -> Iterator[None]:
    """The weights of a model collect no gradients while the block runs."""
    # By name: accelerate makes new parameters whenever it brings weights.
    trainable = [name for name, x in model.named_parameters(remove_duplicate=False) if x.requires_grad]
    _collect_gradients(model, trainable, False)
    try:
        yield
    finally:
        _collect_gradients(model, trainable, True)


def _collect_gradients(model: nn.Module, names: Sequence[str], collect: bool) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # What accelerate made during inference may be told about gradients in inference mode only.
    with torch.inference_mode():
        for name in names:
            parameters[name].requires_grad_(collect)


def _hooks(module: nn.Module) -> Iterator[AlignDevicesHook]:
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    yield from (each for each in hooks if isinstance(each, AlignDevicesHook))


def _own_tensors(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse)
    yield from module.named_buffers(recurse=recurse)


def _resolved(weights: Any, key: str) -> OffloadedWeight:
    while isinstance(weights, PrefixedDataset):
        weights, key = weights.dataset, f"{weights.prefix}{key}"
    return OffloadedWeight(weights, key)


def check_device_map(device_map: DeviceMap | None) -> None:
    """Refuse a device map that names no strategy, and a place that is not here."""
    if device_map is None:
        return
    if isinstance(device_map, str):
        if device_map not in STRATEGIES:
            raise ModelError(
                f"device_map must be one of {', '.join(STRATEGIES)}, or a place for each part of the model, got "
                f"'{device_map}'; use 'auto', or name a single device with device"
            )
        return
    if not device_map:
        raise ModelError("device_map must place at least one part of the model, got none; use 'auto'")
    here = available_devices()
    for part, place in device_map.items():
        if str(place) != "disk" and not _is_here(place, here):
            raise ModelError(
                f"device_map must name devices here ({', '.join(here)}) or disk, got '{place}' for '{part}'; use 'cpu'"
            )


def complete_device_map(
    device_map: Mapping[str, int | str | torch.device], model: nn.Module
) -> dict[str, int | str | torch.device]:
    """The map with a place for every part of the model: "" in it stands for all that the other names leave."""
    places = {name: place for name, place in device_map.items() if name}
    parts = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    for name in places:
        if name not in parts:
            near = difflib.get_close_matches(name, parts, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "the empty name '' stands for all that is left"
            raise ModelError(f"device_map must name parts of the model, got '{name}'; {hint}")
    if not places:
        return dict(device_map)
    for name in _left_over(model, places):
        if "" not in device_map:
            raise ModelError(
                f"device_map must give every part of the model a place, and '{name}' has none; add one, or one for ''"
            )
        places[name] = device_map[""]
    return places


def _left_over(model: nn.Module, places: Mapping[str, object], name: str = "") -> list[str]:
    """The largest parts of a module that hold something and have no place."""
    if name in places:
        return []
    if name and not any(place.startswith(f"{name}.") for place in places):
        return [name] if next(_own_tensors(model, recurse=True), None) is not None else []
    prefix = f"{name}." if name else ""
    own = [f"{prefix}{tensor}" for tensor, _ in _own_tensors(model, recurse=False) if f"{prefix}{tensor}" not in places]
    return own + [
        part for child, module in model.named_children() for part in _left_over(module, places, prefix + child)
    ]


def available_devices() -> dict[str, int]:
    """Kinds of device that can be used here, with how many there are of each."""
    available = {"cpu": 1}
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        available[accelerator.type] = torch.accelerator.device_count()
    return available


def resolve_device(device: int | str | torch.device) -> torch.device | None:
    """The device of this name, or None if there is none here."""
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        return None
    return resolved if (resolved.index or 0) < available_devices().get(resolved.type, 0) else None


def _is_here(place: int | str | torch.device, here: Mapping[str, int]) -> bool:
    if isinstance(place, int):
        return place < max((count for kind, count in here.items() if kind != "cpu"), default=0)
    return resolve_device(place) is not None


def parse_device_map(text: str | None) -> DeviceMap | None:
    """A device map as it is written on a command line: a strategy, or a JSON object of parts and places.

    >>> parse_device_map("auto")
    'auto'
    >>> parse_device_map('{"model.embed_tokens": "cpu", "": "disk"}')
    {'model.embed_tokens': 'cpu', '': 'disk'}
    """
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        places = json.loads(text)
    except ValueError as error:
        raise ModelError(
            f"a device map must be a strategy ({', '.join(STRATEGIES)}) or a JSON object such as "
            f'{{"model.layers.0": "cpu", "": "disk"}}, got \'{text}\' ({error}); check its quotes'
        ) from None
    wrong = [place for place in places.values() if isinstance(place, bool) or not isinstance(place, int | str)]
    if wrong:
        raise ModelError(f"a device map gives each part a device or disk, got {wrong[0]!r}; use 'cpu'")
    return dict(places)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?)b", re.IGNORECASE)
_UNITS = {"": 1} | {f"{unit}{i}": base**n for i, base in (("", 1000), ("i", 1024)) for n, unit in enumerate("kmgt", 1)}


def parse_max_memory(text: str | None) -> MaxMemory | None:
    """Memory limits as they are written on a command line.

    >>> parse_max_memory("0=10GiB,cpu=30GiB")
    {0: '10GiB', 'cpu': '30GiB'}
    """
    if text is None:
        return None
    limits: dict[int | str, int | str] = {}
    for part in text.split(","):
        device, equals, size = (piece.strip() for piece in part.partition("="))
        if not equals or not device or _SIZE.fullmatch(size) is None:
            raise ModelError(
                f"--max-memory takes a limit for each device, such as 0=10GiB,cpu=30GiB, got '{text}'; write "
                "device=number and a unit"
            )
        limits[int(device) if device.isdigit() else device] = size.replace(" ", "")
    return limits


def check_max_memory(max_memory: MaxMemory | None, device_map: DeviceMap | None) -> None:
    """Refuse limits without a strategy that heeds them, limits for devices that are not here, and unreadable ones."""
    if max_memory is None:
        return
    if not isinstance(device_map, str):
        raise ModelError(
            "max_memory limits what device_map='auto' puts on each device, and no such strategy was given; add "
            "device_map='auto'"
        )
    here = available_devices()
    for device in max_memory:
        if not _is_here(device, here):
            raise ModelError(
                f"max_memory must name devices here ({', '.join(here)}; accelerators by number), got '{device}'; "
                "leave it out"
            )
    bytes_of_limits(max_memory)


def bytes_of_limits(max_memory: MaxMemory) -> dict[int | str, int]:
    """The limits in bytes.

    >>> bytes_of_limits({0: "1.5GiB", "cpu": "10 kB"})
    {0: 1610612736, 'cpu': 10000}
    """
    limits: dict[int | str, int] = {}
    for device, size in max_memory.items():
        match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
        if match is None and not (isinstance(size, int) and size >= 0):
            raise ModelError(
                f"max_memory takes a number of bytes or text such as '10GiB' for each device, got {size!r} for "
                f"'{device}'; write a number and a unit"
            )
        limits[device] = int(size) if match is None else int(float(match[1]) * _UNITS[match[2].lower()])
    return limits


def describe_placement(model: nn.Module) -> str:
    """Where the weights lie, in words for a manifest; empty where they are whole on one device."""
    places: dict[str, None] = dict.fromkeys(str(device) for device in execution_devices(model))
    for weight in offloaded_weights(model).values():
        places["offloaded to memory" if weight.in_memory is not None else "offloaded to disk"] = None
    return ", ".join(places) if len(places) > 1 else ""
