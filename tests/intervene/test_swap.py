"""Swapped heads compute what a reference in float64 says, and the others do not move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import softgap
from softgap.attention import attend
from softgap.attention.feature_maps import orthogonal_projection, seeded_affine
from softgap.errors import SoftgapError
from softgap.linearize import heads_of_group, heads_of_layer, swap
from softgap.probe.layout import attention_layers
from softgap.probe.tap import AttentionCall, observe_attention
from softgap.probe.visibility import VisibleSets
from support.linearize_cases import (
    DOUBLE,
    IDS,
    PAIR,
    SINGLE,
    WINDOW,
    apart,
    calls_of,
    edited,
    logits_of,
    ready_for,
    some_heads,
    with_random_parameters,
)
from support.probe_cases import tiny_with, written
from support.tiny_models import attention_names, causal_types, goes_through_registry, tiny_model

TYPES = """llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 gpt2 gpt_neox opt olmo2 granite cohere2 deepseek_v3 gpt_oss
smollm3 mixtral starcoder2 bert bart doge qwen3_next jamba""".split()  # noqa: SIM905
# Without identity: its signed sum may nearly cancel, and then any rounding decides.
MECHANISMS = """softmax elu1 relu hedgehog favor:features=16 taylor2 polynomial cosformer inline decay:lam=0.8 uniform
top_k:k=3 relu2_scores zero self_token previous_token first_token""".split()  # noqa: SIM905
# Its attention is more than softmax of the scores: softcaps, sinks.
NOT_PLAIN = {"gemma2", "gpt_oss", "doge"}
UNBUILT = {"gemma3n", "gemma4_assistant", "reformer"}  # as in test_support.py
REFUSED = {
    "blt": "its positions are not tokens",
    "diffllama": "shares its module",
    "git": "computes attention in code of its own",
    "hrm_text": "shares its module",
}
# Products of experts exist in float32 and below only.
EXPERTS = {"deepseek_v3", "gpt_oss", "mixtral", "qwen3_next", "jamba"}


@pytest.mark.parametrize("model_type", TYPES)
def test_a_swapped_forward_is_the_edited_one(model_type: str) -> None:
    for attn in attention_names(model_type):
        model = tiny_with(model_type, attn=attn, dtype=torch.float32 if model_type in EXPERTS else torch.float64)
        heads = some_heads(model)
        with edited(model, [(heads, ready_for(model, "elu1"))]):
            truth = logits_of(model, IDS)
        with swap(model, heads, "elu1"):
            found = logits_of(model, IDS)
        assert apart(found, truth) < (SINGLE if model_type in EXPERTS else DOUBLE)
        assert apart(found, logits_of(model, IDS)) > 1e-3


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_every_mechanism_is_the_edited_one(model_type: str, name: str) -> None:
    model = tiny_with(model_type, dtype=torch.float64, **WINDOW.get(model_type, {}))
    with edited(model, [(PAIR, ready_for(model, name))]):
        truth = logits_of(model, IDS)
    with swap(model, PAIR, name):
        assert apart(logits_of(model, IDS), truth) < DOUBLE


def test_the_mean_of_values_without_the_seam() -> None:
    """The reference for one mechanism by hooks on the projections alone: head 2 of layer 1 averages its values."""
    model = tiny_with("llama", dtype=torch.float64)
    attention: Any = model.model.layers[1].self_attn
    values: list[Tensor] = []

    def edit(module: Any, given: tuple[Tensor]) -> tuple[Tensor]:
        (heads,) = given
        of_group = values[0][..., 16:32]  # head 2 belongs to the second KV head, 16 numbers each
        count = torch.arange(1, heads.shape[1] + 1)[:, None]
        return (torch.cat([heads[..., :32], of_group.cumsum(dim=1) / count, heads[..., 48:]], dim=-1),)

    hooks = [
        attention.v_proj.register_forward_hook(lambda module, given, output: values.append(output)),
        attention.o_proj.register_forward_pre_hook(edit),
    ]
    truth = logits_of(model, IDS)
    for hook in hooks:
        hook.remove()
    with swap(model, [(1, 2)], "uniform"):
        assert apart(logits_of(model, IDS), truth) < 1e-12


@pytest.mark.parametrize("heads", [[(0, 2)], PAIR, [(1, 2), (0, 0), (1, 0)], [(0, h) for h in range(4)]], ids=str)
@pytest.mark.parametrize(
    ("name", "key_maps"), [("fitted", 2), ("fitted", 4), ("fitted", 1), ("profile", None), ("constant", None)]
)
def test_parameters_reach_their_layer_and_head(name: str, key_maps: int | None, heads: list[tuple[int, int]]) -> None:
    model = tiny_with("llama", dtype=torch.float64)
    mechanism = with_random_parameters(name, 2, 4, 2, 16, 16, key_maps=key_maps)
    with edited(model, [(heads, mechanism)]):
        truth = logits_of(model, IDS)
    with swap(model, heads, mechanism):
        assert apart(logits_of(model, IDS), truth) < DOUBLE


def test_parameters_by_layer_follow_the_calls_where_layers_have_numbers_of_their_own() -> None:
    model = tiny_with("qwen3_next")
    layers = attention_layers(model)
    assert [(layer.number, layer.index) for layer in layers] == [(1, 0), (3, 1)]
    mechanism = with_random_parameters("constant", 2, layers[0].heads, layers[0].kv_heads, 16, 16)
    with edited(model, [([(3, 1)], mechanism)]):
        truth = logits_of(model, IDS)
    with swap(model, [(3, 1)], mechanism):
        assert apart(logits_of(model, IDS), truth) < SINGLE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["elu1", "softmax", "decay", "uniform"])
def test_at_the_seam_some_heads_are_the_mechanisms_and_the_others_keep_their_bits(
    name: str, dtype: torch.dtype
) -> None:
    model = tiny_with("llama", dtype=dtype)
    plain = calls_of(model, IDS)
    with swap(model, PAIR, name):
        swapped = calls_of(model, IDS)
    for layer, heads in ((0, [1]), (1, [0, 1, 3])):
        call = swapped[layer]
        found = attend(
            ready_for(model, name), call.query, call.key, call.value, visible=VisibleSets().of(call), scale=call.scale
        )
        expected = found.output.transpose(1, 2).to(dtype)
        assert call.output.dtype == dtype
        # The same sums in another order: at most one unit in the last place of the model's dtype.
        assert apart(call.output[:, :, heads], expected[:, :, heads]) <= torch.finfo(dtype).eps
        own = [head for head in range(4) if head not in heads]
        if layer == 0:
            assert torch.equal(call.output[:, :, own], plain[0].output[:, :, own])
    # The last layer alone: what comes to it is the same, so that its other heads must be.
    with swap(model, PAIR[1:], name):
        last = calls_of(model, IDS)[1]
    assert torch.equal(last.output[:, :, 2], plain[1].output[:, :, 2])
    if name != "softmax":
        assert all(apart(last.output[:, :, h], plain[1].output[:, :, h]) > 0.01 for h in (0, 1, 3))


@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in NOT_PLAIN])
def test_softmax_is_no_change(model_type: str) -> None:
    for attn in attention_names(model_type):
        model = tiny_with(model_type, attn=attn)
        everything = [head for layer in attention_layers(model) for head in heads_of_layer(model, layer.number)]
        plain = logits_of(model, IDS)
        with swap(model, everything, "softmax"):
            assert apart(logits_of(model, IDS), plain) < SINGLE
            tokens = written(model, IDS, 6)
        assert torch.equal(tokens, written(model, IDS, 6))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # gpt_bigcode
@pytest.mark.parametrize("model_type", causal_types())
def test_softmax_is_no_change_at_the_seam_of_any_type(model_type: str) -> None:
    if model_type in UNBUILT or not goes_through_registry(model_type):
        pytest.skip("not built, or outside the registry")
    model = tiny_model(model_type, attn=attention_names(model_type)[-1])
    if model_type in REFUSED:
        with pytest.raises(SoftgapError, match=REFUSED[model_type]):
            heads_of_layer(model, 0)
        return
    # One layer at a time, so that nothing adds up.
    for layer in attention_layers(model):
        with swap(model, heads_of_layer(model, layer.number), "softmax"):
            swapped = calls_of(model, IDS)[layer.index]
        own = calls_of(model, IDS)[layer.index]
        if any(own.options.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
            continue
        assert apart(swapped.output, own.output) < SINGLE


def test_nested_swaps_and_where_they_meet() -> None:
    model = tiny_with("llama", dtype=torch.float64)
    outer, inner = [(0, 1), (1, 0), (1, 2)], [(1, 2), (0, 3)]
    first, second = ready_for(model, "uniform"), ready_for(model, "taylor2")
    with edited(model, [(outer, first), (inner, second)]):
        truth = logits_of(model, IDS)
    with edited(model, [(outer, first)]):
        truth_outside = logits_of(model, IDS)
    with swap(model, outer, "uniform"):
        with swap(model, inner, "taylor2"):
            assert apart(logits_of(model, IDS), truth) < DOUBLE
        assert apart(logits_of(model, IDS), truth_outside) < DOUBLE


def test_whole_layers_and_groups() -> None:
    model = tiny_with("llama")
    assert heads_of_layer(model, 1) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert heads_of_group(model, 1, 1) == [(1, 2), (1, 3)]
    assert softgap.linearize.swap is swap
    plain = calls_of(model, IDS)[1]
    with swap(model, heads_of_group(model, 1, 0), "zero"):
        found = calls_of(model, IDS)[1]
    assert torch.count_nonzero(found.output[:, :, :2]) == 0
    assert torch.equal(found.output[:, :, 2:], plain.output[:, :, 2:])


def test_the_arithmetic_is_float32_under_autocast() -> None:
    model = tiny_with("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16), swap(model, PAIR, "elu1"):
        call = calls_of(model, IDS)[0]
    assert (call.query.dtype, call.value.dtype, call.output.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    found = attend("elu1", call.query, call.key, call.value, scale=call.scale).output.transpose(1, 2)
    # Rounded once, at the end, nearly every number is the same; rounded on the way, every other one is.
    same = call.output[:, :, 1] == found[:, :, 1].to(torch.bfloat16)
    assert float(same.float().mean()) > 0.98


def test_seeded_maps_first_used_in_inference_mode_serve_gradients() -> None:
    """A generation in inference mode fills the caches; a later backward pass must be able to use them."""
    for make in (lambda: (orthogonal_projection(6, 4, 987),), lambda: seeded_affine(4, 987)):
        with torch.inference_mode():
            make()
        for matrix in make():
            x = torch.ones(matrix.shape[-1], dtype=torch.float64, requires_grad=True)
            (matrix * x).sum().backward()
            assert x.grad is not None


@pytest.mark.parametrize(
    "name", ["softmax", "elu1", "uniform", "top_k:k=3", "taylor2", "relu", "hedgehog", "favor", "decay"]
)
def test_gradients_pass_through(name: str) -> None:
    model = tiny_with("gpt2", dtype=torch.float64)  # its norms, unlike Llama's, do not compute in float32
    embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
    direction = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        found: Tensor = model(inputs_embeds=x, use_cache=False).logits.logsumexp(dim=-1).sum()
        return found

    with swap(model, PAIR, name):
        (gradient,) = torch.autograd.grad(loss(embedded), embedded)
        step = 1e-6
        with torch.no_grad():
            rise = loss(embedded + step * direction) - loss(embedded - step * direction)
    assert float((gradient * direction).sum()) == pytest.approx(float(rise) / (2 * step), rel=1e-5)
    if name == "softmax":
        (own,) = torch.autograd.grad(loss(embedded), embedded)
        assert apart(gradient, own) < DOUBLE


def test_a_mask_per_head_is_cut_to_the_swapped_heads() -> None:
    model = tiny_with("llama", dtype=torch.float64)
    seen = torch.ones(13, 13, dtype=torch.bool).tril()
    by_head = torch.stack([seen & (torch.arange(13) != head + 1) for head in range(4)])[None]
    by_head = by_head | torch.eye(13, dtype=torch.bool)
    with edited(model, [(PAIR, ready_for(model, "elu1"))]):
        truth = logits_of(model, IDS, attention_mask=by_head)
    with swap(model, PAIR, "elu1"):
        assert apart(logits_of(model, IDS, attention_mask=by_head), truth) < DOUBLE


def test_a_part_of_the_model_called_on_its_own() -> None:
    model = tiny_with("llama")
    with swap(model, PAIR, "decay"), torch.no_grad():
        whole = model(IDS, output_hidden_states=True).hidden_states[-1]
        cache = model.model(IDS[:, :9]).past_key_values
        part = model.model(IDS[:, 9:], past_key_values=cache).last_hidden_state
    assert apart(part, whole[:, 9:]) < SINGLE


def test_a_listener_sees_what_the_model_passes_on_wherever_it_stands() -> None:
    model = tiny_with("llama")
    around: list[AttentionCall] = []
    inside: list[AttentionCall] = []
    with (
        observe_attention(model, around.append),
        swap(model, [(0, 2)], "zero"),
        observe_attention(model, inside.append),
    ):
        logits_of(model, IDS)
    for call in (around[0], inside[0]):
        assert torch.count_nonzero(call.output[:, :, 2]) == 0
        assert torch.count_nonzero(call.output[:, :, 1]) > 0


@pytest.mark.parametrize("name", ["window:w=3,sinks=2", "elu1+window:w=3,sinks=2", "razor:w=3,sinks=2"])
@pytest.mark.parametrize(("family", "settings"), [("mistral", {"sliding_window": 5}), ("gemma3", {})])
def test_sinks_are_the_same_where_the_cache_of_a_layer_forgets(family: str, settings: Any, name: str) -> None:
    """A sliding-window layer's cache hands over its last keys only; the first of them are no sinks."""
    model = tiny_with(family, **settings).double()
    ids = torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(3))
    heads = [(layer.number, head) for layer in attention_layers(model) for head in range(layer.heads)]
    with torch.no_grad(), swap(model, heads, name):
        truth = model(ids, use_cache=False).logits
        cache, steps = None, []
        for part in ids.split([9, 1, 1, 12, 1, 16], dim=1):
            step = model(part, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            steps.append(step.logits)
    assert apart(torch.cat(steps, dim=1), truth) < DOUBLE
