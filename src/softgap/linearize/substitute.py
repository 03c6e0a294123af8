"""What a swapped head computes instead of softmax: a mechanism, softmax on the nearest keys, a map of its output."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention import Mechanism
from softgap.errors import ShapeError, ValueInputError
from softgap.probe.models import Model
from softgap.probe.recording import ready

__all__ = ["Readout", "Substitute", "substitute"]


@dataclass(frozen=True, eq=False)
class Readout:
    """An affine map of every head's output, l -> weight l + bias: what a repair fits. Heads without one keep theirs."""

    weight: Float[Tensor, "layer head value_dim value_dim"]
    bias: Float[Tensor, "layer head value_dim"]

    def __post_init__(self) -> None:
        if self.weight.dim() != 4 or tuple(self.bias.shape) != tuple(self.weight.shape[:3]):
            raise ShapeError(
                "a readout's weight must be [layer, head, value_dim, value_dim] and its bias the same without the last "
                f"axis, got {list(self.weight.shape)} and {list(self.bias.shape)}"
            )

    @classmethod
    def identity(cls, layers: int, heads: int, value_dim: int) -> Readout:
        """The one that changes nothing."""
        weight = torch.eye(value_dim).expand(layers, heads, value_dim, value_dim).clone()
        return cls(weight, torch.zeros(layers, heads, value_dim))

    def tensors(self) -> dict[str, Tensor]:
        """Its numbers by name."""
        return {"weight": self.weight, "bias": self.bias}


@dataclass(frozen=True, eq=False)
class Substitute:
    """What swapped heads compute.

    Attributes
    ----------
    mechanism
        With its parameters ``[layer, head, ...]``.
    window
        Keep softmax on so many of the nearest keys, the query's own included, and use the mechanism for the rest
        (:func:`softgap.attention.attend_hybrid`); None uses the mechanism for all.
    readout
        A map of each head's output; None leaves it.
    """

    mechanism: Mechanism
    window: int | None = None
    readout: Readout | None = None

    @property
    def name(self) -> str:
        """The mechanism with its options, the window and the repair, in words."""
        options = ",".join(f"{key}={value:g}" for key, value in self.mechanism.options.items())
        window = "" if self.window is None else f" + softmax on {self.window}"
        return f"{self.mechanism.name}{':' + options if options else ''}{window}{', repaired' if self.readout else ''}"


def substitute(mechanism: str | Mechanism | Substitute, model: Model, *, window: int | None = None) -> Substitute:
    """A mechanism by name or object, ready for this model, with a window where one is given."""
    if window is not None and window < 1:
        raise ValueInputError(f"window must be at least 1 key, got {window}; leave it out for none")
    if isinstance(mechanism, Substitute):
        return mechanism if window is None else replace(mechanism, window=window)
    return Substitute(ready(mechanism, model), window)
