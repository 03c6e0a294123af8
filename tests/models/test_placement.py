"""A model that accelerate has offloaded is measured, calibrated, swapped and planned as if it were whole."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

import softgap
from softgap.calibration import Recipe
from softgap.cli import main
from softgap.errors import ModelError
from softgap.linearize import apply, find_plan, swap
from softgap.models.fingerprint import model_fingerprint
from softgap.models.placement import freeze_weights, input_device, offloaded_weights, weight_of
from softgap.probe.layout import attention_layers, output_weight
from support.model_examples import attending_llama, byte_tokenizer, save_folder

TOKENIZER = byte_tokenizer()
MECHANISMS = ["elu1", "uniform", "window:w=8,sinks=2", "top_k:k=4"]
WORDS = ("boat", "left", "harbour", "3", "at", "night", "the", "old", "fox")
MAP = {"model.layers.0": "disk", "model.norm": "disk", "": "cpu"}


def whole() -> Any:
    return attending_llama(max_position_embeddings=512)


def text(words: int) -> str:
    return " ".join(np.random.default_rng(0).choice(WORDS, size=words))


def in_memory(folder: Path) -> Any:
    return cpu_offload(whole())


def in_memory_with_buffers(folder: Path) -> Any:
    return cpu_offload(whole(), offload_buffers=True)


def on_disk(folder: Path) -> Any:
    return disk_offload(whole(), str(folder))


def in_part(folder: Path) -> Any:
    places = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu"}
    return dispatch_model(whole(), {**places, "model.layers.1": "disk", "model.norm": "disk"}, offload_dir=str(folder))


def by_map(folder: Path) -> Any:
    saved = save_folder(folder / "saved", whole())
    return softgap.load_model(saved, device_map=MAP, progress=False)[0]


def by_memory(folder: Path) -> Any:
    saved = save_folder(folder / "saved", whole())
    return softgap.load_model(saved, device_map="auto", max_memory={"cpu": "40kB"}, progress=False)[0]


WAYS: list[Callable[[Path], Any]] = [in_memory, in_memory_with_buffers, on_disk, in_part, by_map, by_memory]


@pytest.mark.parametrize("offload", WAYS)
def test_an_offloaded_model_gives_the_same_numbers(offload: Callable[[Path], Any], tmp_path: Path) -> None:
    model, original = offload(tmp_path), whole()
    assert offloaded_weights(model)
    assert input_device(model) == torch.device("cpu")
    live, expected = (
        softgap.generate(m, TOKENIZER, "Boat 3 left", 6, mechanisms=MECHANISMS) for m in (model, original)
    )
    # Weights mapped from a file lie at other addresses than those in memory, so sums may be rounded otherwise.
    atol = 1e-5 if offload in (by_map, by_memory) else 0.0
    assert np.allclose(live.quantities["divergence"], expected.quantities["divergence"], rtol=0, atol=atol)
    assert np.allclose(live.logprob, expected.logprob, rtol=0, atol=atol)
    assert "offloaded" in live.manifest.extra["placement"]
    assert "placement" not in expected.manifest.extra
    read, plain = (softgap.read(m, TOKENIZER, text(60), mechanisms=MECHANISMS, focus=True) for m in (model, original))
    assert np.allclose(read.quantities["divergence"], plain.quantities["divergence"], rtol=0, atol=atol)
    assert np.allclose(read.logprob[:-1], plain.logprob[:-1], rtol=0, atol=atol)


@pytest.mark.parametrize("offload", WAYS)
def test_the_fingerprint_is_that_of_the_whole_model(offload: Callable[[Path], Any], tmp_path: Path) -> None:
    model, other = offload(tmp_path), attending_llama(1, max_position_embeddings=512)
    assert model_fingerprint(model) == model_fingerprint(whole()) != model_fingerprint(other)
    assert model_fingerprint(model, fresh=True) == model_fingerprint(whole())


def test_weights_on_disk_are_read_once_for_all_fingerprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_disk(tmp_path)
    loads: list[str] = []
    kind: Any = type(next(iter(offloaded_weights(model).values())))
    honest = kind.load

    def load(weight: Any) -> Any:
        loads.append(weight.key)
        return honest(weight)

    monkeypatch.setattr(kind, "load", load)
    for _ in range(3):
        model_fingerprint(model)
    assert len(loads) == len(set(loads)) > 10


def test_an_edit_of_an_offloaded_weight_is_seen() -> None:
    model = cpu_offload(whole())
    before = model_fingerprint(model)
    held = offloaded_weights(model)["model.layers.1.self_attn.q_proj.weight"].in_memory
    assert held is not None
    with torch.no_grad():
        held.mul_(2)
    assert model_fingerprint(model) != before


@pytest.mark.parametrize("offload", [in_memory, on_disk])
def test_calibrations_and_plans_are_those_of_the_whole_model(offload: Callable[[Path], Any], tmp_path: Path) -> None:
    found = []
    for number, model in enumerate((offload(tmp_path / "weights"), whole())):
        out = tmp_path / f"{number}.safetensors"
        recipe = Recipe(features=4, steps=2)
        made = softgap.calibrate(
            model, TOKENIZER, [text(520)], recipe=recipe, positions=128, stability=False, out=str(out)
        )
        plan = find_plan(
            model, TOKENIZER, [text(520)], "window:w=16,sinks=2", budget=0.5, length=64, tokens=700,
            recall_budget=None, baselines=False,
        )  # fmt: skip
        ids = torch.tensor([TOKENIZER("the old fox " * 4)["input_ids"]])
        with apply(model, plan) as applied:
            written = model.generate(ids, max_new_tokens=6, do_sample=False, past_key_values=applied.cache())
        with swap(model, [(0, 1), (1, 2)], "elu1"), torch.inference_mode():
            swapped = model(ids).logits
        found.append((made.digest, plan.groups, plan.expected["loss"], written.tolist(), swapped.tolist()))
    assert found[0] == found[1]


def test_every_gate_passes_on_an_offloaded_model(tmp_path: Path) -> None:
    assert [g for g in softgap.doctor(on_disk(tmp_path), TOKENIZER, repeats=4).gates if g.verdict != "pass"] == []


def test_recording_under_autocast_follows_the_device_that_runs(tmp_path: Path) -> None:
    model, ids = on_disk(tmp_path), torch.tensor([[5, 9, 4, 12]])
    with torch.autocast("cpu", torch.bfloat16), softgap.record(model, ["elu1"]) as recording, torch.no_grad():
        model(ids)
    assert np.isfinite(recording.trajectories()[0].divergence).all()


def test_frozen_weights_thaw_though_accelerate_made_others(tmp_path: Path) -> None:
    model, ids = on_disk(tmp_path), torch.tensor([[5, 9, 4, 12]])
    with torch.inference_mode():
        model(ids)
    with freeze_weights(model):
        assert not model(ids).logits.requires_grad
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model(ids).logits.requires_grad


def test_a_weight_is_read_where_it_lies(tmp_path: Path) -> None:
    layer, expected = (attention_layers(m)[1] for m in (on_disk(tmp_path), whole()))
    assert weight_of(layer.module) is None
    found, known = (output_weight(each, 8) for each in (layer, expected))
    assert found is not None
    assert known is not None
    assert torch.equal(found, known)


def test_weights_that_were_never_loaded_are_refused() -> None:
    with torch.device("meta"):
        model = whole()
    with pytest.raises(ModelError, match=r"the weight 'lm_head\.weight' is not loaded"):
        softgap.generate(model, TOKENIZER, "Boat 3 left", 2)
    with pytest.raises(ModelError, match=r"'lm_head\.weight' is not loaded"):
        model_fingerprint(model)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"device_map": "sideways"}, "device_map must be one of auto, balanced, .*, got 'sideways'; use .auto."),
        ({"device_map": {}}, "device_map must place at least one part of the model, got none; use 'auto'"),
        ({"device_map": {"": "cuda:7"}}, r"must name devices here \(cpu.*\) or disk, got 'cuda:7' for ''; use 'cpu'"),
        ({"device_map": {"": 7}}, "or disk, got '7' for ''; use 'cpu'"),
        ({"device_map": {"model.layer.0": "cpu", "": "disk"}}, "got 'model.layer.0'; did you mean 'model.layers.0'"),
        ({"device_map": {"model": "cpu", "lm_head.weight": "disk"}, "device": "cuda"}, "say where the model goes"),
        ({"device_map": {"model.layers.0": "disk"}}, "and 'model.embed_tokens' has none; add one, or one for ''"),
        ({"max_memory": {"cpu": "1GB"}}, "max_memory limits what device_map='auto' puts on each device"),
        ({"device_map": "auto", "max_memory": {"cpu": "1 GiB of it"}}, "max_memory takes .* '1 GiB of it' for 'cpu'"),
        ({"device_map": "auto", "max_memory": {"cpu": -1}}, "max_memory takes a number of bytes .* got -1 for 'cpu'"),
        ({"device_map": "auto", "max_memory": {"cuda:9": "1GB"}}, "max_memory must name devices here .*'cuda:9'"),
    ],
)
def test_impossible_placements_are_refused(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    saved = save_folder(tmp_path / "saved", whole())
    with pytest.raises(ModelError, match=sentence):
        softgap.load_model(saved, progress=False, **given)


def test_weights_beyond_memory_are_refused_before_they_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = save_folder(tmp_path / "large", whole())
    capsys.readouterr()
    os.truncate(large / "model.safetensors", 10**12)
    assert main(["doctor", str(large)]) == 2
    assert re.fullmatch(
        r"\[  0 % 0:00:00\] loading .*large\n"
        r"softgap: the weights of '.*large' take 1,000 GB, and \d+ GB of memory are free; use device_map='auto', which "
        r"leaves on disk what does not fit, or a smaller model\n",
        capsys.readouterr().err,
    )
