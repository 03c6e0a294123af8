"""The analysis of a study: against the plain measures, on systems that are known, and where it must refuse."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softgap.analysis import analyze
from softgap.errors import SoftgapError
from softgap.signal import apply_transform, pattern_counts, permutation_entropy, residuals, simulate
from softgap.signal.complexity import plane
from softgap.trajectories import StudyWriter, open_study
from support.analysis_examples import column, noise, run_of

RNG = np.random.default_rng


@pytest.mark.parametrize("transform", ["raw", "diff", "diff2", "diff3"])
@pytest.mark.parametrize(("order", "delay"), [(3, 1), (4, 2)])
def test_of_one_run_they_are_the_plain_measures(transform: str, order: int, delay: int) -> None:
    series = noise(1, 400)
    found = analyze(run_of(series), transform=transform, order=order, delay=delay)
    changed = apply_transform(series.reshape(6, -1), transform)
    assert column(found, "entropy") == pytest.approx(permutation_entropy(changed, order, delay).value, abs=1e-12)
    assert [head.windows for head in found.heads] == [changed.shape[-1] - (order - 1) * delay] * 6
    assert [(head.layer, head.head, head.kv_group) for head in found.heads] == [
        (layer, head, head // 2) for layer in range(2) for head in range(3)
    ]


def test_windows_of_all_samples_count_together_and_none_across_two() -> None:
    parts = [noise(seed, steps) for seed, steps in ((1, 90), (2, 150), (3, 61))]
    found = analyze([run_of(x, str(i)) for i, x in enumerate(parts)], order=4)
    counts = np.sum([pattern_counts(apply_transform(x.reshape(6, -1), "diff"), 4).counts for x in parts], axis=0)
    entropy, complexity = plane(counts / counts.sum(axis=1, keepdims=True))
    assert column(found, "entropy") == pytest.approx(entropy, abs=1e-12)
    assert column(found, "complexity") == pytest.approx(complexity, abs=1e-12)
    assert [head.windows for head in found.heads] == [90 + 150 + 61 - 3 * 4] * 6
    assert (found.samples, found.skipped, found.steps) == (3, 0, 301)


def test_mean_spread_and_slope_are_those_of_the_quantity_itself() -> None:
    steps = np.arange(120)
    ramps = np.stack([0.2 + 0.001 * steps, 0.5 - 0.002 * steps + 0.01 * np.sin(steps)])[None]
    found = analyze([run_of(ramps, "a"), run_of(ramps + 0.1, "b")])
    assert column(found, "mean") == pytest.approx(ramps[0].mean(axis=-1) + 0.05, abs=1e-6)
    assert column(found, "spread") == pytest.approx(ramps[0].std(axis=-1), abs=1e-6)
    assert column(found, "slope") == pytest.approx([100 * np.polyfit(steps, x, 1)[0] for x in ramps[0]], abs=1e-5)


def test_another_mechanism_and_quantity() -> None:
    found = analyze(run_of(noise(1)), mechanism="uniform", quantity="relative_l2")
    assert column(found, "mean") == pytest.approx(2 * (1 - noise(1).reshape(6, -1).mean(axis=-1)), abs=1e-5)
    assert found.settings["mechanism"] == "uniform"


def test_segments_are_cut_from_what_the_transform_left() -> None:
    series = noise(3, 400)
    late = apply_transform(series.reshape(6, -1), "diff")[:, 266:]
    assert column(analyze(run_of(series), segment="late"), "entropy") == pytest.approx(
        permutation_entropy(late).value, abs=1e-12
    )


def test_the_residual_is_fitted_over_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [noise(seed, steps) + np.linspace(0, 5, steps) for seed, steps in ((1, 100), (2, 140), (3, 100))]
    runs = [run_of(x, str(i)) for i, x in enumerate(parts)]
    left = residuals(
        [x.astype(np.float32).reshape(6, -1) for x in parts], [run.positions.astype(int) for run in runs]
    ).series
    counts = np.sum([pattern_counts(x, 3).counts for x in left], axis=0)
    expected = plane(counts / counts.sum(axis=1, keepdims=True))[0]
    assert column(analyze(runs, transform="residual"), "entropy") == pytest.approx(expected, abs=1e-12)
    # The same where memory allows only two heads at a time.
    monkeypatch.setattr("softgap.analysis.pattern_counts.HELD_VALUES", 2 * 340)
    assert column(analyze(runs, transform="residual"), "entropy") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("transform", "samples", "steps"), [("raw", 1, 120), ("diff", 1, 120), ("diff", 12, 20), ("residual", 3, 60)]
)
def test_noise_does_not_stand_out(transform: str, samples: int, steps: int) -> None:
    """p-values of 600 heads of noise are those of the null, whatever the transform, one run or many short ones."""
    runs = [run_of(noise(seed, steps, layers=20, heads=30), str(seed)) for seed in range(samples)]
    found = analyze(runs, transform=transform)
    p = column(found, "p")
    assert np.mean(p <= 0.05) == pytest.approx(0.05, abs=0.03)
    assert np.mean(p <= 0.5) == pytest.approx(0.5, abs=0.08)
    assert abs(column(found, "z").mean()) < 0.25
    assert len(found.standing_out()) <= 3


def test_a_white_null_would_find_structure_in_differenced_noise() -> None:
    """What the analysis would report if the null skipped the transform: the reason why it does not."""
    differenced = np.diff(noise(0, 401, layers=5, heads=20), axis=-1)
    assert column(analyze(run_of(differenced), transform="raw"), "z").mean() < -2
    assert abs(column(analyze(run_of(noise(0, 401, layers=5, heads=20)), transform="diff"), "z").mean()) < 0.4


def test_known_systems_are_recognised_and_stand_out() -> None:
    series = np.stack([simulate(name, 1500, rng=RNG(5)) for name in ("white", "logistic", "henon", "brown")])
    found = analyze(run_of(series[None]), transform="raw", order=4)
    assert [head.nearest.split()[0] for head in found.heads][:3] == ["white", "logistic", "henon"]
    # A walk of fair steps is brown noise by another name.
    assert found.heads[3].nearest.split()[0] in ("brown", "fbm", "markov_fair")
    out = {head.head for head in found.standing_out()}
    assert out == {1, 2, 3}
    assert all(found.heads[i].z < -5 for i in out)


def test_heads_after_correction_are_those_of_benjamini_and_hochberg() -> None:
    found = analyze(run_of(noise(2, 300, layers=4, heads=5)))
    p = column(found, "p")
    order = np.argsort(p)
    expected = np.empty(20)
    running = 1.0
    for rank in range(20, 0, -1):
        running = min(running, p[order[rank - 1]] * 20 / rank)
        expected[order[rank - 1]] = running
    assert column(found, "q") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("samples", [1, 3, 40])
def test_intervals_hold_what_they_estimate(samples: int) -> None:
    """Of an AR(1) process, whose entropy at infinite length is approached by one very long series."""
    truth = permutation_entropy(simulate("ar1", 400_000, rng=RNG(0), phi=0.9)).value
    steps = 1200 // samples
    runs = [run_of(simulate("ar1", steps, rng=RNG(seed), size=(4, 25), phi=0.9), str(seed)) for seed in range(samples)]
    found = analyze(runs, transform="raw")
    inside = (column(found, "low") <= truth) & (truth <= column(found, "high"))
    assert inside.mean() > 0.85
    assert (column(found, "high") - column(found, "low")).max() < 0.1


def test_heads_without_windows_enough_are_marked() -> None:
    series = noise(1, 200)
    series[0, 1] = 0.25
    series[1, 2, ::2] = np.round(series[1, 2, ::2])
    found = analyze(run_of(series))
    constant = found.heads[1]
    assert not constant.eligible
    assert constant.windows == 0
    assert constant.tie_rate == 1
    assert "all windows hold equal values" in constant.reason
    assert all(math.isnan(getattr(constant, name)) for name in ("entropy", "low", "high", "z", "q", "complexity"))
    assert [head.eligible for head in found.heads] == [True, False, True, True, True, True]
    short = analyze(run_of(noise(1, 30)))
    assert not short.eligible
    assert "27 windows are fewer than the 64 asked for" in short.heads[0].reason
    assert len(analyze(run_of(noise(1, 30)), eligibility="2*order!").eligible) == 6


def test_ties_shorten_the_noise_they_are_compared_with() -> None:
    series = noise(4, 150, layers=10, heads=20)
    # Half of the steps repeat the one before: in differences these are ties with one another.
    rounded = np.round(series * 4) / 4
    found = analyze(run_of(rounded), transform="raw")
    assert 0.1 < column(found, "tie_rate").mean() < 0.6
    assert abs(column(found, "z").mean()) < 0.6


@pytest.mark.parametrize(("transform", "short"), [("diff", 3), ("residual", 15)])
def test_samples_too_short_are_counted_and_left_out(transform: str, short: int) -> None:
    found = analyze([run_of(noise(1, 200), "a"), run_of(noise(2, short), "b")], transform=transform)
    assert (found.samples, found.skipped, found.steps) == (1, 1, 200)
    alone = analyze(run_of(noise(1, 200)), transform=transform)
    assert column(found, "entropy").tolist() == column(alone, "entropy").tolist()


def test_layers_with_fewer_heads() -> None:
    found = analyze(run_of(noise(1, 200), heads=(3, 1)))
    assert [(head.layer, head.head) for head in found.heads] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_a_seed_gives_the_same_findings() -> None:
    runs = [run_of(noise(seed, 60), str(seed)) for seed in range(12)]
    first, again, other = (analyze(runs, seed=seed).to_json() for seed in (1, 1, 2))
    assert first == again
    assert first["heads"] != other["heads"]
    assert [head["entropy"] for head in first["heads"]] == [head["entropy"] for head in other["heads"]]


def test_a_study_on_disk_is_read_sample_by_sample(tmp_path: Path) -> None:
    runs = [run_of(noise(seed, 50), str(seed)) for seed in range(25)]
    with StudyWriter(tmp_path / "study", runs[0].manifest) as writer:
        writer.append(runs[:13])
        writer.append(runs[13:])
    from_disk = analyze(open_study(tmp_path / "study"))
    assert from_disk.heads == analyze(runs).heads
    assert from_disk.source["model"] == "tiny"
    assert from_disk.source["study"] == str(tmp_path / "study")


def test_progress_is_told() -> None:
    told: list[tuple[str, float]] = []
    analyze([run_of(noise(seed, 60), str(seed)) for seed in range(3)], progress=lambda *step: told.append(step))
    assert [what for what, _ in told].count("counting patterns") == 3
    assert all(0 <= share <= 1 for _, share in told)


def test_findings_as_a_frame() -> None:
    found = analyze(run_of(noise(1)))
    frame = found.to_frame()
    assert list(frame.columns) == [field.name for field in dataclasses.fields(found.heads[0])]
    assert frame["entropy"].tolist() == [head.entropy for head in found.heads]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"order": 9}, "order must be between 2 and 8, got 9"),
        ({"order": 1}, "order must be between 2 and 8, got 1"),
        ({"delay": 0}, "delay must be a whole number from 1, got 0"),
        ({"transform": "dif"}, "unknown transform 'dif'"),
        ({"segment": "middle"}, "unknown segment 'middle'"),
        ({"ties": "drop"}, "unknown ties policy 'drop'"),
        ({"eligibility": "many"}, "unknown eligibility rule 'many'"),
        ({"mechanism": "taylor2"}, "unknown mechanism of this study 'taylor2'"),
        ({"quantity": "norm"}, "unknown quantity 'norm'"),
        ({"alpha": 0.0}, "alpha must be between 0 and 1, both excluded, got 0.0; 0.05 is usual"),
        ({"seed": -1}, "seed must be a whole number from 0, got -1"),
        ({"delay": 200}, "no sample holds one window of order 3 and delay 200"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SoftgapError, match=sentence.replace("(", r"\(")):
        analyze(run_of(noise(1)), **settings)


def test_bad_studies_are_refused() -> None:
    with pytest.raises(SoftgapError, match="an analysis needs trajectories, got a study without any"):
        analyze([])
    with pytest.raises(SoftgapError, match="got 4 in sample 'b' and 6 in 'a'"):
        analyze([run_of(noise(1), "a"), run_of(noise(1, heads=2), "b")])
    broken = noise(1)
    broken[1, 2, 17] = np.nan
    with pytest.raises(SoftgapError, match=r"head 1\.2 must be a number at every step, got nan at step 17"):
        analyze(run_of(broken))
    with pytest.raises(SoftgapError, match="ties='raise' allows no equal values"):
        analyze(run_of(np.round(noise(1))), ties="raise")


def test_heads_are_counted_in_groups_where_all_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run_of(noise(seed, 40), str(seed)) for seed in range(12)]
    whole = analyze(runs, order=4)
    # Two heads at a time: 12 samples of 24 patterns each.
    monkeypatch.setattr("softgap.analysis.pattern_counts._COUNTS", 2 * 12 * 24)
    told: list[float] = []
    parts = analyze(runs, order=4, progress=lambda what, share: told.append(share) if "counting" in what else None)
    assert parts.heads == whole.heads
    assert (len(told), told) == (3 * 12, sorted(told))


def test_the_noise_of_a_study_needs_memory_for_a_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """At order 8 the pattern counts of all simulated studies would take 3 GB."""
    monkeypatch.setattr("softgap.analysis.pattern_counts._USUAL", 999)
    tracemalloc.start()
    try:
        found = analyze(run_of(noise(1, 60, layers=1, heads=1)), order=8, eligibility=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.null_samples == 999
    assert peak < 100e6 < 999 * math.factorial(8) * 8


def test_one_head_among_many_can_stand_out_alone() -> None:
    """With 9,999 simulations its corrected p could not fall below 2 / 10,000 x 270 = 0.054."""
    series = noise(3, 300, layers=27, heads=10)
    series[5, 3] = simulate("logistic", 300, rng=RNG(0))
    found = analyze(run_of(series), transform="raw")
    assert found.least_q <= found.alpha
    assert [(head.layer, head.head) for head in found.standing_out()] == [(5, 3)]


def test_ties_are_reported_under_every_policy() -> None:
    series = np.round(noise(4, 200) * 4) / 4
    expected = permutation_entropy(series.reshape(6, -1)).tie_rate
    assert expected.min() > 0.1
    for ties in ("exclude", "stable", "jitter"):
        assert column(analyze(run_of(series), transform="raw", ties=ties), "tie_rate") == pytest.approx(expected)
    many = [run_of(series, str(i)) for i in range(12)]
    assert column(analyze(many, transform="raw", ties="stable"), "tie_rate") == pytest.approx(expected)


def test_short_samples_with_many_ties_have_a_null() -> None:
    """Of 18 windows 2 % are less than half a window: the shares of all samples have to add up."""
    runs = []
    for i in range(200):
        series = noise(i, 20)
        series[0, 0] = series[0, 0] if i < 4 else 0.0
        runs.append(run_of(series, str(i)))
    tied = analyze(runs, transform="raw").heads[0]
    assert (tied.windows, tied.eligible) == (4 * 18, True)
    assert abs(tied.z) < 4
