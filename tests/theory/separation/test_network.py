"""The separation's data and network: against the source's tensor products, between its forms, and at known sizes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from softgap.attention import Visible, attention_weights, resolve
from softgap.errors import UnknownNameError, UnsupportedError, ValueInputError
from softgap.theory.separation.classes import (
    Construction,
    Draw,
    class_outputs,
    construct,
    dense_products,
    distinct_products,
    draw_many,
    form_of,
    sequences,
)
from softgap.theory.separation.network import (
    argument,
    computable,
    fire,
    hoeffding,
    mechanism_names,
    missing_bound,
    share,
    signal_margin,
    trial,
    trials,
)
from softgap.theory.separation.reference import tensor_product_network, tensor_product_scores

ALIKE = [name for name in computable() if form_of(resolve(name), construct(d=8)) == "classes"]
POSITION_FREE = [*ALIKE, "favor", "relu_affine", "dpfp"]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def some_draws(size: Construction, count: int = 6) -> tuple[Draw, ...]:
    return draw_many(size, count, rng=rng(3))


def test_a_sequence_is_written_as_in_the_source() -> None:
    size = construct(d=5, t=2, b=0.4, a1=0.9)
    assert (size.n, size.d, size.t, size.c) == (6, 5, 2, 0.6)
    matrix, keys = sequences(size, 1, Draw(4, 4, np.ones((5, size.m), np.int8)))
    unit = math.sqrt(math.log(6))
    expected = [
        [0, 0.4, 0, 0, 0.6],
        [0, 0, 0.4, 0, 0.6],
        [0, 0, 0, 0.4, 0.6],
        [0, 0.4, 0, 0, 0.6],
        [0.9, 0, 0.4, 0, 0.6],
        [0, 0, 0, 0.4, 0.6],
    ]
    np.testing.assert_allclose(matrix, np.array(expected) * unit, rtol=1e-15)
    assert keys is matrix
    assert size.m == math.ceil(4 * math.log(600))
    assert size.tau == pytest.approx(0.7 * unit)


def test_cross_attention_has_two_sequences_of_one_class() -> None:
    size = construct(d=8, t=3, cross=True)
    draw = next(one for one in some_draws(size) if one.row != one.key_row)
    queries, keys = sequences(size, 1, draw)
    assert queries[draw.row, 0] == keys[draw.key_row, 0] == pytest.approx(size.unit)
    assert (queries != keys).sum() == 2


def test_draws_depend_on_the_generator_alone() -> None:
    size = construct(d=9)
    first, again, other = (draw_many(size, 2, rng=rng(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first[1].signs, again[1].signs)
    assert (first[0].signs != other[0].signs).any()
    assert set(np.unique(first[0].signs)) == {-1, 1}
    np.testing.assert_array_equal(first[0].block_sums, first[0].signs[1:-1].astype(int).sum(0))


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(("name", "exponential"), [("softmax", True), ("identity", False)])
def test_the_network_is_the_sources_tensor_product(name: str, exponential: bool, cross: bool) -> None:
    size = construct(d=6, t=2, b=0.6, m=9, cross=cross)
    draws = some_draws(size)
    fired = 0
    for label in (0, 1):
        expected = [
            tensor_product_network(*sequences(size, label, draw), draw.signs, size.tau, exponential=exponential)
            for draw in draws
        ]
        for form in ("dense", "classes"):
            found = fire(resolve(name), size, label, draws, form=form)
            np.testing.assert_allclose(found.value, expected, rtol=1e-11, atol=1e-12)
        fired += sum(value > 0 for value in expected)
    assert fired  # at this size both classes pass the threshold for some signs


def test_the_tensor_product_is_the_bilinear_form() -> None:
    a1, a2, x = (rng(i).standard_normal(shape) for i, shape in enumerate(((3, 4), (5, 4), (4, 4))))
    np.testing.assert_allclose(tensor_product_scores(a1, a2, x), a1 @ x @ a2.T, rtol=1e-12)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("name", [*ALIKE, "top_k:k=5", "polynomial:p=4"])
def test_classes_of_rows_agree_with_the_dense_form(name: str, t: int, cross: bool) -> None:
    size = construct(d=11, t=t, b=0.7, m=7, cross=cross)
    draws = some_draws(size)
    for label in (0, 1):
        classes, dense = (fire(resolve(name), size, label, draws, form=form) for form in ("classes", "dense"))
        np.testing.assert_allclose(classes.value, dense.value, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(classes.largest, dense.largest, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", POSITION_FREE)
def test_different_rows_agree_with_the_dense_form(name: str) -> None:
    size = construct(n=23, d=9, t=3, allow_breaks=True, m=5)
    for draw in some_draws(size, 2):
        distinct, dense = (f(resolve(name), size, 1, draw) for f in (distinct_products, dense_products))
        rows, which = np.unique(sequences(size, 1, draw)[0], axis=0, return_inverse=True)
        assert len(distinct) == len(rows) == 8  # seven block columns and the marked row
        np.testing.assert_allclose(distinct[which], dense, rtol=1e-11, atol=1e-13)


def test_a_mechanism_that_looks_at_positions_is_computed_densely() -> None:
    size = construct(d=10)
    for name in ("cosformer", "decay", "self_token", "first_token"):
        assert form_of(resolve(name), size) == "dense"
    assert form_of(resolve("favor"), size) == "distinct"
    with pytest.raises(UnsupportedError, match=r"mechanism 'decay' has no structured form .* got n = 16,384"):
        form_of(resolve("decay"), construct(n=16384, d=258))


@pytest.mark.parametrize(
    ("sizes", "softmax", "linear"),
    [
        ({"d": 514}, (0, 1), (0, 0)),
        ({"d": 514, "t": 4}, (0, 1), (0, 0)),
        ({"d": 258, "b": 0.2}, (0, 1), (0, 0)),
        ({"d": 66}, (0.75, 1), (0.80, 1)),
        ({"d": 258, "b": 0.8}, (1, 1), (1, 1)),
        ({"n": 2048, "d": 130, "b": 0.6}, (1, 1), None),
    ],
)
def test_known_sizes(sizes: dict[str, float], softmax: tuple[float, float], linear: tuple[float, float] | None) -> None:
    """The interval of what was measured once with 20 draws and that of 60 others overlap."""
    found = trials(("softmax", "identity"), construct(**sizes), 60, rng=rng(11))  # type: ignore[arg-type]
    for one, expected in zip(found, (softmax, linear), strict=True):
        if expected is None:
            continue
        for measured, value in zip((one.fires_d0, one.fires_d1), expected, strict=True):
            once = share(round(20 * value), 20)
            assert measured.low <= once.high
            assert once.low <= measured.high


def test_column_one_of_the_linear_output_differs_between_the_classes() -> None:
    size = construct(d=258)
    low, high = (class_outputs(resolve("identity"), size, label).marked[0] / size.unit for label in (0, 1))
    assert low == pytest.approx(0.0004, abs=5e-5)
    assert high == pytest.approx(0.023, abs=5e-4)


def test_the_margin_of_a_small_a1_is_lost_at_large_n() -> None:
    margins = []
    for n in (8192, 16384, 32768):
        size = construct(n=n, t=1, a1=0.7)
        margins.append(signal_margin(class_outputs(resolve("softmax"), size, 1), size))
    assert margins[0] > 0 > margins[1] > margins[2]


def test_softmax_weights_follow_the_powers_of_n() -> None:
    size = construct(d=34, t=2)
    own = size.n ** (size.a1**2 + size.b**2)
    total = own + (size.t - 1) * size.n ** (size.b**2) + size.n - size.t
    marked = class_outputs(resolve("softmax"), size, 1).marked
    assert marked[0] == pytest.approx(own / total * size.a1 * size.unit, rel=1e-12)
    draw = some_draws(size, 1)[0]
    rows = torch.from_numpy(sequences(size, 1, draw)[0])[None, None]
    everything = Visible(mask=torch.ones(1, 1, size.n, size.n, dtype=torch.bool))
    weights = attention_weights("softmax", rows, rows, visible=everything, scale=1.0, dtype=torch.float64)
    assert float(weights[0, 0, draw.row, draw.row]) == pytest.approx(own / total, rel=1e-12)


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("sizes", [{"d": 66}, {"d": 130, "b": 0.3}, {"d": 258, "t": 2}, {"d": 514, "m": 8}])
def test_the_bounds_are_bounds(name: str, sizes: dict[str, float], cross: bool) -> None:
    size = construct(**sizes, cross=cross)  # type: ignore[arg-type]
    draws = draw_many(size, 200, rng=rng(5))
    silent, firing = (class_outputs(resolve(name), size, label) for label in (0, 1))
    fires = share(int((fire(resolve(name), size, 0, draws).value > 0).sum()), 200)
    misses = share(int((fire(resolve(name), size, 1, draws).value == 0).sum()), 200)
    assert fires.low <= hoeffding(silent, size)
    assert misses.low <= missing_bound(firing, size)


def test_hoeffding_promises_something_where_the_source_says_so() -> None:
    size = construct(d=514)
    assert hoeffding(class_outputs(resolve("softmax"), size, 0), size) < 0.01
    assert argument(size) < 1 < argument(construct(d=66)) < argument(construct(d=66, t=8))


def test_wilsons_interval() -> None:
    # Newcombe 1998, table I: 81 of 263, and 0 of 20.
    assert (share(81, 263).low, share(81, 263).high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert (share(0, 20).low, share(0, 20).high) == pytest.approx((0, 0.1611), abs=5e-5)
    assert (share(20, 20).low, share(20, 20).high) == pytest.approx((0.8389, 1), abs=5e-5)


def test_every_mechanism_that_can_be_computed_is_compared() -> None:
    names = computable()
    assert {"softmax", "identity", "top_k", "favor", "cosformer", "uniform", "zero"} <= set(names)
    assert not {"fitted", "constant", "profile", "window", "razor"} & set(names)
    size = construct(d=18)
    found = trials(names, size, 5, rng=rng())
    assert [one.mechanism for one in found] == list(names)
    zero = found[names.index("zero")]
    assert (zero.fires_d0.value, zero.fires_d1.value, zero.largest_d1) == (0, 0, 0)
    assert mechanism_names(["elu1"]) == ("softmax", "identity", "elu1")


def test_mechanisms_share_their_draws() -> None:
    size = construct(d=40)
    relu, identity = trials(("relu", "identity"), size, 10, rng=rng())
    # On data without negative numbers relu is the identity.
    assert dataclasses.replace(relu, mechanism="identity") == identity


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"n": 100, "d": 34, "t": 3}, "n must be (d - 2) t, got n = 100, d = 34, t = 3 with (d - 2) t = 96; leave one"),
        ({"n": 100, "d": 34}, "n must be (d - 2) t, got n = 100, d = 34, t = 3"),
        ({"n": 101, "t": 2}, "n must be (d - 2) t, got n = 101, d = 52, t = 2"),
        ({"d": 4}, "the construction needs d >= 5 and t >= 1, got d = 4 and t = 1"),
        ({"d": 8, "t": 0}, "the construction needs d >= 5 and t >= 1, got d = 8 and t = 0"),
        ({"b": 0.5, "c": 0.6}, "b + c must be 1, got 0.5 + 0.6 = 1.1; leave c out"),
        ({"b": 0.95}, "b and c must be at least 0.1, got b = 0.95 and c = 0.05"),
        ({"a1": -1}, "a1 must be between 0 and 10, got -1"),
        ({"a0": math.nan}, "a0 must be between 0 and 10, got nan"),
        ({"m": 0}, "m must be a whole number from 1, got 0"),
    ],
)
def test_sizes_that_are_no_construction(sizes: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueInputError) as caught:
        construct(**sizes)  # type: ignore[arg-type]
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).count(". ") == 0


def test_break_conditions_are_taken_when_allowed() -> None:
    assert construct(n=100, d=34, t=3, allow_breaks=True).regular is False
    size = construct(d=34, b=0.5, c=0.9, allow_breaks=True)
    assert size.tau == pytest.approx(1.0 * size.unit)
    one = trial("softmax", construct(n=100, d=34, t=3, allow_breaks=True), some_draws(construct(n=96, d=34)))
    assert one.form == "distinct"
    assert math.isnan(one.bound_d0)


def test_other_bad_input() -> None:
    size = construct(d=10)
    with pytest.raises(UnsupportedError, match="mechanism 'fitted' needs the parameters query_weight"):
        trial("fitted", size, some_draws(size))
    with pytest.raises(UnknownNameError, match="unknown mechanism 'softmix'"):
        trial("softmix", size, some_draws(size))
    with pytest.raises(UnknownNameError, match="unknown form 'fast'"):
        fire(resolve("softmax"), size, 0, some_draws(size), form="fast")
    with pytest.raises(ValueInputError, match="draws must be a whole number from 1, got 0"):
        draw_many(size, 0, rng=rng())


@pytest.mark.parametrize("name", ["window:w=4,sinks=1", "razor", "elu1+window:w=4"])
def test_a_window_is_refused_since_rows_have_no_order(name: str) -> None:
    with pytest.raises(UnsupportedError, match="chooses keys by their order, and the rows of the separation data"):
        trials([name], construct(d=18), 1, rng=rng())
