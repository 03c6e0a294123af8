"""The injectivity lab: verdicts that follow the numbers, heads of a model against plain loops, and the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from softgap.attention import attend, resolve
from softgap.attention.outputs import divergence
from softgap.calibration import Recipe, calibrate
from softgap.cli import main
from softgap.errors import ValueInputError
from softgap.intervals import ClusterInterval, cluster_interval, joint_level, rank_correlation, weighted_mean
from softgap.probe.layout import LayerTensors, visit_layers
from softgap.theory.injectivity.confusion import confusion_rate, first_injective
from softgap.theory.injectivity.inversion import key_condition
from softgap.theory.injectivity.model import ModelInjectivity, injectivity_in_model
from softgap.theory.injectivity.synthetic import Injectivity, injectivity_lab
from softgap.theory.lab import Claim
from support.cli_examples import failure, loads_once
from support.model_examples import byte_tokenizer, save_folder, tiny_llama

IDS = [int(x) for x in np.random.default_rng(0).integers(3, 250, 60)]


@pytest.fixture(scope="module")
def synthetic() -> Injectivity:
    names = ["softmax", "elu1", "relu2_scores", "hedgehog"]
    return injectivity_lab(rng=np.random.default_rng(0), dim=4, keys=20, draws=4, starts=3, queries=1, mechanisms=names)


@pytest.fixture(scope="module")
def in_model() -> ModelInjectivity:
    return injectivity_in_model(tiny_llama(), IDS, rng=np.random.default_rng(0), mechanisms=["relu"], queries=12)


def verdicts(claims: tuple[Claim, ...]) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in claims}


def test_the_verdicts_on_synthetic_keys(synthetic: Injectivity) -> None:
    assert verdicts(synthetic.claims) == {
        "softmax injective": "holds only when",
        "translations": "does not hold",
        "inverter": "holds",
        "collision of relu": "holds",
        "collision of elu1": "holds",
        "collision of relu_affine": "holds",
        "linear not injective": "holds",
        "more units than dimensions": "not decided",
        "inline injective": "holds only when",
        "outside the proposition": "holds only when",
    }
    outside = next(claim for claim in synthetic.claims if claim.name == "outside the proposition")
    assert outside.condition == "the mechanism is one of: relu2_scores; none was found for hedgehog, softmax"
    json.dumps(synthetic.to_json())


def test_verdicts_follow_the_numbers(synthetic: Injectivity) -> None:
    spoiled: list[tuple[str, Any, str]] = [
        ("prefixes", tuple(dataclasses.replace(p, error=0.1) for p in synthetic.prefixes), "softmax injective"),
        ("exact", tuple(dataclasses.replace(c, distance=1e-9) for c in synthetic.exact), "collision of elu1"),
        ("inline", dataclasses.replace(synthetic.inline, error=1.0), "inline injective"),
    ]
    for field, value, claim in spoiled:
        changed = dataclasses.replace(synthetic, **{field: value})
        assert verdicts(changed.claims)[claim] == "does not hold"
    lost = tuple(dataclasses.replace(search, collision=None) for search in synthetic.searches)
    changed = dataclasses.replace(synthetic, searches=lost)
    assert verdicts(changed.claims)["linear not injective"] == "not decided"
    assert verdicts(changed.claims)["outside the proposition"] == "does not hold"


def test_confusion_is_counted_as_a_loop_would() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, weights = torch.randn(2, 9, 4, generator=generator), torch.rand(2, 9, 7, generator=generator)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    weights[1] = 1 / 7
    pairs = [(i, j) for i in range(9) for j in range(i)]
    q, w = queries[0].double(), weights[0].double()
    apart = [float((q[i] - q[j]).norm()) for i, j in pairs]
    variation = [float((w[i] - w[j]).abs().sum()) / 2 for i, j in pairs]
    far = [a >= np.median(apart) for a in apart]
    close = [v < 0.8 * np.mean(variation) for v in variation]
    expected = sum(f and c for f, c in zip(far, close, strict=True)) / sum(far)
    rate = confusion_rate(queries, weights, near=0.8)
    assert 0 < expected < 1
    assert rate[0] == pytest.approx(expected)
    assert np.isnan(rate[1])


def test_confusion_does_not_depend_on_how_far_a_mechanism_is_from_even() -> None:
    generator = torch.Generator().manual_seed(1)
    queries, weights = torch.randn(1, 20, 4, generator=generator), torch.rand(1, 20, 30, generator=generator)
    weights = (weights / weights.sum(dim=-1, keepdim=True)).double()
    nearly_even = 0.99 / 30 + 0.01 * weights
    assert confusion_rate(queries, nearly_even, near=0.9) == pytest.approx(confusion_rate(queries, weights, near=0.9))


def test_the_first_injective_length_is_found_by_bisection() -> None:
    keys = np.random.default_rng(0).standard_normal((40, 5))
    assert first_injective(keys) == 6
    keys[:17, 4] = 2.0
    lengths = [n for n in range(2, 41) if key_condition(keys[:n], eps=1e-7).injective]
    assert first_injective(keys) == lengths[0] == 18
    keys[:, 4] = 2.0
    assert first_injective(keys) == -1


def test_heads_of_a_model_are_measured_as_they_are(in_model: ModelInjectivity) -> None:
    layers = visit_layers(tiny_llama(), IDS, lambda layer: layer)
    layer: LayerTensors = layers[1]
    dim = layer.query.shape[-1]
    assert in_model.dim == dim
    assert in_model.lengths[-1] == len(IDS)
    keys = layer.key[1].double().numpy()
    at = in_model.lengths.index(16)
    assert in_model.margin[1, 3, at] == pytest.approx(key_condition(keys[:16]).log_margin)
    assert (in_model.first == dim + 1).all()
    assert (in_model.margin[..., [n <= dim for n in in_model.lengths]] == 0).all()
    output = attend("relu", layer.query[None], layer.key[None], layer.value[None], scale=layer.scale).output[0]
    start = in_model.settings["start"]
    expected = divergence(layer.output, output)[:, start:].mean(dim=-1)
    np.testing.assert_allclose(in_model.divergence[in_model.of("relu"), 1], expected.numpy(), atol=1e-6)
    half = len(IDS) // 2
    assert in_model.lengths[in_model.common] == half
    a = torch.softmax(
        layer.scale * layer.query[:, half:].double() @ layer.key[:, :half].double().repeat_interleave(2, 0).mT, -1
    )
    asked = np.unique(np.linspace(half, len(IDS) - 1, 12).astype(int))
    rate = confusion_rate(layer.query[:, asked], a[:, asked - half], near=0.2)
    np.testing.assert_allclose(in_model.rate[in_model.of("softmax"), 1], rate)
    assert np.isnan(in_model.rate[in_model.of("uniform")]).all()


def test_parameters_of_layers_and_heads_are_those_of_the_head() -> None:
    def drawn(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))

    mine = resolve("fitted").with_parameters(
        query_weight=drawn(4, 6, 8, seed=1),
        query_bias=drawn(4, 6, seed=2),
        key_weight=drawn(2, 6, 8, seed=3),
        key_bias=drawn(2, 6, seed=4),
        rate=0.1 * drawn(2, 6, seed=5).abs(),
    )
    lab = injectivity_in_model(tiny_llama(), IDS, rng=np.random.default_rng(0), mechanisms=[mine, "zero"], queries=12)
    layer = visit_layers(tiny_llama(), IDS, lambda seen: seen)[1]
    half = len(IDS) // 2
    asked = np.unique(np.linspace(half, len(IDS) - 1, 12).astype(int))
    queries, ages = layer.query[:, asked].double(), torch.arange(half - 1, -1, -1).double()
    rows = []
    for head in range(4):
        at = {name: head if name.startswith("query") else head // 2 for name in mine.parameters}
        given = {name: tensor[1, at[name]].double() for name, tensor in mine.parameters.items()}
        q = torch.exp(queries[head] @ given["query_weight"].T + given["query_bias"])
        k = torch.exp(layer.key[head // 2, :half].double() @ given["key_weight"].T + given["key_bias"])
        weights = q @ (k * torch.exp(-ages[:, None] * given["rate"])).T
        rows.append(weights / weights.sum(dim=-1, keepdim=True))
    expected = confusion_rate(layer.query[:, asked], torch.stack(rows), near=0.2)
    np.testing.assert_allclose(lab.rate[lab.of("fitted"), 1], expected)
    assert np.isnan(lab.rate[lab.of("zero")]).all()
    np.testing.assert_allclose(lab.divergence[lab.of("zero")], 1)
    calibrated = next(claim for claim in lab.claims if claim.name == "calibrated divergence")
    assert calibrated.numbers["heads"] == 8
    assert calibrated.condition == ""


def test_a_calibrated_model_brings_its_fitted_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTGAP_CALIBRATIONS", str(tmp_path))
    model = tiny_llama(max_position_embeddings=512)
    text = " ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(90))
    found = calibrate(model, byte_tokenizer(), [text], recipe=Recipe(features=4, steps=3), positions=128)
    lab = injectivity_in_model(model, IDS, rng=np.random.default_rng(0), queries=12)
    assert "fitted" in lab.mechanisms
    assert {c.mechanism for c in lab.correlations} == {"elu1", "uniform", "fitted"}
    layer = visit_layers(model, IDS, lambda seen: seen)[1]
    q, k, v = (x[None] for x in (layer.query, layer.key, layer.value))
    linear = attend(found.mechanism().for_layers([1]), q, k, v, scale=layer.scale).output[0]
    start = lab.settings["start"]
    mean = divergence(layer.output, linear)[:, start:].mean(dim=-1)
    assert lab.divergence[lab.mechanisms.index("fitted"), 1] == pytest.approx(mean.numpy(), abs=1e-5)


def test_the_verdicts_in_a_model_follow_the_numbers(in_model: ModelInjectivity) -> None:
    found = verdicts(in_model.claims)
    assert found["rank condition"] == "holds only when"
    assert found["calibrated divergence"] == "not decided"
    assert in_model.collision.exact
    json.dumps(in_model.to_json())
    for low, high, verdict in ((0.1, 0.2, "does not hold"), (-0.2, -0.1, "holds"), (-0.1, 0.1, "not decided")):
        changed = dataclasses.replace(in_model, nearer=ClusterInterval(0.1, low, high, 8, 4))
        assert verdicts(changed.claims)["injectivity matters"] == verdict
    turned = tuple(dataclasses.replace(c, plain=ClusterInterval(-0.5, -0.6, -0.4, 8, 4)) for c in in_model.correlations)
    confusion = np.full_like(in_model.confusion, 0.1)
    found = verdicts(dataclasses.replace(in_model, correlations=turned, confusion=confusion).claims)
    assert (found["fine distinctions"], found["lost distinctions"]) == ("holds", "does not hold")
    confusion[in_model.of("elu1")] = 0
    found = verdicts(dataclasses.replace(in_model, correlations=turned, confusion=confusion).claims)
    assert found["lost distinctions"] == "not decided"
    linear = [i for i, name in enumerate(in_model.mechanisms) if in_model.linear[i]]
    assert {in_model.mechanisms[i] for i in linear} == {"elu1", "taylor2", "relu"}
    for more, verdict in (((), "does not hold"), (linear[:1], "holds only when"), (linear, "holds")):
        confused = tuple(
            ClusterInterval(0.1, 0.05, 0.2, 8, 4) if i in more else ClusterInterval(0.1, -0.05, 0.2, 8, 4)
            for i in range(len(in_model.mechanisms))
        )
        changed = dataclasses.replace(in_model, confused=confused)
        assert verdicts(changed.claims)["semantic confusion"] == verdict
    some = in_model.first.copy()
    some[0, 0] = -1
    assert verdicts(dataclasses.replace(in_model, first=some).claims)["rank condition"] == "not decided"


def test_rank_correlations_cover_and_condition() -> None:
    generator = np.random.default_rng(0)
    clusters = np.repeat(np.arange(40), 3)
    common = generator.standard_normal(120)
    x, y = common + generator.standard_normal(120), common + generator.standard_normal(120)
    plain = rank_correlation(x, y, clusters, rng=generator)
    partial = rank_correlation(x, y, clusters, rng=generator, covariate=common)
    assert plain.sign == 1
    assert partial.sign == 0
    assert plain.low < plain.value < plain.high
    assert (plain.heads, plain.clusters) == (120, 40)
    # Copies of a head within its cluster add heads but no information.
    doubled = rank_correlation(np.repeat(x, 4), np.repeat(y, 4), np.repeat(clusters, 4), rng=generator)
    assert doubled.high - doubled.low == pytest.approx(plain.high - plain.low, rel=0.25)
    assert np.isnan(rank_correlation(x, np.ones(120), clusters, rng=generator).value)
    assert np.isnan(rank_correlation(x[:5], y[:5], clusters[:5], rng=generator).value)
    assert rank_correlation(np.exp(x), y, clusters, rng=generator).value == pytest.approx(plain.value)


def test_intervals_widen_with_their_number_as_bonferroni_asks() -> None:
    values = np.random.default_rng(0).standard_normal((1, 400))
    clusters = np.arange(400)
    widths = []
    for intervals in (1, 46):
        level = joint_level(intervals)
        found = cluster_interval(values, clusters, weighted_mean, rng=np.random.default_rng(1), level=level)
        assert found.level == pytest.approx(1 - 0.05 / intervals)
        widths.append(found.high - found.low)
    # A mean of many is normal: the ratio of widths is that of the quantiles, 3.266 and 1.960.
    assert norm.ppf(1 - 0.025 / 46) == pytest.approx(3.266, abs=1e-3)
    assert widths[1] / widths[0] == pytest.approx(3.266 / 1.960, rel=0.08)


def test_every_interval_of_a_run_stands_at_the_joint_level(in_model: ModelInjectivity) -> None:
    document = in_model.to_json()
    shown = [c[kind] for c in document["correlations"] for kind in ("plain", "at_equal_focus")]
    rated = [x for name, x in document["confused"].items() if name != "softmax" and np.isfinite(x["value"])]
    intervals = len(shown) + len(rated) + 1
    assert in_model.settings["intervals"] == intervals
    assert intervals > 20
    for estimate in (*shown, *rated, document["nearer"]):
        assert estimate["level"] == in_model.settings["level"] == pytest.approx(1 - 0.05 / intervals)


@pytest.mark.slow
def test_unrelated_measures_are_hardly_ever_decided() -> None:
    """Twenty correlations of noise in each of 60 runs: some interval excludes 0 in at most 5 % of the runs."""
    level, clusters = joint_level(20), np.repeat(np.arange(40), 3)
    runs = []
    for run in range(60):
        generator = np.random.default_rng(run)
        table = generator.standard_normal((21, 120))
        pairs = [rank_correlation(table[0], y, clusters, rng=generator, level=level, replicates=99) for y in table[1:]]
        runs.append(any(pair.sign for pair in pairs))
    # 3 expected of 60; 9 are three standard errors above.
    assert sum(runs) <= 9


def test_the_command_prints_verdicts_and_saves_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lab"
    small = [
        "--dim",
        "3",
        "--keys",
        "8",
        "--queries",
        "1",
        "--starts",
        "1",
        "--mechanism",
        "relu",
        "--mechanism",
        "inline",
    ]
    assert main(["lab", "injectivity", *small, "--full", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    for part in ("holds only when", "does not hold", "inline *", "none found", "saved"):
        assert part in shown
    document = json.loads((out / "result.json").read_text())
    assert [search["mechanism"] for search in document["searches"]] == ["relu", "inline"]
    assert (out / "figure.svg").read_text().count("<path") > 20
    assert main(["lab", "injectivity", *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["claims"] == document["claims"]


def test_the_command_reads_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads_once(monkeypatch)
    folder = save_folder(tmp_path / "model", tiny_llama())
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog and runs away.")
    base = ["lab", "injectivity", "--model", str(folder), "--text", str(tmp_path / "text.txt"), "--mechanism", "relu"]
    assert main([*base, "--queries", "10", "--out", str(tmp_path / "lab"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["tokens"] == 58
    assert document == json.loads((tmp_path / "lab" / "result.json").read_text())
    assert "layer" in (tmp_path / "lab" / "figure.svg").read_text()
    assert failure([*base, "--tokens", "10"], capsys) == (
        "a text must have at least 20 tokens for heads of dimension 8, got 10; give a longer text"
    )
    assert failure([*base, "--queries", "3"], capsys).startswith(
        "queries must be at least 8 for a rate over pairs, got 3"
    )
    assert failure([*base, "--near", "2"], capsys).startswith("near must be between 0 and 1, got 2.0")
    assert failure([*base, "--mechanism", "fitted"], capsys).startswith("mechanism 'fitted' needs the parameters")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--keys", "9"], "dim must be at least 2 and keys at least dim + 2, got dim 8 and keys 9; use more keys"),
        (["--mechanism", "elu2"], "unknown mechanism 'elu2'"),
        (["--mechanism", "fitted"], "mechanism 'fitted' needs the parameters"),
        (["--mechanism", "zero"], "mechanism 'zero' has no weights"),
        (["--starts", "0"], "queries and starts must be at least 1, got 2 and 0"),
        (["--model", "x", "--text", "nowhere.txt"], "cannot read 'nowhere.txt'"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(["lab", "injectivity", *arguments], capsys).startswith(sentence)


def test_a_text_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueInputError, match="the model's context is 64 tokens, got 70 tokens"):
        injectivity_in_model(tiny_llama(), [5] * 70, rng=np.random.default_rng(0))
