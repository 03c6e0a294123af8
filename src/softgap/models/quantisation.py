"""Quantised weights: packed while a model is loaded, or as they were saved; read through the tensors they consist of.

softgap reads queries, keys, values and outputs, which no quantisation of weights changes in kind. It touches the
weights themselves in two places only: their fingerprint, and the norm of what a head writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from softgap.errors import ModelError

__all__ = ["QUANTISE", "check_quantise", "packed_parts", "quantisation_of", "quantising", "require_library"]

QUANTISE = ("int8",)
"""How weights can be quantised while a model is loaded."""

# The library that unpacks weights of a method, as it is imported and as it is installed.
_LIBRARIES = {
    "torchao": ("torchao", "'softgap[quantised]'"),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
    "gptq": ("gptqmodel", "gptqmodel"),
    "awq": ("gptqmodel", "gptqmodel"),
}


def check_quantise(quantise: str | None) -> None:
    """Refuse a quantisation that is unknown, or whose library is missing."""
    if quantise is None:
        return
    if quantise not in QUANTISE:
        raise ModelError(f"quantise must be {' or '.join(QUANTISE)}, got '{quantise}'; leave it out for whole weights")
    module, package = _LIBRARIES["torchao"]
    if find_spec(module) is None:
        raise ModelError(f"quantise='{quantise}' needs the library {module}; install it with pip install {package}")


def quantising(quantise: str | None) -> dict[str, Any]:
    """What transformers is told to quantise weights while it loads them."""
    if quantise is None:
        return {}
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return {"quantization_config": TorchAoConfig(quant_type=Int8WeightOnlyConfig(version=2))}


def require_library(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a model whose config.json says that its weights are quantised by a library that is missing."""
    settings = config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    module, package = _LIBRARIES.get(str(method), ("", ""))
    if module and find_spec(module) is None:
        raise ModelError(
            f"the weights of '{name}' are quantised with {method}, and the library {module} that unpacks them is not "
            f"installed; install it with pip install {package}, or give the original model"
        )


def quantisation_of(model: nn.Module) -> str:
    """How the weights of a model are quantised, in the words of the library that did it; empty where they are not."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    method = config.get("quant_method", "") if isinstance(config, Mapping) else getattr(config, "quant_method", "")
    packed = next((type(x).__name__ for x in model.parameters() if packed_parts(x)), "")
    return " ".join(word for word in (str(getattr(method, "value", method)), packed) if word)


def packed_parts(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that a quantised weight is made of (codes, scales, zero points); none for a plain tensor."""
    packed: Any = tensor
    if not is_traceable_wrapper_subclass(packed):
        return {}
    names, _ = packed.__tensor_flatten__()
    return {name: getattr(packed, name) for name in names}
