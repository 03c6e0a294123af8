"""The keys that heads attend to, against weights by loops in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softgap.attention import Mechanism, resolve
from softgap.attention.reference import reference_attention
from softgap.errors import ValueInputError
from softgap.probe import generate, head_anatomy, read, run_anatomy
from softgap.probe.anatomy import has_weights
from softgap.trajectories import Anatomy, StudyWriter, open_study
from softgap.trajectories.anatomy import parse_heads
from support.model_examples import byte_tokenizer, tiny_llama
from support.probe_cases import SAME_MODEL, ids_of, row, softmax_of, spied, tiny_with, window_of

IDS = ids_of(41)
MODELS = [("llama", "sdpa"), ("mistral", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")]
SHOWN = ("elu1", "identity", "window:w=8,sinks=2", "elu1+window:w=8,sinks=2,f=0.5", "razor:w=6,sinks=1")


def oracle(model: Any, layer: int, shown: list[Mechanism], drop: int = 0) -> np.ndarray:
    """Weights [mechanism, head, query, key] of a layer, softmax first; a mechanism's are its output on unit values."""
    with spied(model) as layers, torch.no_grad():
        model(row(IDS), use_cache=False)
    (call,) = layers[layer]
    seen, weights, _ = softmax_of(call, window_of(model.config, layer), drop=drop)
    n, heads = len(IDS), call.q.shape[1]
    unit = torch.eye(n, dtype=torch.float64).expand(1, call.k.shape[1], n, n)
    others = [
        reference_attention(
            mechanism.for_layers([layer]),
            call.q.double(),
            call.k.double(),
            unit,
            seen.expand(1, heads, -1, -1),
            scale=call.scale,
            offset=0,
            ordinals=torch.arange(n)[None],
            softcap=call.softcap,
            sink_logits=call.sinks,
        )[0].numpy()
        for mechanism in shown
    ]
    return np.stack([weights, *others])


def check(found: Anatomy, truth: np.ndarray) -> None:
    """Every stored weight is that of its key, no other key has a larger one, and the rest is the sum of the others."""
    for m in range(len(found.mechanisms)):
        for t, weights in enumerate(truth[m]):
            # Relative where signed weights are above 1, as everywhere.
            least = SAME_MODEL * max(1.0, np.abs(weights).max())
            keys = found.keys[m, t]
            real = keys[keys >= 0]
            assert len(set(real.tolist())) == len(real)
            np.testing.assert_allclose(found.weights[m, t][keys >= 0], weights[real], atol=least)
            others = np.delete(weights, real)
            least_shown = np.abs(weights[real]).min() if len(real) == found.keys.shape[2] else 0.0
            assert np.abs(others).max(initial=0.0) <= least_shown + least
            assert found.rest[m, t] == pytest.approx(others.sum(), abs=10 * least)


@pytest.mark.parametrize(("model_type", "attn"), MODELS)
def test_keys_weights_and_rest_are_those_of_the_loops(model_type: str, attn: str) -> None:
    model = tiny_with(model_type, attn=attn)
    shown = [resolve(name) for name in SHOWN]
    found = head_anatomy(model, IDS, "1.3,0.0", SHOWN)
    assert [entry.name for entry in found] == ["1.3", "0.0"]
    for entry in found:
        assert entry.mechanisms == ("softmax", *(mechanism.label for mechanism in shown))
        check(entry, oracle(model, entry.layer, shown)[:, entry.head])
        assert (entry.weights[0].sum(axis=1) + entry.rest[0] <= 1 + 1e-6).all()
        assert (entry.weights[0] >= 0).all()


def test_parameters_of_a_head_and_far_keys_of_a_group_are_its_own() -> None:
    model = tiny_with("llama")
    generator = torch.Generator().manual_seed(3)
    heads, groups, d = 4, 2, 16

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    fitted = resolve("fitted").with_parameters(
        query_weight=draw(2, heads, 6, d),
        query_bias=draw(2, heads, 6),
        key_weight=draw(2, groups, 6, d),
        key_bias=draw(2, groups, 6),
        rate=draw(2, groups, 6).abs(),
    )
    far = resolve("window:w=6,sinks=2,far=3")
    for entry in head_anatomy(model, IDS, [(1, 2), (0, 1)], [fitted, far]):
        check(entry, oracle(model, entry.layer, [fitted, far])[:, entry.head])


