"""The position lab: slopes, terms that sum to a trend, what the normaliser cannot do, verdicts, and the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from softgap.attention import Visible, attend, attention_weights, resolve
from softgap.attention.outputs import divergence
from softgap.cli import main
from softgap.errors import ValueInputError
from softgap.intervals import ClusterInterval
from softgap.probe.layout import LayerTensors
from softgap.theory.position.drift import TERMS, layer_series, log_slopes, normaliser_effect, predicted, synthetic_layer
from softgap.theory.position.lab import Position, position_in_model, position_lab
from support.cli_examples import failure, loads_once
from support.model_examples import save_folder, tiny_llama

IDS = [int(x) for x in np.random.default_rng(0).integers(3, 250, 60)]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def layer() -> LayerTensors:
    return synthetic_layer(heads=12, length=160, dim=32, rng=rng(), gains=(0.3, 2.0, 4.0), value_mean=0.2)


@pytest.fixture(scope="module")
def synthetic() -> Position:
    return position_lab(rng=rng(), heads=15, length=200, dim=32, mechanisms=["elu1", "taylor2"])


def alike(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Noise whose neighbours resemble each other, as steps of a text do; the last axis is that of steps."""
    steps = rng(seed).standard_normal(shape)
    for t in range(1, shape[-1]):
        steps[..., t] += 0.9 * steps[..., t - 1]
    return steps


def test_a_slope_is_per_doubling_and_its_interval_covers_it() -> None:
    positions = np.arange(9.0, 209.0)
    found = log_slopes(0.03 * np.log2(positions) + 0.02 * alike((8, 1000, 200), 0), positions)
    covered = (found.low <= 0.03) & (found.high >= 0.03)
    assert found.value.mean() == pytest.approx(0.03, abs=2e-3)
    # 1000 intervals: 95 % within three standard errors.
    assert covered.mean() == pytest.approx(0.95, abs=0.021)
    exact = log_slopes(np.stack([0.5 * np.log2(positions)[None]] * 3), positions)
    assert (exact.low[0], exact.high[0]) == pytest.approx((0.5, 0.5))
    assert exact.trending.all()
    flat = log_slopes(np.zeros((3, 2, 200)), positions)
    assert (flat.p == 1).all()


def test_heads_without_a_trend_hardly_ever_rise_or_fall() -> None:
    """270 heads on 8 texts: any head is called in at most 5 % of studies, whatever resembles what within a text."""
    positions = np.arange(9.0, 109.0)
    called = [log_slopes(alike((8, 270, 100), seed), positions).trending.any() for seed in range(100)]
    # All heads are null, so that the false discovery rate is the chance of any call: 5 of 100, and chance.
    assert np.sum(called) <= 11


def test_false_heads_are_at_most_a_twentieth_of_those_that_are_called() -> None:
    positions = np.arange(9.0, 109.0)
    shares, power = [], []
    for seed in range(40):
        series = alike((8, 270, 100), seed)
        series[:, :90] += 4 * np.log2(positions)
        called = log_slopes(series, positions).trending
        shares.append(called[90:].sum() / max(called.sum(), 1))
        power.append(called[:90].mean())
    assert np.mean(shares) < 0.06
    assert np.mean(power) > 0.9


def test_a_head_that_rises_on_one_text_only_has_no_trend() -> None:
    positions = np.arange(9.0, 209.0)
    once = 0.01 * rng().standard_normal((8, 1, 200))
    once[3] += np.log2(positions)
    assert not log_slopes(once, positions).trending.any()
    single = log_slopes(once[3:4], positions)
    assert np.isnan(single.q).all()
    assert not single.trending.any()


def test_more_heads_ask_for_smaller_p_values() -> None:
    slopes = log_slopes(alike((8, 60, 100), 3), np.arange(9.0, 109.0))
    order = np.argsort(slopes.p)
    raw = slopes.p[order] * 60 / np.arange(1, 61)
    np.testing.assert_allclose(slopes.q[order], np.minimum.accumulate(raw[::-1])[::-1].clip(max=1))
    assert slopes[order[:1]].q[0] == slopes.p[order[0]]  # type: ignore[index]


def test_slopes_of_terms_sum_to_the_slope() -> None:
    terms = rng().standard_normal((4, 3, 5, 64))
    positions = np.arange(1.0, 65.0)
    parts, whole = log_slopes(terms, positions), log_slopes(terms.sum(axis=1), positions)
    np.testing.assert_allclose(parts.value.sum(axis=0), whole.value, atol=1e-12)


