"""What swapped heads compute: one mechanism for all of them, or several for heads of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from softgap.attention import Mechanism, ScoreRule, Visible, add_window, attend, resolve
from softgap.errors import ModelError, ShapeError, UnsupportedError, ValueInputError
from softgap.models.loading import Model
from softgap.models.tensor_files import digest_of, load_calibration
from softgap.probe.layout import AttentionLayer
from softgap.probe.recording import prepare_mechanism
from softgap.probe.tap import AttentionCall

__all__ = [
    "LARGEST_WINDOW",
    "Head",
    "Mixture",
    "Readout",
    "Substitute",
    "SwappedHeads",
    "SwappedLayer",
    "Swaps",
    "check_substitute",
    "substitute",
    "swapped_layer",
]


Head = tuple[int, int]


LARGEST_WINDOW = 2**20


@dataclass(frozen=True, eq=False)
class Readout:
    """An affine map of every head's output, l -> weight l + bias: the output correction."""

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


@dataclass(frozen=True, eq=False, init=False)
class Substitute:
    """What swapped heads compute.

    Attributes
    ----------
    mechanism
        With its parameters ``[layer, head, ...]``.
    readout
        A map of each head's output; None leaves it.

    Parameters
    ----------
    window
        Keep softmax on so many of the most recent keys: short for ``add_window(mechanism, w=window, sinks=0)``.
    """

    mechanism: Mechanism
    readout: Readout | None

    def __init__(self, mechanism: Mechanism, window: int | None = None, readout: Readout | None = None) -> None:
        hybrid = mechanism if window is None else add_window(mechanism, w=window, sinks=0)
        object.__setattr__(self, "mechanism", hybrid)
        object.__setattr__(self, "readout", readout)

    @property
    def window(self) -> int | None:
        """Recent keys that softmax sees; None where it sees none."""
        return int(self.mechanism.options["w"]) if self.mechanism.kind in ("window", "hybrid") else None

    @property
    def name(self) -> str:
        """The mechanism with its options and the output correction, in words."""
        options = self.mechanism.options_in_words(",")
        return f"{self.mechanism.name}{':' + options if options else ''}{', output corrected' if self.readout else ''}"

    def tensors(self) -> dict[str, Tensor]:
        """Its numbers by name: those of the mechanism, and those of the readout."""
        tensors = {f"mechanism.{name}": x for name, x in self.mechanism.parameters.items()}
        if self.readout is not None:
            tensors |= {f"readout.{name}": x for name, x in self.readout.tensors().items()}
        return tensors

    @property
    def digest(self) -> str:
        """A hash of its numbers; empty where it has none."""
        tensors = self.tensors()
        return digest_of(tensors) if tensors else ""

    def swaps(self, heads: Sequence[Head]) -> Swaps:
        """These heads with what they become, mechanism by mechanism."""
        return [(tuple(heads), self)]

    def with_readout(self, readout: Readout | None) -> Substitute:
        """The same with another output correction."""
        return Substitute(self.mechanism, readout=readout)


