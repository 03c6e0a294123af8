"""The separation lab: phase maps, growth in n, ablation, probe, and verdicts that follow the numbers."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from softgap.attention import resolve
from softgap.errors import UnknownNameError, ValueInputError
from softgap.report.lab_figures import draw_separation
from softgap.theory.separation.ablation import best_threshold, normaliser_ablation, probe_outputs
from softgap.theory.separation.classes import class_outputs, construct, draw_many, sequences
from softgap.theory.separation.lab import Separation, separation_lab
from softgap.theory.separation.network import fire, share, trial
from softgap.theory.separation.phase_map import AXES, Axis, PhaseMap, parse_axes, phase_maps, turning_point


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def found() -> Separation:
    axes = (Axis("d", (34, 258, 514)), Axis("b", (0.2, 0.5, 0.9)))
    names = ["elu1", "polynomial", "uniform"]
    return separation_lab({"d": 258}, mechanisms=names, axes=axes, draws=20, map_draws=10, rng=rng(4))


def test_a_map_has_the_trials_of_its_cells() -> None:
    x, y = Axis("d", (34, 130)), Axis("b", (0.2, 0.8))
    soft, linear = phase_maps(("softmax", "identity"), x, y, {"a1": 0.9}, 6, rng=rng(1))
    stream = rng(1)
    for j, b in enumerate(y.values):
        for i, d in enumerate(x.values):
            size = construct(d=int(d), b=b, a1=0.9)
            draws = draw_many(size, 6, rng=stream)
            for grid in (soft, linear):
                one = trial(grid.mechanism, size, draws)
                assert grid.success[j, i] == one.success.value
                assert (grid.low[j, i], grid.high[j, i]) == (one.success.low, one.success.high)
                assert grid.fires_d0[j, i] == one.fires_d0.value
                assert grid.bound[j, i] == min(1, one.bound_d0 + one.bound_d1)
    assert np.isnan(linear.argued).all()
    assert soft.success[0, 1] > soft.success[1, 0]


def test_sizes_of_a_map_follow_each_other() -> None:
    # n over d: only n that are multiples of d - 2 are constructions.
    (grid,) = phase_maps(("softmax",), Axis("n", (64, 96, 100)), Axis("d", (34, 66)), {}, 2, rng=rng())
    assert np.isnan(grid.success).tolist() == [[False, False, True], [False, True, True]]
    # With all three given, an axis takes the place of its own and n gives way.
    (grid,) = phase_maps(("softmax",), Axis("d", (18, 34)), Axis("t", (1, 2)), {"n": 32}, 2, rng=rng())
    assert not np.isnan(grid.success).any()
    (grid,) = phase_maps(("softmax",), Axis("c", (0.2, 0.5)), Axis("m", (1, 64)), {"d": 130, "b": 0.3}, 9, rng=rng())
    assert not np.isnan(grid.success).any()
    assert grid.fires_d1[1, 0] >= grid.fires_d1[0, 0]
    with pytest.raises(ValueInputError, match="no cell of the map n, d is a construction: n must be"):
        phase_maps(("softmax",), Axis("n", (63,)), Axis("d", (34,)), {}, 2, rng=rng())
    (grid,) = phase_maps(
        ("softmax",), Axis("b", (0.2, 0.5)), Axis("c", (0.3, 0.5)), {"d": 34}, 2, rng=rng(), allow_breaks=True
    )
    assert not np.isnan(grid.success).any()


@pytest.mark.parametrize(("x", "y"), [("a0", "m"), ("a1", "n"), ("t", "c")])
def test_any_two_sizes_can_be_mapped(x: str, y: str) -> None:
    small = {"n": (64, 128), "t": (1, 2), "m": (2, 40), "a0": (0.0, 0.1), "a1": (0.5, 1.0), "c": (0.2, 0.5)}
    (grid,) = phase_maps(("softmax",), Axis(x, small[x]), Axis(y, small[y]), {}, 2, rng=rng())
    assert grid.success.shape == (2, 2)
    assert not np.isnan(grid.success).any()


def of_rows(*rows: list[float], argued: list[float] | None = None) -> PhaseMap:
    values = np.array(rows)
    blank = np.full(values.shape, np.nan)
    expected = blank if argued is None else np.array([argued] * len(rows))
    x = Axis("d", (1.0, 10.0, 100.0)[: values.shape[1]])
    y = Axis("b", tuple(float(i) for i in range(len(rows))))
    return PhaseMap("softmax", x, y, values, values, values, blank, blank, blank, expected, blank)


def test_boundaries_are_interpolated_on_a_logarithmic_scale() -> None:
    grid = of_rows([0.0, 0.0, 1.0], [0.25, 0.75, 1.0], [0.0, 0.0, 0.0], [1.0, math.nan, 0.0], argued=[0, 1, 1])
    measured = grid.boundary()
    assert measured[:2] == pytest.approx((10**1.5, 10**0.5))
    assert math.isnan(measured[2])
    assert measured[3] == pytest.approx(10)
    assert grid.boundary("argued")[0] == pytest.approx(10**0.5)
    # 11 cells are known: argued and measured differ in the middle of row 1, twice in row 3 and twice in row 4.
    assert grid.agreement() == pytest.approx(6 / 11)
    assert math.isnan(grid.agreement("median"))


def test_axes_are_read() -> None:
    assert parse_axes("d,b") == (Axis("d", AXES["d"]), Axis("b", AXES["b"]))
    assert parse_axes("n=1024/512, a1=.7") == (Axis("n", (512, 1024)), Axis("a1", (0.7,)))
    for text, sentence in {
        "d": "a map has two axes, written like d,b",
        "d,d": "the two axes of a map must differ, got d twice",
        "d,b=x/2": "the values of axis b are numbers with / between them, got 'x/2'",
        "d=1.5,b": "axis d takes whole numbers, got '1.5'",
    }.items():
        with pytest.raises(ValueInputError, match=sentence):
            parse_axes(text)
    with pytest.raises(UnknownNameError, match="unknown axis of a map 'z'"):
        parse_axes("d,z")


def test_the_turning_point_is_where_the_margin_is_lost() -> None:
    n = turning_point("softmax", a1=0.7, b=0.5)
    assert n is not None
    assert 8192 < n < 16384
    for at, sign in ((n - 1, 1), (n, -1)):
        size = construct(n=at, t=1, a1=0.7)
        row = class_outputs(resolve("softmax"), size, 1).marked
        assert sign * (row[0] + row[1] + row[4] - size.tau) > 0
    assert turning_point("softmax", a1=1.0, b=0.5, largest=2**16) is None
    with pytest.raises(ValueInputError, match="mechanism 'favor' has no classes of rows"):
        turning_point("favor", a1=0.7, b=0.5)


def test_large_n_does_not_cost_its_square() -> None:
    # The n x n form would need 17 billion weights, which no machine of ours holds.
    size = construct(n=2**17, d=514, t=256, a1=1.0)
    assert (fire(resolve("softmax"), size, 1, draw_many(size, 3, rng=rng())).value > 0).all()


def test_ablation_at_the_sources_threshold_and_at_the_best() -> None:
    size = construct(d=514)
    four = {(one.weights, one.normalised): one for one in normaliser_ablation(size, 40, rng=rng(2))}
    assert set(four) == {(weights, on) for weights in ("exp", "linear") for on in (True, False)}
    assert four["exp", True].fires_d0.value == 0
    assert four["exp", True].fires_d1.value == four["exp", True].tuned.value == 1
    # Without the division C is hundreds of times larger: the source's threshold says nothing, a tuned one does.
    assert four["exp", False].fires_d0.value == 1
    assert four["exp", False].tuned.value > 0.9
    assert four["linear", True].tuned.value < 0.5
    with pytest.raises(ValueInputError, match=r"the ablation needs n = \(d - 2\) t and at least 4 draws, got n = 100"):
        normaliser_ablation(construct(n=100, d=34, t=3, allow_breaks=True), 40, rng=rng())


def test_unnormalised_classes_are_plain_sums() -> None:
    size = construct(d=12, t=2)
    draw = draw_many(size, 1, rng=rng())[0]
    matrix, _ = sequences(size, 1, draw)
    for name, u in (("softmax", np.exp(matrix @ matrix.T)), ("identity", matrix @ matrix.T)):
        expected = (u @ matrix @ draw.signs.astype(float)).max() / size.unit
        assert fire(resolve(name), size, 1, [draw], normalised=False).largest == pytest.approx(expected, rel=1e-12)


def test_the_best_threshold() -> None:
    assert best_threshold(np.array([0.0, 1.0]), np.array([2.0, 3.0])) == 1.5
    assert best_threshold(np.array([0.0, 5.0, 0.5]), np.array([2.0, 3.0, 9.0])) == 1.25


def test_a_linear_classifier_sees_the_linear_output() -> None:
    size = construct(d=34)
    probes = probe_outputs(("softmax", "identity", "zero"), size, 24, rng=rng(3), noises=(0.0, 1.0))
    by = {(one.mechanism, one.noise): one for one in probes}
    assert by["identity", 0.0].accuracy.value == by["identity", 0.0].pooled.value == 1
    assert by["softmax", 0.0].pooled.value == 1
    assert by["identity", 0.0].marked_d1 > 10 * by["identity", 0.0].marked_d0 > 0
    assert by["softmax", 0.0].distance > by["identity", 0.0].distance > 0
    assert by["identity", 1.0].accuracy.low < 0.5 < by["identity", 1.0].accuracy.high
    assert by["zero", 0.0].accuracy.value == 0.5
    assert by["zero", 0.0].distance == 0


def test_the_lab_gives_a_verdict_for_every_claim(found: Separation) -> None:
    claims = {claim.name: claim for claim in found.claims}
    assert claims["softmax separates"].verdict == "holds"
    assert claims["linear fails"].verdict == "holds"
    assert claims["any size"].verdict == "holds only when"
    assert "d is above" in claims["any size"].condition
    assert claims["a1 = 0.7 at any n"].condition.startswith("n is below 10,1")
    assert claims["normaliser"].verdict == "does not hold"
    assert claims["no linear classifier"].verdict == "does not hold"
    assert claims["Hoeffding's bound"].verdict == "holds"
    assert [one.mechanism for one in found.trials] == ["softmax", "identity", "elu1", "polynomial", "uniform"]
    assert [one.n for one in found.scaled][-1] == 32768
    json.dumps(found.to_json())


def test_verdicts_follow_the_numbers(found: Separation) -> None:
    def verdict(changed: Separation, name: str) -> str:
        return next(claim.verdict for claim in changed.claims if claim.name == name)

    softmax, identity, *rest = found.trials
    wrong = dataclasses.replace(softmax, success=share(3, 20))
    assert verdict(dataclasses.replace(found, trials=(wrong, identity)), "softmax separates") == "does not hold"
    able = dataclasses.replace(identity, success=share(19, 20))
    assert verdict(dataclasses.replace(found, trials=(softmax, able)), "linear fails") == "does not hold"
    assert verdict(dataclasses.replace(found, trials=(softmax, able)), "only softmax") == "does not hold"
    assert verdict(dataclasses.replace(found, trials=(softmax, identity)), "only softmax") == "holds"
    assert verdict(dataclasses.replace(found, turning=None), "a1 = 0.7 at any n") == "holds"
    grid = found.maps[0]
    broken = dataclasses.replace(grid, bound=np.zeros_like(grid.bound), high=np.full_like(grid.high, 0.5))
    assert verdict(dataclasses.replace(found, maps=(broken,)), "Hoeffding's bound") == "does not hold"
    everywhere = dataclasses.replace(grid, success=np.ones_like(grid.success))
    assert verdict(dataclasses.replace(found, maps=(everywhere,)), "any size") == "holds"
    able_map = dataclasses.replace(grid, mechanism="identity", low=np.full_like(grid.low, 0.8))
    assert verdict(dataclasses.replace(found, maps=(able_map,)), "linear fails") == "holds only when"
    assert verdict(found, "linear ahead") == "does not hold"
    lost = dataclasses.replace(grid, high=np.full_like(grid.high, 0.1), success=np.zeros_like(grid.success))
    assert verdict(dataclasses.replace(found, maps=(lost, able_map)), "linear ahead") == "holds"
    blind = tuple(dataclasses.replace(one, accuracy=share(20, 40)) for one in found.probes)
    assert verdict(dataclasses.replace(found, probes=blind), "no linear classifier") == "holds"
    assert rest


def test_the_lab_is_a_function_of_its_seed() -> None:
    axes = (Axis("d", (18, 34)), Axis("b", (0.2, 0.5)))
    once, again, other = (
        separation_lab({"d": 34}, mechanisms=["elu1"], axes=axes, draws=6, map_draws=3, rng=rng(seed)).to_json()
        for seed in (1, 1, 2)
    )
    assert json.dumps(once) == json.dumps(again)  # NaN equals itself in writing
    assert once["trials"] != other["trials"]


def test_linear_attention_is_ahead_where_softmax_fires_on_both_classes() -> None:
    size = construct(d=2050, b=0.9)
    draws = draw_many(size, 12, rng=rng(6))
    linear, soft = trial("identity", size, draws), trial("softmax", size, draws)
    assert linear.success.value > 0.8
    assert soft.fires_d0.value == 1


def test_the_figure_shows_mechanisms_maps_and_growth(found: Separation) -> None:
    figure = draw_separation(found)
    titles = " ".join(axes.get_title() for axes in figure.axes)
    assert "softmax, P(both right)" in titles
    assert "identity, P(both right)" in titles
    labels = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert labels == [one.mechanism for one in found.trials]
    assert "n = 256, d = 258" in str(figure.get_suptitle())
