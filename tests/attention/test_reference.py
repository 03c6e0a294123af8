"""The plain chunked form equals the quadratic formula and the fast chunked form, whatever the chunk length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softgap.attention import Visible
from softgap.attention.feature_maps import featurise
from softgap.attention.reference import reference_chunked
from support.attention_cases import TOLERANCE, Case, computed, equipped, reference

# Plain features, one plain feature, a shared rate of decay, a rate per feature.
NAMES = ("elu1", "relu", "uniform", "hedgehog", "decay", "fitted")


def one_head(length: int, d: int, d_v: int, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, length, width, generator=generator, dtype=torch.float64) for width in (d, d, d_v))
    return Case(q, k, v, Visible())


@pytest.mark.parametrize("name", NAMES)
@given(
    length=st.one_of(st.integers(1, 9), st.sampled_from([63, 64, 65, 127, 131, 193])),
    chunk=st.one_of(st.integers(1, 9), st.sampled_from([17, 63, 64, 65, 500])),
    d=st.integers(1, 6),
    d_v=st.integers(1, 6),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25)
def test_plain_chunked_form_matches_the_formula_and_the_fast_form(
    name: str, length: int, chunk: int, d: int, d_v: int, seed: int
) -> None:
    case = one_head(length, d, d_v, seed)
    mechanism, positions = equipped(name, case), torch.arange(length)
    features = featurise(mechanism, case.q, case.k, scale=d**-0.5, query_positions=positions, key_positions=positions)
    query, key = (x[0, 0].exp().numpy() if features.log else x[0, 0].numpy() for x in (features.query, features.key))
    plain = reference_chunked(
        query,
        key,
        case.v[0, 0].numpy(),
        chunk=chunk,
        rate=None if features.rate is None else features.rate[0, 0].numpy(),
    )
    quadratic, fast = (
        reference(mechanism, case)[0, 0].numpy(),
        computed(mechanism, case, "chunked").output[0, 0].numpy(),
    )
    norm = np.linalg.norm(quadratic, axis=1)
    for expected in (quadratic, fast):
        error = np.linalg.norm(plain - expected, axis=1) / np.where(norm == 0, 1, norm)
        assert error.max() < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 3, 8, 11, 64])
def test_decay_per_feature_matches_explicit_weights(chunk: int) -> None:
    rng = np.random.default_rng(3)
    query, key, value = rng.random((11, 4)), rng.random((11, 4)), rng.standard_normal((11, 3))
    rate = np.array([0.0, 0.1, 1.0, 4.0])
    expected = np.zeros((11, 3))
    for t in range(11):
        weights = [(query[t] * key[j] * np.exp(-rate * (t - j))).sum() for j in range(t + 1)]
        expected[t] = weights @ value[: t + 1] / np.sum(weights)
    np.testing.assert_allclose(reference_chunked(query, key, value, chunk=chunk, rate=rate), expected, rtol=1e-12)


def test_a_query_without_weights_gets_zero() -> None:
    features, value = np.zeros((5, 2)), np.ones((5, 3))
    np.testing.assert_array_equal(reference_chunked(features, features, value, chunk=2), np.zeros((5, 3)))
