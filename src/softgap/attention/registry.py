"""The registry of mechanisms, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention.catalogue import BUILT_IN
from softgap.attention.mechanism import Mechanism, Site
from softgap.errors import ShapeError, ValueInputError, unknown_name

__all__ = ["mechanisms", "register_mechanism", "resolve"]

PlainMap = Callable[[Float[Tensor, "... dim"]], Float[Tensor, "... feature"]]

_registry: dict[str, Mechanism] = {mechanism.name: mechanism for mechanism in BUILT_IN}


def mechanisms() -> Mapping[str, Mechanism]:
    """All registered mechanisms by name, in the order they were registered.

    Returns
    -------
    Mapping
        From name to ``Mechanism``; it cannot be changed. Use ``register_mechanism`` to add one.

    Examples
    --------
    >>> import softgap
    >>> "elu1" in softgap.mechanisms()
    True
    >>> softgap.mechanisms()["elu1"].formula
    'phi(x) = elu(x) + 1'
    """
    return MappingProxyType(_registry)


def register_mechanism(
    name: str,
    feature_map: PlainMap | None = None,
    *,
    mechanism: Mechanism | None = None,
    key_map: PlainMap | None = None,
    formula: str = "phi given by the user",
    paper: str = "",
    signed: bool = False,
    log: bool = False,
    scale: str = "none",
    replace: bool = False,
) -> Mechanism:
    """Make a mechanism known by name to every part of softgap.

    Parameters
    ----------
    name
        Letters, digits, underscores and hyphens.
    feature_map
        phi on vectors along the last axis; non-negative unless ``signed``, logarithms of features if ``log``.
    mechanism
        A whole ``Mechanism`` instead, for what no single map expresses.
    key_map
        phi for keys, where it differs from the queries'.
    formula
        The formula, as ``softgap mechanisms`` shows it.
    paper
        Where the formula comes from.
    signed
        Whether features may be negative. Rows whose sum of weights nearly vanishes are then flagged.
    log
        Whether ``feature_map`` returns the logarithms of features.
    scale
        "sqrt" multiplies q and k by the square root of the model's scaling first; "none" leaves them.
    replace
        Allow an existing name to be replaced.

    Returns
    -------
    Mechanism
        The registered mechanism.

    Raises
    ------
    ValueInputError
        If the name is taken or not allowed, or if both or neither of ``feature_map`` and ``mechanism`` are given.

    Examples
    --------
    >>> import softgap
    >>> softgap.register_mechanism("square", lambda x: x.square(), formula="phi = x^2")
    Mechanism(square)
    >>> "square" in softgap.mechanisms()
    True
    """
    if not name.replace("_", "").replace("-", "").isalnum():
        raise ValueInputError(f"a mechanism's name is made of letters, digits, _ and -, got {name!r}; choose another")
    if name in _registry and not replace:
        raise ValueInputError(f"mechanism '{name}' exists already; choose another name or pass replace=True")
    if (feature_map is None) == (mechanism is None):
        raise ValueInputError("register_mechanism takes either a feature_map or a mechanism, and exactly one of them")
    if scale not in ("none", "sqrt"):
        raise ValueInputError(f"scale must be 'none' or 'sqrt', got {scale!r}")
    if feature_map is not None:
        phi = feature_map
        mechanism = Mechanism(
            name=name,
            formula=formula,
            paper=paper,
            kind="features",
            signed=signed,
            scale="sqrt" if scale == "sqrt" else "none",
            log=log,
            query_map=_check_map(name, phi, signed or log),
            key_map=_check_map(name, key_map or phi, signed or log),
            dim=lambda d, _: int(phi(torch.zeros(1, d)).shape[-1]),
        )
    if mechanism is not None:
        _registry[name] = mechanism = dataclasses.replace(mechanism, name=name)
    return _registry[name]


def resolve(mechanism: str | Mechanism) -> Mechanism:
    """A mechanism from itself, from its name, or from ``name:option=value,option=value``."""
    if isinstance(mechanism, Mechanism):
        return mechanism
    name, _, settings = mechanism.partition(":")
    if name not in _registry:
        raise unknown_name("mechanism", name, _registry)
    options: dict[str, float] = {}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        try:
            options[key] = float(value)
        except ValueError:
            raise ValueInputError(
                f"an option of mechanism '{name}' is written option=number, got {setting!r}; "
                f"for example {name}:{next(iter(_registry[name].options), 'option')}=2"
            ) from None
    return _registry[name].configure(**options) if options else _registry[name]


def _check_map(name: str, plain: PlainMap, any_sign: bool) -> Callable[[Tensor, Site], Tensor]:
    """The user's map, held to what it promised."""

    def features(x: Float[Tensor, "batch head time dim"], site: Site) -> Float[Tensor, "batch head time feature"]:
        phi = plain(x)
        if phi.shape[:-1] != x.shape[:-1]:
            raise ShapeError(
                f"the feature map of '{name}' must keep all axes but the last, got {list(phi.shape)} from "
                f"{list(x.shape)}; write it with ... in front"
            )
        if not any_sign and bool((phi < 0).any()):
            raise ValueInputError(
                f"the feature map of '{name}' gave {phi.min().item():g}; register it with signed=True or make it "
                "non-negative"
            )
        return phi

    return features
