"""Allocations: the path is the best there is for its bytes, budgets are kept, and a plan stands beside pure ones."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from softgap.attention import ExactSet, resolve
from softgap.attention.memory import kept_numbers, trade_for_far_keys
from softgap.errors import SoftgapError
from softgap.linearize import Mixture, Substitute, allocation, find_plan, head_scores, load_plan, split_sequences
from softgap.linearize.allocation import (
    SOFTMAX,
    Menu,
    calibrated_options,
    cheapest_path,
    choose_allocation,
    default_options,
    larger_rank,
    original_cache_bytes,
)
from softgap.linearize.candidates import CandidateCosts
from softgap.linearize.frontier import Budget, units_of
from softgap.linearize.plan import cache_bytes_at, kind_of
from softgap.linearize.scores import unit_scores
from support.linearize_cases import sharp_llama
from support.model_examples import byte_tokenizer
from support.probe_cases import tiny_with

TEXT = " ".join(f"Cart {i} carried {i * 7 % 31} crates of apples over the bridge." for i in range(60))
FULL = 100.0
SEVERAL = ["window:w=3,sinks=1", "window:w=12,sinks=2", "elu1"]


@pytest.fixture(scope="module")
def small() -> Any:
    return sharp_llama(max_position_embeddings=512).float()


@given(
    st.lists(st.lists(st.floats(-1, 3), min_size=3, max_size=3), min_size=1, max_size=3),
    st.lists(st.sampled_from([0.0, 5.0, 20.0, 60.0, 100.0]), min_size=3, max_size=3),
)
def test_no_allocation_lies_below_the_path(columns: list[list[float]], kept: list[float]) -> None:
    """Every step minimises score + lambda x bytes over all allocations, lambda being what the step costs per byte."""
    scores, sizes = np.array(columns).T, np.array(kept)
    path = cheapest_path(scores, sizes, FULL)

    def totals(choice: Any) -> tuple[float, float]:
        swapped = [(option, unit) for unit, option in enumerate(choice) if option != SOFTMAX]
        bytes_kept = sum(sizes[option] for option, _ in swapped) + FULL * (len(choice) - len(swapped))
        return sum(scores[option, unit] for option, unit in swapped), bytes_kept

    # An option that keeps as much as softmax saves nothing and is never taken.
    smaller = [SOFTMAX, *(option for option in range(3) if sizes[option] < FULL)]
    every = [totals(choice) for choice in itertools.product(smaller, repeat=len(columns))]
    for before, after in itertools.pairwise(path):
        (score, size), (next_score, next_size) = totals(before), totals(after)
        assert next_size < size
        assert (before != after).sum() == 1
        price = (next_score - score) / (size - next_size)
        assert all(a + price * b >= next_score + price * next_size - 1e-9 for a, b in every)
    assert totals(path[-1])[1] == min(size for _, size in every)


def test_one_pass_scores_every_option_as_its_own(small: Any) -> None:
    """With one head per unit they are the scores of that mechanism alone; a unit's slope is that of its heads."""
    text = split_sequences(small, byte_tokenizer(), [TEXT], length=64, tokens=192)
    options = [Substitute(resolve(name)) for name in SEVERAL]
    slopes, curvature = unit_scores(small, text, options, units_of(small, "heads"), samples=2, seed=5)
    for number, option in enumerate(options):
        alone = head_scores(small, text, option, names=["gradient", "fisher"], samples=2, seed=5)
        assert np.allclose(slopes[number], alone.values["gradient"], rtol=1e-4, atol=1e-7)
        assert np.allclose(curvature[number], alone.values["fisher"], rtol=1e-4, atol=1e-7)
    together, joint = unit_scores(small, text, options, units_of(small, "groups"), samples=2, seed=5)
    assert np.allclose(together, slopes.reshape(3, -1, 2, len(text)).sum(axis=2), atol=1e-7)
    apart = curvature.reshape(3, -1, 2, len(text)).sum(axis=2)
    assert (joint <= 2 * apart + 1e-9).all()
    assert not np.allclose(joint, apart, rtol=1e-3)


