"""What a substitute keeps of a sequence: numbers per KV head at any length, and substitutes of equal memory.

    constant, zero      0
    window              (sinks + w) (d + d_v)
    far keys            far (d + d_v + 3), and w: their priorities, positions and ordinals, and the window's priorities
    razor               the same, and d + d_v + 1: sums of the dropped keys and values, and their number
    features            r (d_v + 1), and r scales and r ages where features are logarithms
    TAIL+window         the sum of the two
    softmax, profile and others without a state    keys and values of the whole text

Parameters are counted apart: a model has them once, whatever the number and length of its texts.
"""

from __future__ import annotations

from softgap.attention.decode import can_decode, recent_rows
from softgap.attention.exact_set import ExactSet
from softgap.attention.mechanism import Mechanism
from softgap.attention.registry import resolve
from softgap.errors import UnsupportedError, ValueInputError

__all__ = [
    "SINKS",
    "derived_numbers",
    "divide_features",
    "equal_window",
    "features_worth",
    "kept_numbers",
    "keys_per_feature",
    "keys_worth",
    "split_keys",
    "split_memory",
    "trade_for_far_keys",
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
        exact_set = ExactSet.of(resolved.options)
        exact = exact_set.size * (dim + value_dim)
        if exact_set.far:
            exact += 3 * exact_set.far + exact_set.recent
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


def derived_numbers(mechanism: str | Mechanism, *, kv_heads: int | None = None) -> int:
    """Numbers per KV head that a plan's cache holds on the CPU besides those that are kept.

    They are sums over the features of recent keys (``softgap.attention.decode``), which follow from the window and
    could be computed anew at every step. They are counted where a plan foretells its bytes, not where mechanisms are
    compared at equal memory.

    Examples
    --------
    >>> derived_numbers("window:w=60,sinks=4")
    0
    """
    resolved = resolve(mechanism)
    if resolved.kind != "hybrid" or not can_decode(resolved):
        return 0
    key_maps, features = resolved.parameters["key_weight"].shape[1:3]
    copies = 1 if kv_heads is None else max(1, key_maps // kv_heads)
    return copies * features * recent_rows(int(resolved.options["w"]))


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


def features_worth(keys: float, dim: int, value_dim: int | None = None) -> int:
    """Features of a fitted map that keeps as much as so many keys with their values; at least 1.

    Examples
    --------
    >>> features_worth(64, 64), features_worth(67, 64)
    (122, 128)
    """
    return max(1, round(keys / keys_per_feature(dim, value_dim)))


def split_memory(
    keys: float, share: float, dim: int, value_dim: int | None = None, *, sinks: int = SINKS
) -> tuple[int, ExactSet]:
    """Features of a hybrid, and its exact set, that together keep as much as so many keys.

    Parameters
    ----------
    keys
        The memory, in keys with their values.
    share
        The part of it that features get, above 0 and below 1.
    dim, value_dim
        Dimensions of keys and of values; None for equal ones.
    sinks
        First tokens that stay exact, at most half of the exact keys.

    Examples
    --------
    >>> split_memory(64, 0.25, 64)
    (31, ExactSet(recent=44, sinks=4))
    """
    if not 0 < share < 1:
        raise ValueInputError(f"the share of features must be above 0 and below 1, got {share:g}; 0.5 is usual")
    features = features_worth(share * keys, dim, value_dim)
    exact = round(keys - features * keys_per_feature(dim, value_dim))
    recent, first = split_keys(max(1, exact), sinks=sinks)
    return features, ExactSet(recent, first)


def keys_per_feature(dim: int, value_dim: int | None = None) -> float:
    """What a feature that is a logarithm keeps, in keys with their values: sums of values and ones, a scale, an age.

    Examples
    --------
    >>> round(128 * keys_per_feature(64))
    67
    """
    value_dim = dim if value_dim is None else value_dim
    return (value_dim + 3) / (dim + value_dim)


def divide_features(
    features: int, dim: int, value_dim: int | None = None, *, share: float = 0.5, sinks: int = SINKS
) -> tuple[int, ExactSet]:
    """Features of a hybrid, and its exact set, that together keep as much as a fitted map with so many features.

    Parameters
    ----------
    features
        Of the fitted map.
    dim, value_dim
        Dimensions of keys and of values; None for equal ones.
    share
        The part of the memory that features get, above 0 and below 1.
    sinks
        First tokens that stay exact, at most half of the exact keys.

    Examples
    --------
    >>> divide_features(128, 64)
    (64, ExactSet(recent=30, sinks=4))
    """
    return split_memory(features * keys_per_feature(dim, value_dim), share, dim, value_dim, sinks=sinks)


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


def trade_for_far_keys(mechanism: Mechanism, dim: int, value_dim: int | None = None) -> Mechanism:
    """A window or hybrid with half of its recent keys as far keys, that keeps no more than before.

    Examples
    --------
    >>> trade_for_far_keys(resolve("window:w=60,sinks=4"), 64)
    Mechanism(window: w=29, sinks=4, far=30)
    """
    recent = int(mechanism.options["w"])
    kept = kept_numbers(mechanism, dim, value_dim)
    for window in range(recent - recent // 2, 0, -1):
        traded = mechanism.configure(w=window, far=recent // 2)
        if kept_numbers(traded, dim, value_dim) <= kept:
            return traded
    raise ValueInputError(f"a window needs at least 3 recent keys to keep half of them as far keys, got {recent}")