def test_exchangeable_values_diverge_from_their_mean_as_predicted(layer: LayerTensors) -> None:
    series = layer_series(layer, [resolve("elu1")], start=16, rng=rng())
    # 12 heads and 144 positions: the mean over both is far less noisy than one cosine.
    assert series.uniform.mean() == pytest.approx(series.predicted.mean(), abs=0.01)
    by_head = np.corrcoef(series.uniform.mean(axis=1), series.predicted.mean(axis=1))[0, 1]
    assert by_head > 0.99
    a = attention_weights("softmax", layer.query[None], layer.key[None], scale=layer.scale)[0].double()
    effective = 1 / a[3, 100].square().sum()
    values = layer.value[3].double()
    spread = (values - values.mean(0)).square().sum(-1).mean()
    r = values.mean(0).square().sum() / spread - 1 / 160
    expected = 1 - torch.sqrt((r + 1 / 101) / (r + 1 / effective))
    assert series.predicted[3, 100 - 16] == pytest.approx(float(expected), abs=1e-6)


def test_the_two_parts_of_the_prediction_sum_to_its_change(layer: LayerTensors) -> None:
    series = layer_series(layer, [resolve("elu1")], start=16, rng=rng())
    left = series.predicted - series.mean_term - series.concentration_term
    np.testing.assert_allclose(left, np.repeat(left[:, :1], left.shape[1], axis=1), atol=1e-12)
    # An even softmax is the running mean itself: no divergence, whatever the position.
    assert predicted(np.array(0.1), np.array(50.0), np.array(50.0)) == 0


def test_a_mean_that_settles_and_a_softmax_that_does_not() -> None:
    """Queries that find their own key only: n_eff stays at 1, and all of the trend is the settling of the mean."""
    k = torch.as_tensor(rng().standard_normal((8, 120, 64)), dtype=torch.float32)
    v = torch.as_tensor(rng(1).standard_normal((8, 120, 64)), dtype=torch.float32)
    q = 40 * k
    output = attend("softmax", q[None], k[None], v[None]).output[0]
    sharp = LayerTensors(0, q, k, v, output, 64**-0.5, Visible())
    series = layer_series(sharp, [resolve("elu1")], start=4, rng=rng())
    assert np.abs(series.concentration_term).max() < 1e-3
    assert np.ptp(series.mean_term, axis=1).min() > 0.2


def test_random_queries_keep_their_norms_and_nothing_else(layer: LayerTensors) -> None:
    series = layer_series(layer, [resolve("elu1"), resolve("uniform")], start=16, rng=rng(7))
    np.testing.assert_allclose(series.random[1], series.divergence[1])
    assert np.abs(series.random[0] - series.divergence[0]).max() > 0.01
    q = layer.query[None]
    expected = divergence(layer.output, attend("elu1", q, layer.key[None], layer.value[None]).output[0])
    np.testing.assert_allclose(series.divergence[0], expected[:, 16:].numpy(), atol=1e-6)


def test_the_normaliser_grows_and_cannot_matter(layer: LayerTensors) -> None:
    change, growth = normaliser_effect(layer, resolve("elu1"), 8)
    assert change < 1e-9
    assert growth == pytest.approx(1, abs=0.05)
    for name in ("favor", "identity", "inline", "relu2_scores", "decay"):
        assert all(np.isnan(normaliser_effect(layer, resolve(name), 8)))


def test_terms_and_shares_of_synthetic_heads(synthetic: Position) -> None:
    trend = synthetic.trends[0]
    np.testing.assert_allclose(trend.terms.value.sum(axis=0), trend.slopes.value, atol=1e-10)
    assert sum(share.value for share in trend.shares) == pytest.approx(1, abs=1e-9)
    values = trend.shares[TERMS.index("values")]
    assert values.low < 0.3
    assert abs(values.value) < 0.3
    by_name = {correction.name: correction for correction in trend.corrections}
    assert by_name["minus uniform"].trend_left < 0.3
    json.dumps(synthetic.to_json())


def test_the_verdicts_follow_the_numbers(synthetic: Position) -> None:
    def verdicts(**changes: object) -> dict[str, str]:
        trend = dataclasses.replace(synthetic.trends[0], **changes)  # type: ignore[arg-type]
        return {claim.name: claim.verdict for claim in dataclasses.replace(synthetic, trends=(trend,)).claims}

    found = verdicts()
    assert found["normaliser"] == "does not hold"
    assert found["correction"] == "holds"
    assert verdicts(normaliser_change=0.1)["normaliser"] == "holds"
    assert verdicts(normaliser_change=float("nan"))["normaliser"] == "not decided"
    shares = synthetic.trends[0].shares
    mine = ClusterInterval(0.9, 0.8, 1.0, 10, 10)
    assert verdicts(shares=(*shares[:3], mine))["running mean"] == "does not hold"
    little = ClusterInterval(-0.1, -0.15, 0.05, 10, 10)
    assert verdicts(shares=(*shares[:3], little))["running mean"] == "holds"
    none = ClusterInterval(float("nan"), float("nan"), float("nan"), 0, 0)
    assert verdicts(shares=(none,) * 4, corrections=())["concentration"] == "not decided"
    low, high = ClusterInterval(0.1, 0.0, 0.2, 10, 10), ClusterInterval(0.8, 0.7, 0.9, 10, 10)
    assert verdicts(shares=(low, high, low, low))["concentration"] == "holds"
    assert verdicts(shares=(high, low, low, low))["concentration"] == "does not hold"
    left = tuple(dataclasses.replace(c, trend_left=0.9) for c in synthetic.trends[0].corrections)
    assert verdicts(corrections=left)["correction"] == "does not hold"


