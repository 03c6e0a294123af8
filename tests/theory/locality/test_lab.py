"""The locality lab: heads whose label is known, residuals against loops, verdicts, resumption, the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from softgap.attention import Visible, attend, resolve
from softgap.attention.outputs import divergence
from softgap.attention.rotary import Rotation
from softgap.cli import main
from softgap.errors import SoftgapError
from softgap.intervals import ClusterInterval
from softgap.probe.layout import AttentionLayer, LayerTensors
from softgap.theory.locality.ablation import Ablation, Arm, Assignment, TrainedArm
from softgap.theory.locality.dependence import Dependence, Label, passing, planted_heads, t_test_p
from softgap.theory.locality.lab import Locality, ModelLocality, locality_in_model, locality_lab, measured_heads
from softgap.theory.locality.masking import MaskedText
from softgap.theory.locality.residuals import ALONE, KEYS, VALUES, WINDOW, ResidualPlan, measure_residuals
from support.cli_examples import failure
from support.model_examples import save_folder, tiny_llama

IDS = [int(x) for x in np.random.default_rng(0).integers(3, 250, 160)]
TEXTS = [IDS[i : i + 40] for i in (0, 40, 80)]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def found() -> ModelLocality:
    return locality_in_model(tiny_llama(), TEXTS, rng=rng(), mechanisms=["elu1", "inline"], heads=None, queries=8)


def test_a_local_head_a_heavy_head_and_an_even_head_are_called_so() -> None:
    truth: tuple[Label, ...] = ("local", "heavy", "neither") * 6
    for seed in range(5):
        planted = planted_heads(truth, rng=rng(seed), texts=6, length=128, dim=32, width=4, least=0.14)
        assert planted.labels == truth
        heavy = planted.rise[:, :, 1]
        # The far key holds nearly all: as little mass as the local keys hold is not missed, the key itself is.
        assert heavy[:, 2].min() > 0.5 > heavy[:, 1].max()


def noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return 0.05 * rng(seed).standard_normal(shape)


def test_heads_that_depend_on_nothing_hardly_ever_get_a_label() -> None:
    heads = tuple((0, i) for i in range(100))
    wrong = 0
    for seed in range(40):
        labels = Dependence(heads, noise((6, 3, 100), seed), np.zeros((6, 3, 100)), 4, 0.0).labels
        wrong += any(label != "neither" for label in labels)
    # All heads are null, so that the false discovery rate of the two labels is the chance of any call.
    assert wrong <= 8


def test_local_asks_for_more_than_both_far_masks() -> None:
    heads = tuple((0, i) for i in range(4))
    rise = noise((8, 3, 4), 0) + np.array([[0.0, 3.0, 3.0, 3.0], [0.0, 0.0, 3.0, 0.0], [0.0, 0.0, 0.0, 4.0]])
    dependence = Dependence(heads, rise, np.zeros_like(rise), 4, 0.1)
    assert dependence.labels == ("neither", "local", "heavy", "heavy")
    np.testing.assert_allclose(dependence.excess("equal mass"), (rise[:, 0] - rise[:, 1]).mean(axis=0))
    assert Dependence(heads, rise[:1], rise[:1], 4, 0.1).labels == ("not decided",) * 4
    assert dataclasses.replace(dependence, least=5.0).labels == ("neither",) * 4


def test_a_t_test_is_one_sided_and_knows_texts_that_agree() -> None:
    p = t_test_p(np.array([[1.0, -1.0, 0.0, 2.0], [1.0, -1.0, 0.0, 4.0]]))
    np.testing.assert_allclose(p, [0.0, 1.0, 0.5, 0.102416], atol=1e-6)
    assert passing(np.array([0.001, 0.02, 0.5])).tolist() == [True, True, False]


def layer_of(time: int = 40, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> LayerTensors:
    generator = rng(3)
    q = torch.tensor(generator.standard_normal((heads, time, dim)), dtype=torch.float32) * 2
    k, v = torch.tensor(generator.standard_normal((2, kv_heads, time, dim)), dtype=torch.float32)
    output = attend("softmax", q[None], k[None], v[None]).output[0]
    return LayerTensors(0, q, k, v, output, dim**-0.5, Visible())


def test_a_residual_on_values_is_the_least_squares_fit_of_the_first_half() -> None:
    layer = layer_of()
    plan = ResidualPlan((resolve("elu1"),), 3, 8, 0.2, None)
    measured = measure_residuals(layer, plan)
    linear = attend("elu1", layer.query[None], layer.key[None], layer.value[None]).output[0].double().numpy()
    v, o = layer.value.double().numpy(), layer.output.double().numpy()
    for head in range(4):
        rows = [
            [linear[head, t], *(v[head // 2, t - i] if t >= i else np.zeros(16) for i in range(3))] for t in range(40)
        ]
        columns = np.array(rows).transpose(0, 2, 1)
        weights = np.linalg.lstsq(columns[:20].reshape(-1, 4), o[head, :20].ravel(), rcond=None)[0]
        fitted = torch.tensor(columns[20:] @ weights)
        expected = divergence(torch.tensor(o[head, 20:]), fitted).mean()
        assert measured[f"divergence/elu1/{VALUES}"][head] == pytest.approx(float(expected), abs=1e-5)
    window = attend(resolve("window").configure(w=3, sinks=0), layer.query[None], layer.key[None], layer.value[None])
    expected_window = divergence(layer.output, window.output[0])[:, 20:].double().mean(dim=1)
    np.testing.assert_allclose(measured[f"divergence/none/{WINDOW}"], expected_window.numpy(), atol=1e-6)
    assert set(measured) >= {f"divergence/elu1/{kind}" for kind in (ALONE, VALUES, WINDOW, KEYS)}


def test_a_head_whose_output_is_the_value_before_is_closed_by_values_alone() -> None:
    layer = layer_of()
    before = torch.nn.functional.pad(layer.value, (0, 0, 1, 0))[:, :40].repeat_interleave(2, dim=0)
    measured = measure_residuals(
        dataclasses.replace(layer, output=before), ResidualPlan((resolve("elu1"),), 2, 8, 0.2, None)
    )
    assert measured[f"divergence/none/{VALUES}"].max() < 1e-6
    assert measured[f"divergence/elu1/{ALONE}"].min() > 0.3


def test_a_convolution_on_keys_is_found_where_the_model_has_one() -> None:
    """Keys that hold the key before: the planted weight is recovered, turned by the rotary embedding or not."""
    rotation = Rotation.of_pairs(torch.tensor([1.0, 0.1, 0.01, 0.001] * 2), 16)
    layer = layer_of()
    for turn in (None, rotation):
        before = torch.nn.functional.pad(layer.key, (0, 0, 1, 0))[:, :40]
        before = before if turn is None else turn.turned(before, torch.ones(40, dtype=torch.long))
        mixed = attend("hedgehog", layer.query[None], (layer.key + before)[None], layer.value[None]).output[0]
        plan = ResidualPlan((resolve("hedgehog"),), 2, 8, 0.2, None if turn is None else (turn,))
        measured = measure_residuals(dataclasses.replace(layer, output=mixed), plan)
        assert measured[f"divergence/hedgehog/{KEYS}"].max() < 1e-5
        assert measured[f"divergence/hedgehog/{ALONE}"].min() > 1e-3


def test_a_model_is_measured_head_by_head(found: ModelLocality) -> None:
    assert found.widths == (1, 4)
    assert found.share.shape == (3, 2, 8)
    assert found.dependence is not None
    assert found.dependence.rise.shape == (3, 3, 8)
    assert found.dependence.heads == tuple((layer, head) for layer in range(2) for head in range(4))
    uniform = found.residual("uniform", ALONE)
    assert uniform is not None
    assert uniform.gap_closed.value == pytest.approx(0, abs=1e-12)
    closed = found.residual("elu1", VALUES)
    assert closed is not None
    baseline = found.residual("uniform", VALUES)
    assert baseline is not None
    plain = found.residual("elu1", ALONE)
    assert plain is not None
    rest = 1 - closed.divergence.mean() / plain.divergence.mean()
    assert closed.of_rest.value == pytest.approx(float(rest), abs=1e-9)
    expected = (baseline.divergence - closed.divergence).mean() / uniform.divergence.mean()
    assert closed.over_uniform.value == pytest.approx(float(expected), abs=1e-9)
    json.dumps(found.to_json())
    assert {claim.name for claim in found.claims} >= {"local mass", "one head, equal mass", "key convolution"}


def test_masked_heads_are_spread_over_layers_and_over_places_in_them() -> None:
    layers = [AttentionLayer(i, i, nn.Identity(), 9, 3, False) for i in range(30)]
    for count in (15, 30, 90):
        heads = measured_heads(layers, count)
        assert sum(map(len, heads.values())) == count
        assert len(heads) >= min(count, 15)
        assert {head for some in heads.values() for head in some} == set(range(9))
    assert measured_heads(layers, None) == {i: list(range(9)) for i in range(30)} == measured_heads(layers, 1000)
    assert measured_heads(layers, 0) == {}


def test_the_verdicts_follow_the_numbers(found: ModelLocality) -> None:
    def verdicts(**changes: Any) -> dict[str, tuple[str, str]]:
        return {c.name: (c.verdict, c.condition) for c in dataclasses.replace(found, **changes).claims}

    even = np.full_like(found.share, 0.2)
    assert verdicts(share=even + 0.1 + noise(even.shape, 0) / 10, even=even)["local mass"][0] == "holds"
    assert verdicts(share=even - 0.1, even=even)["local mass"][0] == "does not hold"
    half = even + 0.3 * (np.arange(8) < 4) + noise(even.shape, 0) / 10
    assert verdicts(share=half, even=even)["local mass"] == ("holds only when", "the head is one of 4 of 8")
    assert found.dependence is not None
    rise = np.zeros((8, 3, 8)) + np.array([1.0, 0.0, 0.0])[:, None] + noise((8, 3, 8), 1)
    local = dataclasses.replace(found.dependence, rise=rise, removed=np.zeros_like(rise))
    for value, verdict in ((1.0, "holds"), (-1.0, "does not hold"), (0.0, "not decided")):
        interval = ClusterInterval(value, value - 0.1, value + 0.1, 8, 2)
        for name, kind, other in (
            ("one head, equal mass", "equal mass", "heaviest"),
            ("one head, equal number", "heaviest", "equal mass"),
        ):
            excess = {kind: interval, other: ClusterInterval(0.0, -1.0, 1.0, 8, 2)}
            expected = (verdict, "head by head: 8 local, 0 heavy, 0 neither")
            assert verdicts(dependence=local, excess=excess)[name] == expected
    high, low = (ClusterInterval(x, x - 0.1, x + 0.1, 8, 4) for x in (0.8, 0.2))
    for interval, verdict in ((high, "holds"), (low, "does not hold")):
        residuals = tuple(dataclasses.replace(r, of_rest=interval) for r in found.residuals)
        assert verdicts(residuals=residuals)["local residual closes the gap"][0] == verdict
    nothing = tuple(
        dataclasses.replace(r, over_uniform=ClusterInterval(0.0, -0.01, 0.01, 8, 4)) for r in found.residuals
    )
    assert verdicts(residuals=nothing)["linear part beside a residual"][0] == "does not hold"
    confused = {"elu1": high, "inline": high}
    assert verdicts(confused=confused)["confusion of linear attention"][0] == "holds"
    assert verdicts(confused=confused)["confusion of InLine attention"][0] == "does not hold"
    for interval, verdict in ((high, "holds"), (ClusterInterval(0.0, -0.01, 0.01, 8, 4), "does not hold")):
        helped = tuple(dataclasses.replace(r, of_rest=interval) for r in found.residuals)
        assert verdicts(residuals=helped)["key convolution"][0] == verdict
    some = tuple(dataclasses.replace(r, of_rest=high if r.mechanism == "elu1" else low) for r in found.residuals)
    some = tuple(
        dataclasses.replace(r, of_rest=ClusterInterval(0.0, -1.0, 0.01, 8, 4)) if r.mechanism == "inline" else r
        for r in some
    )
    assert verdicts(residuals=some)["key convolution"] == ("holds only when", "it is elu1")
    together = {kind: np.zeros((3, 2, 2)) for kind in found.together}
    together["local"] = together["local"] + 1 + noise((3, 2, 2), 0) / 10
    assert verdicts(together=together)["all heads at once"][0] == "holds"


def trained(scores: dict[Arm, float], task: str = "mixed") -> Ablation:
    cells = [TrainedArm(arm, seed, s + seed / 1000, s, 0.0) for arm, s in scores.items() for seed in range(3)]
    return Ablation(tuple(cells), Assignment(task))


def test_verdicts_on_trained_models() -> None:
    def verdicts(gain: float, plain_gain: float, injective: float) -> dict[str, tuple[str, str]]:
        scores = {}
        for kernel in ("softmax", "relu", "relu_affine", "leaky_relu", "identity"):
            for is_injective in (False, True) if kernel != "softmax" else (False,):
                for window in (8, 0):
                    for residual in ("none", "values"):
                        more = (gain if is_injective else plain_gain) * (residual == "values")
                        scores[Arm(kernel, is_injective, window, residual)] = 0.5 + more + injective * is_injective
        base = locality_lab(rng=rng(), heads=1, length=64, dim=16, texts=3)
        lab = dataclasses.replace(base, trained=(trained(scores),))
        return {claim.name: (claim.verdict, claim.condition) for claim in lab.claims}

    both = verdicts(0.2, 0.2, 0.1)
    assert both["trained local residual"][0] == "holds"
    assert both["trained injectivity"][0] == "holds"
    assert both["trained window"][0] == "does not hold"
    assert both["trained kernel"][0] == "holds"
    assert verdicts(0.2, 0.0, -0.1)["trained local residual"] == ("holds only when", "the weights are injective")
    assert verdicts(0.0, 0.0, -0.1)["trained injectivity"][0] == "does not hold"
    binding = {Arm("relu", False, 0, r): s for r, s in (("none", 0.3), ("values", 0.5), ("keys", 0.9))}
    base = locality_lab(rng=rng(), heads=1, length=64, dim=16, texts=3)
    (_, claim) = dataclasses.replace(base, trained=(trained(binding, "binding"),)).claims
    assert (claim.name, claim.verdict) == ("trained key convolution", "holds")
    assert claim.numbers["all"] == pytest.approx(0.6)
    assert isinstance(base, Locality)


def test_an_interrupted_measurement_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    settings: dict[str, Any] = {"mechanisms": ["elu1"], "heads": 3, "queries": 8}
    whole = locality_in_model(model, TEXTS[:2], rng=rng(), **settings)
    original, calls = MaskedText.hide_from_heads, []

    def interrupted(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(MaskedText, "hide_from_heads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        locality_in_model(model, TEXTS[:2], rng=rng(), folder=tmp_path, **settings)
    resumed = locality_in_model(model, TEXTS[:2], rng=rng(), folder=tmp_path, **settings)
    assert json.dumps(resumed.to_json()) == json.dumps(whole.to_json())
    assert len(calls) == 3 + 2  # two layers of two texts, of which two were finished
    locality_in_model(model, TEXTS[:2], rng=rng(), folder=tmp_path, **{**settings, "mechanisms": ["relu"]})
    assert len(calls) == 5  # masks do not depend on the mechanisms


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mechanisms": ["top_k"]}, "a local residual is added to linear attention, and mechanism 'top_k' is none; .*"),
        ({"mechanisms": []}, "a locality lab needs at least one mechanism, got none; name one"),
        ({"heads": -1}, "heads must be 0 or more, got -1; leave it out for all"),
        (
            {"widths": [12]},
            "a text must have at least 16 tokens and 4 for each of the 12 recent keys, .*, got 40 tokens",
        ),
        ({"width": 0}, ".* and widths must be at least 1, got 40 tokens and widths 0, 1, 4; give a longer text"),
        ({"texts": [IDS[:40], IDS[:50]]}, "texts must have the same number of tokens, got 40 to 50; cut them to 40"),
        ({"texts": IDS[:12]}, "a text must have at least 16 tokens and 4 for each of the 4 recent keys, .*, got 12"),
    ],
)
def test_bad_input_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SoftgapError, match=sentence):
        locality_in_model(tiny_llama(), **{"texts": TEXTS, "rng": rng(), **options})


def test_one_text_decides_nothing_about_heads() -> None:
    lab = locality_in_model(tiny_llama(), TEXTS[:1], rng=rng(), mechanisms=["elu1"], heads=2, queries=8)
    verdicts = {claim.name: claim.verdict for claim in lab.claims}
    for name in ("local mass", "all heads at once", "one head, equal mass"):
        assert verdicts[name] == "not decided"
    alone = locality_in_model(tiny_llama(), TEXTS[:1], rng=rng(), mechanisms=["elu1"], heads=0, queries=8)
    assert alone.dependence is None
    assert "one head, equal mass" not in {claim.name for claim in alone.claims}


def test_the_command_prints_verdicts_saves_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["lab", "locality", "--full", "--heads", "2", "--tokens", "64", "--texts", "3"]
    train = ["--train", "--task", "mixed", "--steps", "1", "--seeds", "1", "--out", str(tmp_path / "lab")]
    assert main([*small, *train]) == 0
    shown = capsys.readouterr().out
    for part in ("local heads from heavy", "holds", "one seed has no interval", "leaky_relu, injective", "saved"):
        assert part in shown
    assert (tmp_path / "lab" / "figure.svg").stat().st_size > 5000
    document = json.loads((tmp_path / "lab" / "result.json").read_text())
    assert len(list((tmp_path / "lab" / "cells").iterdir())) == 36
    assert main([*small, *train, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    folder = save_folder(tmp_path / "model", tiny_llama())
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog and runs away. " * 4)
    base = ["lab", "locality", "--full", "--model", str(folder), "--mechanism", "elu1"]
    base += ["--text", str(tmp_path / "text.txt")]
    given = [*base, "--tokens", "48", "--heads", "2", "--out", str(tmp_path / "inside")]
    assert main(given) == 0
    shown = capsys.readouterr().out
    for part in ("off the model's", "Share of the gap", "elu1", "saved"):
        assert part in shown
    document = json.loads((tmp_path / "inside" / "result.json").read_text())
    settings = document["settings"]
    assert (settings["tokens"], settings["texts"], settings["masked_heads"]) == (48, 4, 2)
    assert len(document["one_head"]["heads"]) == 2
    assert (tmp_path / "inside" / "figure.svg").stat().st_size > 5000
    assert main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "--tokens 32 --width 4",
            "planted heads need heads from 1, dim from 8, texts from 2 and 16 tokens for each of the recent keys, got "
            "12 heads of dimension 64, 8 texts of 32 tokens and 4 recent keys; use more",
        ),
        ("--train --task listops --heads 1", "unknown task 'listops'; choose one of: binding, mixed"),
        ("--model nowhere/at-all --mechanism elu2", "unknown mechanism 'elu2'; did you mean 'relu'?"),
    ],
)
def test_the_command_refuses(arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(["lab", "locality", *arguments.split()], capsys).startswith(sentence)
