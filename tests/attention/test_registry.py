"""The registry, single mechanisms at hand-checked values, and the user's own maps."""

from __future__ import annotations

import math

import pytest
import torch

import softgap
from softgap.attention import LinearState, attend, attention_weights, mechanisms, register_mechanism
from softgap.attention.feature_maps import orthogonal_projection
from softgap.errors import ShapeError, ValueInputError
from support.attention_cases import ALL

ISSUE = [
    "softmax",
    "elu1",
    "relu",
    "relu_affine",
    "identity",
    "relu2_scores",
    "favor",
    "taylor2",
    "hedgehog",
    "cosformer",
    "focused",
    "dpfp",
    "exp_dim",
    "inline",
    "l2_normalised",
    "decay",
    "polynomial",
    "top_k",
    "uniform",
    "zero",
    "constant",
    "self_token",
    "previous_token",
    "first_token",
    "profile",
]
QUADRATIC_ONLY = {"softmax", "relu2_scores", "top_k", "zero", "constant", "self_token", "previous_token",
                  "first_token", "profile"}  # fmt: skip


def head(t: int = 40, d: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, t, d, generator=generator, dtype=torch.float64) for _ in range(3))
    return q, k, v


def test_every_mechanism_is_registered_and_described() -> None:
    assert set(ISSUE) <= set(ALL)
    for name, mechanism in mechanisms().items():
        assert mechanism.name == name
        assert mechanism.formula
        assert mechanism.paper


def test_which_forms_serve_which_mechanism() -> None:
    assert {name for name in ALL if mechanisms()[name].forms == ("quadratic",)} == QUADRATIC_ONLY
    assert mechanisms()["polynomial"].configure(p=4).forms == ("quadratic",)


@pytest.mark.parametrize("name", [n for n in ALL if mechanisms()[n].kind == "features" and not mechanisms()[n].needs])
def test_feature_dimension_is_what_the_map_gives(name: str) -> None:
    mechanism = mechanisms()[name]
    x = torch.randn(1, 1, 3, 6, generator=torch.Generator().manual_seed(0))
    site = mechanism.site(torch.arange(3), x.dtype)
    assert mechanism.query_map is not None
    assert mechanism.query_map(x, site).shape[-1] == mechanism.feature_dim(6)


def test_the_registry_cannot_be_changed_from_outside() -> None:
    with pytest.raises(TypeError):
        mechanisms()["mine"] = mechanisms()["elu1"]  # type: ignore[index]


def test_a_users_feature_map_is_three_lines() -> None:
    register_mechanism("squares_of_entries", lambda x: x.square(), formula="phi = x^2", replace=True)
    q, k, v = head()
    expected = torch.tril((q**2) @ (k**2).transpose(-1, -2))
    expected = (expected / expected.sum(-1, keepdim=True)) @ v
    for form in ("quadratic", "chunked"):
        found = softgap.attend("squares_of_entries", q, k, v, form=form, dtype=torch.float64)
        assert torch.allclose(found.output, expected, rtol=1e-12, atol=1e-12)
    streamed = LinearState("squares_of_entries", dtype=torch.float64).attend(q, k, v)
    assert torch.allclose(streamed.output, expected, rtol=1e-12, atol=1e-12)
    assert softgap.mechanisms()["squares_of_entries"].feature_dim(64) == 64


def test_a_users_map_is_held_to_its_promise() -> None:
    q, k, v = head()
    register_mechanism("negative_by_mistake", lambda x: x, replace=True)
    with pytest.raises(ValueInputError, match=r"the feature map of 'negative_by_mistake' gave -\d"):
        attend("negative_by_mistake", q, k, v)
    register_mechanism("wrong_axes", lambda x: x.flatten(2).abs(), replace=True)
    with pytest.raises(ShapeError, match="the feature map of 'wrong_axes' must keep all axes but the last"):
        attend("wrong_axes", q, k, v, form="quadratic")
    with pytest.raises(ValueInputError, match="mechanism 'elu1' exists already"):
        register_mechanism("elu1", lambda x: x.abs())
    with pytest.raises(ValueInputError, match="made of letters, digits, _ and -, got 'a b'"):
        register_mechanism("a b", lambda x: x.abs())
    with pytest.raises(ValueInputError, match="either a feature_map or a mechanism"):
        register_mechanism("neither")


def test_favor_approaches_softmax_as_features_grow() -> None:
    q, k, v = head(d=4)
    q, k = q / 2, k / 2  # the variance of an estimate grows as exp |q + k|^2
    target = attend("softmax", q, k, v, dtype=torch.float64).output
    errors = [
        (attend(f"favor:features={m}", q, k, v, dtype=torch.float64).output - target).norm() / target.norm()
        for m in (16, 4096)
    ]
    # 256 times the features shrink the error of an unbiased estimate 16 times, give or take.
    assert errors[1] < errors[0] / 6


def test_favor_directions_are_uniform() -> None:
    """QR alone prefers one sign: the mean of a coordinate over 4,000 rows must be 0 within four standard errors."""
    mean = orthogonal_projection(4000, 8, 1).mean(dim=0)
    assert (mean.abs() < 4 / 4000**0.5).all()


