"""Two pretend accelerators with real numbers: every operation checks that its tensors lie on one of them.

``with simulated_devices():`` makes ``sim:0`` and ``sim:1`` usable on a machine that has a CPU only. A tensor there
holds its numbers in a CPU tensor, shows the pretend device, and refuses what PyTorch refuses: an operation over two
devices (tensors of no dimensions aside, copies aside), and being read by NumPy. A computation that passes here runs
each operation on the device of its tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["SimulatedTensor", "simulated_devices"]

NAME = "sim"
COUNT = 2
# What may lie elsewhere: a copy goes between devices, and a mask of indices may stay on the CPU.
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::_copy_from")


class SimulatedTensor(Tensor):
    """A tensor that says it is on a pretend device; ``numbers`` holds its numbers."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> SimulatedTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
            requires_grad=False,
        )
        made.numbers = inner
        return made

    def tolist(self) -> Any:
        """The numbers, which PyTorch does not read out of a subclass."""
        return self.numbers.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.numbers!r}, device='{self.device}')"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})


class _Devices(TorchDispatchMode):
    """Catches what makes a tensor out of none, such as ``torch.arange(..., device="sim:0")``."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        if any(isinstance(x, SimulatedTensor) or (isinstance(x, torch.device) and x.type == NAME) for x in leaves):
            if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"):
                # In inference mode operations made of others arrive whole.
                with self:
                    return function.decompose(*args, **kwargs)
            return _run(function, args, kwargs)
        return function(*args, **kwargs)


class _Generator(torch.Generator):
    """Random numbers of a pretend device are the CPU's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        real = "cpu" if torch.device(device).type == NAME else device
        return _REAL_GENERATOR(device=real)


_REAL_GENERATOR = torch.Generator


class _Literals(TorchFunctionMode):
    """``torch.tensor`` writes its numbers past every dispatch mode, so it does that on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            if device.type == NAME:
                return function(*args, **{**kwargs, "device": "cpu"}).to(device)
        return function(*args, **kwargs)


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the numbers, its results on the device of its tensors."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    name = function._schema.name
    devices = {x.device for x in tensors if x.dim() > 0 or len(tensors) == 1}
    if name in ("aten::index.Tensor", "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"):
        # PyTorch takes indices from the CPU.
        devices -= {torch.device("cpu")} if len(devices) > 1 and args[0].device.type == NAME else set()
    if len(devices) > 1 and name not in _COPIES:
        shown = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(f"Expected all tensors to be on the same device in {name}, but found {shown}")
    target = kwargs.get("device")
    device = torch.device(target) if target is not None else _own_device(tensors)
    if str(device) == NAME:
        device = torch.device(NAME, 0)
    inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
    if target is not None and device.type == NAME:
        inner_kwargs["device"] = torch.device("cpu")
    result = function(*inner_args, **inner_kwargs)
    simulated = [x for x in tensors if isinstance(x, SimulatedTensor)]
    inference = torch.is_inference_mode_enabled() and all(x.is_inference() for x in simulated)
    aliases = {id(_inner(x)): x for x in tensors if isinstance(x, SimulatedTensor)}

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, SimulatedTensor):
            return x
        known = aliases.get(id(x))
        if known is not None and function._schema.name.endswith("_"):
            return known
        if device.type != NAME:
            return x
        # A view of an ordinary tensor is an ordinary tensor in inference mode too.
        with torch.inference_mode(mode=inference):
            return SimulatedTensor(x, device)

    if name.endswith("_") and not name.endswith("__"):
        return args[0] if isinstance(args[0], Tensor) else tree_map(wrap, result)
    if "out" in kwargs:
        return kwargs["out"]
    return tree_map(wrap, result)


def _own_device(tensors: list[Tensor]) -> torch.device:
    for x in tensors:
        if x.dim() > 0 and x.device.type == NAME:
            return x.device
    return next((x.device for x in tensors if x.device.type == NAME), torch.device("cpu"))


def _inner(x: Any) -> Any:
    return x.numbers if isinstance(x, SimulatedTensor) else x


class _Module:
    """What ``torch.sim`` offers."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(1)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass


@cache
def _register() -> None:
    """Give PyTorch's free place for a backend our name, once in a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())


@contextmanager
def simulated_devices() -> Iterator[tuple[torch.device, torch.device]]:
    """Let the block use two pretend accelerators."""
    _register()
    # The engine has threads for devices that PyTorch was built for only.
    one_thread = torch.autograd.set_multithreading_enabled(False)
    devices: Any = _Devices
    with one_thread, devices(), _Literals(), patch("torch.Generator", _Generator):
        yield torch.device(NAME, 0), torch.device(NAME, 1)