def test_a_model_is_read_head_by_head() -> None:
    model = tiny_llama()
    texts = [IDS, IDS[::-1], IDS[30:] + IDS[:30]]
    lab = position_in_model(model, texts, rng=rng(), mechanisms=["relu", "uniform"])
    assert lab.trends[0].slopes.value.shape == (2, 4)
    assert lab.settings["texts"] == 3
    alone = [position_in_model(model, ids, rng=rng(), mechanisms=["relu"]) for ids in texts]
    slopes = np.stack([one.trends[0].slopes.value for one in alone])
    np.testing.assert_allclose(lab.trends[0].slopes.value, slopes.mean(axis=0), atol=1e-12)
    error = slopes.std(axis=0, ddof=1) / np.sqrt(3)
    # t with 2 degrees of freedom.
    np.testing.assert_allclose(lab.trends[0].slopes.high, slopes.mean(axis=0) + 4.302653 * error, rtol=1e-6)
    (first,) = [claim for claim in alone[0].claims if claim.name == "position trend"]
    assert first.verdict == "not decided"
    assert first.condition.startswith("one text says nothing about other texts")
    control = lab.trends[1]
    np.testing.assert_allclose(control.terms.value[TERMS.index("map")], 0, atol=1e-9)
    np.testing.assert_allclose(control.random, control.slopes.value, atol=1e-9)
    assert lab.positions[0] == 9


def test_the_command_prints_verdicts_and_saves_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads_once(monkeypatch)
    small = ["lab", "position", "--heads", "8", "--tokens", "48", "--dim", "8", "--mechanism", "elu1"]
    assert main([*small, "--out", str(tmp_path / "lab")]) == 0
    shown = capsys.readouterr().out
    for part in ("growing normaliser", "does not hold", "saved"):
        assert part in shown
    assert "Shares of the trend" not in shown
    assert main([*small, "--full", "--texts", "1"]) == 0
    shown = capsys.readouterr().out
    for part in ("Shares of the trend", "random queries", "What the verdicts were read from"):
        assert part in shown
    assert "nan" not in shown
    assert (tmp_path / "lab" / "figure.svg").stat().st_size > 5000
    document = json.loads((tmp_path / "lab" / "result.json").read_text())
    assert main([*small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    folder = save_folder(tmp_path / "model", tiny_llama())
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog and runs away.")
    base = ["lab", "position", "--model", str(folder), "--text", str(tmp_path / "text.txt"), "--mechanism", "elu1"]
    assert main([*base, "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["tokens"], settings["texts"]) == (58, 1)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog and runs away. " * 9)
    assert main([*base, "--tokens", "40", "--texts", "5", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["tokens"], settings["texts"]) == (40, 5)
    assert failure([*base, "--tokens", "20"], capsys) == (
        "a text must have at least 24 tokens to show a trend from position 8 on, got 20; give a longer text"
    )
    assert failure([*base, "--mechanism", "fitted"], capsys).startswith("mechanism 'fitted' needs the parameters")
    assert failure([*base, "--mechanism", "elu2"], capsys).startswith("unknown mechanism 'elu2'")


def test_bad_sizes_are_one_sentence() -> None:
    with pytest.raises(ValueInputError, match="heads must be at least 8 and dim at least 2, got 3 and 64"):
        position_lab(rng=rng(), heads=3)
    with pytest.raises(ValueInputError, match="at least one mechanism, got none"):
        position_lab(rng=rng(), mechanisms=[])
    with pytest.raises(ValueInputError, match="start must be at least 1, got 0"):
        position_in_model(tiny_llama(), IDS, rng=rng(), start=0)
    with pytest.raises(ValueInputError, match="same number of tokens, got 50 to 60; cut them to 50"):
        position_in_model(tiny_llama(), [IDS, IDS[:50]], rng=rng())
    with pytest.raises(ValueInputError, match="texts must be at least 1, got 0"):
        position_lab(rng=rng(), texts=0)
    with pytest.raises(ValueInputError, match="a trend needs at least 16 steps"):
        log_slopes(np.zeros((3, 2, 5)), np.arange(1.0, 6.0))