def test_a_byte_budget_is_kept_and_the_best_kind_taken(small: Any, tmp_path: Path) -> None:
    whole = original_cache_bytes(small, 256)
    plan = find_plan(
        small, byte_tokenizer(), [TEXT], SEVERAL, budget_bytes=0.6 * whole, context=256, length=64, recalls=0
    )
    assert isinstance(plan.substitute, Mixture)
    assert 0 < cache_bytes_at(plan.memory, 256) <= 0.6 * whole
    assert cache_bytes_at(plan.memory, 256, original=True) == whole
    rises = plan.provenance["rise_by_kind"]
    assert set(rises) == {"mixed", "window", "elu1"}
    assert rises[plan.provenance["chosen"]] == min(rises.values())
    assert plan.provenance["score"] == "fisher"
    assert "instead of" in plan.cache_words()
    assert load_plan(plan.save(tmp_path / "plan.json")).cache_words() == plan.cache_words()
    assert plan.baselines is not None
    assert {"only window", "only elu1", "sinks + window", "random groups"} <= {row.name for row in plan.baselines.rows}


def test_groups_that_miss_softmax_most_can_keep_it(small: Any) -> None:
    menu = Menu.of(small, [Substitute(resolve(name)) for name in SEVERAL], 256)
    scores = np.arange(1.0, 1 + len(menu.units)) * np.array([[3.0], [2.0], [1.0]])
    free = menu.allocations(scores)
    for kept in range(len(menu.units) + 1):
        spared = menu.allocations(scores, kept=kept)
        swapped = {unit for choice in spared.path for unit in np.flatnonzero(choice != SOFTMAX).tolist()}
        assert swapped == set(range(len(menu.units) - kept))
        last = [spared.path[-1][unit] for unit in sorted(swapped)]
        assert last == [free.path[-1][unit] for unit in sorted(swapped)]


def test_a_byte_budget_spares_groups_where_recall_is_lost_without_them(small: Any) -> None:
    menu = Menu.of(small, [Substitute(resolve(name)) for name in SEVERAL], 256)
    # The last group looks cheap with one option alone.
    rising = np.arange(1.0, 1 + len(menu.units))
    scores = np.stack([3 * rising, 2 * rising, 0.5 - 0.1 * rising])
    needed = menu.units[-1][0]

    class Costs:
        """Recall is lost by what was tried before any group was spared."""

        def __init__(self) -> None:
            self.lossy: list[Any] = []

        def change(self, candidate: Any) -> dict[str, float]:
            if not allocation.KEPT:
                self.lossy.append(candidate.key)
            lost = -0.5 if candidate.key in self.lossy else 0.0
            return {"loss": 0.01 * len(candidate.heads), "recall": lost, "recall_low": lost}

    budget = menu.original_bytes * 0.8
    settings: Any = (Costs(), menu, scores, Budget(None, 0.05), budget, lambda stage, share: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocation, "KEPT", ())
        with pytest.raises(SoftgapError, match="nothing meets the recall budget"):
            choose_allocation(*settings)
        patch.setattr(allocation, "KEPT", (1, 2))
        found, about = choose_allocation(*settings)
    assert needed not in found.heads
    assert found.heads
    assert about["chosen"].endswith(", softmax in 1 groups")
    assert about["rise_by_kind"][about["chosen"]] == 0.01 * len(found.heads)


def test_a_loss_budget_saves_more_bytes_when_it_is_larger(small: Any) -> None:
    settings: dict[str, Any] = {"length": 64, "recalls": 0, "baselines": False, "context": 256, "correct": False}
    sizes = []
    for budget in (0.02, 3.0):
        plan = find_plan(small, byte_tokenizer(), [TEXT], SEVERAL, budget=budget, **settings)
        sizes.append(cache_bytes_at(plan.memory, 256))
    assert sizes[1] < sizes[0] < original_cache_bytes(small, 256)


def test_the_default_options_need_no_calibration(small: Any) -> None:
    text = split_sequences(small, byte_tokenizer(), [TEXT], length=256)
    options = default_options(small, text)
    # A window of 256 keys cannot be judged by sequences of 256; half as many keys can.
    windows = ["window:w=12,sinks=4", "window:w=60,sinks=4", "window:w=124,sinks=4"]
    far = ["window:w=22,sinks=4,far=30", "window:w=47,sinks=4,far=62"]
    assert [option.mechanism.label for option in options] == ["constant", *windows, *far]
    menu = Menu.of(small, options)
    assert menu.kinds == ["constant", *["window"] * 3, *["window with far keys"] * 2]
    assert menu.sizes[4] <= menu.sizes[2]
    assert menu.sizes[5] <= menu.sizes[3]
    plan = find_plan(small, byte_tokenizer(), [TEXT], budget=3.0, length=128, recalls=0, baselines=False)
    assert set(plan.kinds().values()) <= {"constant", "window"}


