"""What a compiled decode step reads and writes: arrays over the tensors of a state, and room for one layer's work.

Absent parts are arrays without elements, since compiled code knows the number of axes beforehand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from softgap.attention.simd import compiled

__all__ = ["Carried", "Exact", "Far", "Maps", "Readout", "Recent", "Room", "Rule", "Step", "make_room"]

Array = np.ndarray[Any, Any]


class Step(NamedTuple):
    """Numbers of the call: keys so far, recent keys, sinks, and the scaling. ``recent`` is 0 for a state alone."""

    length: int
    recent: int
    sinks: int
    scale: Any


class Exact(NamedTuple):
    """Slots of sinks, then of the ring; ordinals, counts and sink positions are empty while there was no padding."""

    keys: Array  # [batch, kv_head, slot, dim]
    values: Array  # [batch, kv_head, slot, value_dim]
    ordinals: Array  # [batch, ring]
    counts: Array  # [batch]
    sink_positions: Array  # [batch, sink]


class Far(NamedTuple):
    """Far keys; none where the mechanism keeps none."""

    keys: Array  # [batch, kv_head, far, dim]
    values: Array  # [batch, kv_head, far, value_dim]
    priorities: Array  # [batch, kv_head, far]
    positions: Array  # [batch, kv_head, far]
    ordinals: Array  # [batch, kv_head, far]
    pending: Array  # [batch, kv_head, recent]


class Carried(NamedTuple):
    """The state, relative to exp(scale - rate * age) per feature; no features where there is no tail."""

    sums: Array  # [batch * key_head, feature, value_dim]
    totals: Array  # [batch * key_head, feature]
    scale: Array  # [batch * key_head, feature]
    age: Array  # [batch * key_head, feature]


class Recent(NamedTuple):
    """Logarithms of the features of recent keys: sums by chunk, and key by key where a chunk is leaving."""

    chunks: Array  # [batch, key_head, chunk, feature]
    edge: Array  # [batch, key_head, position of the chunk, feature]


class Maps(NamedTuple):
    """The affine maps of a fitted mechanism, its decay, and the rotation that it undoes: J x = sign * x[partner]."""

    query_weight: Array  # [head, feature, seen]
    query_bias: Array  # [head, feature]
    key_weight: Array  # [key_head, feature, seen]
    key_bias: Array  # [key_head, feature]
    rate: Array  # [key_head, feature]
    frequency: Array  # [dim]
    partner: Array  # [dim]
    sign: Array  # [dim]
    factor: Array  # [head]


class Rule(NamedTuple):
    """The model's softcap (0 for none) and learned sinks (empty for none)."""

    softcap: Any
    logits: Array  # [head]


class Readout(NamedTuple):
    """The output correction; empty for none."""

    weight: Array  # [head, value_dim, value_dim]
    bias: Array  # [head, value_dim]


class Room(NamedTuple):
    """Room for the work on one position; the key features of one head at a time."""

    angles: Array  # [2, dim]
    seen: Array  # [seen]
    leaving: Array  # [1]: ordinal of what leaves the window
    logs: Array  # [feature]
    work: Array  # [4, feature]: two for terms, then z and the logarithms it is to be multiplied by
    bits: Array  # [longest]
    shown: Array  # [slot]
    scores: Array  # [slot]
    weights: Array  # [far]
    keys: Array  # [kv_head, dim]: what leaves the window
    values: Array  # [kv_head, value_dim]
    query: Array  # [dim]
    sums: Array  # [head, 3]: top, total and recent mass
    answers: Array  # [head, value_dim]
    answer: Array  # [value_dim]


@compiled
def make_room(exact: Exact, far: Far, maps: Maps, heads: int, dim: int, value_dim: int) -> Room:
    """Room for a layer's heads that share a mechanism."""
    features, slots, n_far = maps.rate.shape[1], exact.keys.shape[2], far.priorities.shape[2]
    kv_heads = exact.keys.shape[1]
    single = np.float32
    return Room(
        np.empty((2, dim), single),
        np.empty(max(dim, maps.key_weight.shape[2]), single),
        np.empty(1, np.int64),
        np.empty(features, single),
        np.empty((4, features), single),
        np.empty(max(features, slots, n_far), np.int32),
        np.zeros(slots, np.int8),
        np.empty(slots, single),
        np.empty(n_far, single),
        np.empty((kv_heads, dim), single),
        np.empty((kv_heads, value_dim), single),
        np.empty(dim, single),
        np.empty((heads, 3), single),
        np.zeros((heads, value_dim), single),
        np.empty(value_dim, single),
    )
