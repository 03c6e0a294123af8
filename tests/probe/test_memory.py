"""What a recording keeps: a handful of numbers per head and token, and never a query, key, value or cache."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from softgap.attention import Visible
from softgap.probe import Recording, meter, read_ids, record
from support.probe_cases import ids_of, row, tiny_with, written

LAYERS, HEADS, KV_HEADS, D, VOCABULARY = 2, 4, 2, 16, 128
# Three quantities of two mechanisms for every head; a token id, its log-probability and its entropy.
NUMBERS = 3 * 2 * LAYERS * HEADS * 4 + 8 + 4 + 4


def kept(recording: Recording, besides: Any = None) -> int:
    """Bytes of all tensor storages that can be reached from a recording's streams, less those of a cache in use."""
    pending: list[Any] = [recording.streams]
    seen: set[int] = set()
    storages: dict[int, int] = {}
    while pending:
        thing = pending.pop()
        if id(thing) in seen or isinstance(thing, type | types.ModuleType | types.FunctionType):
            continue
        seen.add(id(thing))
        assert not isinstance(thing, torch.nn.Module)
        if isinstance(thing, Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        pending += gc.get_referents(thing)
    for layer in besides.layers if besides is not None else ():
        for tensor in (layer.keys, layer.values):
            storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def bytes_after(model: Any, *lengths: int, **settings: Any) -> int:
    """What is kept of generations of these many tokens."""
    with record(model, **settings) as recording:
        for n in lengths:
            written(model, ids_of(11), n)
    return kept(recording)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_only_numbers_are_kept(model_type: str) -> None:
    model = tiny_with(model_type)
    assert bytes_after(model, 300) == pytest.approx((300 + 10) * NUMBERS, rel=0.05)


def test_every_generation_leaves_its_numbers_and_nothing_else() -> None:
    model = tiny_with("llama")
    one, five = bytes_after(model, 20), bytes_after(model, *[20] * 5)
    assert five == pytest.approx(5 * one, rel=0.01)
    assert one == pytest.approx(30 * NUMBERS, rel=0.05)


def test_every_forward_leaves_its_numbers_and_nothing_else() -> None:
    model = tiny_with("llama")
    with torch.no_grad(), record(model) as recording:
        for seed in range(5):
            model(row(ids_of(40, seed)))
    assert kept(recording) == pytest.approx(5 * 40 * NUMBERS, rel=0.02)


def test_focus_adds_its_three_numbers() -> None:
    model = tiny_with("llama")
    plain, focused = (bytes_after(model, 90, focus=focus) for focus in (False, True))
    assert focused - plain == pytest.approx(100 * 3 * LAYERS * HEADS * 4, rel=0.02)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("block", [1, 32])
def test_what_waits_is_bounded_by_a_block(cache: str | None, block: int) -> None:
    model = tiny_with("llama")
    held: list[int] = []
    with record(model, block=block) as recording:
        # Behind the recording's own hook: within a forward it may hold what the model holds anyway.
        hook = model.register_forward_hook(lambda *call: held.append(kept(recording, besides=call[-1].past_key_values)))
        written(model, ids_of(11), 100, cache_implementation=cache)
        hook.remove()
    step = LAYERS * (2 * HEADS + 2 * KV_HEADS) * D * 4
    # Of elu1 D features and a sum for each column of [v, 1], of uniform one; stacked for all layers, copied once.
    states = 2 * LAYERS * KV_HEADS * (D + 1) * (D + 2) * 4
    for i, size in enumerate(held):
        assert size < (block + 1) * (step + VOCABULARY * 4) + (11 + i) * NUMBERS + states


def test_no_cache_is_kept_alive() -> None:
    model = tiny_with("llama")
    with torch.no_grad(), record(model) as recording:
        output = model(row(ids_of(11)))
        gone = weakref.ref(output.past_key_values)
        del output
        gc.collect()
        assert gone() is None
    assert len(recording.trajectories()) == 1


def test_reading_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_with("llama")
    sizes: list[int] = []
    head = model.lm_head.forward

    def watched(x: Tensor) -> Tensor:
        sizes.append(x.shape[1])
        logits: Tensor = head(x)
        return logits

    monkeypatch.setattr(model.lm_head, "forward", watched)
    read_ids(model, [ids_of(500)])
    assert max(sizes) <= 128
    # Every position once, and the last one with the pass itself.
    assert sum(sizes) == 501


def test_queries_times_keys_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_with("llama")
    monkeypatch.setattr(meter, "POSITIONS", 16)
    sizes: list[int] = []
    rows = Visible.rows

    def spied(self: Visible, start: int, stop: int, *arguments: Any) -> Tensor:
        sizes.append(stop - start)
        return rows(self, start, stop, *arguments)

    monkeypatch.setattr(Visible, "rows", spied)
    read_ids(model, [ids_of(100)])
    assert sizes == []
    # Sets that are described in two ways are compared part by part.
    monkeypatch.setattr(meter, "same_description", lambda *_: False)
    read_ids(model, [ids_of(100)])
    assert max(sizes) == 16
