"""The sentence a run opens with: its share against one by hand, its interval, its heads, and when there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from softgap.analysis import GapSums, gap_sums, headline
from softgap.analysis.headline import Headline
from softgap.trajectories import Trajectories
from trajectory_examples import example_fields


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
    assert "1 (1 to 1) of 8 heads keeps more than half of the gap, with elu1 8, " in found.sentence
    assert f"layer {run.layers[-1]} head" in found.sentence


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
    assert f" ({found.fewest:.0f} to {found.most:.0f}) of 8 heads" in found.sentence


def test_what_is_left_is_a_share_of_each_gap() -> None:
    run = measured(40)
    gap = gap_sums(run)
    assert gap is not None
    expected = np.full((2, 4), 0.25)
    expected[-1, -1] = 0.9
    np.testing.assert_allclose(gap.left, expected, rtol=1e-5)
    nothing = GapSums(np.stack([np.full((1, 3, 2, 4), 1e-4)] * 2)[:, 0], 100)
    assert np.isnan(nothing.left).all()


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
    assert "elu1" not in found.sentence


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_pages_show_the_sentence_as_it_is_written(page: str) -> None:
    heads = ((5, 8), (18, 6), (5, 6), *((29, head) for head in range(10)))
    shown = Headline(0.77, 0.74, 0.80, 0.03, heads, 270, 0.02, 0.03, 9, 27, 270).sentence
    text = (Path(__file__).parents[1] / page).read_text(encoding="utf-8")
    assert shown in " ".join(text.split())
