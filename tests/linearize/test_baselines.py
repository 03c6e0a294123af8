"""What else a plan's memory buys: every row is a plain swap, bytes are equal, nothing is lost when interrupted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softgap.attention import resolve
from softgap.attention.memory import equal_window
from softgap.checkpoints import Checkpoints
from softgap.errors import SoftgapError
from softgap.intervals import Interval, interval_of
from softgap.linearize import Plan, Readout, Substitute, find_plan, load_plan, recall_sequences, split_sequences, swap
from softgap.linearize import baselines as module
from softgap.linearize.baselines import (
    Baseline,
    Baselines,
    evaluate_baselines,
    group_bytes,
    sequences_by_length,
    window_of_equal_memory,
)
from softgap.linearize.frontier import units_of
from softgap.linearize.impact import mean_outputs
from softgap.linearize.plan import memory_of
from softgap.linearize.sequences import read_swapped, read_under
from softgap.models.tokens import token_ids
from softgap.report.documents import plan_document
from support.linearize_cases import sharp_llama, with_random_parameters
from support.model_examples import byte_tokenizer

TEXT = " ".join(f"Cart {i} carried {i * 7 % 31} crates of apples over the bridge." for i in range(60))
GROUPS = ((0, 0), (0, 1), (1, 2), (1, 3))  # one KV group of each layer
READOUT = Readout(1.2 * torch.eye(8).expand(2, 4, 8, 8).clone(), torch.full((2, 4, 8), 0.1))
NAMES = ["plan", "plan without output correction", "window alone", "sinks + window", "constant", "random groups"]


@pytest.fixture(scope="module")
def small() -> Any:
    return sharp_llama(max_position_embeddings=512).float()


@pytest.fixture(scope="module")
def texts(small: Any) -> Any:
    read = split_sequences(small, byte_tokenizer(), [TEXT], length=64)
    long = split_sequences(small, byte_tokenizer(), [TEXT], length=256)
    return read.part(slice(0, 8)), {64: read.part(slice(8, 16)), 256: long.part(slice(-4, None))}


def evaluate(small: Any, texts: Any, chosen: Substitute, heads: Any = GROUPS, **settings: Any) -> Baselines:
    fit, by_length = texts
    lists = settings.pop("lists", None)
    return evaluate_baselines(
        small, [(heads, chosen)], by_length, lists, fit=fit, units=units_of(small, "groups"), **settings
    )


def by_hand(small: Any, texts: Any, length: int, heads: Any, chosen: Any) -> np.ndarray:
    """Rise in loss of every text."""
    sequences = texts[1][length]
    swapped, original = (read_swapped(small, sequences, None, which, chosen) for which in (heads, ()))
    rise: np.ndarray = swapped.loss - original.loss
    return rise


def test_every_row_is_what_a_plain_swap_costs(small: Any, texts: Any) -> None:
    lists = recall_sequences(small, byte_tokenizer(), 3, pairs=4)
    chosen = Substitute(resolve("elu1+window:w=10,sinks=2"), readout=READOUT)
    found = evaluate(small, texts, chosen, lists=lists)
    assert [row.name for row in found.rows] == NAMES
    # elu1 keeps 8 x 9 numbers, 4.5 keys' worth, and the exact keys 12.
    substitutes = {
        "plan": chosen,
        "plan without output correction": Substitute(chosen.mechanism),
        "window alone": Substitute(resolve("window:w=16,sinks=0")),
        "sinks + window": Substitute(resolve("window:w=12,sinks=4")),
        "constant": Substitute(mean_outputs(small, texts[0])),
    }
    for name, each in substitutes.items():
        row = found.row(name)
        assert set(row.loss) == {64, 256}
        for length, interval in row.loss.items():
            values = by_hand(small, texts, length, GROUPS, each)
            assert interval == interval_of(values, rng=np.random.default_rng(0))
        recall = (
            read_swapped(small, None, lists, GROUPS, each).recall - read_swapped(small, None, lists, [], None).recall
        )
        assert row.recall is not None
        assert row.recall.value == pytest.approx(float(recall.mean()))
    assert (found.lists, found.texts) == (3, {64: 8, 256: 4})


def test_rows_have_equal_bytes_and_say_so(small: Any, texts: Any) -> None:
    chosen = Substitute(resolve("elu1+window:w=10,sinks=2"), readout=READOUT)
    found = evaluate(small, texts, chosen)
    plan = found.row("plan").bytes_per_group
    assert plan == 4 * (12 * 16 + 8 * 9) == memory_of(small, [(0, 0)], chosen)["states"]
    for name in ("plan without output correction", "random groups"):
        assert found.row(name).bytes_per_group == plan
    for name in ("window alone", "sinks + window"):
        assert found.row(name).bytes_per_group == 4 * 16 * 16
        assert abs(found.row(name).bytes_per_group / plan - 1) < 0.05
    assert found.row("constant").bytes_per_group == 0
    for name in ("elu1", "hedgehog+window:w=10,sinks=2", "razor:w=20,sinks=4"):
        window = window_of_equal_memory(small, resolve(name))
        assert window is not None
        assert window.label == equal_window(name, 8)
    # A map for every query head keeps a state for each of them, and the window is as much larger.
    one, each = (with_random_parameters("fitted", 2, 4, key_heads, 8, 8) for key_heads in (2, 4))
    assert group_bytes(small, each) == 2 * group_bytes(small, one)
    sizes = [window_of_equal_memory(small, mechanism) for mechanism in (one, each)]
    assert [str(size) for size in sizes] == ["Mechanism(window: w=2, sinks=1)", "Mechanism(window: w=4, sinks=3)"]


def test_the_plan_is_compared_with_the_better_window_text_by_text(small: Any, texts: Any) -> None:
    chosen = Substitute(resolve("elu1+window:w=10,sinks=2"), readout=READOUT)
    found = evaluate(small, texts, chosen)
    for length in (64, 256):
        rises = {
            name: by_hand(small, texts, length, GROUPS, Substitute(resolve(window)))
            for name, window in (("window alone", "window:w=16,sinks=0"), ("sinks + window", "window:w=12,sinks=4"))
        }
        best = min(rises, key=lambda name: float(rises[name].mean()))
        own = by_hand(small, texts, length, GROUPS, chosen)
        assert found.best_window[length] == best
        paired = interval_of(own - rises[best], rng=np.random.default_rng(0))
        assert found.difference[length].value == pytest.approx(paired.value, abs=1e-9)
        assert found.difference[length].low == pytest.approx(paired.low, abs=1e-9)


def test_random_groups_are_as_many_and_seeded(small: Any, texts: Any) -> None:
    units = units_of(small, "groups")
    bare = [(GROUPS, Substitute(resolve("elu1")))]
    draws = module._draw_units(bare, units, np.random.default_rng(4))
    assert len(draws) == 3
    for ((heads, _),) in draws:
        assert sum(set(unit) <= set(heads) for unit in units) == 2
        assert len(heads) == 4
    assert len({tuple(draw[0][0]) for draw in draws}) > 1
    others = [module._draw_units(bare, units, np.random.default_rng(seed)) for seed in (4, 5)]
    assert others[0] == draws != others[1]
    # The draws take turns with the texts.
    rises = [by_hand(small, texts, 64, draw[0][0], draw[0][1]) for draw in draws]
    values = np.array([rises[text % 3][text] for text in range(8)])
    found = evaluate(small, texts, Substitute(resolve("elu1")), seed=4)
    interval = interval_of(values, rng=np.random.default_rng(4))
    assert found.row("random groups").loss[64].value == pytest.approx(interval.value, abs=1e-6)
    assert found.row("random groups").loss[64].high == pytest.approx(interval.high, abs=1e-6)
    # Of all groups there is one choice only.
    everything = [head for unit in units for head in unit]
    whole = evaluate(small, texts, Substitute(resolve("elu1")), heads=everything)
    assert whole.row("random groups").loss == whole.row("plan").loss
    single = evaluate_baselines(small, bare, texts[1], None, fit=texts[0], units=units_of(small, "heads"))
    assert single.rows[-1].name == "random heads"


def test_what_has_no_window_of_equal_memory_is_compared_with_none(small: Any, texts: Any) -> None:
    for name, size in (("top_k:k=3", math.inf), ("zero", 0.0)):
        found = evaluate(small, texts, Substitute(resolve(name)))
        assert [row.name for row in found.rows] == ["plan", "constant", "random groups"]
        assert found.rows[0].bytes_per_group == size
        assert (found.difference, found.verdict()) == ({}, "")
        assert "No window has the same memory" in found.notes()[0]
        assert Baselines.from_json(json.loads(json.dumps(found.to_json()))) == found
    # One key is twice the memory of a mean, so that windows have rows and no verdict.
    found = evaluate(small, texts, Substitute(resolve("uniform")))
    assert found.row("sinks + window").bytes_per_group > 1.5 * found.rows[0].bytes_per_group
    assert not found.difference


def test_several_kinds_at_once(small: Any, texts: Any) -> None:
    """Each part has a window of its own memory; swapped one after the other or together is the same."""
    parts = [(GROUPS[:2], Substitute(resolve("elu1"))), (GROUPS[2:], Substitute(resolve("window:w=6,sinks=2")))]
    fit, by_length = texts
    found = evaluate_baselines(small, parts, by_length, None, fit=fit, units=units_of(small, "groups"))
    assert found.row("plan").substitute == "elu1, window:w=6,sinks=2"
    assert found.row("sinks + window").substitute == "window:w=2,sinks=2, window:w=4,sinks=4"
    assert found.row("plan").bytes_per_group == (4 * 72 + 4 * 8 * 16) / 2
    reading = read_under(small, by_length[64], None, parts)
    with swap(small, *parts[0]), swap(small, *parts[1]):
        assert np.array_equal(reading.loss, read_swapped(small, by_length[64], None, [], None).loss)


def test_lengths_that_cannot_be_evaluated_are_named(small: Any) -> None:
    ids = list(token_ids(byte_tokenizer(), [TEXT]))[:400]
    texts, left_out = sequences_by_length(small, ids, [64, 512, 2048, 128], 100)
    assert {length: len(sequences) for length, sequences in texts.items()} == {64: 3, 128: 3}
    assert texts[64].ids.shape == (3, 64)
    assert texts[64].ids[0].tolist() == ids[:64]
    assert texts[64].ids[-1].tolist() == ids[320:384]
    assert left_out == {
        512: "the text that the search never saw has 400 tokens",
        2048: "the model's context has 512 tokens",
    }


def test_an_interrupted_evaluation_goes_on(
    small: Any, texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Substitute(resolve("elu1"), readout=READOUT)
    whole = evaluate(small, texts, chosen)
    told: list[float] = []

    def stop(stage: str, share: float) -> None:
        told.append(share)
        if "constant" in stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(small, texts, chosen, checkpoints=Checkpoints(tmp_path, {}), progress=stop)
    done = len(list(tmp_path.glob("*.json")))
    assert done == 2 * 5, "the model, and four rows before the constant"
    assert told == sorted(told)
    calls: list[Any] = []

    def counted(*given: Any) -> Any:
        calls.append(given)
        return read_under(*given)

    monkeypatch.setattr(module, "read_under", counted)
    assert evaluate(small, texts, chosen, checkpoints=Checkpoints(tmp_path, {})) == whole
    assert len(calls) == 2 * 4, "the constant, and three draws of a third of the texts each"
    # Other numbers are other work.
    other = replace(chosen, readout=Readout(READOUT.weight * 2, READOUT.bias))
    evaluate(small, texts, other, checkpoints=Checkpoints(tmp_path, {}))
    assert len(calls) == 2 * 4 + 2


def table_of(plan: float, window: float, low: float, high: float) -> Baselines:
    rows = (
        Baseline("plan", "elu1", 4160.0, {512: Interval(plan, plan, plan)}),
        Baseline("sinks + window", "window:w=60,sinks=4", 4096.0, {512: Interval(window, window, window)}),
    )
    difference = {512: Interval(plan - window, low, high)}
    return Baselines(
        rows, {512: 4}, 0, {512: "sinks + window"}, difference, {8192: "the model's context has 512 tokens"}
    )


def test_a_better_window_is_said_first() -> None:
    assert table_of(0.097, 0.042, 0.04, 0.07).verdict() == (
        "A sliding window with sinks costs less at the same memory: +0.042 nats per token instead of +0.097 at 512 "
        "tokens (plan minus window +0.055 (+0.040 to +0.070))."
    )
    unsure = table_of(0.097, 0.09, -0.01, 0.02).verdict()
    assert unsure.startswith("A sliding window with sinks costs no more than the plan at the same memory: +0.090")
    better = table_of(0.03, 0.09, -0.07, -0.05)
    assert better.verdict() == ""
    assert better.notes() == [
        "Loss of the plan minus that of the better window, paired by text: -0.060 (-0.070 to -0.050) at 512 tokens.",
        "Loss is measured on sequences that the search never saw (4 of 512 tokens).",
        "Not evaluated at 8,192 tokens: the model's context has 512 tokens.",
    ]
    plan = Plan(
        "tiny", "", ((0, 0),), (), (), Substitute(resolve("elu1")), memory={}, baselines=table_of(0.2, 0.1, 0, 1)
    )
    plan = replace(plan, memory=dict.fromkeys(("per_token", "per_token_original", "states", "parameters"), 1.0))
    document = plan_document(plan, [4], [2], [0])
    assert document.verdict.startswith("A sliding window with sinks costs")
    assert document.tables[0].rows[1][0] == "sinks + window (window:w=60,sinks=4)"


def test_a_search_attaches_the_baselines(small: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"budget": 10.0, "by": "groups", "length": 64, "recalls": 2, "score": "divergence"}
    told: list[float] = []
    plan = find_plan(
        small,
        byte_tokenizer(),
        [TEXT],
        "elu1",
        folder=tmp_path,
        progress=lambda _, share: told.append(share),
        **settings,
    )
    found = plan.baselines
    assert found is not None
    assert [row.name for row in found.rows] == NAMES
    # At the length of the search the texts and lists are those that the plan was checked on.
    assert found.row("plan").loss[64].value == pytest.approx(plan.expected["loss"].value, abs=1e-9)
    assert found.row("plan").recall == plan.expected["recall"]
    assert found.lists == plan.recall["lists"] == 2
    assert set(found.texts) == {64, 512}
    assert set(found.left_out) == {2048, 8192}
    assert told == sorted(told)
    assert max(told) <= 1
    # Sequences of every length begin where the search ended.
    ids = token_ids(byte_tokenizer(), [TEXT])
    whole = split_sequences(small, byte_tokenizer(), [TEXT], length=64)
    begin = (len(whole) - len(whole) // 4) * 64
    assert found.texts[512] == (len(ids) - begin) // 512
    again = load_plan(plan.save(tmp_path / "plan.json"))
    assert again.baselines == found
    without = find_plan(small, byte_tokenizer(), [TEXT], "elu1", baselines=False, **settings)
    assert without.baselines is None
    assert (without.heads, without.expected) == (plan.heads, plan.expected)
    assert load_plan(without.save(tmp_path / "without.json")).baselines is None


def test_text_that_is_thinned_out_is_unseen_too() -> None:
    """The sequences of a search may lie apart; the unseen text begins with the first one that checks."""
    from softgap.linearize.search import _unseen_tokens

    assert list(_unseen_tokens(range(1000), 4, 100)) == list(range(900, 1000))
    assert _unseen_tokens(range(1000), 8, 100)[0] == 800


def test_damaged_baselines_are_refused(small: Any, tmp_path: Path) -> None:
    plan = Plan("tiny", "", ((0, 0),), (), (), Substitute(resolve("elu1")), baselines=table_of(0.2, 0.1, 0.05, 0.15))
    path = plan.save(tmp_path / "plan.json")
    document = json.loads(path.read_text())
    assert load_plan(path).baselines == plan.baselines
    for key, value in (("rows", []), ("difference", {"64": 3}), ("texts", {"512": 4, "64": 2}), ("best_window", {})):
        path.write_text(json.dumps({**document, "baselines": {**document["baselines"], key: value}}))
        with pytest.raises(SoftgapError, match="is no plan of softgap"):
            load_plan(path)
    del document["baselines"]
    path.write_text(json.dumps(document))
    assert load_plan(path).baselines is None, "files of version 0.1"
