"""A mechanism: what it is, in words and numbers, and the functions that compute it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softgap.errors import ShapeError, UnsupportedError, ValueInputError, unknown_name
from softgap.inputs import as_items

__all__ = ["FeatureMap", "Mechanism", "Options", "PositionWeights", "ScoreWeights", "Site"]

Options = Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Site:
    """What a map may know besides the vectors it is given.

    Attributes
    ----------
    positions
        Position of each vector in its sequence.
    turned_by
        Position by which rotary embedding has turned each vector: padding does not count.
    options
        The mechanism's numbers (k of top_k, lambda of decay, ...).
    parameters
        The mechanism's tensors, each ``[1 or batch, 1 or head, ...]``.
    """

    positions: Int[Tensor, " time"]
    turned_by: Int[Tensor, "#batch time"]
    options: Options
    parameters: Mapping[str, Tensor]


FeatureMap = Callable[[Float[Tensor, "batch head time dim"], Site], Float[Tensor, "batch head time feature"]]
# Weights are relative to each other within a row; the caller has masked nothing yet and normalises by the row's sum.
ScoreWeights = Callable[
    [Float[Tensor, "batch head query key"], Bool[Tensor, "batch head query key"], Options],
    Float[Tensor, "batch head query key"],
]
PositionWeights = Callable[
    [Int[Tensor, "query 1"], Int[Tensor, " key"], Bool[Tensor, "batch head query key"], Site],
    Float[Tensor, "batch head query key"],
]


@dataclass(frozen=True, eq=False, repr=False)
class Mechanism:
    """One way to turn a query, keys and values into an output.

    Attributes
    ----------
    name, formula, paper
        What people call it, what it computes, where it comes from.
    kind
        ``features``: weights phi(q).phi(k), possibly decaying with distance, so that a fixed-size state exists;
        ``scores``: weights are a function of the scores s_j; ``positions``: weights know neither q nor k;
        ``constant``: no weights at all; ``window``: exact softmax on sinks and recent keys; ``hybrid``: the same with a
        ``tail`` for the other keys; ``mean_key``: the tail that replaces them by one key, their mean.
    signed
        Whether weights may be negative.
    cancels
        Whether features have signs although weights do not: in a state a small weight is a difference of large terms.
    scale
        Where the model's scaling goes: ``none``, ``sqrt`` (each of q and k times its square root) or ``scores``.
    normaliser
        ``sum``: weights divided by their sum over the visible keys; ``centred``: (1 + w_j - mean w) / N.
    log
        Whether the feature maps return logarithms of the features.
    query_free
        Whether the query features ignore the query, so that one output serves all heads of a KV group.
    needs
        Parameter tensors without which it cannot be computed; a calibration brings them.
    options
        Its numbers, with their defaults.
    parameters
        Its tensors, ``[layer, head, ...]``; ``for_layers`` picks what a call needs.
    tail
        What a hybrid does with the keys outside of its exact set.
    origin
        Where its tensors come from: the hash of a calibration.
    held_out
        What held-out text said of that calibration, as plain data for the reader of a manifest.
    """

    name: str
    formula: str
    paper: str
    kind: Literal["features", "scores", "positions", "constant", "window", "hybrid", "mean_key"]
    signed: bool = False
    cancels: bool = False
    scale: Literal["none", "sqrt", "scores"] = "none"
    normaliser: Literal["sum", "centred"] = "sum"
    log: bool = False
    query_free: bool = False
    needs: tuple[str, ...] = ()
    accepts: tuple[str, ...] = ()
    options: Options = field(default_factory=lambda: MappingProxyType({}))
    parameters: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    origin: str = ""
    held_out: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    query_map: FeatureMap | None = None
    key_map: FeatureMap | None = None
    rate: Callable[[Site], Float[Tensor, "batch head feature"]] | None = None
    score_weights: ScoreWeights | None = None
    position_weights: PositionWeights | None = None
    constant: Callable[[Site], Float[Tensor, "batch head dim"]] | None = None
    dim: Callable[[int, Mechanism], int | None] | None = None
    check: Callable[[Options], None] | None = None
    tail: Mechanism | None = None

    def __post_init__(self) -> None:
        for name in ("needs", "accepts"):
            object.__setattr__(self, name, as_items(getattr(self, name)))

    def __repr__(self) -> str:
        options = self.options_in_words(", ")
        return f"Mechanism({self.name}{': ' + options if options else ''})"

    def feature_dim(self, d: int) -> int | None:
        """Number of features for vectors of dimension d; None where no finite feature map is implemented."""
        return None if self.dim is None else self.dim(d, self)

    def factorable(self, d: int) -> bool:
        """Whether weights factor as phi(q).phi(k) with the present options, so that a state exists."""
        return self.kind == "features" and self.feature_dim(d) is not None

    def streams(self, d: int) -> bool:
        """Whether it can follow a growing sequence in constant space."""
        if self.kind == "hybrid" and self.tail is not None:
            tail = self.tail_with_parameters() or self.tail
            return tail.kind == "mean_key" or tail.factorable(d)
        return self.kind == "window" or self.factorable(d)

    @property
    def label(self) -> str:
        """Its name, for windows and hybrids with the numbers that tell one from another."""
        if self.kind not in ("window", "hybrid"):
            return self.name
        usual = {"f": 1, "far": 0}
        options = ",".join(f"{key}={value:g}" for key, value in self.options.items() if value != usual.get(key))
        return f"{self.name}:{options}"

    def options_in_words(self, separator: str) -> str:
        """All options with their values; far keys only where some are kept."""
        return separator.join(f"{key}={value:g}" for key, value in self.options.items() if key != "far" or value)

    def tail_with_parameters(self) -> Mechanism | None:
        """What a hybrid does with the keys outside of its exact set; None for a window alone."""
        if self.tail is None:
            return None
        known = (*self.tail.needs, *self.tail.accepts)
        own = {name: tensor for name, tensor in self.parameters.items() if name in known}
        return dataclasses.replace(self.tail, parameters=MappingProxyType(own))

    def tail_factor(self, like: Tensor) -> float | Float[Tensor, "#batch #head 1 1"]:
        """The factor f of a hybrid's tail: the option, times that of each head where there is one."""
        by_head, option = self.parameters.get("tail_factor"), self.options.get("f", 1.0)
        return option if by_head is None else option * by_head.to(like.device, like.dtype)[:, :, None, None]

    @property
    def forms(self) -> tuple[str, ...]:
        """The computations that can serve this mechanism."""
        return ("quadratic", "chunked", "streaming") if self.streams(64) else ("quadratic",)

    @property
    def missing(self) -> tuple[str, ...]:
        """The needed parameters that it does not carry yet."""
        return tuple(name for name in self.needs if name not in self.parameters)

    def configure(self, **options: float) -> Mechanism:
        """The same mechanism with other numbers."""
        for key in options:
            if key not in self.options:
                if not self.options:
                    raise ValueInputError(
                        f"mechanism '{self.name}' has no options, got {key}={options[key]!r}; leave it out"
                    )
                raise unknown_name(f"option of mechanism '{self.name}'", key, self.options)
        merged = MappingProxyType({**self.options, **options})
        if self.check is not None:
            self.check(merged)
        return dataclasses.replace(self, options=merged)

    def with_parameters(self, **parameters: Float[Tensor, "layer head ..."]) -> Mechanism:
        """The same mechanism carrying these tensors, each ``[layer, head, ...]`` (1 where they are shared)."""
        known = (*self.needs, *self.accepts)
        for key, tensor in parameters.items():
            if key not in known:
                raise unknown_name(f"parameter of mechanism '{self.name}'", key, known or ("none",))
            if tensor.dim() < 2:
                raise ShapeError(
                    f"parameter '{key}' of mechanism '{self.name}' must begin with [layer, head], "
                    f"got shape {list(tensor.shape)}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise ValueInputError(f"parameter '{key}' of mechanism '{self.name}' holds NaN or inf; repair it first")
        return dataclasses.replace(self, parameters=MappingProxyType({**self.parameters, **parameters}))

    def for_layers(self, layers: Sequence[int], repeat: int = 1) -> Mechanism:
        """The same mechanism with the parameters of these layers along the batch axis, each repeated ``repeat`` times.

        A batch that stacks the sequences of several layers (layer-major) is then one call without a loop.
        """
        if not self.parameters:
            return self
        if len(layers) == 1 == repeat:
            # A view: plans hold the parameters of every layer once.
            views = {name: x if x.shape[0] == 1 else x.narrow(0, layers[0], 1) for name, x in self.parameters.items()}
            return dataclasses.replace(self, parameters=MappingProxyType(views))
        index = torch.tensor(list(layers)).repeat_interleave(repeat)
        picked = {
            name: tensor if tensor.shape[0] == 1 else tensor[index.to(tensor.device)]
            for name, tensor in self.parameters.items()
        }
        return dataclasses.replace(self, parameters=MappingProxyType(picked))

    def site(
        self, positions: Int[Tensor, " time"], dtype: torch.dtype, turned_by: Int[Tensor, "#batch time"] | None = None
    ) -> Site:
        """Where its maps are evaluated, once the parameters are known to be there."""
        if self.missing:
            raise UnsupportedError(
                f"mechanism '{self.name}' needs the parameters {', '.join(self.needs)} and has no "
                f"{', '.join(self.missing)}; give them with Mechanism.with_parameters or calibrate the model"
            )
        cast = {name: tensor.to(positions.device, dtype) for name, tensor in self.parameters.items()}
        return Site(positions, positions[None] if turned_by is None else turned_by, self.options, cast)
