"""The repair is the ridge regression that it says, on the activations that the swapped and repaired model has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softgap.errors import SoftgapError
from softgap.intervene.substitute import Readout, Substitute
from softgap.linearize import heads_of_layer, swap
from softgap.linearize.output_correction import fit_output_correction, ridge_map
from softgap.linearize.sequences import Sequences
from softgap.probe.tap import AttentionCall, observe_attention
from support.linearize_cases import sharp_llama

HEADS = [(0, 0), (0, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3)]


@pytest.fixture(scope="module")
def small() -> Any:
    return sharp_llama(num_hidden_layers=3)


@pytest.fixture(scope="module")
def read() -> Sequences:
    ids = torch.randint(3, 200, (6, 40), generator=torch.Generator().manual_seed(4))
    return Sequences(ids, torch.ones(6, 39, dtype=torch.bool))


def calls(model: Any, ids: Tensor) -> list[AttentionCall]:
    seen: list[AttentionCall] = []
    with torch.no_grad(), observe_attention(model, seen.append):
        model(ids, use_cache=False)
    return seen


def test_every_map_is_the_regression_on_what_its_layer_sees(small: Any, read: Sequences) -> None:
    found = fit_output_correction(small, read, HEADS, "elu1", ridge=0.1)
    assert found.readout is not None
    own = calls(small, read.ids)
    for layer in range(3):
        # The layers below repaired, this one and those above swapped without: nothing above matters here.
        below = Readout(found.readout.weight.clone(), found.readout.bias.clone())
        below.weight[layer], below.bias[layer] = torch.eye(8), 0
        with swap(small, HEADS, Substitute(found.mechanism, readout=below)):
            seen = calls(small, read.ids)
        for head in [h for number, h in HEADS if number == layer]:
            x, y = seen[layer].output[:, :, head].reshape(-1, 8), own[layer].output[:, :, head].reshape(-1, 8)
            ones = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
            pull = 0.1 * float(x.square().sum(0).mean())
            # As least squares with rows that stand for the penalty.
            rows = torch.cat([torch.eye(8, dtype=x.dtype), torch.zeros(8, 1, dtype=x.dtype)], dim=1) * pull**0.5
            truth = torch.linalg.lstsq(
                torch.cat([ones, rows]), torch.cat([y, torch.eye(8, dtype=x.dtype) * pull**0.5])
            ).solution
            torch.testing.assert_close(found.readout.weight[layer, head].double(), truth[:8].T, atol=2e-4, rtol=1e-3)
            torch.testing.assert_close(found.readout.bias[layer, head].double(), truth[8], atol=2e-4, rtol=1e-3)
    kept = [(1, 0), (0, 3)]
    for layer, head in kept:
        assert torch.equal(found.readout.weight[layer, head], torch.eye(8))


def test_a_repair_brings_outputs_nearer_to_the_original(small: Any) -> None:
    drawn = torch.randint(3, 30, (34, 60), generator=torch.Generator().manual_seed(9))
    fresh, more = drawn[:4], drawn[4:]
    found = fit_output_correction(small, Sequences(more, torch.ones(30, 59, dtype=torch.bool)), HEADS, "elu1")
    with torch.no_grad():
        truth = small(fresh, use_cache=False).logits
        apart = []
        for one in (Substitute(found.mechanism), found):
            with swap(small, HEADS, one):
                apart.append(float((small(fresh, use_cache=False).logits - truth).square().mean()))
    assert apart[1] < 0.9 * apart[0]


def test_a_softmax_substitute_needs_no_repair(small: Any, read: Sequences) -> None:
    found = fit_output_correction(small, read, heads_of_layer(small, 1), "softmax")
    assert found.readout is not None
    torch.testing.assert_close(found.readout.weight, torch.eye(8).expand(3, 4, 8, 8), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.readout.bias, torch.zeros(3, 4, 8), atol=1e-5, rtol=0)


def test_nothing_to_learn_from_leaves_the_identity() -> None:
    weight, bias = ridge_map(
        torch.eye(4, dtype=torch.float64)[None] * 1e-20, torch.zeros(1, 4, 3, dtype=torch.float64), 0.1
    )
    torch.testing.assert_close(weight[0], torch.eye(3))
    assert not bias.any()


def test_bad_input_is_one_sentence(small: Any, read: Sequences) -> None:
    with pytest.raises(SoftgapError, match="ridge must be above 0, got 0"):
        fit_output_correction(small, read, HEADS, "elu1", ridge=0)
    with pytest.raises(SoftgapError, match="heads of layer 0 are 0 to 3, got"):
        fit_output_correction(small, read, [(0, 4)], "elu1")
    with (
        pytest.raises(SoftgapError, match="must be for 3 layers"),
        swap(
            small,
            HEADS,
            Substitute(
                fit_output_correction(small, read, HEADS[:1], "elu1").mechanism, readout=Readout.identity(2, 4, 8)
            ),
        ),
    ):
        pass