def test_favor_rows_are_orthogonal_in_blocks_and_seeded() -> None:
    w = orthogonal_projection(12, 8, 3)
    gram = w[:8] @ w[:8].T
    assert torch.allclose(gram, torch.diag(gram.diagonal()), atol=1e-12)
    assert torch.equal(w, orthogonal_projection.__wrapped__(12, 8, 3))
    assert not torch.equal(w, orthogonal_projection(12, 8, 4))


def test_top_k_of_everything_is_softmax_and_of_one_is_the_largest() -> None:
    q, k, _ = head()
    soft = attention_weights("softmax", q, k, dtype=torch.float64)
    assert torch.equal(attention_weights("top_k:k=40", q, k, dtype=torch.float64), soft)
    one = attention_weights("top_k:k=1", q, k, dtype=torch.float64)
    assert torch.equal(one.argmax(-1), soft.argmax(-1))
    assert torch.equal(one.amax(-1), torch.ones(1, 1, 40, dtype=torch.float64))


def test_position_controls_pick_the_value_they_name() -> None:
    q, k, v = head(t=6)
    assert torch.equal(attend("self_token", q, k, v, dtype=torch.float64).output, v)
    assert torch.equal(attend("first_token", q, k, v, dtype=torch.float64).output, v[:, :, :1].expand_as(v))
    previous = torch.cat([v[:, :, :1], v[:, :, :-1]], dim=2)
    assert torch.equal(attend("previous_token", q, k, v, dtype=torch.float64).output, previous)
    assert (attend("zero", q, k, v).output == 0).all()


def test_all_features_off_gives_zero_and_a_flag() -> None:
    q, k, v = head()
    for form in ("quadratic", "chunked"):
        found = attend("relu", -q.abs(), k, v, form=form)
        assert (found.output == 0).all()
        assert found.flagged.all()
        assert found.valid.all()


@pytest.mark.parametrize("form", ["quadratic", "chunked"])
def test_a_signed_sum_that_cancels_is_flagged(form: str) -> None:
    q = torch.ones(1, 1, 2, 1)
    k = torch.tensor([1.0, -1.0 + 1e-7]).view(1, 1, 2, 1)
    found = attend("identity", q, k, torch.ones(1, 1, 2, 1), form=form)
    assert found.flagged.tolist() == [[[False, True]]]
    assert torch.isfinite(found.output).all()


def test_log_features_survive_what_exponentials_do_not() -> None:
    """Keys whose features lie 600 nats apart: outside any float, yet each row that sees them is exact."""
    q = torch.zeros(1, 1, 3, 2)
    k = torch.tensor([[-300.0, 0.0], [0.0, 0.0], [300.0, 0.0]]).view(1, 1, 3, 2)
    v = torch.tensor([1.0, 10.0, 100.0]).view(1, 1, 3, 1)
    shared = {"query_weight": torch.zeros(1, 1, 1, 2), "query_bias": torch.zeros(1, 1, 1)}
    mechanism = mechanisms()["fitted"].with_parameters(
        **shared, key_weight=torch.tensor([[[[1.0, 0.0]]]]), key_bias=torch.zeros(1, 1, 1), rate=torch.zeros(1, 1, 1)
    )
    streamed = LinearState(mechanism)
    rows = [streamed.attend(q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(3)]
    for output in (
        attend(mechanism, q, k, v, form="quadratic").output,
        attend(mechanism, q, k, v, form="chunked").output,
        torch.cat([row.output for row in rows], dim=2),
    ):
        assert output.flatten().tolist() == [1.0, 10.0, 100.0]


def test_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    orthogonal_projection.cache_clear()
    q, k, v = head()
    for name in ("favor", "relu_affine"):
        attend(name, q, k, v)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_decay_by_hand() -> None:
    q, k, _ = head(t=3)
    weights = attention_weights("decay:lam=0.5", q, k, dtype=torch.float64)[0, 0, 2]
    assert torch.allclose(weights, torch.tensor([1.0, 2.0, 4.0]).double() / 7)
    assert mechanisms()["decay"].options["lam"] == pytest.approx(0.9)
    assert math.isclose(float(attention_weights("decay", q, k)[0, 0, 1, 0]), 0.9 / 1.9, rel_tol=1e-6)


def test_a_power_that_cancels_in_a_state_is_flagged() -> None:
    """q and the first key are nearly orthogonal: (q.k)^2 is 1e-6, of terms that add up to 4."""
    q = torch.tensor([[[[1.0, 1.0], [1.0, 1.0]]]])
    k = torch.tensor([[[[1.0, -1.0 + 1e-3], [1.0, 0.5]]]])
    v = torch.tensor([[[[2.0], [3.0]]]])
    state, scores = (attend("polynomial", q, k, v, form=form) for form in ("chunked", "quadratic"))
    assert state.flagged.flatten().tolist() == [True, False]
    assert scores.flagged.flatten().tolist() == [False, False]
    assert scores.output.flatten().tolist() == pytest.approx([2.0, 3.0], abs=1e-6)
    assert state.output[0, 0, 1].item() == pytest.approx(3.0, abs=1e-6)
