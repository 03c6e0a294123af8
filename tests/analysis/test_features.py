"""Features of a comparison against their formulas, written out: S(a), control, residual, segments, equal windows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from softgap.analysis import Preregistration
from softgap.analysis import features as features_module
from softgap.analysis.features import FeatureTable, Mode, feature_table
from softgap.trajectories import Manifest, Study, StudyWriter, Trajectories, open_study
from support.stats_cases import RNG

LENGTHS = (41, 60, 47, 52)
LAYERS, HEADS = 2, 3
# Head 2 of layer 1 is not there, as in a model whose layers differ.
KV_GROUP = np.array([[0, 0, 1], [0, 0, -1]], np.int32)
REAL = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def sample(number: int, steps: int, rng: np.random.Generator) -> Trajectories:
    """Divergences around a common trend with position; S(a) beside them."""
    trend = np.log1p(np.arange(steps) + 7)
    values = (trend + rng.standard_normal((2, LAYERS, HEADS, steps))).astype(np.float32)
    values[:, 1, 2] = np.nan
    sparsity = rng.uniform(size=(LAYERS, HEADS, steps)).astype(np.float32)
    sparsity[1, 2] = np.nan
    return Trajectories(
        mechanisms=("elu1", "uniform"),
        layers=tuple(range(LAYERS)),
        heads_per_layer=(3, 2),
        kv_group=KV_GROUP,
        quantities={"divergence": values, "relative_l2": values + 1, "norm_ratio": values},
        focus={"sparsity": sparsity, "attention_entropy": sparsity, "largest_weight": sparsity},
        positions=np.arange(steps) + 7,
        token_ids=np.zeros(steps, int),
        tokens=("a",) * steps,
        logprob=np.zeros(steps),
        entropy=np.zeros(steps),
        sample_id=str(number),
        prompt_text="q",
        completion_text="a" * steps,
        n_prompt=8,
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("features") / "study"
    rng = RNG(5)
    with StudyWriter(folder, Manifest(mechanisms={"elu1": {}, "uniform": {}})) as writer:
        writer.append([sample(i, steps, rng) for i, steps in enumerate(LENGTHS)])
    return open_study(folder)


def measured(study: Study, used: tuple[bool, ...] = (True,) * 4, **choices: object) -> FeatureTable:
    plan = replace(Preregistration(eligibility=1), **choices)  # type: ignore[arg-type]
    return feature_table(study, LENGTHS, np.array(used), plan, lambda _: None)


def shares(series: np.ndarray, order: int, windows: int) -> list[float]:
    """The shares of the patterns that occur in the first windows; of equal values the earlier is the smaller."""
    found = Counter(tuple(sorted(range(order), key=lambda k: (series[i + k], k))) for i in range(windows))
    return [count / windows for count in found.values()]


def shannon(shares: list[float]) -> float:
    return -sum(p * math.log(p) for p in shares if p > 0)


def entropy(series: np.ndarray, order: int, windows: int) -> float:
    return shannon(shares(series, order, windows)) / math.log(math.factorial(order))


def complexity(series: np.ndarray, order: int, windows: int) -> float:
    """Jensen-Shannon complexity: Q0 JS(P, even) H, Q0 such that JS lies between 0 and 1."""
    n = math.factorial(order)
    p = shares(series, order, windows)
    p += [0.0] * (n - len(p))
    js = shannon([(x + 1 / n) / 2 for x in p]) - shannon(p) / 2 - math.log(n) / 2
    most = -((n + 1) / n * math.log(n + 1) - 2 * math.log(2 * n) + math.log(n)) / 2
    return js / most * shannon(p) / math.log(n)


def residual(study: Study, number: int, layer: int, head: int, chosen: list[int]) -> np.ndarray:
    """x_i(p) - w m_i(p) - (1 - w) s(p), w = c / (c + 8): the mean of the c others at p, and a cubic in log(1 + p)."""
    runs = {i: run for i, run in enumerate(study) if i in chosen}
    series = {i: run.divergence[layer, head].astype(np.float64) for i, run in runs.items()}
    at = np.concatenate([np.log1p(runs[i].positions) for i in runs])
    cubic = np.polynomial.Polynomial.fit(at, np.concatenate(list(series.values())), 3)
    left = []
    for step, position in enumerate(runs[number].positions):
        others = [series[i][step] for i in runs if i != number and step < len(series[i])]
        weight = len(others) / (len(others) + 8)
        mean = float(np.mean(others)) if others else 0.0
        left.append(series[number][step] - weight * mean - (1 - weight) * cubic(math.log1p(position)))
    return np.array(left)


def third(series: np.ndarray, segment: str) -> np.ndarray:
    n = len(series)
    start, stop = {"full": (0, n), "early": (0, n // 3), "mid": (n // 3, 2 * n // 3), "late": (2 * n // 3, n)}[segment]
    return series[start:stop]


def test_sparsity_is_the_mean_of_s_over_the_steps(study: Study) -> None:
    table = measured(study, features=("sparsity",))
    assert table.modes == (Mode("", "sparsity"),)
    assert list(zip(table.layer.tolist(), table.head.tolist(), strict=True)) == REAL
    for row, run in zip(table.values, study, strict=True):
        expected = [sum(map(float, run.focus["sparsity"][layer, head])) / run.n_steps for layer, head in REAL]
        np.testing.assert_allclose(row[0], expected, rtol=1e-12)


def test_a_study_without_focus_has_no_sparsity(study: Study, tmp_path: Path) -> None:
    runs = [replace(run, focus={}) for run in study]
    with StudyWriter(tmp_path / "plain", Manifest(mechanisms={"elu1": {}, "uniform": {}})) as writer:
        writer.append(runs)
    table = measured(open_study(tmp_path / "plain"), features=("mean", "sparsity"))
    assert [mode.feature for mode in table.modes] == ["mean", "mean"]


@pytest.mark.parametrize("segment", ["full", "early", "mid", "late"])
@pytest.mark.parametrize("order", [2, 3])
def test_the_control_is_taken_away_before_patterns_are_counted(study: Study, segment: str, order: int) -> None:
    table = measured(
        study, features=("entropy", "complexity"), transforms=("control",), orders=(order,), segments=(segment,)
    )
    windows = min(len(third(np.arange(n), segment)) for n in LENGTHS) - order + 1
    assert table.modes == tuple(
        Mode("elu1", feature, "control", order, segment, windows) for feature in ("entropy", "complexity")
    )
    assert set(table.skipped.values()) == {"it subtracts 'uniform' from another mechanism"}
    for row, run in zip(table.values, study, strict=True):
        both = run.quantities["divergence"].astype(np.float64)
        for k, (layer, head) in enumerate(REAL):
            left = third(both[0, layer, head] - both[1, layer, head], segment)
            assert row[0, k] == pytest.approx(entropy(left, order, windows), abs=1e-12)
            assert row[1, k] == pytest.approx(complexity(left, order, windows), abs=1e-12)


@pytest.mark.parametrize("segment", ["full", "early", "mid", "late"])
@pytest.mark.parametrize("transform", ["raw", "diff", "diff2"])
def test_a_segment_is_cut_from_the_transformed_series(study: Study, transform: str, segment: str) -> None:
    table = measured(study, features=("entropy",), transforms=(transform,), segments=(segment,), quantity="relative_l2")
    lost = {"raw": 0, "diff": 1, "diff2": 2}[transform]
    windows = min(len(third(np.arange(n - lost), segment)) for n in LENGTHS) - 2
    assert {mode.windows for mode in table.modes} == {windows}
    assert [mode.mechanism for mode in table.modes] == ["elu1", "uniform"]
    for row, run in zip(table.values, study, strict=True):
        for m in range(2):
            for k, (layer, head) in enumerate(REAL):
                series = run.quantities["relative_l2"][m, layer, head].astype(np.float64)
                left = third(np.diff(series, lost), segment)
                assert row[m, k] == pytest.approx(entropy(left, 3, windows), abs=1e-12)


@pytest.mark.parametrize("held", [None, 2 * sum(LENGTHS), 1])
def test_the_residual_is_that_of_the_samples_compared(
    study: Study, held: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all heads are held at once, two, or one; and a sample that is left out bends no trend."""
    if held is not None:
        monkeypatch.setattr(features_module, "HELD_VALUES", held)
    chosen, used = [0, 1, 3], (True, True, False, True)
    family = ("entropy", "complexity"), ("residual", "raw"), ("full", "late")
    table = measured(study, used, features=family[0], mechanisms=("elu1",), transforms=family[1], segments=family[2])
    assert len(table.modes) == 8
    for row, number in zip(table.values, chosen, strict=True):
        run = study.sample(str(number))
        for k, (layer, head) in enumerate(REAL):
            series = {
                "residual": residual(study, number, layer, head, chosen),
                "raw": run.divergence[layer, head].astype(np.float64),
            }
            for m, mode in enumerate(table.modes):
                of = entropy if mode.feature == "entropy" else complexity
                left = third(series[mode.transform], mode.segment)
                assert row[m, k] == pytest.approx(of(left, 3, mode.windows), abs=1e-12), mode


