"""What a swapped head computes instead of softmax: a mechanism, softmax on the nearest keys, a map of its output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention import Mechanism, resolve
from softgap.errors import ShapeError, ValueInputError
from softgap.probe.calibrations import digest_of, load_calibration
from softgap.probe.models import Model
from softgap.probe.recording import ready

__all__ = ["Readout", "Substitute", "check_substitute", "substitute"]

LARGEST_WINDOW = 2**20


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

    def tensors(self) -> dict[str, Tensor]:
        """Its numbers by name: those of the mechanism, and those of the readout."""
        found = {f"mechanism.{name}": x for name, x in self.mechanism.parameters.items()}
        if self.readout is not None:
            found |= {f"readout.{name}": x for name, x in self.readout.tensors().items()}
        return found

    @property
    def digest(self) -> str:
        """A hash of its numbers; empty where it has none."""
        tensors = self.tensors()
        return digest_of(tensors) if tensors else ""


def check_substitute(mechanism: str | None, window: int | None) -> None:
    """Refuse a mechanism that is unknown or softmax itself, and a window that is none; no model is needed for it."""
    if window is not None and not 1 <= window <= LARGEST_WINDOW:
        raise ValueInputError(f"window must be from 1 to {LARGEST_WINDOW} keys, got {window}; leave it out for none")
    if mechanism is None:
        return
    if resolve(mechanism.partition("@")[0]).name == "softmax":
        raise ValueInputError("heads must become something else than softmax, got 'softmax'; choose elu1 or fitted")
    if "@" in mechanism:
        load_calibration(Path(mechanism.partition("@")[2]).expanduser())


def substitute(mechanism: str | Mechanism | Substitute, model: Model, *, window: int | None = None) -> Substitute:
    """A mechanism by name or object, ready for this model, with a window where one is given."""
    check_substitute(None, window)
    if isinstance(mechanism, Substitute):
        return mechanism if window is None else replace(mechanism, window=window)
    return Substitute(ready(mechanism, model), window)