class Mixture(Substitute):
    """Several mechanisms, each for heads of its own, with one output correction.

    Parameters
    ----------
    parts
        Heads with their mechanism; no head comes twice.
    readout
        A map of each head's output, for all parts; None leaves it.

    Examples
    --------
    >>> import softgap
    >>> window, elu1 = softgap.mechanisms()["window"], softgap.mechanisms()["elu1"]
    >>> mixture = Mixture([([(0, 0), (0, 1)], window), ([(1, 3)], elu1)])
    >>> mixture.name
    'window:w=60,sinks=4 (2 heads); elu1 (1 head)'
    """

    parts: tuple[tuple[tuple[Head, ...], Mechanism], ...]

    def __init__(self, parts: Sequence[tuple[Sequence[Head], Mechanism]], readout: Readout | None = None) -> None:
        own = tuple((tuple((layer, head) for layer, head in heads), mechanism) for heads, mechanism in parts)
        heads = [head for part, _ in own for head in part]
        if not heads or len(set(heads)) < len(heads):
            raise ValueInputError(f"a mixture must name at least one head and each head once, got {heads}")
        object.__setattr__(self, "parts", own)
        object.__setattr__(self, "readout", readout)

    def __repr__(self) -> str:
        return f"Mixture({self.name})"

    @property
    def mechanism(self) -> Mechanism:
        """There is none for all heads."""
        raise UnsupportedError("a mixture has no single mechanism; read its parts")

    @property
    def window(self) -> int | None:
        """There is none for all heads."""
        return None

    def with_readout(self, readout: Readout | None) -> Mixture:
        """The same with another output correction."""
        return Mixture(self.parts, readout)

    @property
    def heads(self) -> tuple[Head, ...]:
        """All heads that have a mechanism."""
        return tuple(sorted(head for heads, _ in self.parts for head in heads))

    @property
    def name(self) -> str:
        """Its mechanisms with the number of their heads and the output correction, in words."""
        names = (
            f"{Substitute(mechanism).name} ({len(heads)} head{'s' * (len(heads) > 1)})"
            for heads, mechanism in self.parts
        )
        return f"{'; '.join(names)}{', output corrected' if self.readout else ''}"

    def tensors(self) -> dict[str, Tensor]:
        """Its numbers by name; what several parts share comes once, under the name of the first."""
        tensors: dict[str, Tensor] = {}
        for number, (_, mechanism) in enumerate(self.parts):
            own = {f"part{number}.{name}": x for name, x in mechanism.parameters.items()}
            tensors |= {name: x for name, x in own.items() if not any(x is known for known in tensors.values())}
        if self.readout is not None:
            tensors |= {f"readout.{name}": x for name, x in self.readout.tensors().items()}
        return tensors

    def swaps(self, heads: Sequence[Head]) -> Swaps:
        """These heads with what they become, mechanism by mechanism."""
        left = set(heads)
        unknown = left - set(self.heads)
        if unknown:
            raise ValueInputError(f"the mixture has no mechanism for head {min(unknown)}; leave that head out")
        parts = [(tuple(head for head in part if head in left), mechanism) for part, mechanism in self.parts]
        return [(part, Substitute(mechanism, readout=self.readout)) for part, mechanism in parts if part]


Swaps = Sequence[tuple[Sequence[Head], Substitute]]
"""Heads with what they become; a mixture has several of them."""


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
    if isinstance(mechanism, Mixture):
        if window is not None:
            raise ValueInputError("a mixture takes no window of its own; give its parts windows")
        return mechanism
    if isinstance(mechanism, Substitute):
        return mechanism if window is None else Substitute(mechanism.mechanism, window, mechanism.readout)
    return Substitute(prepare_mechanism(mechanism, model), window)


@dataclass(frozen=True, eq=False)
class SwappedHeads:
    """Swapped heads of one layer that share a mechanism, with the parameters of these heads only.

    ``kv_heads`` are the KV heads that they need: each once where all serve equally many swapped heads, else one for
    each swapped head.
    """

    layer: AttentionLayer
    heads: Int[Tensor, " swapped"]
    kv_heads: Int[Tensor, " kv_head"]
    mechanism: Mechanism
    weight: Float[Tensor, "swapped value_dim value_dim"] | None = None
    bias: Float[Tensor, "swapped value_dim"] | None = None

    def output(self, call: AttentionCall, visible: Visible) -> Float[Tensor, "batch query swapped value_dim"]:
        """The mechanism's output on the tensors of one call."""
        if (call.query.shape[1], call.key.shape[1]) != (self.layer.heads, self.layer.kv_heads):
            raise ModelError(
                f"layer {self.layer.number} had {self.layer.heads} heads when the swap began and has "
                f"{call.query.shape[1]} now; do not change a model while its heads are swapped"
            )
        device = call.query.device
        heads, kv_heads = self.heads.to(device), self.kv_heads.to(device)
        q = call.query.index_select(1, heads)
        k, v = (x.index_select(1, kv_heads) for x in (call.key, call.value))
        if visible.mask is not None and visible.mask.shape[1] > 1:
            visible = dataclasses.replace(visible, mask=visible.mask.index_select(1, heads))
        with torch.autocast(device.type, enabled=False):
            output = self.read_out(self._attended(q, k, v, visible, call.scale, call.rule.for_heads(heads)))
        return output.transpose(1, 2).to(call.output.dtype)

    def read_out(
        self, output: Float[Tensor, "batch swapped query value_dim"]
    ) -> Float[Tensor, "batch swapped query value_dim"]:
        """The output after the readout, where there is one."""
        if self.weight is None or self.bias is None:
            return output
        weight, bias = (x.to(output.device, output.dtype) for x in (self.weight, self.bias))
        return (output @ weight.transpose(-1, -2)).add_(bias[:, None])

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, rule: ScoreRule) -> Tensor:
        # One row over all keys costs less than the state they would make; and the chunked form writes over what a
        # gradient needs.
        explicit = q.shape[2] == 1 or _needs_gradient(q, k, v, *self.mechanism.parameters.values())
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        form = "quadratic" if explicit else "auto"
        return attend(
            self.mechanism, q, k, v, visible=visible, scale=scale, form=form, dtype=dtype, check=False, rule=rule
        ).output


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@dataclass(frozen=True, eq=False)
class SwappedLayer:
    """All swapped heads of one layer, by mechanism; ``heads`` and ``output`` have them in ascending order."""

    layer: AttentionLayer
    parts: tuple[SwappedHeads, ...]

    @property
    def heads(self) -> Int[Tensor, " swapped"]:
        """All swapped heads."""
        return torch.cat([part.heads for part in self.parts]).sort().values

    def output(self, call: AttentionCall, visible: Visible) -> Float[Tensor, "batch query swapped value_dim"]:
        """Every mechanism's output on the tensors of one call."""
        outputs = [part.output(call, visible) for part in self.parts]
        if len(outputs) == 1:
            return outputs[0]
        order = torch.cat([part.heads for part in self.parts]).argsort()
        return torch.cat(outputs, dim=2).index_select(2, order.to(outputs[0].device))