def test_heads_of_a_key_value_head_are_averaged(study: Study) -> None:
    single = measured(study, features=("mean", "sparsity"))
    table = measured(study, features=("mean", "sparsity"), collapse=True)
    assert (table.layer.tolist(), table.head.tolist()) == ([0, 0, 1], [0, 1, 0])
    for k, members in enumerate(([0, 1], [2], [3, 4])):
        np.testing.assert_allclose(table.values[:, :, k], single.values[:, :, members].mean(axis=2), rtol=1e-12)


def test_ties_are_counted(study: Study, tmp_path: Path) -> None:
    flat = [replace(run, quantities={name: np.round(x) for name, x in run.quantities.items()}) for run in study]
    with StudyWriter(tmp_path / "flat", Manifest(mechanisms={"elu1": {}, "uniform": {}})) as writer:
        writer.append(flat)
    table = measured(open_study(tmp_path / "flat"), features=("entropy",), transforms=("raw",))
    windows = min(LENGTHS) - 2
    tied = max(
        sum(len(set(run.quantities["divergence"][m, layer, head, i : i + 3])) < 3 for i in range(windows)) / windows
        for run in flat
        for m in range(2)
        for layer, head in REAL
    )
    assert table.tie_rate == pytest.approx(tied)
    assert measured(study, features=("entropy",)).tie_rate == 0
