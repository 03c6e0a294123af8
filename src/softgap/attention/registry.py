"""The registry of mechanisms, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention.catalogue import ALIASES, BUILT_IN, check_window
from softgap.attention.mechanism import Mechanism, Site
from softgap.errors import ShapeError, UnsupportedError, ValueInputError, unknown_name

__all__ = ["add_window", "mechanisms", "register_mechanism", "resolve"]

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
    """A mechanism from itself, from its name, or from ``name:option=value,option=value``.

    ``TAIL+window:w=60,sinks=4`` is the hybrid of exact softmax on sinks and recent keys with any mechanism on the
    others.
    """
    if isinstance(mechanism, Mechanism):
        return mechanism
    tail, plus, window = mechanism.partition("+")
    if plus:
        if window.partition(":")[0] != "window":
            raise ValueInputError(
                f"a hybrid is written TAIL+window:w=60,sinks=4, got {mechanism!r}; name the tail first"
            )
        return add_window(resolve(tail), **_settings("window", window.partition(":")[2]))
    name, _, settings = mechanism.partition(":")
    name = ALIASES.get(name, name)
    if name not in _registry:
        raise unknown_name("mechanism", name, _registry)
    options = _settings(name, settings)
    return _registry[name].configure(**options) if options else _registry[name]


def add_window(mechanism: str | Mechanism, **options: float) -> Mechanism:
    """The hybrid of a mechanism with exact softmax on some keys.

    Parameters
    ----------
    mechanism
        What the keys outside of the exact set get; its weights must not be negative.
    options
        ``w``, the number of recent keys, ``sinks``, the number of first keys, ``far``, the number of exact keys between
        them (``softgap.attention.far_keys``), and ``f``, the factor of the tail.

    Examples
    --------
    >>> add_window("elu1", w=60, sinks=4)
    Mechanism(elu1+window: w=60, sinks=4, f=1)
    """
    tail = resolve(mechanism)
    if tail.signed or tail.normaliser != "sum" or tail.kind in ("constant", "window", "hybrid"):
        raise UnsupportedError(
            f"a hybrid shares weights that are not negative, and mechanism '{tail.name}' has others or none; use one "
            "such as elu1 or fitted"
        )
    hybrid = Mechanism(
        name=f"{tail.name}+window",
        formula=f"exp(s_j) on the first sinks and the last w keys, f c_t times {tail.name} on the others",
        paper=f"{tail.paper}; arXiv:2410.10254, arXiv:2309.17453",
        kind="hybrid",
        needs=tail.needs,
        accepts=(*tail.accepts, "tail_factor"),
        options=MappingProxyType({"w": 60.0, "sinks": 4.0, "f": 1.0, "far": 0.0}),
        parameters=tail.parameters,
        origin=tail.origin,
        held_out=tail.held_out,
        check=check_window,
        tail=dataclasses.replace(tail, parameters=MappingProxyType({})),
    )
    return hybrid.configure(**options) if options else hybrid


def _settings(name: str, settings: str) -> dict[str, float]:
    """The options of ``option=value,option=value``."""
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
    return options


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
