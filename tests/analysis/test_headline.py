"""The sentence a run opens with: its share against one by hand, its interval, its heads, and when there is none."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softgap.analysis import GapSums, gap_sums, headline
from softgap.analysis.headline import Headline, held_out_sentence, kind_counts_sentence, opening
from softgap.kinds import NOT_CALIBRATED, UNKNOWN_KINDS, UNMEASURED
from softgap.trajectories import Manifest, Trajectories
from support.trajectory_examples import example_fields

REPOSITORY = Path(__file__).parents[2]


def measured(steps: int, rest: float = 0.25, *, fitted: bool = True) -> Trajectories:
    """A run whose fitted map keeps a share of every head's gap, and all of it in the last head."""
    names = ("elu1", "uniform", "fitted") if fitted else ("elu1", "uniform")
    fields = example_fields(mechanisms=names, layers=(0, 1), heads_per_layer=(4, 4), steps=steps, missing=0)
    uniform = np.random.default_rng(0).uniform(0.3, 0.7, size=(2, 4, steps)).astype(np.float32)
    mine = rest * uniform
    mine[-1, -1] = 0.9 * uniform[-1, -1]
    fields["quantities"]["divergence"] = np.stack([0.95 * uniform, uniform, mine][: len(names)])
    return Trajectories(**fields)


def test_the_share_is_one_minus_a_ratio_of_means() -> None:
    run = measured(200)
    gap = gap_sums(run)
    assert gap is not None
    found = headline(gap, run.layers)
    assert found is not None
    late = run.positions >= 64
    mine, uniform = (run.select(name).divergence[..., late].sum(dtype=float) for name in ("fitted", "uniform"))
    assert found.share == pytest.approx(1 - mine / uniform)
    assert found.classical == pytest.approx(0.05, abs=1e-6)
    assert found.low < found.share < found.high
    assert found.stubborn == ((run.layers[-1], run.divergence.shape[1] - 1),)
    assert found.heads == run.divergence[..., 0].size
    assert found.classical is not None
    assert found.classical_low is not None
    assert found.classical_high is not None
    assert found.classical_low <= found.classical <= found.classical_high
    assert (found.fewest, found.most, found.classical_stubborn) == (1, 1, 8)
    assert "1 of 8 heads (1 to 1) keeps more than half of its gap (with elu+1, 8 do): " in found.sentence
    assert found.sentence.endswith(f"(with elu+1, 8 do): {run.layers[-1]}.3 (90 %).")


def test_without_a_fitted_map_there_is_no_headline() -> None:
    assert gap_sums(measured(40, fitted=False)) is None


def test_samples_count_once_each_and_their_spread_is_the_interval() -> None:
    runs = [measured(40, rest) for rest in (0.1, 0.2, 0.3, 0.4)]
    gaps = [gap for gap in map(gap_sums, runs) if gap is not None]
    whole = headline(GapSums.of_samples(gaps), runs[0].layers)
    alike = headline(GapSums.of_samples(gaps[:1] * 4), runs[0].layers)
    assert whole is not None
    assert alike is not None
    assert whole.high - whole.low > 0.05
    assert alike.high == pytest.approx(alike.low)


def test_a_model_whose_softmax_is_the_mean_has_no_gap() -> None:
    flat = GapSums(np.zeros((3, 3, 2, 4)), 48)
    assert headline(flat, (0, 1)) is None


def test_the_number_of_heads_has_an_interval_where_samples_differ() -> None:
    runs = [measured(40, rest) for rest in (0.1, 0.1, 0.8, 0.8)]
    gaps = [gap for gap in map(gap_sums, runs) if gap is not None]
    found = headline(GapSums.of_samples(gaps), runs[0].layers)
    assert found is not None
    # Either kind of sample may fill a resample: then one head keeps more than half, or all of them do.
    assert (found.fewest, found.most) == (1, 8)
    assert f" of 8 heads ({found.fewest:.0f} to {found.most:.0f}) keep" in found.sentence


def test_what_is_left_is_a_share_of_each_gap() -> None:
    run = measured(40)
    gap = gap_sums(run)
    assert gap is not None
    expected = np.full((2, 4), 0.25)
    expected[-1, -1] = 0.9
    np.testing.assert_allclose(gap.left, expected, rtol=1e-5)
    nothing = GapSums(np.stack([np.full((1, 3, 2, 4), 1e-4)] * 2)[:, 0], 100)
    assert np.isnan(nothing.left).all()


def test_heads_are_named_in_the_order_of_the_share_that_the_sentence_speaks_of() -> None:
    # The largest divergence (layer 0) keeps the smallest share of its gap, and the smallest divergence the largest.
    uniform = np.array([[0.9, 0.5], [0.3, 0.1]])
    fitted = uniform * np.array([[0.6, 0.8], [0.95, 1.11]])
    gap = GapSums(np.stack([np.stack([fitted, uniform, uniform])] * 2), 2)
    found = headline(gap, (4, 7))
    assert found is not None
    assert found.stubborn == ((7, 1), (7, 0), (4, 1), (4, 0))
    assert found.gap_left == pytest.approx((1.11, 0.95, 0.8, 0.6))
    assert found.sentence.endswith("most of all 7.1 (111 %), 7.0 (95 %) and 4.1 (80 %).")


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_heads_is_that_of_the_shares(seed: int) -> None:
    parts = np.random.default_rng(seed).uniform(0, 1, size=(4, 3, 5, 6))
    gap = GapSums(parts * np.random.default_rng(seed + 9).choice([0.01, 1.0], size=(5, 6)), 4)
    shares = [gap.left[place] for place in gap.ranked]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == np.count_nonzero(~np.isnan(gap.left)) < 30


