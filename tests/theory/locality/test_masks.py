"""Masks of near and far keys against loops in float64, and what hiding them from one head does to a model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from softgap.attention import Visible
from softgap.errors import ValueInputError
from softgap.probe.layout import attention_layers
from softgap.probe.tap import AttentionCall, replace_attention
from softgap.theory.locality.masking import MaskedText
from softgap.theory.locality.masks import KINDS, Mask, local_shares, masked_rows, removed_share
from support.model_examples import tiny_llama
from support.tiny_models import tiny_model

IDS = [int(x) for x in np.random.default_rng(0).integers(3, 120, 48)]


def call_of(heads: int = 4, kv_heads: int = 2, time: int = 13, dim: int = 8, **options: Any) -> AttentionCall:
    rng = np.random.default_rng(1)
    q, k, v = (
        torch.tensor(rng.standard_normal((1, h, time, dim)), dtype=torch.float32) for h in (heads, kv_heads, kv_heads)
    )
    return AttentionCall(nn.Identity(), 2 * q, k, v, None, {"scaling": 0.7, **options}, q.transpose(1, 2).contiguous())


def loops(
    call: AttentionCall, mask: Mask, head: int, t: int, window: int | None = None
) -> tuple[np.ndarray, float, float]:
    """Output of one query under a mask, the removed mass, and the share of mass on the last w keys: key by key."""
    group = call.query.shape[1] // call.key.shape[1]
    q, k, v = (
        call.query[0, head, t].double(),
        call.key[0, head // group].double(),
        call.value[0, head // group].double(),
    )
    seen = [j for j in range(t + 1) if window is None or t - j < window]
    score = {j: math.exp(call.scale * float(q @ k[j])) for j in seen}
    sink = call.options.get("s_aux")
    total = sum(score.values()) + (0.0 if sink is None else math.exp(float(sink[head])))
    a = {j: x / total for j, x in score.items()}
    local = [j for j in seen if 1 <= t - j <= mask.width and j >= 1]
    far = sorted((j for j in seen if t - j > mask.width and j >= 1), key=lambda j: -a[j])
    removed = dict.fromkeys(seen, 0.0)
    if mask.kind == "local":
        removed |= dict.fromkeys(local, 1.0)
    elif mask.kind == "heaviest":
        removed |= dict.fromkeys(far[: mask.width], 1.0)
    else:
        left = sum(a[j] for j in local)
        for j in far:
            removed[j] = min(1.0, left / a[j])
            left -= removed[j] * a[j]
    mass = float(sum(a[j] * removed[j] for j in seen))
    output = sum(a[j] * (1 - removed[j]) * v[j].numpy() for j in seen) / (1 - mass)
    near, rest = sum(a[j] for j in local), sum(a[j] for j in far)
    return np.asarray(output), mass, near / (near + rest) if near + rest else 0.0


@pytest.mark.parametrize("kind", ["local", "equal mass", "heaviest"])
@pytest.mark.parametrize("width", [1, 3, 20])
@pytest.mark.parametrize("options", [{}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_a_mask_equals_its_loops(kind: Any, width: int, options: dict[str, Any]) -> None:
    call, mask = call_of(**options), Mask(kind, width)
    rows = masked_rows(call, Visible(), mask, start=4)
    for head in range(4):
        expected = [loops(call, mask, head, t) for t in range(4, 13)]
        np.testing.assert_allclose(rows.output[:, head].numpy(), [o for o, _, _ in expected], atol=2e-5)
        assert float(rows.removed[head]) == pytest.approx(np.mean([m for _, m, _ in expected]), abs=1e-6)


def test_shares_equal_their_loops_under_a_window_of_the_model_too() -> None:
    call = call_of()
    for window in (None, 6):
        share, even = local_shares(call, Visible(window=window), (1, 3), start=5)
        for i, width in enumerate((1, 3)):
            for head in range(4):
                expected = [loops(call, Mask("local", width), head, t, window)[2] for t in range(5, 13)]
                assert float(share[i, head]) == pytest.approx(np.mean(expected), abs=1e-6)
    # Of t - 1 keys that are neither sink nor self, w are the last ones.
    _, even = local_shares(call, Visible(), (3,), start=5)
    assert float(even[0, 0]) == pytest.approx(np.mean([3 / (t - 1) for t in range(5, 13)]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(8, 24), st.floats(0.1, 8.0))
def test_equal_mass_is_equal_wherever_far_keys_have_it(seed: int, width: int, keys: int, gain: float) -> None:
    a = torch.tensor(np.random.default_rng(seed).standard_normal((2, 3, keys)) * gain).softmax(dim=-1)
    place = torch.arange(keys)
    local = ((place >= keys - 1 - width) & (place < keys - 1) & (place > 0)).expand(1, 3, keys)
    far = ((place < keys - 1 - width) & (place > 0)).expand(1, 3, keys)
    near, rest = (a * local).sum(-1), (a * far).sum(-1)
    share = removed_share(a, local, far, Mask("equal mass", width))
    torch.testing.assert_close((a * share).sum(-1), torch.minimum(near, rest), atol=1e-9, rtol=1e-9)
    assert float((share * ~far).abs().max()) == 0
    for kind in KINDS:
        taken = removed_share(a, local, far, Mask(kind, width), torch.Generator().manual_seed(seed))
        assert float(taken.min()) >= 0
        assert float(taken.max()) <= 1
        assert not bool((taken * ~(local | far)).any())
    random = removed_share(a, local, far, Mask("random", width), torch.Generator().manual_seed(seed))
    assert int(random[0, 0].sum()) == min(width, int(far[0, 0].sum()))


def test_hiding_keys_from_one_head_equals_a_whole_forward_without_them() -> None:
    """The model's own loss with that head's output replaced by loops, nothing reused."""
    model = tiny_llama()
    text = MaskedText(model, IDS, start=24, widths=(1, 4))
    layer = attention_layers(model)[1]
    mask = Mask("local", 4)
    rises = text.hide_from_heads(layer, [0, 3], [mask, Mask("equal mass", 4)])
    ids = torch.tensor([IDS])

    def loss() -> float:
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0, 24:]
        return float(nn.functional.cross_entropy(logits.double(), ids[0, 25:]))

    def replaced(call: AttentionCall) -> torch.Tensor:
        if call.module is not layer.module:
            return call.output
        output = call.output.clone()
        for t in range(24, call.query.shape[2]):
            output[0, t, 3] = torch.tensor(loops(call, mask, 3, t)[0]).to(output)
        return output

    before = loss()
    assert text.loss == pytest.approx(before, abs=1e-5)
    with replace_attention(model, replaced):
        assert float(rises.rise[0, 1]) == pytest.approx(loss() - before, abs=2e-5)
    assert abs(loss() - before) < 1e-12
    assert float(rises.removed[0, 1]) == pytest.approx(float(rises.removed[1, 1]), abs=1e-6)
    assert [tuple(share.shape) for share in text.shares] == [(2, 2, 4)] * 2


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt2"])
def test_models_of_other_kinds_are_masked_alike_with_and_without_reuse(kind: str) -> None:
    model = tiny_model(kind).eval()
    text = MaskedText(model, IDS, start=24)
    layer = attention_layers(model)[0]
    masks = [Mask("local", 2), Mask("heaviest", 2)]
    assert text._reuse
    reused = text.hide_from_heads(layer, [0, 1], masks).rise
    text._reuse = False
    torch.testing.assert_close(text.hide_from_heads(layer, [0, 1], masks).rise, reused, atol=1e-5, rtol=0)
    assert float(reused.abs().max()) > 0


def test_all_heads_at_once_is_every_head_at_once() -> None:
    model = tiny_llama()
    text = MaskedText(model, IDS, start=24)
    rise, removed = text.hide_from_all(Mask("local", 30))
    assert 0 < removed < 1
    assert rise != 0
    assert text.hide_from_all(Mask("random", 2)) == text.hide_from_all(Mask("random", 2))


def test_a_width_of_no_keys_is_refused() -> None:
    with pytest.raises(ValueInputError, match="a width must be at least 1 key, got 0; 4 is usual"):
        Mask("local", 0)
