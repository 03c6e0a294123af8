"""A curve through two points gives their values, and a probe sees the memory and the time of a call."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from softgap.costs import Cost, Curve, Probe
from support.model_examples import tiny_llama

POSITIVE = st.floats(0.01, 100)


@given(linear=POSITIVE, square=POSITIVE, short=st.integers(1, 50), more=st.integers(1, 50), n=st.integers(1, 9999))
def test_two_points_determine_a_curve(linear: float, square: float, short: int, more: int, n: int) -> None:
    true = Curve(linear, square)
    found = Curve.through((short, true.at(short)), (short + more, true.at(short + more)))
    assert found.at(n) == pytest.approx(true.at(n), rel=1e-6)


@given(first=st.floats(0, 100), second=st.floats(0, 100), n=st.integers(1, 9999))
def test_a_curve_is_never_negative_and_meets_the_longer_text(first: float, second: float, n: int) -> None:
    found = Curve.through((10, first), (30, second))
    assert min(found.linear, found.square, found.at(n)) >= 0
    assert found.at(30) == pytest.approx(second)


def test_one_point_gives_a_line() -> None:
    assert Curve.through((4, 2.0)) == Curve(0.5)
    assert Curve(1.0, 2.0).over([1, 2]) == 3 + 10


def test_a_probe_measures_a_call_and_its_memory() -> None:
    probe = Probe(tiny_llama())
    assert probe.loading > 0
    before = probe.memory

    def work() -> str:
        held = np.ones(25_000_000)
        time.sleep(0.05)
        return f"{held.sum():.0f}"

    result, seconds, held = probe.call(work)
    assert result == "25000000"
    assert seconds >= 0.05
    assert 150e6 < held < 300e6
    probe.hold(10e9)
    assert probe.memory > before + 9e9


def test_a_cost_is_the_sum_of_its_stages() -> None:
    cost = Cost("run", {"loading": 1.0, "reading": 2.5}, 10, 20)
    assert cost.seconds == 3.5
    assert cost.to_json()["seconds"] == 3.5
    assert cost.to_json()["stages"] == {"loading": 1.0, "reading": 2.5}
