"""Laws of transforms, segments, residuals, surrogates and change points, for any series."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from softgap.signal.change_points import change_points
from softgap.signal.surrogates import SURROGATES, spectrum_error, surrogates
from softgap.signal.systems import simulate, systems
from softgap.signal.transforms import apply_transform, residuals, segment, steps_lost

DIFFERENCES = ("raw", "diff", "diff2", "diff3")
VALUES = st.floats(-1e3, 1e3, width=32)
series = arrays(np.float64, array_shapes(min_dims=1, max_dims=3, min_side=4, max_side=20), elements=VALUES)
seeds = st.integers(0, 2**32 - 1)


@given(x=series, name=st.sampled_from(DIFFERENCES), factor=st.sampled_from([-2.0, 0.5, 4.0]))
def test_transforms_are_linear_and_lose_the_steps_they_say(x: np.ndarray, name: str, factor: float) -> None:
    found = apply_transform(x, name)
    assert found.shape == (*x.shape[:-1], x.shape[-1] - steps_lost(name))
    np.testing.assert_array_equal(apply_transform(factor * x, name), factor * found)


@given(x=series, name=st.sampled_from(DIFFERENCES[1:]), level=st.integers(-1000, 1000))
def test_differences_forget_the_level(x: np.ndarray, name: str, level: int) -> None:
    whole = np.round(x)  # so that adding the level is exact
    np.testing.assert_array_equal(apply_transform(whole + level, name), apply_transform(whole, name))


@given(x=series)
def test_higher_differences_are_differences_of_differences(x: np.ndarray) -> None:
    once = apply_transform(x, "diff")
    np.testing.assert_array_equal(apply_transform(once, "diff"), apply_transform(x, "diff2"))
    np.testing.assert_array_equal(apply_transform(once, "diff2"), apply_transform(x, "diff3"))


@given(x=series)
def test_the_thirds_make_up_the_whole(x: np.ndarray) -> None:
    thirds = [segment(x, name) for name in ("early", "mid", "late")]
    np.testing.assert_array_equal(np.concatenate(thirds, axis=-1), segment(x, "full"))
    lengths = [third.shape[-1] for third in thirds]
    assert max(lengths) - min(lengths) <= 1


@given(
    lengths=st.lists(st.integers(16, 60), min_size=1, max_size=6),
    seed=seeds,
    coefficients=st.tuples(*[st.floats(-3, 3)] * 4),
    shrinkage=st.sampled_from([0.0, 1.0, 8.0, np.inf]),
)
def test_residuals_forget_a_common_smooth_trend(
    lengths: list[int], seed: int, coefficients: tuple[float, ...], shrinkage: float
) -> None:
    """A cubic in log position that all samples share changes nothing."""
    rng = np.random.default_rng(seed)
    plain = [rng.standard_normal((2, n)) for n in lengths]
    moved = [x + np.polyval(coefficients, np.log1p(np.arange(x.shape[-1]))) for x in plain]
    for a, b in zip(
        residuals(plain, shrinkage=shrinkage).series, residuals(moved, shrinkage=shrinkage).series, strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-8)


@given(x=series, method=st.sampled_from(SURROGATES), seed=seeds, count=st.integers(1, 4))
@settings(max_examples=60)
def test_surrogates_keep_values_or_spectrum(x: np.ndarray, method: str, seed: int, count: int) -> None:
    block = 2 if method == "block_shuffle" else None
    found = surrogates(x, method, count, rng=np.random.default_rng(seed), block=block).series
    assert found.shape == (*x.shape[:-1], count, x.shape[-1])
    if method == "phase":
        scale = np.abs(x).max() + 1e-300
        varied = x.std(-1) > 1e-6 * scale
        assert spectrum_error(x[..., None, :], found)[varied].max(initial=0) < 1e-6
        np.testing.assert_allclose(found.mean(-1) / scale, x.mean(-1)[..., None].repeat(count, -1) / scale, atol=1e-13)
    else:
        np.testing.assert_array_equal(np.sort(found), np.sort(x)[..., None, :].repeat(count, -2))


@given(x=series, factor=st.sampled_from([0.25, 2.0]), seed=seeds)
@settings(max_examples=30)
def test_iaaft_follows_a_change_of_unit(x: np.ndarray, factor: float, seed: int) -> None:
    plain = surrogates(x, "iaaft", 2, rng=np.random.default_rng(seed), max_iterations=50).series
    scaled = surrogates(x * factor, "iaaft", 2, rng=np.random.default_rng(seed), max_iterations=50).series
    np.testing.assert_array_equal(scaled, plain * factor)


@given(name=st.sampled_from(tuple(systems())), n=st.integers(1, 40), seed=seeds)
@settings(max_examples=40)
def test_systems_are_functions_of_their_generator(name: str, n: int, seed: int) -> None:
    first = simulate(name, n, rng=np.random.default_rng(seed), size=2)
    np.testing.assert_array_equal(first, simulate(name, n, rng=np.random.default_rng(seed), size=2))
    assert np.isfinite(first).all()


@given(x=arrays(np.float64, st.integers(6, 30), elements=VALUES), factor=st.sampled_from([-4.0, 0.5, 8.0]), seed=seeds)
@settings(max_examples=30)
def test_change_points_do_not_depend_on_the_unit(x: np.ndarray, factor: float, seed: int) -> None:
    plain = change_points(x, rng=np.random.default_rng(seed), permutations=39)
    scaled = change_points(x * factor, rng=np.random.default_rng(seed), permutations=39)
    np.testing.assert_array_equal(plain.starts, scaled.starts)
    np.testing.assert_array_equal(plain.null * abs(factor), scaled.null)
    edges = np.flatnonzero(plain.starts)
    assert (np.diff([0, *edges, len(x)]) >= 3).all()