def test_dropped_sinks_are_hidden_from_everyone() -> None:
    model = tiny_with("llama")
    (entry,) = head_anatomy(model, IDS, "1.0", ["elu1", "window:w=8,sinks=2"], drop_sinks=3)
    assert not np.isin(entry.keys, [0, 1, 2]).any()
    truth = oracle(model, 1, [resolve("elu1"), resolve("window:w=8,sinks=2")], drop=3)[:, 0]
    check(entry, truth)


def test_what_has_no_weights_is_left_out() -> None:
    model = tiny_with("llama")
    (entry,) = head_anatomy(model, IDS, "0.0", ["uniform", "elu1"])
    assert entry.mechanisms == ("softmax", "elu1")
    assert not has_weights(resolve("uniform"))


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_with("llama")
    whole = head_anatomy(model, IDS, "1.1", SHOWN)[0]
    for module in ("softgap.attention.quadratic", "softgap.probe.softmax"):
        monkeypatch.setattr(f"{module}.BLOCK_NUMBERS", 300)
    parts = head_anatomy(model, IDS, "1.1", SHOWN)[0]
    np.testing.assert_allclose(parts.weights, whole.weights, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(parts.rest, whole.rest, rtol=1e-5, atol=1e-5)


def test_a_run_is_read_again_and_stored_beside_its_study(tmp_path: Path) -> None:
    model, tokenizer = tiny_llama(), byte_tokenizer()
    written = generate(model, tokenizer, "A fox went out.", 6, mechanisms=["elu1", "uniform"])
    texts = read(model, tokenizer, "A fox went out at night.", mechanisms=["elu1", "uniform"])
    for run in (written, texts):
        heads = run_anatomy(model, tokenizer, run, "1.2,0.1")
        assert heads[0].rest.shape == (2, int(run.positions[-1]) + 1)
        folder = tmp_path / run.completion_text[:3].strip()
        with StudyWriter(folder, run.manifest) as writer:
            number = writer.append([run])
            writer.append_anatomy(heads, batch=number)
        study = open_study(folder)
        assert study.sample("0").equals(run if run.manifest.started else study.sample("0"))
        again = study.anatomy("0")
        assert [entry.name for entry in again] == ["1.2", "0.1"]
        for old, new in zip(heads, again, strict=True):
            assert (old.mechanisms, old.first) == (new.mechanisms, new.first)
            for name in ("keys", "weights", "rest"):
                np.testing.assert_array_equal(getattr(old, name), getattr(new, name))


def test_a_study_without_anatomy_has_none(tmp_path: Path) -> None:
    run = read(tiny_llama(), byte_tokenizer(), "A fox.", mechanisms=["elu1"])
    run.save(tmp_path / "plain")
    assert open_study(tmp_path / "plain").anatomy("0") == ()


@pytest.mark.parametrize(
    ("heads", "sentence"),
    [
        ("1.9", r"head 1\.9 does not exist: layer 1 has heads 0 to 3; name another head"),
        ("7.0", r"head 7\.0 must be in a layer with attention, which are 0 to 1 here"),
        ("fox", r"heads must be named LAYER\.HEAD and separated by commas, such as 18\.8,3\.2, got 'fox'"),
    ],
)
def test_unknown_heads_are_refused(heads: str, sentence: str) -> None:
    with pytest.raises(ValueInputError, match=sentence):
        head_anatomy(tiny_with("llama"), IDS, heads)


def test_too_many_heads_are_refused() -> None:
    with pytest.raises(ValueInputError, match="at most 32 heads can be stored, got 33"):
        parse_heads([f"0.{head}" for head in range(33)])
    assert parse_heads("1.2,1.2, 0.3") == ((1, 2), (0, 3))
