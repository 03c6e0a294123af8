"""The parts of the focus lab on tensors: concentration, off-diagonal ranks, placement, interventions, features."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softgap.attention import Visible, attention_weights, mechanisms, resolve
from softgap.attention.rank import (
    block_spectra,
    capacity_exponent,
    dyadic_blocks,
    numerical_rank,
    rank_growth,
    without_sink,
)
from softgap.errors import ShapeError, ValueInputError
from softgap.theory.focus.closed_forms import iid_sparsity
from softgap.theory.focus.concentration import (
    column_share,
    concentration,
    distance_share,
    feature_prediction,
    intervene,
    intervention_effects,
    measure_feature_families,
    score_moments,
)

LENGTH, DIM = 64, 8


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length).tril()


def test_concentration_of_known_weights() -> None:
    weights = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0, 1, 0, 0], [0.5, 0.5, 0, 0], [0.5, -0.5, 0, 0], [0, 0, 0, 0]])
    found = concentration(weights, torch.tensor([4.0, 4, 4, 4, 4]))
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-6, equal_nan=True)
    half = math.sqrt(0.5)
    close(found.sparsity, torch.tensor([1, 0.5, half, half, torch.nan]))
    log2 = math.log(2)
    close(found.entropy, torch.tensor([2 * log2, 0, log2, log2, torch.nan]))
    close(found.largest, torch.tensor([0.25, 1, 0.5, 0.5, torch.nan]))


@given(seed=st.integers(0, 1000), n=st.integers(1, 30))
def test_sparsity_lies_between_its_bounds(seed: int, n: int) -> None:
    weights = drawn(5, n, seed=seed).double().abs() ** 6
    found = concentration(weights, torch.full((5,), float(n))).sparsity
    assert bool((found >= n**-0.5 * (1 - 1e-12)).all())
    assert bool((found <= 1 + 1e-12).all())


def test_moments_are_those_of_the_scores_and_of_the_covariance() -> None:
    q, k, seen = drawn(2, LENGTH, DIM), drawn(2, LENGTH, DIM, seed=1) + 0.5, causal(LENGTH)
    found = score_moments(q, k, seen, 0.3)
    row, head = 40, 1
    keys = k[head, : row + 1].double().numpy()
    covariance = np.cov(keys.T, bias=True)
    query = 0.3 * q[head, row].double().numpy()
    assert found.beta[head, row].item() == pytest.approx(query @ keys.mean(axis=0), rel=1e-9)
    assert found.gamma[head, row].item() == pytest.approx(math.sqrt(query @ covariance @ query), rel=1e-6)
    expected = np.linalg.norm(query) * math.sqrt(np.trace(covariance) / DIM)
    assert found.isotropic[head, row].item() == pytest.approx(expected, rel=1e-6)
    scores = keys @ query
    skewness = np.mean((scores - scores.mean()) ** 3) / scores.std() ** 3
    assert found.skewness[head, row].item() == pytest.approx(skewness, rel=1e-6)
    first = (query @ keys[0] - query @ keys.mean(axis=0)) / math.sqrt(query @ covariance @ query)
    assert found.first[head, row].item() == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize(
    "name", ["elu1", "relu", "exp_dim", "hedgehog", "focused", "dpfp", "l2_normalised", "relu_affine"]
)
def test_the_general_formula_is_the_sparsity_of_every_map(name: str) -> None:
    q, k = drawn(2, LENGTH, DIM).double(), drawn(2, LENGTH, DIM, seed=1).double()
    predicted = feature_prediction(resolve(name), q, k, causal(LENGTH), 0.3)
    assert predicted is not None
    weights = attention_weights(name, q[None], k[None], scale=0.3, dtype=torch.float64)[0]
    measured = concentration(weights, causal(LENGTH).sum(dim=-1)).sparsity
    torch.testing.assert_close(predicted[0], measured, rtol=1e-9, atol=0, equal_nan=True)


def test_the_iid_formula_takes_all_features_for_alike() -> None:
    q, k = drawn(2, LENGTH, DIM).double(), drawn(2, LENGTH, DIM, seed=1).double()
    predicted = feature_prediction(resolve("elu1"), q, k, causal(LENGTH), 0.3)
    assert predicted is not None
    row, head = 40, 1
    phi_q, phi_k = (np.where(x > 0, x + 1, np.exp(x)) for x in (q[head, row].numpy(), k[head, : row + 1].numpy()))
    expected = iid_sparsity(phi_q, phi_k.std() / phi_k.mean())
    assert predicted[1][head, row].item() == pytest.approx(float(expected), rel=1e-10)


def test_maps_outside_the_formula_have_no_prediction() -> None:
    q = drawn(1, LENGTH, DIM)
    for name in ("softmax", "identity", "decay", "top_k", "taylor2", "uniform", "inline"):
        assert feature_prediction(resolve(name), q, q, causal(LENGTH), 0.3) is None


@pytest.mark.parametrize(("length", "smallest"), [(64, 8), (100, 16), (7, 1), (33, 16)])
def test_dyadic_blocks_are_disjoint_and_below_the_diagonal(length: int, smallest: int) -> None:
    cover = np.zeros((length, length), int)
    for rows, columns in dyadic_blocks(length, smallest):
        cover[rows, columns] += 1
        assert rows.stop - rows.start == columns.stop - columns.start >= smallest
    assert cover.max() == 1
    assert np.triu(cover).sum() == 0
    if (length, smallest) == (64, 8):
        # One block of 32, two of 16, four of 8: all below the diagonal but eight triangles of 8.
        assert cover.sum() == 32**2 + 2 * 16**2 + 4 * 8**2 == 64 * 64 // 2 - 8 * 8 * 8 // 2


def test_a_known_spectrum_gives_its_floor_and_ranks() -> None:
    a = torch.zeros(1, 8, 8)
    a[0, 4:, :4] = torch.diag(torch.tensor([4.0, 2.0, 1.0, 0.0]))
    found = block_spectra(a, 4)
    assert found.sizes == (4,)
    np.testing.assert_allclose(found.floor(0), [1])
    np.testing.assert_allclose(found.floor(1), [math.sqrt(5 / 21)])
    np.testing.assert_allclose(found.floor(3), [0], atol=1e-12)
    assert found.energy_rank(4, 0.01).tolist() == [3]
    assert found.energy_rank(4, 0.1).tolist() == [2]
    assert found.needed(0.3).tolist() == [2]
    assert numerical_rank(a[:, 4:, :4]).tolist() == [3]


@pytest.mark.parametrize("name", [n for n, m in mechanisms().items() if m.kind == "features" and not m.missing])
def test_blocks_of_linear_attention_have_no_more_rank_than_features(name: str) -> None:
    q, k = drawn(1, 1, LENGTH, 3).double(), drawn(1, 1, LENGTH, 3, seed=1).double()
    mechanism = resolve("favor:features=7" if name == "favor" else name)
    a = attention_weights(mechanism, q, k, dtype=torch.float64)[0]
    features = mechanism.feature_dim(3)
    assert features is not None
    block = numerical_rank(a[:, LENGTH // 2 :, : LENGTH // 2])
    assert int(block[0]) <= features + (name == "inline")
    softmax = attention_weights("softmax", q, k, dtype=torch.float64)[0]
    spectra = block_spectra(softmax, 8)
    lost = sum(float((a - softmax)[:, r, c].square().sum()) for r, c in dyadic_blocks(LENGTH, 8))
    whole = sum(float(softmax[:, r, c].square().sum()) for r, c in dyadic_blocks(LENGTH, 8))
    assert math.sqrt(lost / whole) >= float(spectra.floor(features + (name == "inline"))[0]) - 1e-12


def test_rank_sees_the_features_only_without_the_mask() -> None:
    q, k = drawn(1, 1, LENGTH, DIM).double(), drawn(1, 1, LENGTH, DIM, seed=1).double()
    lifted = Visible(mask=torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool))
    assert numerical_rank(attention_weights("elu1", q, k, dtype=torch.float64)[0]).tolist() == [LENGTH]
    assert numerical_rank(attention_weights("elu1", q, k, visible=lifted, dtype=torch.float64)[0]).tolist() == [DIM]


def test_the_exponent_is_the_slope() -> None:
    sizes = (16, 32, 64)
    ranks = np.stack([np.array([5.0, float(size), math.sqrt(size)]) for size in sizes])
    np.testing.assert_allclose(capacity_exponent(sizes, ranks), [0, 1, 0.5], atol=1e-12)


def test_a_sink_hides_the_rank_of_everything_else() -> None:
    """Heads with 90 % of their weight on the first key, the rest on one key each that no other query shares."""
    length = 64
    own = torch.zeros(length, length, dtype=torch.float64)
    t = torch.arange(1, length)
    own[t, (t - 1) // 2] = 1.0  # a sparse pattern of full rank in every block
    heads = torch.stack([0.1 * own, 0.1 * own])
    heads[..., 0] += 0.9
    energies = (0.9, 0.97, 0.999)
    whole = [rank_growth([block_spectra(heads, 8)], energy, sink=True) for energy in energies]
    rest = [rank_growth([block_spectra(without_sink(heads), 8)], energy, sink=False) for energy in energies]
    assert whole[1].ranks[-1] == 1
    assert whole[1].exponent is not None
    assert whole[1].exponent[1] == pytest.approx(0)
    assert rest[1].exponent is not None
    assert rest[1].exponent[1] > 0.8
    assert [growth.ranks[-1] for growth in rest] == sorted(growth.ranks[-1] for growth in rest)
    # What is left is what there would be without a sink at all.
    alone = rank_growth([block_spectra(without_sink(torch.stack([own, own])), 8)], 0.97, sink=False)
    assert alone.ranks == rest[1].ranks


def test_placement_of_known_matrices() -> None:
    t = torch.arange(LENGTH, dtype=torch.float64)
    sink = torch.full((LENGTH, LENGTH), 0.2, dtype=torch.float64).tril() / (t + 1)[:, None]
    sink[:, 0] += 0.8
    assert float(column_share(sink[None])) == pytest.approx(1, abs=1e-9)
    assert float(distance_share(sink[None])) < 0.3
    toeplitz = 0.5 ** (t[:, None] - t).clamp(min=0) * causal(LENGTH)
    assert float(distance_share(toeplitz[None])) == pytest.approx(1, abs=1e-9)
    assert float(column_share(toeplitz[None])) < 0.3
    q = drawn(1, 1, LENGTH, DIM).double()
    decay = attention_weights("decay", q, q, dtype=torch.float64)[0]
    assert float(distance_share(decay)) > 0.9
    assert float(column_share(decay)) < 0.5
    columns = attention_weights("elu1", q[:, :, :1].expand(-1, -1, LENGTH, -1), q, dtype=torch.float64)[0]
    assert float(column_share(columns)) > 0.8 > 0.3 > float(distance_share(columns))
    assert math.isnan(float(column_share(attention_weights("uniform", q, q, dtype=torch.float64)[0])))


@given(seed=st.integers(0, 1000), length=st.integers(2, 20))
def test_shares_are_those_of_least_squares(seed: int, length: int) -> None:
    a = drawn(length, length, seed=seed).double().abs().tril()
    a /= a.sum(dim=-1, keepdim=True)
    left = whole = 0.0
    for j in range(length):
        rows = np.arange(j, length)
        basis = np.stack([np.ones(len(rows)), 1 / (rows + 1)], axis=1)
        column = a[j:, j].numpy()
        fits = [np.linalg.lstsq(some, column)[0] for some in (basis, basis[:, :1], basis[:, 1:])]
        errors = [
            float(np.square(column - b @ x).sum())
            for b, x in zip((basis, basis[:, :1], basis[:, 1:]), fits, strict=True)
        ]
        left += errors[0] if fits[0].prod() >= 0 else min(errors[1:])
        whole += float(np.square(column - 1 / (rows + 1)).sum())
    assert float(column_share(a[None])) == pytest.approx(1 - left / whole, abs=1e-7)


def test_interventions_do_what_they_say() -> None:
    q, k = drawn(4, LENGTH, DIM) + 0.5, drawn(2, LENGTH, DIM, seed=1)
    scaled, same = intervene("scale q", 3.0, q, k)
    torch.testing.assert_close(scaled, 3 * q)
    assert same is k
    _, spread = intervene("spread keys", 2.0, q, k)
    torch.testing.assert_close(spread.mean(dim=1), k.mean(dim=1), rtol=0, atol=1e-6)
    torch.testing.assert_close(spread.std(dim=1), 2 * k.std(dim=1))
    _, shifted = intervene("shift bias", -2.0, q, k)
    moved = (q.view(2, 2, LENGTH, DIM) @ (shifted - k).mean(dim=1)[:, None, :, None])[..., 0]
    scores = q.view(2, -1, DIM) @ k.transpose(-1, -2)
    torch.testing.assert_close(moved.mean(dim=(1, 2)), -2 * scores.std(dim=-1).mean(dim=-1))
    torch.testing.assert_close((shifted - k).std(dim=1), torch.zeros(2, DIM), rtol=0, atol=1e-6)


def test_interventions_focus_softmax_and_a_negative_bias_focuses_relu2() -> None:
    q, k = drawn(2, LENGTH, DIM) + 1.0, drawn(2, LENGTH, DIM, seed=1)
    compared = [resolve(name) for name in ("softmax", "relu2_scores")]
    found = {(e.change, e.amount, e.mechanism): e for e in intervention_effects(compared, q, k, scale=0.35)}
    for change in ("scale q", "spread keys"):
        assert found[change, 4.0, "softmax"].sparsity < found[change, 1.0, "softmax"].sparsity
        assert found[change, 4.0, "softmax"].sparsity < found[change, 0.5, "softmax"].sparsity
    unchanged, shifted = (found["shift bias", amount, "softmax"].sparsity for amount in (0.0, -4.0))
    assert shifted == pytest.approx(unchanged, abs=1e-5)
    relu2 = [found["shift bias", amount, "relu2_scores"] for amount in (1.0, 0.0, -1.0)]
    assert relu2[0].sparsity > relu2[1].sparsity > relu2[2].sparsity
    assert found["shift bias", -4.0, "relu2_scores"].empty > 0.2
    # relu2 is homogeneous: the size of the query does not matter to it.
    assert found["scale q", 4.0, "relu2_scores"].sparsity == pytest.approx(relu2[1].sparsity, rel=1e-5)


def test_the_road_leads_to_softmax() -> None:
    q, k, v = (drawn(2, LENGTH, DIM, seed=seed) for seed in range(3))
    family_points = measure_feature_families(q[:, -8:], k, v, scale=DIM**-0.5)
    shifted = [point for point in family_points if point.family == "shifted"]
    assert [point.weight_error for point in shifted] == sorted((s.weight_error for s in shifted), reverse=True)
    assert [point.features for point in shifted] == [math.comb(DIM + p, p) for p in (2, 4, 8, 16)]
    assert family_points[-1].family == "softmax"
    assert (family_points[-1].weight_error, family_points[-1].features) == (0, math.inf)
    assert family_points[-1].divergence == pytest.approx(0, abs=1e-6)
    favor = [point.weight_error for point in family_points if point.family == "favor"]
    assert favor[-1] < favor[0]


def test_wrong_input_is_one_sentence() -> None:
    with pytest.raises(ShapeError, match=r"with as many queries as keys, got \[1, 4, 5\]"):
        block_spectra(torch.ones(1, 4, 5))
    with pytest.raises(ShapeError, match=r"with as many queries as keys, got \[1, 4, 5\]"):
        column_share(torch.ones(1, 4, 5))
    with pytest.raises(ValueInputError, match="a text of 20 tokens has no off-diagonal block of 16; read at least 32"):
        block_spectra(torch.ones(1, 20, 20))
    with pytest.raises(ValueInputError, match="there is no block of size 3, only 4"):
        block_spectra(torch.ones(1, 8, 8), 4).energy_rank(3, 0.01)
    with pytest.raises(ValueInputError, match="error must lie between 0 and 1, got 2"):
        block_spectra(torch.ones(1, 8, 8), 4).needed(2)
    with pytest.raises(ValueInputError, match="an exponent needs ranks at two sizes or more, got 1"):
        capacity_exponent([16], np.ones((1, 2)))
