"""Memory of substitutes: what is counted is what a state holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from softgap.attention import ExactSet, add_window, attend, new_state, resolve
from softgap.attention.memory import equal_window, features_worth, kept_numbers, keys_worth, split_keys, split_memory
from softgap.errors import SoftgapError
from support.linearize_cases import with_random_parameters

FITTED = with_random_parameters("fitted", 1, 4, 2, 8, 5)
STATES = ["elu1", "hedgehog", "uniform", "window:w=9,sinks=3", "razor:w=9,sinks=3", "elu1+window:w=4,sinks=1", FITTED]
FAR = ["window:w=9,sinks=3,far=4", "razor:w=4,sinks=0,far=7", add_window(FITTED, w=9, sinks=2, far=5)]


@pytest.mark.parametrize("mechanism", [*STATES, *FAR, add_window(FITTED, w=9, sinks=2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_counted_are_bytes_allocated(mechanism: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    batch, kv_heads = 3, 2
    state = new_state(mechanism, dtype=dtype)
    for _ in range(30):
        q, k = (torch.randn(batch, heads, 1, 8, generator=generator) for heads in (4, kv_heads))
        v = torch.randn(batch, kv_heads, 1, 5, generator=generator)
        state.attend(q, k, v)
    counted = kept_numbers(mechanism, 8, 5, kv_heads=kv_heads) * batch * kv_heads * dtype.itemsize
    # A linear state also notes which rows have seen a key: one byte each.
    assert state.nbytes - counted in (0, batch)


def test_what_keeps_every_key_has_no_size() -> None:
    for name in ("softmax", "top_k:k=8", "profile", "profile+window:w=4"):
        assert kept_numbers(name, 64) == float("inf")
    assert kept_numbers("zero", 64) == kept_numbers("constant", 64) == 0


def test_a_window_of_equal_memory() -> None:
    for name in ("elu1", "hedgehog", "elu1+window:w=60,sinks=4"):
        window = equal_window(name, 64)
        assert abs(keys_worth(window, 64) / keys_worth(name, 64) - 1) < 0.05
    assert equal_window("uniform", 64) == "window:w=1,sinks=0"
    assert split_keys(64) == (60, 4)
    assert split_keys(3) == (2, 1)


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (8, 8), (128, 32), (80, 96)])
@pytest.mark.parametrize("keys", [16, 32, 67, 256])
def test_maps_and_hybrids_of_a_given_memory(keys: int, dim: int, value_dim: int) -> None:
    def worth(features: int, exact: ExactSet | None) -> float:
        maps = {"weight": torch.zeros(1, 2, features, dim), "bias": torch.zeros(1, 2, features)}
        parameters = {f"{side}_{name}": tensor for side in ("query", "key") for name, tensor in maps.items()}
        fitted = resolve("fitted").with_parameters(**parameters, rate=torch.zeros(1, 2, features))
        mechanism = fitted if exact is None else add_window(fitted, w=exact.recent, sinks=exact.sinks)
        return keys_worth(mechanism, dim, value_dim, kv_heads=2)

    assert worth(features_worth(keys, dim, value_dim), None) == pytest.approx(keys, rel=0.05)
    for share in (0.25, 0.5, 0.75):
        features, exact = split_memory(keys, share, dim, value_dim, sinks=4)
        assert worth(features, exact) == pytest.approx(keys, rel=0.05)
        assert features == pytest.approx(share * features_worth(keys, dim, value_dim), abs=1)
        assert exact.sinks <= exact.recent


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(SoftgapError, match="the share of features must be above 0 and below 1, got 1; "):
        split_memory(64, 1, 64)
    with pytest.raises(SoftgapError, match="'softmax' keeps every key and value"):
        equal_window("softmax", 64)
    with pytest.raises(SoftgapError, match="a window must keep at least 1 key, got 0"):
        split_keys(0)
    assert attend("window:w=1,sinks=0", *(torch.ones(1, 1, 2, 4) for _ in range(3))).output.shape == (1, 1, 2, 4)
