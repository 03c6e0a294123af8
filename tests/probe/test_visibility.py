"""A model's mask and the visible set that is read from it are the same set, in the cheapest form that is exact."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from softgap.attention import Visible
from softgap.errors import ModelError
from softgap.probe.meter import same_description
from softgap.probe.tap import AttentionCall
from softgap.probe.visibility import VisibleSets, interval_or_mask, seen_by_mask

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def intervals(draw: st.DrawFn) -> tuple[Tensor, int]:
    """What causal queries of a batch see (a window, padding left, right or anywhere) and the place of the first.

    There are keys before and behind them.
    """
    batch, n_queries = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    offset, behind = draw(st.integers(0, 8)), draw(st.integers(0, 4))
    n_keys = offset + n_queries + behind
    window = draw(st.one_of(st.none(), st.integers(1, n_keys + 2)))
    p, j = torch.arange(n_queries)[:, None] + offset, torch.arange(n_keys)
    seen = (j <= p)[None].repeat(batch, 1, 1)
    if window is not None:
        seen &= p - j < window
    for row in seen:
        kind = draw(st.sampled_from(["none", "left", "right", "holes"]))
        amount = draw(st.integers(0, n_keys))
        if kind == "left":
            row[:, :amount] = False
        elif kind == "right":
            row[:, n_keys - amount :] = False
        elif kind == "holes":
            row &= torch.tensor(draw(st.lists(st.booleans(), min_size=n_keys, max_size=n_keys)))
    return seen[:, None], offset


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    """Anything."""
    shape = [draw(st.integers(1, n)) for n in (3, 2, 6, 8)]
    return torch.rand(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31)))) < draw(
        st.sampled_from([0.1, 0.5, 0.9, 1.0])
    )


def rows_of(found: Visible, like: Tensor) -> Tensor:
    batch, heads, n_queries, n_keys = like.shape
    fitted = found.fitted_to(batch, heads, n_queries, n_keys)
    return fitted.rows(0, n_queries, (0, n_keys), like.device).expand_as(like)


@given(interval=intervals())
def test_intervals_with_padding_come_back_as_intervals(interval: tuple[Tensor, int]) -> None:
    seen, offset = interval
    found = interval_or_mask(seen, offset)
    assert torch.equal(rows_of(found, seen), seen)
    assert found.offset == offset
    if bool(seen.any()):
        assert found.mask is None


@given(seen=masks(), offset=st.integers(0, 8))
def test_any_mask_comes_back_as_the_same_set(seen: Tensor, offset: int) -> None:
    assert torch.equal(rows_of(interval_or_mask(seen, offset), seen), seen)


@pytest.mark.parametrize(
    "seen",
    [
        torch.ones(4, 4),  # bidirectional
        torch.block_diag(torch.ones(3, 3).tril(), torch.ones(3, 3).tril()),  # chunked attention
        torch.ones(5, 5).tril() - torch.eye(5).roll(-1, 1).tril(),  # a token hidden from the next
        torch.ones(3, 5).triu(),  # anti-causal
    ],
)
def test_what_is_no_interval_stays_a_mask(seen: Tensor) -> None:
    found = interval_or_mask(seen.bool()[None, None], max(0, seen.shape[1] - seen.shape[0]))
    assert found.mask is not None
    assert torch.equal(found.mask[0, 0], seen.bool())


@given(interval=intervals(), dtype=st.sampled_from(FLOATS), lowest=st.booleans())
def test_float_masks_show_what_is_above_the_lowest_numbers(
    interval: tuple[Tensor, int], dtype: torch.dtype, lowest: bool
) -> None:
    seen, _ = interval
    # Finite biases, however negative, hide nothing.
    bias = torch.randn(seen.shape, generator=torch.Generator().manual_seed(0)) * 50 - 200
    hidden = torch.finfo(dtype).min if lowest else -torch.inf
    mask = torch.where(seen, bias, hidden).to(dtype)
    n_queries, n_keys = seen.shape[2:]
    assert torch.equal(seen_by_mask(mask, n_queries, n_keys), seen)
    # A sum of two masks is hidden too, and keys beyond those that are handed over do not count.
    wider = torch.nn.functional.pad(mask.float() + torch.where(seen, 0.0, hidden), (0, 3)).to(dtype)
    assert torch.equal(seen_by_mask(wider, n_queries, n_keys), seen)


def test_a_mask_of_another_shape_is_refused() -> None:
    for mask in (torch.ones(2, 5).bool(), torch.ones(1, 1, 4, 9).bool(), torch.ones(1, 1, 3, 5).bool()):
        with pytest.raises(ModelError, match=r"must be \[batch, head, 3, 9\] to be read, got \["):
            seen_by_mask(mask, 3, 9)


class Module(nn.Module):
    """An attention module as the registry sees one."""

    def __init__(self, attn: str, is_causal: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=attn)
        self.is_causal = is_causal
        self.training = False
        self.num_key_value_groups = 1


def attention_call(module: nn.Module, n_queries: int, n_keys: int, mask: Tensor | None, batch: int = 1) -> Any:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(batch, 2, n_queries, 4, generator=generator)
    k, v = (torch.randn(batch, 2, n_keys, 4, generator=generator) for _ in range(2))
    return AttentionCall(module, q, k, v, mask, {}, q.transpose(1, 2))


def softmax_over(call: AttentionCall, seen: Tensor) -> Tensor:
    scores = call.query @ call.key.transpose(-1, -2) * call.scale
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1) @ call.value


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 6), (4, 4), (4, 7)])
def test_without_a_mask_the_set_is_what_the_attention_function_uses(
    n_queries: int, n_keys: int, attn: str, is_causal: bool
) -> None:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    module = Module(attn, is_causal)
    call = attention_call(module, n_queries, n_keys, None)
    function = ALL_ATTENTION_FUNCTIONS["sdpa"] if attn == "sdpa" else eager_attention_forward
    output, _ = function(module, call.query, call.key, call.value, None, scaling=call.scale)
    seen = rows_of(VisibleSets().of(call), torch.ones(1, 2, n_queries, n_keys).bool())
    assert torch.allclose(softmax_over(call, seen), output.transpose(1, 2), atol=1e-6)


def test_one_mask_for_all_sequences_serves_a_batch() -> None:
    mask = torch.ones(1, 1, 3, 6).tril(3).bool()
    mask[..., :2] = False
    call = attention_call(Module("sdpa", True), 3, 6, mask, batch=4)
    found = VisibleSets(cached=3).of(call)
    assert found.mask is None
    assert torch.equal(rows_of(found, mask.expand(4, -1, -1, -1)), mask.expand(4, -1, -1, -1))


def test_layers_that_share_a_mask_share_the_work() -> None:
    sets = VisibleSets()
    mask = torch.ones(1, 1, 3, 3).tril().bool()
    call = attention_call(Module("sdpa", True), 3, 3, mask)
    assert sets.of(call) is sets.of(call)
    assert sets.of(attention_call(Module("sdpa", True), 3, 3, mask.clone())) is not sets.of(call)


@st.composite
def descriptions(draw: st.DrawFn) -> Visible:
    """A visible set of 3 queries over 5 keys or 6."""
    valid = draw(st.none() | st.lists(st.booleans(), min_size=5, max_size=6))
    return Visible(
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([None, 2, 4, 5, 9])),
        None if valid is None else torch.tensor([valid]),
    )


@given(a=descriptions(), b=descriptions())
def test_sets_of_the_same_description_are_the_same(a: Visible, b: Visible) -> None:
    if same_description(a, b, 5):
        device = torch.device("cpu")
        assert torch.equal(*torch.broadcast_tensors(*(x.rows(0, 3, (0, 5), device) for x in (a, b))))
    assert same_description(a, a, 5)
