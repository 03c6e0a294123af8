"""Injectivity on given keys: rank conditions, margins, the inverters, exact collisions, and the finder."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from softgap.attention import mechanisms, register_mechanism, registry, resolve
from softgap.errors import ShapeError, UnsupportedError, ValueInputError
from softgap.theory.injectivity.collision_search import find_collision, outside_proposition
from softgap.theory.injectivity.collisions import (
    affine_collision,
    certify,
    elu1_collision,
    flat_keys,
    log_margin_sweep,
    mechanism_weights,
    multiples_collision,
    prefixes,
    softmax_collision,
    weight_margin_sweep,
)
from softgap.theory.injectivity.inversion import (
    inline_query,
    key_condition,
    null_direction,
    softmax_query,
    softmax_weights,
    weight_margin,
)

DIM, SCALE = 6, 6**-0.5


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def keys(n: int = 40, dim: int = DIM, seed: int = 1) -> np.ndarray:
    return rng(seed).standard_normal((n, dim))


@pytest.mark.parametrize("n", [2, DIM - 1, DIM, DIM + 1, 4 * DIM])
def test_the_rank_is_that_of_keys_with_a_column_of_ones(n: int) -> None:
    matrix = keys(n)
    condition = key_condition(matrix)
    assert condition.rank == np.linalg.matrix_rank(np.column_stack([matrix, np.ones(n)]))
    assert condition.injective == (n >= DIM + 1)
    assert (condition.log_margin > 0) == condition.injective


def test_margins_are_the_singular_values_they_are_said_to_be() -> None:
    matrix = keys()
    a = softmax_weights(rng().standard_normal(DIM), matrix, SCALE)
    centred = (np.eye(40) - np.full((40, 40), 1 / 40)) @ matrix
    assert key_condition(matrix).log_margin == pytest.approx(np.linalg.svd(centred)[1][-1], rel=1e-12)
    seen = (np.diag(a) - np.outer(a, a)) @ matrix
    assert weight_margin(matrix, a) == pytest.approx(np.linalg.svd(seen)[1][-1], rel=1e-9)


def test_the_weight_margin_is_the_least_slope_of_the_weights() -> None:
    matrix, q = keys(), rng().standard_normal(DIM)
    step = 1e-6 * np.eye(DIM)
    slopes = np.stack([softmax_weights(q + e, matrix, SCALE) - softmax_weights(q - e, matrix, SCALE) for e in step])
    expected = np.linalg.svd(slopes / 2e-6)[1][-1] / SCALE
    assert weight_margin(matrix, softmax_weights(q, matrix, SCALE)) == pytest.approx(expected, rel=1e-6)


def test_a_sharp_distribution_is_injective_and_yet_hard_to_tell_apart() -> None:
    matrix = keys()
    q = 30 * matrix[np.argmax(np.linalg.norm(matrix, axis=1))]
    a = softmax_weights(q, matrix, SCALE)
    assert a.max() > 0.9998
    assert key_condition(matrix).injective
    assert weight_margin(matrix, a) < 1e-9


@pytest.mark.parametrize("n", [DIM + 1, DIM + 2, 50])
def test_a_query_comes_back_from_its_softmax_weights(n: int) -> None:
    matrix, q = keys(n), rng(3).standard_normal(DIM)
    weights = mechanism_weights("softmax", q, matrix, scale=SCALE)[0]
    np.testing.assert_allclose(softmax_query(weights, matrix, SCALE), q, atol=1e-10)


def test_a_query_comes_back_from_its_inline_weights() -> None:
    matrix, q = keys(DIM + 1), rng(3).standard_normal(DIM)
    weights = mechanism_weights("inline", q, matrix, scale=SCALE)[0]
    np.testing.assert_allclose(inline_query(weights, matrix, SCALE), q, atol=1e-10)


@pytest.mark.parametrize("n", [2, 3, DIM])
def test_softmax_collides_on_d_keys_or_fewer(n: int) -> None:
    matrix = keys(n)
    found = softmax_collision(rng().standard_normal(DIM), matrix, scale=SCALE, step=3.0)
    assert found.exact
    assert np.linalg.norm(found.queries[0] - found.queries[1]) == pytest.approx(3.0)
    assert found.weights.shape == (2, n)
    assert np.ptp(matrix @ null_direction(matrix)) < 1e-12


def test_keys_on_a_hyperplane_collide_though_no_two_are_alike() -> None:
    matrix = flat_keys(DIM, 30, rng())
    assert np.linalg.matrix_rank(matrix) == DIM
    assert key_condition(matrix).rank == DIM
    assert softmax_collision(rng(1).standard_normal(DIM), matrix, scale=SCALE).exact


@pytest.mark.parametrize("factor", [1e-6, 0.3, 1.7, 1e6])
def test_elu1_collides_for_every_factor(factor: float) -> None:
    found = elu1_collision(rng().standard_normal(DIM), keys(), scale=SCALE, factors=(1.0, factor))
    assert found.exact
    assert found.apart > 0.1
    assert found.angle > 1


@pytest.mark.parametrize("mechanism", ["relu", "focused", "dpfp", "relu2_scores", "polynomial", "cosformer"])
def test_multiples_collide_where_weights_are_homogeneous(mechanism: str) -> None:
    found = multiples_collision(np.abs(keys(1)[0]), keys(), scale=SCALE, factors=(0.01, 1, 7, 90), mechanism=mechanism)
    assert found.distance <= 1e-12
    assert found.apart > 0.8
    assert np.allclose(found.weights.sum(axis=1), 1)
    assert not multiples_collision(keys(1)[0], keys(), scale=SCALE, mechanism="softmax").exact


def test_four_queries_of_different_direction_and_length_collide_under_relu_affine() -> None:
    found = affine_collision(keys(), scale=SCALE, rng=rng(), queries=4, least_angle=10)
    lengths = np.linalg.norm(found.queries, axis=1)
    assert found.exact
    assert len(found.queries) == 4
    unit = found.queries / lengths[:, None]
    cosines = (unit @ unit.T)[np.triu_indices(4, 1)]
    assert math.degrees(math.acos(cosines.max())) == pytest.approx(found.angle, rel=1e-6)
    assert found.angle >= 10
    assert np.diff(np.sort(lengths)).min() > 1e-3


def test_given_affine_maps_are_used_and_checked() -> None:
    a = torch.as_tensor(rng(5).standard_normal((1, 1, DIM, DIM)))
    b = torch.as_tensor(rng(6).standard_normal((1, 1, DIM)))
    mine = resolve("relu_affine").with_parameters(A=a, b=b)
    found = affine_collision(keys(), scale=SCALE, rng=rng(), mechanism=mine)
    assert found.exact
    features = found.queries @ a[0, 0].numpy().T + b[0, 0].numpy()
    assert (features > 0).all()
    wide = resolve("relu_affine").with_parameters(A=a.repeat(1, 1, 2, 1), b=b.repeat(1, 1, 2))
    with pytest.raises(UnsupportedError, match=r"a square invertible A of size 6, got shape \[12, 6\]"):
        affine_collision(keys(), scale=SCALE, rng=rng(), mechanism=wide)
    flat = resolve("relu_affine").with_parameters(A=a, b=torch.zeros_like(b))
    with pytest.raises(UnsupportedError, match="no 4 queries at least 10 degrees apart"):
        affine_collision(keys(), scale=SCALE, rng=rng(), mechanism=flat, attempts=5)


@pytest.mark.parametrize(
    "name", ["elu1", "relu_affine", "exp_dim", "identity", "l2_normalised", "relu2_scores", "uniform"]
)
def test_the_finder_finds_collisions_that_exist(name: str) -> None:
    matrix = keys()
    search = find_collision(name, matrix, rng=rng())
    assert search.collision is not None
    anew = mechanism_weights(name, search.collision.queries, matrix, scale=SCALE)
    assert np.abs(anew[0] - anew[1]).max() <= 1e-12
    assert np.linalg.norm(search.collision.queries[0] - search.collision.queries[1]) > 0.4
    np.testing.assert_allclose(anew.sum(axis=1), 1, atol=1e-12)


@pytest.mark.parametrize("name", ["softmax", "inline", "taylor2"])
def test_the_finder_finds_none_where_there_is_none_and_says_how_hard_it_tried(name: str) -> None:
    search = find_collision(name, keys(), rng=rng(), queries=1, starts=3)
    assert search.collision is None
    assert (search.queries, search.starts) == (1, 9)
    assert search.evaluations > 100
    assert search.closest > 1e-3


def test_the_finder_sees_softmax_collide_on_few_keys() -> None:
    assert find_collision("softmax", keys(DIM), rng=rng(), queries=1, starts=3).has_collision


def test_the_finder_takes_a_users_own_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(mechanisms()))
    register_mechanism("cube", lambda x: x**3, signed=True)
    register_mechanism("lifted", lambda x: torch.cat([torch.ones_like(x[..., :1]), x], dim=-1), signed=True)
    matrix = keys() / 4
    cube, lifted = (find_collision(name, matrix, rng=rng(), queries=1) for name in ("cube", "lifted"))
    assert cube.has_collision
    assert cube.outside == ""
    # [1, x] is injective under the same rank condition as softmax: one feature more is enough.
    assert not lifted.has_collision
    assert lifted.outside == "it maps 6 dimensions to 7"


def test_what_the_proposition_covers() -> None:
    assert outside_proposition("elu1", 8) == ""
    assert outside_proposition("hedgehog", 8) == "it maps 8 dimensions to 16"
    assert "scores" in outside_proposition("softmax", 8)
    assert "centred" in outside_proposition("inline", 8)
    for name in ("uniform", "decay", "first_token"):
        assert "ignores" in outside_proposition(name, 8)


def test_prefixes_turn_injective_at_d_plus_1_keys() -> None:
    found = prefixes(DIM, [2, DIM, DIM + 1, 30], draws=4, rng=rng())
    assert [p.injective for p in found] == [0, 0, 1, 1]
    assert all(p.collision < 1e-12 and math.isnan(p.error) for p in found[:2])
    assert all(p.error < 1e-9 and math.isnan(p.collision) for p in found[2:])


def test_the_inverters_error_is_the_error_of_the_weights_over_the_margin() -> None:
    by_log = log_margin_sweep(DIM, 30, [1e-1, 1e-3, 1e-5], noise=1e-8, rng=rng())
    np.testing.assert_allclose(by_log.error, by_log.predicted, rtol=1e-3)
    by_weight = weight_margin_sweep(DIM, 30, [0.5, 2, 5], noise=1e-5, rng=rng())
    np.testing.assert_allclose(by_weight.error, by_weight.predicted, rtol=1e-3)
    assert by_weight.margin[-1] < by_weight.margin[0] / 3


def test_a_certificate_says_how_far_apart_its_queries_are() -> None:
    found = certify("softmax", [[3.0, 0.0], [0.0, 4.0]], keys(8, 2), scale=1.0)
    assert found.angle == pytest.approx(90)
    assert found.apart == pytest.approx(5 / 4)
    assert found.distance > 0
    assert dataclasses.asdict(found)["mechanism"] == "softmax"


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(ValueInputError, match="a key matrix needs at least 2 rows, got 1"):
        key_condition(keys(1))
    with pytest.raises(ShapeError, match=r"keys must be a matrix \[key, dim\], got shape \[3\]"):
        key_condition(np.zeros(3))
    with pytest.raises(ValueInputError, match="keys hold NaN or inf"):
        key_condition(np.full((3, 2), np.nan))
    with pytest.raises(UnsupportedError, match=r"rank \[K, 1\] is 6, 7 is needed"):
        softmax_query(np.full(DIM, 1 / DIM), keys(DIM), SCALE)
    with pytest.raises(ValueInputError, match="must all be above 0 to have logarithms, got 0 for key 2"):
        softmax_query([0.5, 0.5, 0.0], keys(3, 2), 1.0)
    with pytest.raises(ShapeError, match="weights must be one per key, 3"):
        weight_margin(keys(3, 2), [0.5, 0.5])
    with pytest.raises(UnsupportedError, match="softmax over these keys is injective"):
        softmax_collision(np.zeros(DIM), keys(), scale=SCALE)
    with pytest.raises(ValueInputError, match="a factor must be above 0 and finite, got -1"):
        elu1_collision(np.zeros(DIM), keys(), scale=SCALE, factors=(-1.0, 1.0))
    with pytest.raises(ShapeError, match="a collision needs at least 2 queries"):
        certify("relu", np.zeros((1, DIM)), keys(), scale=SCALE)
    with pytest.raises(UnsupportedError, match="mechanism 'fitted' needs the parameters"):
        find_collision("fitted", keys(), rng=rng())
    with pytest.raises(UnsupportedError, match="mechanism 'zero' has no weights"):
        find_collision("zero", keys(), rng=rng())
    with pytest.raises(UnsupportedError, match="'relu' gave none of 100 random queries a distribution"):
        find_collision("relu", -np.abs(keys()), rng=rng())
    with pytest.raises(ValueInputError, match="queries and starts must be at least 1, got 0 and 8"):
        find_collision("relu", keys(), rng=rng(), queries=0)