def test_stricter_measures_of_the_calibration_are_quoted_as_far_as_they_are_known() -> None:
    known = {"gap_closed": 0.81, "against_profile": 0.69, "explained": 0.7, "explained_uniform": -1.13}
    whole = held_out_sentence({**known, "rank_correlation": 0.74})
    assert "closes 81 % of the gap that the mean of values leaves, and 69 % of the gap that profile" in whole
    assert "explains 0.70 of the output energy in the median head; the mean of values explains −1.13." in whole
    assert "rank correlation of 0.74 (Spearman)" in whole
    assert "rank correlation" not in held_out_sentence(known)
    for nothing in ({}, None, "text", {**known, "gap_closed": "0.8"}, {**known, "explained": float("nan")}):
        assert held_out_sentence(nothing) == ""


def test_the_kinds_of_heads_are_counted_where_a_calibration_did() -> None:
    numbers = {"window_keys": 67.0}
    for kind, (value, low, high) in {"window": (97, 93, 101), "softmax": (3, 3, 3)}.items():
        numbers |= {f"need_{kind}": value, f"need_{kind}_low": low, f"need_{kind}_high": high}
    assert kind_counts_sentence(numbers) == (
        "Of 100 heads, 97 (93 to 101) need a window; 3 need softmax. Window, fitted map and hybrid keep as much as 67 "
        "keys per KV head."
    )
    for nothing in ({}, None, {"need_window": 3.0}, {"gap_closed": 0.8}):
        assert kind_counts_sentence(nothing) == ""


def test_the_opening_says_why_a_run_without_a_calibration_has_no_map() -> None:
    plain = Manifest(mechanisms={"elu1": {}, "uniform": {}})
    assert opening(None, plain, (0,)).title == NOT_CALIBRATED
    assert opening(None, Manifest(mechanisms={"relu": {}, "uniform": {}}), (0,)).title == UNMEASURED
    assert opening(None, plain, (0,), "Of 4 heads, all.").title == "Of 4 heads, all."
    run = measured(200)
    old = opening(gap_sums(run), run.manifest, run.layers)
    assert old.kinds == UNKNOWN_KINDS
    assert old.headline is not None
    assert (old.title, old.rest) == (old.headline.sentence, UNKNOWN_KINDS)
    known = opening(gap_sums(run), run.manifest, run.layers, "Of 4 heads, all.")
    assert (known.title, known.rest) == ("Of 4 heads, all.", old.headline.sentence)


def test_the_share_of_a_window_stands_beside_it_and_a_short_text_is_said_to_be_short() -> None:
    run = measured(200)
    gap = gap_sums(run)
    assert gap is not None
    assert np.isnan(gap.parts[:, 3]).all()
    parts = gap.parts.copy()
    parts[:, 3] = 0.1 * parts[:, 1]
    found = headline(replace(gap, parts=parts, window="window:w=63,sinks=4"), run.layers)
    assert found is not None
    assert found.window == pytest.approx(0.9)
    assert "; a window of 67 keys closes 90 % (90 to 90) in a text of only 203 tokens; elu+1 closes" in found.sentence
    longer = headline(replace(gap, parts=parts, window="window:w=63,sinks=4", length=2048), run.layers)
    assert longer is not None
    assert "; a window of 67 keys closes 90 % (90 to 90); elu+1 closes" in longer.sentence
    plain = headline(gap, run.layers)
    assert plain is not None
    assert plain.window is None
    assert "window" not in plain.sentence


def test_without_elu1_the_sentence_has_no_control_of_the_fit() -> None:
    run = measured(200)
    gap = gap_sums(run)
    assert gap is not None
    parts = gap.parts.copy()
    parts[:, 2] = np.nan
    found = headline(GapSums(parts, gap.steps), run.layers)
    assert found is not None
    assert found.classical is None
    assert found.classical_stubborn is None
    assert "elu" not in found.sentence


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_pages_show_the_sentence_as_it_is_written(page: str) -> None:
    heads = ((18, 6), (23, 3), (5, 6), (23, 1), (13, 7))
    kept = (0.624, 0.571, 0.568, 0.514, 0.510)
    window: dict[str, Any] = {"window": 0.99, "window_low": 0.98, "window_high": 1.0, "window_keys": 67, "length": 133}
    shown = Headline(0.82, 0.80, 0.84, 0.03, heads, kept, 270, 0.02, 0.03, 0, 12, 270, **window).sentence
    quoted = {"gap_closed": 0.823, "against_profile": 0.699, "explained": 0.783, "explained_uniform": -0.982}
    text = " ".join((REPOSITORY / page).read_text(encoding="utf-8").split())
    assert shown in text
    assert held_out_sentence({**quoted, "rank_correlation": 0.756}) in text


@pytest.mark.parametrize("page", ["README.md", "docs/reading.md"])
def test_how_near_elu1_is_to_uniform_is_said_as_it_was_measured(page: str) -> None:
    findings = (REPOSITORY / "docs" / "findings.md").read_text(encoding="utf-8")
    measured = re.search(r"uniform differ by (.*) in the mean and by (.*) in the worst head of a text", findings)
    assert measured is not None
    mean, worst = measured.groups()
    text = " ".join((REPOSITORY / page).read_text(encoding="utf-8").split())
    assert f"differ by {mean} in the mean over heads, and by {worst} in the worst head of a text" in text
    assert "0.001)" not in text
