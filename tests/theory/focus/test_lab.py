"""The focus lab as a whole: verdicts that follow their numbers, a tiny model, the command, pictures."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from softgap.attention import attend, attention_weights, mechanisms, resolve
from softgap.cli import main
from softgap.errors import UnsupportedError, ValueInputError
from softgap.probe.layout import LayerTensors, visit_layers
from softgap.report.focus_figure import draw_focus, draw_focus_in_model
from softgap.theory.focus import focus_lab, synthetic_claims
from softgap.theory.focus.model import ModelFocus, focus_in_model
from softgap.theory.focus.synthetic import FocusFindings, Ranks
from support.cli_examples import failure
from support.model_examples import save_folder, tiny_llama

LENGTH = 96
NAMES = ["relu", "decay", "identity"]


@pytest.fixture(scope="module")
def found() -> FocusFindings:
    return focus_lab(n=128, d=16, draws=40, rng=np.random.default_rng(0))


@pytest.fixture(scope="module")
def lab() -> ModelFocus:
    model = tiny_llama(max_position_embeddings=128)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(12)
    ids = torch.randint(3, 250, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    return focus_in_model(model, ids, rng=np.random.default_rng(0), mechanisms=NAMES)


def test_the_sources_are_right_and_wrong_where_they_are(found: FocusFindings) -> None:
    expected = {
        "closed forms": "holds",
        "exp focuses": "holds only when",
        "relu2 and bias": "holds",
        "identity bound": "holds",
        "relu at zero bias": "holds",
        "general formula": "holds",
        "norm ratio": "does not hold",
        "decay focuses": "holds",
        "rank bottleneck": "holds only when",
        "separation is focus": "holds",
    }
    assert {claim.name: claim.verdict for claim in found.claims if claim.name in expected} == expected
    assert len(found.claims) == 11


def test_verdicts_follow_the_numbers(found: FocusFindings) -> None:
    wrong = dataclasses.replace(found.checks[0], closed=found.checks[0].closed * (1 + 1e-8))
    assert synthetic_claims.closed_forms([wrong, *found.checks[1:]]).verdict == "does not hold"
    off = dataclasses.replace(found.checks[0], simulated=found.checks[0].expected + 5 * found.checks[0].error)
    assert synthetic_claims.closed_forms([off, *found.checks[1:]]).verdict == "does not hold"
    near = [dataclasses.replace(row, simulated=row.limit) for row in found.finite]
    assert synthetic_claims.exp_focuses(near).verdict == "holds"
    far = [dataclasses.replace(row, simulated=2 * row.limit) for row in found.finite]
    assert synthetic_claims.exp_focuses(far).verdict == "does not hold"
    assert synthetic_claims.identity_bound(found.curves["identity"] - 0.01).verdict == "does not hold"
    assert synthetic_claims.general_formula(1e-3).verdict == "does not hold"
    assert synthetic_claims.norm_ratio(0.1, 3.0, (0.1, 1.0)).verdict == "not decided"
    for last, verdict in ((0.6, "does not hold"), (0.4, "holds")):
        ends = {"favor": 1024, "polynomial": 16, "shifted": 16}
        family_points = [
            dataclasses.replace(point, weight_error=last if point.setting == ends.get(point.family) else 1.0)
            for point in found.feature_families
        ]
        assert synthetic_claims.features_close_gap(family_points).verdict == verdict
    assert synthetic_claims.relu2_needs_negative_bias((-1.0, 0.0), found.gammas, np.ones((2, 121))).verdict == (
        "does not hold"
    )
    low = [
        Ranks(mechanism, mask, 64, 8, 0.5, whole, whole // 2, 4)
        for mechanism, whole in (("softmax", 64), ("elu1", 8))
        for mask in ("causal", "bidirectional")
    ]
    assert synthetic_claims.rank_argument(low).verdict == "holds"


def test_every_mechanism_is_ranked_under_both_masks(found: FocusFindings) -> None:
    rows = {(row.mechanism, row.mask): row for row in found.ranks}
    weighted = {one.label for one in mechanisms().values() if not one.missing and one.kind != "constant"}
    assert {name for name, _ in rows} == weighted
    for mask in ("causal", "bidirectional"):
        assert rows["uniform", mask].sparsity == pytest.approx(1)
        assert rows["relu", mask].block <= found.settings["d"] < rows["softmax", mask].block
    assert rows["uniform", "bidirectional"].whole == 1
    assert rows["self_token", "causal"].whole == rows["self_token", "causal"].n
    assert rows["self_token", "causal"].block == rows["self_token", "causal"].energy == 0
    few = focus_lab(n=64, d=4, draws=10, mechanisms=["decay"], rng=np.random.default_rng(0))
    assert few.settings["mechanisms"] == ["decay", "softmax", "elu1"]


def test_the_lab_repeats_itself(found: FocusFindings) -> None:
    again = focus_lab(n=128, d=16, draws=40, rng=np.random.default_rng(0))
    assert again.to_json() == found.to_json()
    json.dumps(found.to_json()["claims"], allow_nan=False)


def test_rows_of_the_model_are_those_of_its_own_weights(lab: ModelFocus) -> None:
    model = tiny_llama(max_position_embeddings=128)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(12)
    ids = torch.randint(3, 250, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    layer = visit_layers(model, ids, lambda seen: seen)[1]
    first = lab.settings["from_position"]
    assert first == 24
    weights = attention_weights("softmax", layer.query[None], layer.key[None], scale=layer.scale)[0, 2, 50, :51]
    p = weights.double().numpy()
    measured = [lab.predictions[i].measured[1, 2, 50 - first] for i in (2, 4, 5)]
    expected = [1 / math.sqrt(51 * np.square(p).sum()), -(p * np.log(p)).sum(), p.max()]
    assert measured == pytest.approx(expected, rel=1e-4)
    rest = p[1:] / p[1:].sum()
    assert lab.predictions[3].measured[1, 2, 50 - first] == pytest.approx(
        1 / math.sqrt(50 * np.square(rest).sum()), rel=1e-4
    )
    scores = (layer.scale * layer.query[2, 50].double() @ layer.key[1, :51].double().T).numpy()
    gamma = scores.std()
    assert lab.predictions[1].values[1, 2, 50 - first] == pytest.approx(math.exp(-(gamma**2) / 2), rel=1e-6)
    _check_outputs(lab, layer, first)


def _check_outputs(lab: ModelFocus, layer: LayerTensors, first: int) -> None:
    tensors = (layer.query[None], layer.key[None], layer.value[None])
    softmax, elu1 = (attend(name, *tensors, scale=layer.scale).output[0] for name in ("softmax", "elu1"))
    expected = 1 - torch.cosine_similarity(softmax, elu1, dim=-1)[:, first:].mean(dim=-1)
    np.testing.assert_allclose(lab.of("elu1").from_softmax[1], expected.numpy(), atol=1e-5)


def test_what_must_hold_in_any_model_holds(lab: ModelFocus) -> None:
    verdicts = {claim.name: claim.verdict for claim in lab.claims}
    assert verdicts["general formula"] == "holds"
    assert verdicts["floor of weights"] == "holds"
    assert verdicts["scale q"] == verdicts["spread keys"] == "holds"
    assert [found.name for found in lab.mechanisms] == ["softmax", *NAMES, "elu1", "relu2_scores", "uniform"]
    np.testing.assert_allclose(lab.of("uniform").sparsity, 1, atol=1e-5)
    np.testing.assert_allclose(lab.of("softmax").from_softmax, 0, atol=1e-5)
    np.testing.assert_allclose(lab.of("elu1").general, lab.of("elu1").sparsity, atol=1e-5)
    assert np.isnan(lab.of("decay").general).all()
    assert (lab.of("decay").distance > 0.9).all()
    assert lab.capacity.sizes == (24, 48)
    capacity = lab.capacity
    assert capacity.energies == (0.9, 0.99, 0.999)
    assert capacity.ranks.shape == (3, 2, 2, 4)
    assert (capacity.ranks <= capacity.sizes[-1]).all()
    # More energy takes more rank, and the column of one key takes one at most.
    assert (np.diff(capacity.ranks, axis=0) >= 0).all()
    assert (capacity.needed_with_sink >= 1).all()


def test_json_holds_every_part(lab: ModelFocus) -> None:
    document = lab.to_json()
    assert np.shape(document["predictions"][0]["heads"]["measured"]) == (2, 4)
    assert np.shape(document["failure"]["error"]) == (2, 4)
    assert {row["mechanism"] for row in document["mechanisms"]} == {found.name for found in lab.mechanisms}
    assert len(document["effects"]) == 13 * 7
    json.dumps(document)


def test_pictures_hold_their_panels(found: FocusFindings, lab: ModelFocus) -> None:
    titles = [axes.get_title() for axes in draw_focus(found).axes]
    assert titles == ["exp (softmax)", "relu2", "identity", "relu", "decay", "more features"]
    drawn = draw_focus_in_model(lab)
    assert len([axes for axes in drawn.axes if axes.get_title()]) == 8
    line = draw_focus(found).axes[0].lines[0]
    np.testing.assert_allclose(
        np.asarray(line.get_ydata(), float), np.exp(-(np.asarray(line.get_xdata(), float) ** 2) / 2)
    )


def test_the_command_saves_result_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--keys", "64", "--dim", "8", "--draws", "20"]
    assert main(["lab", "focus", *options, "--out", str(tmp_path / "lab"), "--format", "pdf"]) == 0
    assert (tmp_path / "lab" / "figure-column.pdf").read_bytes().startswith(b"%PDF")
    assert "does not hold" in capsys.readouterr().out
    assert (tmp_path / "lab" / "figure.svg").read_text().count("</svg>") == 1
    assert main(["lab", "focus", *options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "lab" / "result.json").read_text())


def test_the_command_in_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_folder(tmp_path / "model", tiny_llama(max_position_embeddings=128))
    (tmp_path / "text.txt").write_text("Every head of a model has its own way of looking back at what was said. " * 2)
    given = ["lab", "focus", "--model", str(folder), "--mechanism", "relu", "--tokens", "70"]
    assert main([*given, "--text", str(tmp_path / "text.txt")]) == 0
    shown = capsys.readouterr().out
    assert "over 70 tokens" in shown
    assert "Means over heads" not in shown
    assert main([*given, "--text", str(tmp_path / "text.txt"), "--full"]) == 0
    shown = capsys.readouterr().out
    assert "Means over heads" in shown
    assert "nan" not in shown
    (tmp_path / "short.txt").write_text("Too short.")
    sentence = failure([*given, "--text", str(tmp_path / "short.txt")], capsys)
    assert sentence == "a text must have at least 64 tokens for this lab, got 10; give a longer one"
    given[-1] = "200"
    assert "the model's context is 128 tokens, got 200 tokens" in failure(given, capsys)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--mechanism", "zero"], "mechanism 'zero' has no weights: its output is a constant; leave it out"),
        (["--mechanism", "fitted"], "mechanism 'fitted' needs the parameters query_weight, query_bias"),
        (["--keys", "8"], "the focus lab needs n from 64, d from 2 and draws from 10, got 8, 64 and 400"),
        (["--model", "nowhere/at-all", "--mechanism", "elu2"], "unknown mechanism 'elu2'; did you mean"),
        (["--model", "x", "--text", "/nowhere.txt"], "cannot read '/nowhere.txt'"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(["lab", "focus", *arguments], capsys).startswith(sentence)


def test_mechanisms_that_the_lab_cannot_serve() -> None:
    model, rng = tiny_llama(), np.random.default_rng(0)
    with pytest.raises(UnsupportedError, match=r"'fitted' needs the parameters query_weight.*no calibration for this"):
        focus_in_model(model, [3] * 64, rng=rng, mechanisms=["fitted"])
    with pytest.raises(UnsupportedError, match="mechanism 'zero' has no weights"):
        focus_in_model(model, [3] * 64, rng=rng, mechanisms=["zero"])
    with pytest.raises(ValueInputError, match="at least 64 tokens for this lab, got 63"):
        focus_in_model(model, [3] * 63, rng=rng)


def test_a_map_fitted_to_every_head_is_measured_with_the_parameters_of_that_head() -> None:
    def drawn(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))

    mine = resolve("fitted").with_parameters(
        query_weight=drawn(4, 6, 8, seed=1),
        query_bias=drawn(4, 6, seed=2),
        key_weight=drawn(2, 6, 8, seed=3),
        key_bias=drawn(2, 6, seed=4),
        rate=0.1 * drawn(2, 6, seed=5).abs(),
    )
    model, ids = tiny_llama(max_position_embeddings=128), list(range(3, 99))
    lab = focus_in_model(model, ids, rng=np.random.default_rng(0), mechanisms=[mine])
    fitted = next(each for each in lab.mechanisms if each.name == "fitted")
    layer = visit_layers(model, ids, lambda seen: seen)[1]
    weights = attention_weights(mine.for_layers([1]), layer.query[None], layer.key[None], scale=layer.scale)[0]
    n = torch.arange(1, len(ids) + 1)
    s = weights.abs().sum(dim=-1) / torch.sqrt(n * weights.square().sum(dim=-1))
    np.testing.assert_allclose(fitted.sparsity[1], s[:, 24:].mean(dim=-1).numpy(), rtol=1e-5)
    assert fitted.features == 6
    assert np.isfinite(fitted.floor).all()


def test_two_windows_are_two_mechanisms() -> None:
    names = ["window:w=20,sinks=2", "window:w=10,sinks=1", "elu1+window:w=20,sinks=2"]
    few = focus_lab(n=64, d=4, draws=10, mechanisms=names, rng=np.random.default_rng(0))
    assert few.settings["mechanisms"][:3] == names