def swapped_layer(
    layer: AttentionLayer, heads: Sequence[int], head_substitute: Substitute, n_layers: int
) -> SwappedLayer:
    """These heads of a layer, ready to be computed by their substitute."""
    parts = []
    for part_heads, part in head_substitute.swaps([(layer.number, head) for head in heads]):
        parts.append(_swapped_heads(layer, [head for _, head in part_heads], part, n_layers))
    return SwappedLayer(layer, tuple(parts))


def _swapped_heads(
    layer: AttentionLayer, heads: Sequence[int], head_substitute: Substitute, n_layers: int
) -> SwappedHeads:
    """Heads of a layer that share a mechanism."""
    size = layer.heads // layer.kv_heads
    owners = [head // size for head in heads]
    shared = sorted(set(owners))
    # attend() gives every KV head equally many query heads.
    if len({owners.count(owner) for owner in shared}) == 1:
        owners = shared
    queries, keys = torch.tensor(heads), torch.tensor(owners)
    layer_parameters = _parameters(head_substitute.mechanism, layer, n_layers)
    parameters = {
        # As large as both where every query head has a KV head of its own; then the two choices are one.
        name: x if x.shape[1] == 1 else _rows(x, queries if x.shape[1] == layer.heads else keys)
        for name, x in layer_parameters.parameters.items()
    }
    mechanism = dataclasses.replace(layer_parameters, parameters=MappingProxyType(parameters))
    weight, bias = _readout(head_substitute.readout, layer, queries, n_layers)
    return SwappedHeads(layer, queries, keys, mechanism, weight, bias)


def _readout(
    readout: Readout | None, layer: AttentionLayer, heads: Int[Tensor, " swapped"], n_layers: int
) -> tuple[Tensor | None, Tensor | None]:
    if readout is None:
        return None, None
    if readout.weight.shape[0] != n_layers or readout.weight.shape[1] < layer.heads:
        raise ShapeError(
            f"a readout for this model must be for {n_layers} layers and, in layer {layer.number}, {layer.heads} "
            f"heads, got {readout.weight.shape[0]} and {readout.weight.shape[1]}; use one made for this model"
        )
    own = (x[layer.index : layer.index + 1] for x in (readout.weight, readout.bias))
    weight, bias = (_rows(x, heads)[0] for x in own)
    return weight, bias


def _rows(x: Float[Tensor, "layer head ..."], heads: Int[Tensor, " head"]) -> Float[Tensor, "layer head ..."]:
    """The rows of these heads, as a view where they follow each other: plans hold their numbers once."""
    first, count = int(heads[0]), len(heads)
    if torch.equal(heads, torch.arange(first, first + count)):
        return x.narrow(1, first, count)
    return x.index_select(1, heads.to(x.device))


def _parameters(mechanism: Mechanism, layer: AttentionLayer, n_layers: int) -> Mechanism:
    """The mechanism with the parameters of one layer."""
    for name, tensor in mechanism.parameters.items():
        by_layer, by_head = tensor.shape[:2]
        if by_layer not in (1, n_layers) or by_head not in (1, layer.heads, layer.kv_heads):
            raise ShapeError(
                f"parameter '{name}' of mechanism '{mechanism.name}' must be for {n_layers} layers and, in layer "
                f"{layer.number}, {layer.heads} heads or {layer.kv_heads} KV heads (or 1 for all), got "
                f"{by_layer} and {by_head}; use parameters made for this model"
            )
    return mechanism.for_layers([layer.index])
