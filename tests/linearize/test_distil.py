"""Tuning lowers what it says it lowers, on text it did not see too, and touches nothing but the swapped heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from softgap.attention import resolve
from softgap.errors import SoftgapError
from softgap.linearize import Readout, Substitute, distil_substitute, fit_output_correction, swap
from softgap.linearize.distil import sequence_order
from softgap.linearize.sequences import Sequences
from softgap.models.tensor_files import digest_of
from support.linearize_cases import sharp_llama, with_random_parameters

HEADS = [(0, 0), (0, 1), (1, 2)]


@pytest.fixture(scope="module")
def small() -> Any:
    """A model whose heads look at few keys, and whose logits depend on what they see."""
    model = sharp_llama().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")):
                parameter.mul_(3)
    return model


def passages(rows: slice) -> Sequences:
    ids = torch.randint(3, 40, (28, 40), generator=torch.Generator().manual_seed(4))[rows]
    return Sequences(ids, torch.ones(len(ids), 39, dtype=torch.bool))


FIT, UNSEEN = passages(slice(0, 24)), passages(slice(24, 28))


def divergence(model: Any, read: Sequences, chosen: Substitute) -> float:
    """Mean KL from the original next-token distributions, by the plain formula."""
    with torch.no_grad():
        p = model(read.ids, use_cache=False).logits.double().softmax(-1)
        with swap(model, HEADS, chosen):
            q = model(read.ids, use_cache=False).logits.double().softmax(-1)
    apart = (p * (p / q).log()).sum(-1)[:, :-1]
    return float(apart[read.scored].mean())


def test_tuning_brings_the_model_nearer_to_itself(small: Any) -> None:
    ridge = fit_output_correction(small, FIT, HEADS, with_random_parameters("fitted", 2, 4, 2, 8, 8))
    found = distil_substitute(small, FIT, HEADS, ridge, steps=48, learning_rate=0.02)
    for read in (FIT, UNSEEN):
        assert divergence(small, read, found) < 0.85 * divergence(small, read, ridge)


def test_one_step_goes_down_the_gradient(small: Any) -> None:
    """Adam's first step moves every number by its rate, against the sign of the slope."""
    begin = Substitute(resolve("elu1"), readout=Readout.identity(2, 4, 8))
    text = Sequences(FIT.ids[:1], FIT.scored[:1])
    found = distil_substitute(small, text, HEADS, begin, steps=1, learning_rate=0.01)
    assert found.readout is not None
    moved = found.readout.bias[1, 2]
    step = 0.01 / 5  # the first step of the warm-up
    torch.testing.assert_close(moved.abs(), torch.full((8,), step), rtol=1e-3, atol=0)
    for place in (0, 5):
        at = []
        for sign in (-1, 1):
            readout = Readout.identity(2, 4, 8)
            readout.bias[1, 2, place] = 0.05 * sign
            at.append(divergence(small, text, Substitute(begin.mechanism, readout=readout)))
        assert np.sign(float(moved[place])) == -np.sign(at[1] - at[0])


def test_only_the_numbers_of_swapped_heads_move(small: Any) -> None:
    mechanism = with_random_parameters("fitted", 2, 4, 2, 8, 8)
    before = {name: x.clone() for name, x in mechanism.parameters.items()}
    weights = [x.clone() for x in small.parameters()]
    begin = fit_output_correction(small, FIT, HEADS, mechanism)
    assert begin.readout is not None
    start = begin.readout.weight.clone()
    found = distil_substitute(small, FIT, HEADS, begin, steps=3)
    alone = distil_substitute(small, FIT, HEADS, begin, steps=3, maps=False)
    assert found.readout is not None
    swapped = torch.zeros(2, 4, dtype=torch.bool)
    swapped[tuple(torch.tensor(HEADS).T)] = True
    assert torch.equal((found.readout.weight != start).flatten(2).any(-1), swapped)
    query, key = (found.mechanism.parameters[f"{side}_weight"] for side in ("query", "key"))
    assert torch.equal((query != before["query_weight"]).flatten(2).any(-1), swapped)
    # Keys of the first KV head of layer 0 and of the second of layer 1 serve swapped heads.
    assert (key != before["key_weight"]).flatten(2).any(-1).tolist() == [[True, False], [False, True]]
    assert torch.equal(found.mechanism.parameters["rate"], before["rate"])
    assert alone.mechanism.origin == mechanism.origin
    assert found.mechanism.origin == digest_of(found.mechanism.parameters)
    for name, x in before.items():
        assert torch.equal(mechanism.parameters[name], x)
        assert torch.equal(alone.mechanism.parameters[name], x)
    assert torch.equal(begin.readout.weight, start)
    for parameter, old in zip(small.parameters(), weights, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.requires_grad
        assert parameter.grad is None


def test_recall_lists_are_learnt_beside_the_text(small: Any) -> None:
    """Trained on tokens of its own kind only, a substitute gets better where only the last ones count."""
    recall_lists = Sequences(UNSEEN.ids.flip(1), (torch.arange(39) > 29).expand(4, 39))
    begin = fit_output_correction(small, FIT, HEADS, with_random_parameters("fitted", 2, 4, 2, 8, 8))
    without, beside = (
        distil_substitute(small, FIT.part(slice(0, 2)), HEADS, begin, recall_lists=more, steps=24, learning_rate=0.02)
        for more in (None, recall_lists)
    )
    assert divergence(small, recall_lists, beside) < 0.8 * divergence(small, recall_lists, without)


def test_a_seed_decides_the_order_and_every_round_reads_everything() -> None:
    drawn = list(sequence_order(5, 12, np.random.default_rng(1)))
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == list(range(5))
    assert drawn[:5] != drawn[5:10]
    assert drawn == list(sequence_order(5, 12, np.random.default_rng(1)))


def test_bad_input_is_one_sentence(small: Any) -> None:
    with pytest.raises(SoftgapError, match=r"at least 1 step and a rate above 0, got 0 and 0\.0006"):
        distil_substitute(small, FIT, HEADS, "elu1", steps=0)
    with pytest.raises(SoftgapError, match="at least 1 step and a rate above 0, got 2 and -1"):
        distil_substitute(small, FIT, HEADS, "elu1", steps=2, learning_rate=-1)
    with pytest.raises(SoftgapError, match="heads of layer 0 are 0 to 3, got"):
        distil_substitute(small, FIT, [(0, 9)], "elu1", steps=2)