def test_windows_have_the_sinks_that_the_calibration_chose(small: Any) -> None:
    calibrated = {name: resolve(name) for name in ("constant", "elu1", "hybrid:w=30,sinks=9")}
    constant, elu1, hybrid = calibrated.values()
    options = calibrated_options(small, {"constant": constant, "fitted": elu1, "hybrid": hybrid}.__getitem__, 256)
    exact: dict[str, list[ExactSet]] = {"window": [], "hybrid": []}
    for option in options:
        if kind_of(option.mechanism) in exact:
            exact[kind_of(option.mechanism)].append(ExactSet.of(option.mechanism.options))
    assert [kept.sinks for kept in exact["window"]] == [min(9, (kept.size - kept.far) // 2) for kept in exact["window"]]
    assert max(kept.sinks for kept in exact["window"]) == 9
    assert {kept.sinks for kept in exact["hybrid"]} == {9}


@given(st.integers(3, 300), st.sampled_from([8, 64, 128]))
def test_far_keys_are_traded_for_recent_ones_at_no_more_memory(recent: int, dim: int) -> None:
    window = resolve(f"window:w={recent},sinks=4")
    try:
        traded = trade_for_far_keys(window, dim)
    except SoftgapError:
        assert recent <= 5
        return
    assert traded.options["far"] == recent // 2
    assert kept_numbers(traded, dim) <= kept_numbers(window, dim)
    longer = traded.configure(w=traded.options["w"] + 1)
    assert kept_numbers(longer, dim) > kept_numbers(window, dim)


@given(st.permutations(range(8)), st.permutations(range(8)))
def test_the_larger_rank_keeps_what_either_score_misses(one: list[int], other: list[int]) -> None:
    first, second = np.array([one]) * 0.1, np.array([other]) * 1.0
    both = larger_rank(first, second)
    assert (both >= first).all()
    assert both.max() == first.max()
    # What one score ranks last is at the top of the combined one.
    assert both[0, first.argmax()] == both[0, second.argmax()] == first.max()
    # Only ranks of the second score count.
    assert (larger_rank(first, second**3) == both).all()


def test_layers_with_a_cache_of_their_own_bound_are_left_alone() -> None:
    model = tiny_with("gemma3")
    growing = {unit[0][0] for unit in Menu.of(model, [Substitute(resolve("elu1"))]).units}
    kinds = model.config.get_text_config().layer_types
    assert growing == {i for i, kind in enumerate(kinds) if kind == "full_attention"}


def test_what_no_search_can_do_is_one_sentence(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str, mechanisms: Any = SEVERAL, **settings: Any) -> None:
        with pytest.raises(SoftgapError, match=message):
            find_plan(small, byte_tokenizer(), [TEXT], mechanisms, length=64, recalls=0, baselines=False, **settings)

    refused("nothing meets the byte budget of 10: the least that these mechanisms keep is", budget_bytes=10)
    refused("allows already; give a smaller one", budget_bytes=1e9)
    with monkeypatch.context() as patched:
        patched.setattr("softgap.linearize.search.score_options", lambda *args: pytest.fail("scored before the check"))
        refused("nothing meets the byte budget of 10", budget_bytes=10)
    refused("the byte budget must be at least 0", budget_bytes=-1)
    refused("a byte budget needs several mechanisms", "elu1", budget_bytes=1000)
    refused("chosen for whole KV groups", by="heads", budget=1)
    refused("ranked by the Fisher curvature of KV groups, got 'divergence'", score="divergence", budget=1)
    refused("keeps every key", ["top_k:k=3", "elu1"], budget=1)
    monkeypatch.setattr(CandidateCosts, "change", lambda self, candidate: {"loss": 0.5})
    half = 0.5 * original_cache_bytes(small, 256)
    refused("the cheapest allocation of .* bytes costs 0.5 already", budget_bytes=half, context=256, budget=0.1)
    refused("context must be at least 1", budget=1, context=0)
