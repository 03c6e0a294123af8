"""A model under a plan, token by token: the compiled step equals the swap, in every dtype, batch and order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from softgap.attention import add_window, resolve
from softgap.attention.tensor_step import TensorMaps
from softgap.errors import ValueInputError
from softgap.intervene.state_cache import cache_bytes
from softgap.linearize import Applied, Mixture, Plan, Readout, Substitute, apply, swap
from softgap.linearize.plan import plan_of
from support.linearize_cases import DOUBLE, SINGLE, apart, with_random_parameters
from support.model_examples import tiny_llama
from support.probe_cases import written

IDS = torch.randint(3, 100, (3, 40), generator=torch.Generator().manual_seed(3))
ALL = [(layer, head) for layer in range(2) for head in range(4)]
# Layer 0 keeps a KV group, layer 1 none.
SOME = ALL[2:]
FITTED = with_random_parameters("fitted", 2, 4, 2, 8, 8)
SINGLE_FITTED = FITTED.with_parameters(**{name: x.float() for name, x in FITTED.parameters.items()})
HYBRID = add_window(SINGLE_FITTED, w=7, sinks=2)
GENERATOR = torch.Generator().manual_seed(0)
READOUT = Readout(torch.randn(2, 4, 8, 8, generator=GENERATOR), torch.randn(2, 4, 8, generator=GENERATOR))
CUTS = [(0, 9), *((t, t + 1) for t in range(9, 20)), (20, 31), *((t, t + 1) for t in range(31, 40))]


def substitutes() -> list[Any]:
    mean = with_random_parameters("constant", 2, 4, 2, 8, 8)
    mixture = Mixture([(ALL[:2] + ALL[6:], HYBRID), (ALL[2:4], resolve("window:w=5,sinks=1")), (ALL[4:6], mean)])
    return [
        pytest.param(Substitute(HYBRID, readout=READOUT), id="hybrid, corrected"),
        pytest.param(Substitute(SINGLE_FITTED), id="fitted"),
        pytest.param(Substitute(resolve("window:w=6,sinks=2")), id="window"),
        pytest.param(mixture.with_readout(READOUT), id="mixture, corrected"),
        pytest.param(Substitute(resolve("elu1+window:w=5,sinks=1")), id="no compiled step"),
    ]


def steps_of(applied: Applied, model: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of prefill, single tokens, more prefill and more single tokens on one cache."""
    cache, parts = applied.cache(), []
    for a, b in CUTS:
        shown = {} if mask is None else {"attention_mask": mask[:, :b]}
        parts.append(model(IDS[:, a:b], past_key_values=cache, use_cache=True, **shown).logits)
    assert cache.get_seq_length() == 40
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("heads", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("chosen", substitutes())
def test_steps_equal_the_swap(chosen: Substitute, heads: Any, padding: int) -> None:
    model = tiny_llama()
    mask = torch.ones_like(IDS)
    mask[1, :padding] = 0
    with torch.no_grad(), swap(model, heads, chosen):
        truth = model(IDS, attention_mask=mask, use_cache=False).logits
    with torch.no_grad(), apply(model, plan_of(model, heads, chosen)) as applied:
        found = steps_of(applied, model, mask if padding else None)
    counted = mask.bool()
    assert apart(found[counted], truth[counted]) < SINGLE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chosen", [x for x in substitutes() if x.id != "no compiled step"])
def test_half_precision_models_take_the_same_steps(chosen: Substitute, dtype: torch.dtype) -> None:
    """What is left is the rounding of the model itself, as without a plan."""
    model: Any = tiny_llama()
    model.to(dtype)
    with torch.no_grad(), swap(model, SOME, chosen):
        truth = model(IDS, use_cache=False).logits
    with torch.no_grad(), apply(model, plan_of(model, SOME, chosen)) as applied:
        found = steps_of(applied, model)
    assert found.dtype == dtype
    assert apart(found, truth) < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("compile_step", [False, "aot_eager"])
def test_float64_and_compiled_steps_equal_the_swap(compile_step: bool | str, padding: int) -> None:
    """Tensor operations, as on other devices: one by one, and as the graph that torch.compile makes of them."""
    model: Any = tiny_llama()
    model.to(torch.float32 if compile_step else torch.float64)
    mixture = Mixture([(ALL[:4], HYBRID), (ALL[4:], add_window(SINGLE_FITTED, w=6, sinks=1, far=3))])
    chosen = mixture.with_readout(READOUT)
    mask = torch.ones_like(IDS)
    mask[1, :padding] = 0
    with torch.no_grad(), swap(model, SOME, chosen):
        truth = model(IDS, attention_mask=mask, use_cache=False).logits
    with torch.no_grad(), apply(model, plan_of(model, SOME, chosen), compile_step=compile_step) as applied:
        found = steps_of(applied, model, mask if padding else None)
        steps = [step for layer in applied._splits.values() for step in layer.maps.values()]
    assert apart(found[mask.bool()], truth[mask.bool()]) < (SINGLE if compile_step else DOUBLE)
    assert steps
    assert all(isinstance(maps, TensorMaps) for maps in steps)


def test_an_unknown_backend_is_one_sentence() -> None:
    model = tiny_llama()
    plan = plan_of(model, SOME, Substitute(HYBRID))
    with (
        pytest.raises(ValueInputError, match="compile_step must be True, False or a backend"),
        apply(model, plan, compile_step="fast"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("chosen", substitutes()[:4])
def test_two_thousand_steps_are_the_swap_in_float64(chosen: Substitute) -> None:
    """Every step to 1e-4, so rounding does not build up in a state."""
    ids = torch.randint(3, 100, (1, 2000), generator=torch.Generator().manual_seed(5))
    model: Any = tiny_llama(max_position_embeddings=2048)
    plan = plan_of(model, SOME, chosen)
    found = []
    with torch.no_grad(), apply(model, plan) as applied:
        cache = applied.cache()
        for t in range(2000):
            found.append(model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits[0, 0])
    with torch.no_grad(), swap(model.double(), SOME, chosen):
        truth = model(ids, use_cache=False).logits[0]
    errors = (torch.stack(found) - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert float(errors.max()) < 1e-4


def test_a_batch_is_its_sequences() -> None:
    model = tiny_llama()
    plan = plan_of(model, SOME, Substitute(HYBRID, readout=READOUT))
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    with torch.no_grad(), apply(model, plan) as applied:
        together = written(model, IDS, 12, attention_mask=mask, past_key_values=applied.cache(), do_sample=False)
        alone = written(model, IDS[:1, 5:], 12, past_key_values=applied.cache(), do_sample=False)
    assert torch.equal(together[0, 5:], alone[0])


def test_two_caches_do_not_mix() -> None:
    model = tiny_llama()
    plan = plan_of(model, ALL, Substitute(HYBRID))
    with torch.no_grad(), apply(model, plan) as applied:
        caches = [applied.cache(), applied.cache()]
        rows = [IDS[:1], IDS[1:2]]
        found: list[list[torch.Tensor]] = [[], []]
        for t, i in itertools.product(range(20), range(2)):
            found[i].append(model(rows[i][:, t : t + 1], past_key_values=caches[i], use_cache=True).logits)
        whole = [model(row[:, :20], use_cache=False).logits for row in rows]
    for steps, truth in zip(found, whole, strict=True):
        assert apart(torch.cat(steps, dim=1), truth) < SINGLE


@pytest.mark.parametrize("chosen", substitutes())
def test_a_plan_foretells_its_bytes_token_by_token(chosen: Substitute) -> None:
    model = tiny_llama(max_position_embeddings=256)
    plan: Plan = plan_of(model, SOME, chosen)
    with torch.no_grad(), apply(model, plan) as applied:
        cache = applied.cache()
        for t in range(40):
            model(IDS[:1, t : t + 1], past_key_values=cache, use_cache=True)
    left = cache_bytes(cache) - plan.memory["states"] - 40 * plan.memory["per_token"]
    # A linear state notes which rows have seen a key, a byte for each of them in each layer.
    assert 0 <= left <= 2


def test_a_layer_that_keeps_nothing_stores_nothing() -> None:
    model = tiny_llama()
    with torch.no_grad(), apply(model, plan_of(model, ALL, Substitute(HYBRID))) as applied:
        cache = applied.cache()
        model(IDS, past_key_values=cache, use_cache=True)
    assert all(layer.keys is None and layer.values is None for layer in cache.layers)
