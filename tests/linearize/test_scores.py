"""Scores are the derivatives they claim to be, and rankings know what their measurement allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from softgap.attention import attend, attention_weights, compare_outputs, resolve
from softgap.errors import SoftgapError
from softgap.intervene.substitute import Substitute
from softgap.intervene.swap import swap
from softgap.linearize import heads_of_layer
from softgap.linearize.scores import (
    SCORES,
    add_recall_scores,
    head_scores,
    rank_agreement,
    split_half,
    unit_scores,
)
from softgap.linearize.sequences import Sequences
from softgap.probe.tap import AttentionCall, observe_attention, replace_attention
from support.linearize_cases import sharp_llama, with_random_parameters

HEADS = [(layer, head) for layer in range(2) for head in range(4)]


@pytest.fixture(scope="module")
def small() -> Any:
    return sharp_llama()


@pytest.fixture(scope="module")
def read() -> Sequences:
    ids = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(2))
    return Sequences(ids, torch.ones(2, 23, dtype=torch.bool))


def gated_loss(model: Any, ids: torch.Tensor, gates: dict[tuple[int, int], float], mechanism: Any) -> torch.Tensor:
    """Loss per text where some heads are part of the way to the mechanism."""

    def output(call: AttentionCall) -> torch.Tensor:
        found = call.output.clone()
        row = call.module.layer_idx
        swapped = attend(
            mechanism if isinstance(mechanism, str) else mechanism.for_layers([row]),
            call.query, call.key, call.value, scale=call.scale, dtype=torch.float64,
        ).output.transpose(1, 2)  # fmt: skip
        for (layer, head), gate in gates.items():
            if layer == row:
                found[:, :, head] += gate * (swapped[:, :, head] - found[:, :, head])
        return found

    with torch.no_grad(), replace_attention(model, output):
        logs = model(ids[:, :-1], use_cache=False).logits.log_softmax(-1)
    found: torch.Tensor = -logs.gather(-1, ids[:, 1:, None])[..., 0].mean(-1)
    return found


@pytest.mark.parametrize("name", ["elu1", "fitted"])
def test_the_gradient_is_the_slope_of_the_loss(small: Any, read: Sequences, name: str) -> None:
    mechanism = name if name == "elu1" else with_random_parameters(name, 2, 4, 2, 8, 8)
    found = head_scores(small, read, mechanism, names=["gradient"])
    for place, head in enumerate(found.heads):
        # The norms of the model compute in float32, so steps must not be tiny: five points instead.
        h = 0.05
        at = {k: gated_loss(small, read.ids, {head: k * h}, mechanism) for k in (-2, -1, 1, 2)}
        slope = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * h)
        np.testing.assert_allclose(found.values["gradient"][place], slope.numpy(), atol=1e-5)
    assert np.abs(found.values["gradient"]).max() > 1e-3


def test_only_the_tokens_that_count_are_scored(small: Any, read: Sequences) -> None:
    """A slope is linear in the loss: that of some tokens and that of the others add up to that of all."""
    some = torch.arange(23) % 3 == 0
    parts = [Sequences(read.ids, mask.expand(2, 23)) for mask in (some, ~some)]
    whole, first, second = (
        head_scores(small, part, "elu1", names=["gradient", "integrated"]).values for part in (read, *parts)
    )
    for name in ("gradient", "integrated"):
        np.testing.assert_allclose(first[name] * 8 + second[name] * 15, whole[name] * 23, atol=1e-5)
        assert np.abs(first[name] - second[name]).max() > 1e-3


def test_recall_lists_are_scored_beside_the_text(small: Any, read: Sequences) -> None:
    recall_lists = Sequences(read.ids[:, :17].flip(1), (torch.arange(16) > 9).expand(2, 16))
    names = ["gradient+fisher", "divergence"]
    apart = [head_scores(small, part, "elu1", names=names, seed=3) for part in (read, recall_lists)]
    both = head_scores(small, read, "elu1", recall_lists=recall_lists, names=names, seed=3)
    for name in names:
        text, recall = (found.mean(name) for found in apart)
        weight = np.abs(text).sum() / np.abs(recall).sum()
        np.testing.assert_allclose(both.mean(name), text + weight * recall, atol=1e-12)
        assert not np.array_equal(np.argsort(both.mean(name)), np.argsort(text))
    nothing = add_recall_scores(np.ones((3, 2)), np.zeros(3))
    assert np.array_equal(nothing, np.ones((3, 2)))


def test_the_integrated_gradient_is_the_mean_slope_on_the_way(small: Any, read: Sequences) -> None:
    """With the last layer alone no step depends on another: the integral is the loss of swapping them all."""
    heads = heads_of_layer(small, 1)
    found = head_scores(small, read, "elu1", names=["integrated"], heads=heads, steps=16)
    rise = gated_loss(small, read.ids, dict.fromkeys(heads, 1.0), "elu1") - gated_loss(small, read.ids, {}, "elu1")
    np.testing.assert_allclose(found.values["integrated"].sum(axis=0), rise.numpy(), atol=2e-4)


def test_the_fisher_score_is_half_the_curvature_of_the_divergence(small: Any, read: Sequences) -> None:
    """KL(p(0) || p(g)) = F g^2 / 2 for small g; drawn labels give F on average."""
    found = head_scores(small, read, "elu1", names=["fisher"], samples=150, heads=HEADS[2:6])
    with torch.no_grad():
        base = small(read.ids[:, :-1], use_cache=False).logits.log_softmax(-1)
    g, ratios = 1e-3, []
    for place, head in enumerate(HEADS[2:6]):

        def output(call: AttentionCall, head: tuple[int, int] = head) -> torch.Tensor:
            found = call.output.clone()
            if call.module.layer_idx == head[0]:
                other = attend("elu1", call.query, call.key, call.value, scale=call.scale, dtype=torch.float64).output
                found[:, :, head[1]] += g * (other[:, head[1]] - found[:, :, head[1]])
            return found

        with torch.no_grad(), replace_attention(small, output):
            logs = small(read.ids[:, :-1], use_cache=False).logits.log_softmax(-1)
        half = (base.exp() * (base - logs)).sum(-1).mean(-1) / g**2
        ratios.append(found.values["fisher"][place] / half.numpy())
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.15)


def test_scores_of_further_swaps_see_the_swapped_model(small: Any, read: Sequences) -> None:
    gone = [(0, 1), (1, 2)]
    found = head_scores(small, read, "elu1", names=["divergence", "gradient"], swapped=gone)
    assert set(found.heads) == set(HEADS) - set(gone)
    seen: list[AttentionCall] = []
    with torch.no_grad(), swap(small, gone, "elu1"), observe_attention(small, seen.append):
        small(read.ids[:1, :-1], use_cache=False)
    linear = attend("elu1", seen[1].query, seen[1].key, seen[1].value, scale=seen[1].scale, dtype=torch.float64).output
    truth = compare_outputs(seen[1].output.transpose(1, 2), linear).divergence[0, 0].mean()
    assert found.values["divergence"][found.heads.index((1, 0)), 0] == pytest.approx(float(truth), abs=1e-7)


def test_what_is_looked_at_is_what_the_definitions_say(small: Any, read: Sequences) -> None:
    found = head_scores(
        small, read, "elu1", names=["relative_l2", "output_l2", "focus", "logit_variance", "block_rank"]
    )
    seen: list[AttentionCall] = []
    with torch.no_grad(), observe_attention(small, seen.append):
        small(read.ids[:1, :-1], use_cache=False)
    for layer, call in enumerate(seen):
        linear = attend("elu1", call.query, call.key, call.value, scale=call.scale, dtype=torch.float64).output[0]
        own = call.output[0].transpose(0, 1)
        weights = attention_weights("softmax", call.query, call.key, scale=call.scale, dtype=torch.float64)[0]
        scores = call.query[0] @ call.key[0].repeat_interleave(2, 0).transpose(-1, -2) * call.scale
        for head in range(4):
            place = found.heads.index((layer, head))
            step = linear[head] - own[head]
            moved = step @ small.model.layers[layer].self_attn.o_proj.weight[:, head * 8 : head * 8 + 8].T
            rows = range(len(step))
            truth = {
                "relative_l2": (step.norm(dim=-1) / own[head].norm(dim=-1)).mean(),
                "output_l2": moved.detach().square().sum(-1).mean().sqrt(),
                "focus": np.mean([1 - 1 / ((t + 1) * float(weights[head, t].square().sum())) ** 0.5 for t in rows]),
                "logit_variance": np.mean([float(scores[head, t, : t + 1].var(unbiased=False)) for t in rows]),
            }
            for name, value in truth.items():
                assert found.values[name][place, 0] == pytest.approx(float(value), rel=2e-3, abs=1e-5)
            assert 1 <= found.values["block_rank"][place, 0] <= 11


def test_a_ranking_is_held_against_its_ceiling() -> None:
    rng = np.random.default_rng(1)
    true = rng.standard_normal(2000)
    costs = true[:, None] + 3 * rng.standard_normal((2000, 16))
    found = rank_agreement(true, costs, rng=rng)
    assert found.correlation.value == pytest.approx(0.78, abs=0.03)  # 1 / sqrt(1 + 9 / 16) = 0.80 for Pearson's
    assert found.ceiling == pytest.approx(found.correlation.value, abs=0.03)
    assert found.disattenuated == pytest.approx(1.0, abs=0.04)
    assert found.correlation.low < found.correlation.value < found.correlation.high
    half, ceiling = split_half(rng.standard_normal((2000, 16)), rng=rng)
    assert abs(half) < 0.06
    assert ceiling < 0.35


def test_bad_input_is_one_sentence(small: Any, read: Sequences) -> None:
    with pytest.raises(SoftgapError, match="unknown score 'gradent'"):
        head_scores(small, read, "elu1", names=["gradent"])
    with pytest.raises(SoftgapError, match="at least 1, got 0"):
        head_scores(small, read, "elu1", samples=0)
    assert set(SCORES) >= {"divergence", "gradient+fisher", "integrated"}


def test_the_scores_of_a_sequence_do_not_depend_on_the_ones_before(small: Any, read: Sequences) -> None:
    """Labels are drawn for each sequence alone, so that workers may share the sequences out."""
    fewer = read.scored.clone()
    fewer[0, 3:] = False
    units = [HEADS[:2], HEADS[6:]]
    by_heads, by_units = (
        [score(Sequences(read.ids, scored)) for scored in (read.scored, fewer)]
        for score in (
            lambda sequences: head_scores(small, sequences, "elu1", names=["fisher"]).values["fisher"],
            lambda sequences: unit_scores(small, sequences, [Substitute(resolve("elu1"))], units)[1][0],
        )
    )
    for whole, part in (by_heads, by_units):
        assert np.array_equal(whole[:, 1], part[:, 1])
        assert not np.array_equal(whole[:, 0], part[:, 0])
    assert not np.array_equal(head_scores(small, read, "elu1", names=["fisher"], seed=1).values["fisher"], by_heads[0])
