"""What a substitute keeps of a sequence: numbers per KV head at any length, and substitutes of equal memory.

    constant, zero      0
    window              (sinks + w) (d + d_v)
    razor               the same, and d + d_v + 1: sums of the dropped keys and values, and their number
    features            r (d_v + 1), and r scales and r ages where features are logarithms
    TAIL+window         the sum of the two
    softmax, profile and others without a state    keys and values of the whole text

Parameters are counted apart: a model has them once, whatever the number and length of its texts.
"""

from __future__ import annotations

from softgap.attention.exact_set import ExactSet
from softgap.attention.mechanism import Mechanism
from softgap.attention.registry import resolve
from softgap.errors import UnsupportedError, ValueInputError

__all__ = [
    "SINKS",
    "equal_window",
    "halve_features",
    "kept_numbers",
    "keys_worth",
    "split_keys",
]

SINKS = 4


def kept_numbers(
    mechanism: str | Mechanism, dim: int, value_dim: int | None = None, *, kv_heads: int | None = None
) -> float:
    """Numbers that a mechanism keeps per KV head, however long the text.

    Parameters
    ----------
    mechanism
        A name, or a ``Mechanism`` with its parameters where their shape decides (``fitted``).
    dim, value_dim
        Dimensions of keys and of values; None for equal ones.
    kv_heads
        KV heads of a layer; a mechanism with one key map per query head keeps a state for each of them.

    Returns
    -------
    float
        ``inf`` where it keeps every key and value.

    Examples
    --------
    >>> kept_numbers("window:w=60,sinks=4", 64), kept_numbers("elu1", 64), kept_numbers("softmax", 64)
    (8192, 4160, inf)
    """
    resolved, value_dim = resolve(mechanism), dim if value_dim is None else value_dim
    if resolved.kind == "constant":
        return 0
    if resolved.kind in ("window", "hybrid"):
        exact = ExactSet.of(resolved.options).size * (dim + value_dim)
        tail = resolved.tail_with_parameters()
        return exact if tail is None else exact + kept_numbers(tail, dim, value_dim, kv_heads=kv_heads)
    if resolved.kind == "mean_key":
        return dim + value_dim + 1
    features = resolved.feature_dim(dim) if resolved.factorable(dim) else None
    if features is None:
        return float("inf")
    maps = resolved.parameters.get("key_weight")
    copies = 1 if maps is None or kv_heads is None else max(1, maps.shape[1] // kv_heads)
    return copies * features * (value_dim + 1 + 2 * resolved.log)


def keys_worth(
    mechanism: str | Mechanism, dim: int, value_dim: int | None = None, *, kv_heads: int | None = None
) -> float:
    """The same in keys with their values."""
    numbers = kept_numbers(mechanism, dim, value_dim, kv_heads=kv_heads)
    return numbers / (dim + (dim if value_dim is None else value_dim))


def split_keys(keys: int, *, sinks: int = SINKS) -> tuple[int, int]:
    """Recent keys and sinks of a window that keeps so many keys: at most half of them are sinks."""
    if keys < 1:
        raise ValueInputError(f"a window must keep at least 1 key, got {keys}; raise the number of bytes")
    first = min(sinks, keys // 2)
    return keys - first, first


def halve_features(features: int, dim: int, value_dim: int | None = None) -> tuple[int, ExactSet]:
    """Features of a hybrid, and its exact set, that together keep as much as a fitted map with so many features.

    Half of the memory goes to either.

    Examples
    --------
    >>> halve_features(128, 64)
    (64, ExactSet(recent=30, sinks=4))
    """
    value_dim = dim if value_dim is None else value_dim
    tail = max(1, features // 2)
    # A sum of values and of ones, a scale and an age per feature, as kept_numbers counts them.
    keys = max(1, round((features - tail) * (value_dim + 3) / (dim + value_dim)))
    recent, sinks = split_keys(keys)
    return tail, ExactSet(recent, sinks)


def equal_window(
    mechanism: str | Mechanism,
    dim: int,
    value_dim: int | None = None,
    *,
    kv_heads: int | None = None,
    sinks: int = SINKS,
) -> str:
    """The window of as much memory as a mechanism keeps, by name; the arguments are those of ``kept_numbers``.

    Examples
    --------
    >>> equal_window("hedgehog", 64)
    'window:w=63,sinks=4'
    """
    worth = keys_worth(mechanism, dim, value_dim, kv_heads=kv_heads)
    if worth == float("inf"):
        raise UnsupportedError(
            f"mechanism '{resolve(mechanism).name}' keeps every key and value, so no window equals it; choose one with "
            "a state of constant size"
        )
    recent, first = split_keys(max(1, round(worth)), sinks=sinks)
    return f"window:w={recent},sinks={first}"
