"""The position lab: slopes, terms that sum to a trend, what the normaliser cannot do, verdicts, and the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cli_examples import failure, loads_once
from model_examples import save_folder, tiny_llama
from softgap.attention import Visible, attend, attention_weights, resolve
from softgap.attention.divergence import divergence
from softgap.cli import main
from softgap.errors import ValueInputError
from softgap.probe.tensors import LayerTensors
from softgap.theory.intervals import Estimate
from softgap.theory.position.drift import TERMS, layer_series, normaliser_effect, predicted, synthetic_layer
from softgap.theory.position.lab import Position, position_in_model, position_lab
from softgap.theory.position.trends import log_slopes

IDS = [int(x) for x in np.random.default_rng(0).integers(3, 250, 60)]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def layer() -> LayerTensors:
    return synthetic_layer(heads=12, length=160, dim=32, rng=rng(), gains=(0.3, 2.0, 4.0), value_mean=0.2)


@pytest.fixture(scope="module")
def synthetic() -> Position:
    return position_lab(rng=rng(), heads=15, length=200, dim=32, mechanisms=["elu1", "taylor2"])


def test_a_slope_is_per_doubling_and_its_interval_covers_it() -> None:
    positions = np.arange(9.0, 209.0)
    noise = 0.02 * rng().standard_normal((200, 200))
    found = log_slopes(0.03 * np.log2(positions) + noise, positions, rng=rng(1))
    covered = (found.low <= 0.03) & (found.high >= 0.03)
    assert found.value.mean() == pytest.approx(0.03, abs=5e-4)
    assert 0.88 < covered.mean() <= 1
    assert log_slopes(noise, positions, rng=rng(1)).trending.mean() < 0.12
    exact = log_slopes(0.5 * np.log2(positions)[None], positions, rng=rng())
    assert (exact.low[0], exact.high[0]) == pytest.approx((0.5, 0.5))


def test_neighbours_that_are_alike_widen_the_interval() -> None:
    positions = np.arange(9.0, 409.0)
    steps = rng().standard_normal((100, 400))
    alike = np.zeros_like(steps)
    for t in range(1, 400):
        alike[:, t] = 0.7 * alike[:, t - 1] + steps[:, t]
    found = log_slopes(alike, positions, rng=rng(1))
    truth = found.value.std()
    width = (found.high - found.low).mean() / (2 * 1.96)
    assert width == pytest.approx(truth, rel=0.35)


def test_slopes_of_terms_sum_to_the_slope_in_every_draw() -> None:
    terms = rng().standard_normal((3, 5, 64))
    positions = np.arange(1.0, 65.0)
    found = log_slopes(np.concatenate([terms, terms.sum(axis=0)[None]]), positions, rng=rng())
    np.testing.assert_allclose(found.value[:3].sum(axis=0), found.value[3], atol=1e-12)
    np.testing.assert_allclose(found.drawn[:3].sum(axis=0), found.drawn[3], atol=1e-12)


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
    assert by_name["minus uniform"].left < 0.3
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
    mine = Estimate(0.9, 0.8, 1.0, 10, 10)
    assert verdicts(shares=(*shares[:3], mine))["running mean"] == "does not hold"
    little = Estimate(-0.1, -0.15, 0.05, 10, 10)
    assert verdicts(shares=(*shares[:3], little))["running mean"] == "holds"
    none = Estimate(float("nan"), float("nan"), float("nan"), 0, 0)
    assert verdicts(shares=(none,) * 4, corrections=())["concentration"] == "not decided"
    low, high = Estimate(0.1, 0.0, 0.2, 10, 10), Estimate(0.8, 0.7, 0.9, 10, 10)
    assert verdicts(shares=(low, high, low, low))["concentration"] == "holds"
    assert verdicts(shares=(high, low, low, low))["concentration"] == "does not hold"
    left = tuple(dataclasses.replace(c, left=0.9) for c in synthetic.trends[0].corrections)
    assert verdicts(corrections=left)["correction"] == "does not hold"


def test_a_model_is_read_head_by_head() -> None:
    model = tiny_llama()
    lab = position_in_model(model, IDS, rng=rng(), mechanisms=["relu", "uniform"])
    assert lab.trends[0].slopes.value.shape == (2, 4)
    np.testing.assert_allclose(lab.profiles["uniform"], lab.profiles["uniform"])
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
    for part in ("growing normaliser", "does not hold", "random queries", "8", "saved"):
        assert part in shown
    assert (tmp_path / "lab" / "figure.svg").stat().st_size > 5000
    document = json.loads((tmp_path / "lab" / "result.json").read_text())
    assert main([*small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    folder = save_folder(tmp_path / "model", tiny_llama())
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog and runs away.")
    base = ["lab", "position", "--model", str(folder), "--text", str(tmp_path / "text.txt"), "--mechanism", "elu1"]
    assert main([*base, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["tokens"] == 58
    assert failure([*base, "--tokens", "20"], capsys) == (
        "a text must hold at least 24 tokens to show a trend from position 8 on, got 20; give a longer text"
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
    with pytest.raises(ValueInputError, match="a trend needs at least 16 steps"):
        log_slopes(np.zeros((2, 5)), np.arange(1.0, 6.0), rng=rng())
