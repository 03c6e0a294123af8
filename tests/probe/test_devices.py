"""The torch paths of tap, meter, swap and applied plan run on two pretend accelerators, and give the CPU's numbers.

A CI machine has no accelerator. Here the devices are simulated (``support.simulated_device``): tensors hold real
numbers, show a device, and refuse to be mixed. What cannot be seen this way: kernels of a real device, its speed, its
rounding, and that work is queued on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import dispatch_model

import softgap
from softgap.attention import resolve
from softgap.intervene.substitute import Substitute
from softgap.linearize import Plan, Sequences, apply, fit_output_correction, head_scores, swap
from softgap.models.fingerprint import model_fingerprint
from softgap.models.placement import execution_devices, input_device
from support.model_examples import attending_llama, byte_tokenizer
from support.simulated_device import simulated_devices

TOKENIZER = byte_tokenizer()
MECHANISMS = ["elu1", "uniform", "window:w=8,sinks=2", "elu1+window:w=6,sinks=1", "top_k:k=4"]
TEXT = " ".join(np.random.default_rng(0).choice(["boat", "left", "harbour", "3", "the", "old", "fox"], size=520))
Devices = tuple[torch.device, torch.device]


def whole() -> Any:
    return attending_llama(max_position_embeddings=512, tie_word_embeddings=False)


@pytest.fixture
def devices() -> Iterator[Devices]:
    with simulated_devices() as two:
        yield two


def spread(devices: Devices) -> Any:
    """The embeddings and the first layer on one device, the second layer and the head on the other."""
    first, second = devices
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), first)
    places |= dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), second)
    return dispatch_model(whole(), places, main_device=first)


def ids_of(model: Any, text: str) -> Any:
    return torch.tensor([TOKENIZER(text)["input_ids"]]).to(input_device(model))


def generated(model: Any) -> list[np.ndarray]:
    runs = softgap.generate(model, TOKENIZER, ["Boat 3 left", "A"], 5, mechanisms=MECHANISMS, focus=True)
    return [run.quantities["divergence"] for run in runs] + [runs[0].focus["attention_entropy"], runs[0].logprob]


def sampled(model: Any) -> list[np.ndarray]:
    run = softgap.generate(model, TOKENIZER, "Boat 3 left", 5, mechanisms=MECHANISMS, seed=3, drop_sinks=2)
    return [run.quantities["divergence"], run.token_ids]


def read(model: Any) -> list[np.ndarray]:
    run = softgap.read(model, TOKENIZER, TEXT[:120], mechanisms=MECHANISMS)
    return [run.quantities["divergence"], run.logprob[:-1], run.entropy]


def swapped(model: Any) -> list[np.ndarray]:
    found = []
    for options in ({}, {"positions": (3, 8)}, {"window": 4}):
        with swap(model, [(0, 1), (1, 2)], "elu1", **options), torch.inference_mode():
            found.append(model(ids_of(model, "the old fox")).logits.cpu().numpy())
    with swap(model, [(0, 1), (1, 2)], "elu1"):
        found.append(model.generate(ids_of(model, "the old fox"), max_new_tokens=4, do_sample=False).cpu().numpy())
    return found


def gated(model: Any) -> list[np.ndarray]:
    gates = softgap.doctor(model, TOKENIZER, repeats=4).gates
    assert [gate for gate in gates if gate.verdict != "pass"] == []
    return []


@pytest.mark.parametrize("measure", [generated, sampled, read, swapped, pytest.param(gated, marks=pytest.mark.slow)])
def test_two_devices_give_the_numbers_of_one(measure: Callable[[Any], list[np.ndarray]], devices: Devices) -> None:
    expected, model = measure(whole()), spread(devices)
    assert execution_devices(model) == devices
    for got, want in zip(measure(model), expected, strict=True):
        assert np.allclose(got, want, atol=1e-5, equal_nan=True)


def test_the_fingerprint_is_the_same_everywhere(devices: Devices) -> None:
    assert model_fingerprint(spread(devices)) == model_fingerprint(whole())


@pytest.mark.parametrize("name", ["elu1", "window:w=8,sinks=2", "elu1+window:w=8,sinks=2", "hybrid-with-far-keys"])
def test_a_plan_is_applied_on_two_devices(name: str, devices: Devices) -> None:
    mechanism = resolve("elu1+window:w=8,sinks=2,far=4" if "far" in name else name)
    groups = ((0, 0), (1, 1))
    heads = tuple((layer, head) for layer, group in groups for head in (2 * group, 2 * group + 1))
    found = []
    for model in (whole(), spread(devices)):
        plan = Plan("tiny", model_fingerprint(model), heads, groups, (), Substitute(mechanism))
        ids = ids_of(model, "the old fox " * 3)
        with apply(model, plan) as applied, torch.inference_mode():
            logits = model(ids).logits.cpu()
            written = model.generate(ids, max_new_tokens=4, do_sample=False, past_key_values=applied.cache())
        found.append((logits, written.tolist()))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-4)
    assert found[0][1] == found[1][1]


def test_heads_are_scored_and_corrected_on_two_devices(devices: Devices) -> None:
    """The gradients of scores and the least squares of a correction go through both devices."""
    found = []
    for model in (whole(), spread(devices)):
        ids = torch.from_numpy(np.random.default_rng(0).integers(5, 200, size=(3, 12))).to(input_device(model))
        texts = Sequences(ids, torch.ones(3, 11, dtype=torch.bool, device=ids.device))
        scores = head_scores(model, texts, "elu1", names=["gradient", "divergence", "output_l2"])
        corrected = fit_output_correction(model, texts, [(0, 0), (1, 1)], "elu1")
        found.append((scores, corrected))
    for name, values in found[0][0].values.items():
        assert np.allclose(values, found[1][0].values[name], atol=1e-4, equal_nan=True), name
    first, second = (corrected.tensors()["readout.weight"] for _, corrected in found)
    assert torch.allclose(first, second, atol=1e-2)


def test_the_simulation_refuses_what_a_device_refuses(devices: Devices) -> None:
    first, second = (torch.arange(6, device=device).float() for device in devices)
    assert float((first + 1)[2:].sum()) == 18
    with pytest.raises(RuntimeError, match=r"same device in aten::add, but found sim:0, sim:1"):
        first + second
    with pytest.raises(RuntimeError, match=r"same device in aten::add, but found cpu, sim:0"):
        first + torch.ones(6)
    with pytest.raises(RuntimeError, match="numpy"):
        first.numpy()
    assert torch.equal(first.to(devices[1]) + second, 2 * second)
