"""Any mixture of mechanisms in one recording: with a state or without, built in or registered, each as if alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from softgap.attention import mechanisms, register_mechanism, resolve
from softgap.attention.reference import RELATIVE, Row
from softgap.errors import UnknownNameError, UnsupportedError, ValueInputError
from softgap.probe import read_ids, record
from softgap.trajectories import Trajectories
from support.probe_cases import (
    SAME_MODEL,
    SAME_TENSORS,
    difference,
    expected,
    gap,
    ids_of,
    only,
    prompt_of,
    tiny_with,
    written,
)

# Without identity: its signed sum may nearly cancel, and then float32 decides the direction.
WITH_STATE = ["elu1", "taylor2", "decay:lam=0.8", "hedgehog", "inline", "cosformer"]
HYBRIDS = [
    "window:w=5,sinks=2",
    "window:w=3,sinks=0",
    "razor:w=5,sinks=2",
    "elu1+window:w=5,sinks=2",
    "elu1+window:w=5,sinks=2,f=0.5",
    "decay+window:w=4,sinks=1",
    "top_k+window:w=4,sinks=6",
]
WITHOUT = ["top_k:k=4", "relu2_scores", "softmax", "self_token", "previous_token", "first_token", "zero"]
IDS = ids_of(21)


def live(model: Any, names: list[str], **settings: Any) -> tuple[Trajectories, list[int]]:
    with record(model, names, **settings) as recording:
        tokens = written(model, IDS, 12)[0].tolist()
    return only(recording.trajectories()), tokens


def chosen(model: Any, names: list[str]) -> list[Any]:
    """The mechanisms as a recording of this model configures them."""
    context = model.config.max_position_embeddings
    found = [resolve(name) for name in names]
    return [m.configure(context=context) if "context" in m.options else m for m in found]


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize(
    "names",
    [WITH_STATE, WITHOUT, ["top_k:k=4", "elu1", "self_token", "uniform", "relu2_scores"], ["softmax"], HYBRIDS],
    ids=["with state", "without", "mixed", "one without", "windows and hybrids"],
)
def test_every_mechanism_equals_the_oracle_live_and_read(model_type: str, names: list[str]) -> None:
    model = tiny_with(model_type)
    run, tokens = live(model, names)
    truth = expected(model, tokens[:-1], chosen(model, names))
    assert run.mechanisms == tuple(resolve(name).label for name in names)
    assert gap(run, truth, slice(20, None)) < SAME_MODEL
    assert gap(prompt_of(run), truth, slice(0, 20)) < SAME_MODEL
    replay = only(read_ids(model, [tokens[:-1]], mechanisms=names))
    assert gap(replay, truth, slice(None)) < SAME_MODEL


@pytest.mark.parametrize(("model_type", "attn"), [("llama", "sdpa"), ("gpt2", "eager"), ("mistral", "sdpa")])
def test_softmax_is_at_no_distance_from_the_model(model_type: str, attn: str) -> None:
    run, _ = live(tiny_with(model_type, attn=attn), ["softmax", "elu1"])
    for part in (run, prompt_of(run)):
        assert part.relative_l2.max() < SAME_TENSORS
        assert part.divergence.max() < 1e-9
        assert np.abs(part.norm_ratio - 1).max() < SAME_TENSORS
        assert np.median(part.select("elu1").relative_l2) > 0.1


def test_softmax_without_softcap_and_sinks_is_at_some_distance_from_a_model_with_them() -> None:
    # They belong to the model's side alone.
    for model_type in ("gemma2", "gpt_oss"):
        model = tiny_with(model_type, attn="eager")
        for layer in model.model.layers:
            if model_type == "gemma2":
                layer.self_attn.attn_logit_softcapping = 1.0
            else:
                layer.self_attn.sinks.data.fill_(5.0)
        run, tokens = live(model, ["softmax"])
        assert np.median(run.relative_l2) > 0.01
        assert gap(run, expected(model, tokens[:-1], ["softmax"]), slice(20, None)) < SAME_MODEL


@pytest.fixture
def square() -> Iterator[str]:
    register_mechanism("square", lambda x: x.square(), formula="phi = x^2")
    RELATIVE["square"] = lambda row: (row.k**2) @ (row.q**2)
    yield "square"
    registry: Any = mechanisms()
    assert "square" in registry
    _forget("square")
    del RELATIVE["square"]


def _forget(name: str) -> None:
    from softgap.attention import registry

    del registry._registry[name]


def test_a_registered_mechanism_is_used_by_name(square: str) -> None:
    model = tiny_with("llama")
    run, tokens = live(model, ["uniform", square])
    assert run.mechanisms == ("uniform", "square")
    assert gap(run, expected(model, tokens[:-1], ["uniform", square]), slice(20, None)) < SAME_MODEL
    assert isinstance(RELATIVE[square], type(lambda: Row))


def test_parameters_by_layer_and_head_reach_the_right_head() -> None:
    model = tiny_with("llama")
    generator = torch.Generator().manual_seed(1)
    layers, heads, kv_heads, features, d = 2, 4, 2, 5, 16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    known = mechanisms()
    fitted = known["fitted"].with_parameters(
        query_weight=random(layers, heads, features, d),
        query_bias=random(layers, heads, features),
        key_weight=random(layers, kv_heads, features, d),
        key_bias=random(layers, kv_heads, features),
        rate=random(layers, kv_heads, features).abs(),
    )
    profile = known["profile"].with_parameters(
        first=random(layers, heads).abs(), by_distance=random(layers, heads, 6).abs()
    )
    mean = known["constant"].with_parameters(mean=random(layers, heads, d))
    with record(model, [profile, fitted, mean], block=4) as recording:
        tokens = written(model, IDS, 12)[0].tolist()
    run = only(recording.trajectories())
    for layer in range(layers):
        of_layer = [mechanism.for_layers([layer]) for mechanism in (profile, fitted, mean)]
        truth = expected(model, tokens[:-1], of_layer)
        for name, values in run.quantities.items():
            assert difference(values[:, layer], truth.quantities[name][:, layer, :, 20:]) < SAME_MODEL


def test_the_first_mechanism_is_the_runs_own() -> None:
    run, _ = live(tiny_with("llama"), ["top_k:k=4", "elu1"])
    assert difference(run.divergence, run.quantities["divergence"][0]) == 0
    assert difference(run.select("elu1").divergence, run.quantities["divergence"][1]) == 0
    assert run.manifest.mechanisms == {"top_k": {"k": 4.0}, "elu1": {}}


def test_the_default_is_elu1_beside_its_control() -> None:
    model = tiny_with("llama")
    with record(model) as recording:
        written(model, IDS, 3)
    assert only(recording.trajectories()).mechanisms == ("elu1", "uniform")


def test_mechanisms_that_cannot_be_measured_are_refused() -> None:
    model = tiny_with("llama")
    with (
        pytest.raises(
            UnsupportedError,
            match=r"'fitted' needs the parameters query_weight, .*there is no calibration for this model",
        ),
        record(model, ["fitted"]),
    ):
        raise AssertionError("never reached")
    with (
        pytest.raises(UnknownNameError, match=r"unknown mechanism 'unifrom'; did you mean 'uniform'\?"),
        record(model, ["unifrom"]),
    ):
        raise AssertionError("never reached")
    with (
        pytest.raises(ValueInputError, match="each mechanism may be named once, got elu1, uniform, elu1"),
        record(model, ["elu1", "uniform", "elu1"]),
    ):
        raise AssertionError("never reached")
    assert "generate" not in model.__dict__
