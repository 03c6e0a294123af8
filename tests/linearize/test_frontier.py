"""The frontier and the search for a plan: sets that grow, numbers from unseen text, nothing lost when interrupted."""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softgap.attention import resolve
from softgap.errors import SoftgapError
from softgap.intervals import Interval
from softgap.linearize import (
    Budget,
    Frontier,
    Point,
    Substitute,
    distil_substitute,
    find_plan,
    frontier,
    head_scores,
    heads_of_group,
    load_plan,
    recall_sequences,
    split_sequences,
    swap,
)
from softgap.linearize.candidates import Candidate, largest_candidate
from softgap.linearize.frontier import first_heads, order_units, random_order, units_of
from softgap.linearize.sequences import read_swapped
from softgap.models import load_model
from softgap.report.figures import draw_frontier, draw_plan, save_figure
from support.linearize_cases import sharp_llama
from support.model_examples import byte_tokenizer, save_folder, tiny_llama

TEXT = " ".join(f"Cart {i} carried {i * 7 % 31} crates of apples over the bridge." for i in range(60))


@pytest.fixture(scope="module")
def small() -> Any:
    return sharp_llama(max_position_embeddings=512).float()


@pytest.fixture(scope="module")
def texts(small: Any) -> Any:
    read = split_sequences(small, byte_tokenizer(), [TEXT], length=64)
    return read.part(slice(0, 8)), read.part(slice(8, 16)), recall_sequences(small, byte_tokenizer(), 2, pairs=4)


def test_orders_put_the_cheapest_first_and_keep_groups_together(small: Any) -> None:
    heads = [(layer, head) for layer in range(2) for head in range(4)]
    score = np.array([5.0, 0, 1, 2, 9, 9, -8, -3])
    assert order_units(units_of(small, "heads"), heads, score)[:3] == [((1, 2),), ((1, 3),), ((0, 1),)]
    assert order_units(units_of(small, "groups"), heads, score) == [
        tuple(heads_of_group(small, 1, 1)),
        tuple(heads_of_group(small, 0, 1)),
        tuple(heads_of_group(small, 0, 0)),
        tuple(heads_of_group(small, 1, 0)),
    ]
    drawn = random_order(units_of(small, "heads"), rng=np.random.default_rng(0))
    assert sorted(drawn) == units_of(small, "heads")
    assert first_heads(drawn, 8) == heads


def test_every_point_is_what_a_plain_forward_says(small: Any, texts: Any) -> None:
    fit, held_out, recall_lists = texts
    found = frontier(small, fit, held_out, recall_lists, "elu1", orders=["divergence", "random"], shares=[0.5, 1.0])
    lines = {(p.order, p.mechanism) for p in found.points}
    assert lines == {
        ("divergence", "elu1"), ("divergence", "elu1, repaired"), ("divergence", "constant"), ("random", "elu1"),
        ("divergence", "window:w=2,sinks=2"), ("greedy", "elu1"), ("greedy", "elu1, repaired"),
    }  # fmt: skip
    everything = [(layer, head) for layer in range(2) for head in range(4)]
    with torch.no_grad():
        losses = []
        for heads in ([], everything):
            with swap(small, heads, "elu1") if heads else torch.no_grad():
                logs = small(held_out.ids, use_cache=False).logits[:, :-1].log_softmax(-1)
            losses.append(-logs.gather(-1, held_out.ids[:, 1:, None]).mean())
    for order in ("divergence", "random", "greedy"):
        last = found.curve(order, "elu1")[-1]
        assert (last.units, last.heads, last.share) == (8, 8, 1.0)
        assert last.change["loss"].value == pytest.approx(float(losses[1] - losses[0]), abs=1e-5)
        assert last.change["loss"].low <= last.change["loss"].value <= last.change["loss"].high
    assert set(found.points[0].change) == {"loss", "accuracy", "recall", "whole_answers"}


def test_an_interrupted_frontier_goes_on(
    small: Any, texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit, held_out, _ = texts
    settings: dict[str, Any] = {"orders": ["divergence"], "shares": [0.5, 1.0], "greedy": False, "baselines": False}
    whole = frontier(small, fit, held_out, None, "elu1", **settings)
    seen: list[str] = []

    def stop(stage: str, share: float) -> None:
        seen.append(stage)
        if len(seen) > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        frontier(small, fit, held_out, None, "elu1", folder=tmp_path, progress=stop, **settings)
    done = len(list(tmp_path.glob("*.json")))
    assert 0 < done < 6
    calls: list[Any] = []

    def counted(*given: Any) -> Any:
        calls.append(given)
        return read_swapped(*given)

    monkeypatch.setattr(sys.modules["softgap.linearize.frontier"], "read_swapped", counted)
    again = frontier(small, fit, held_out, None, "elu1", folder=tmp_path, **settings)
    assert again.points == whole.points
    assert len(calls) < 5


def test_frontiers_of_other_text_share_scores_and_nothing_else(
    small: Any, texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit, held_out, _ = texts
    settings: dict[str, Any] = {"orders": ["divergence"], "shares": [0.5], "greedy": False, "baselines": False}
    first = frontier(small, fit, held_out, None, "elu1", folder=tmp_path, **settings)
    scored: list[Any] = []

    def counted(*given: Any, **options: Any) -> Any:
        scored.append(given)
        return head_scores(*given, **options)

    monkeypatch.setattr(sys.modules["softgap.linearize.frontier"], "head_scores", counted)
    other = held_out.part(slice(0, 4))
    second = frontier(small, fit, other, None, "elu1", folder=tmp_path, **settings)
    assert not scored
    assert second.points != first.points
    assert second.points == frontier(small, fit, other, None, "elu1", **settings).points
    assert len(scored) == 1
    frontier(small, held_out, fit, None, "elu1", folder=tmp_path, **settings)
    assert len(scored) == 2, "other text to score on"


def test_a_plan_is_checked_on_text_that_the_search_never_saw(small: Any, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    plan = find_plan(small, tokenizer, [TEXT], "elu1", budget=10.0, by="groups", length=64, recalls=2, folder=tmp_path)
    assert len(plan.heads) == 8
    assert plan.groups == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert plan.layers == (0, 1)
    assert plan.memory["per_token"] == 0
    assert plan.memory["saved_per_token"] == 4 * 2 * 8 * 4
    read = split_sequences(small, tokenizer, [TEXT], length=64)
    unseen = read.part(slice(len(read) - len(read) // 4, None))
    rise = (
        read_swapped(small, unseen, None, plan.heads, plan.substitute).loss
        - read_swapped(small, unseen, None, [], None).loss
    )
    assert plan.expected["loss"].value == pytest.approx(float(rise.mean()), abs=1e-6)
    again = load_plan(plan.save(tmp_path / "plan.json"))
    assert again.expected == plan.expected


def test_tuned_sets_are_those_of_tuning_by_hand(small: Any, texts: Any) -> None:
    fit, held_out, _ = texts
    settings: dict[str, Any] = {"greedy": False, "correct": False, "baselines": False, "distil": 2}
    found = frontier(small, fit, held_out, None, "elu1", orders=["divergence"], shares=[1.0], **settings)
    plain, trained = found.points
    assert (plain.mechanism, trained.mechanism) == ("elu1", "elu1, tuned")
    everything = [(layer, head) for layer in range(2) for head in range(4)]
    by_hand = distil_substitute(small, fit, everything, "elu1", steps=2)
    rise = (
        read_swapped(small, held_out, None, everything, by_hand).loss
        - read_swapped(small, held_out, None, [], None).loss
    )
    assert trained.change["loss"].value == pytest.approx(float(rise.mean()), abs=1e-6)
    assert trained.change["loss"].value != plain.change["loss"].value


def test_a_plan_of_tuned_heads_is_tuned_on_the_half_that_fits(small: Any) -> None:
    tokenizer = byte_tokenizer()
    plan = find_plan(small, tokenizer, [TEXT], "elu1", budget=10.0, length=64, recalls=0, score="divergence", distil=2)
    read = split_sequences(small, tokenizer, [TEXT], length=64)
    by_hand = distil_substitute(small, read.part(slice(0, len(read) // 2)), plan.heads, "elu1", steps=2)
    assert plan.provenance["tune"] == 2
    assert plan.substitute.readout is not None
    assert by_hand.readout is not None
    assert torch.equal(plan.substitute.readout.weight, by_hand.readout.weight)


class Known:
    """Costs that grow with the square of the set; recall is lost from the seventh head on."""

    share = 0.0

    def change(self, candidate: Candidate) -> dict[str, float]:
        n = len(candidate.heads)
        return {"loss": 0.01 * n**2, "recall": -0.02 * max(0, n - 6)}


def largest(budget: float, recall_budget: float | None = None) -> int:
    costs: Any = Known()
    elu1 = Substitute(resolve("elu1"))
    found = largest_candidate(
        costs,
        21,
        lambda n: Candidate(tuple((0, head) for head in range(n)), elu1),
        Budget(budget, recall_budget),
        first="the cheapest of the heads",
        words=str,
        progress=lambda stage, share: None,
    )
    return len(found.heads)


def test_a_plan_of_heads_without_a_state_frees_no_memory(small: Any) -> None:
    settings: dict[str, Any] = {"budget": 10.0, "by": "groups", "length": 64, "recalls": 0, "score": "divergence"}
    kept, freed = (
        find_plan(small, byte_tokenizer(), [TEXT], name, correct=False, **settings) for name in ("top_k:k=3", "elu1")
    )
    assert kept.heads
    assert kept.groups == ()
    assert kept.memory["saved_per_token"] == 0
    assert freed.groups
    assert freed.memory["saved_per_token"] > 0


def test_a_tighter_budget_gives_a_smaller_plan() -> None:
    assert [largest(budget) for budget in (0.01, 0.1, 1.0, 3.99, 9.0)] == [1, 3, 10, 19, 20]
    assert [largest(3.99, recall) for recall in (None, 1.0, 0.1, 0.05, 0.0)] == [19, 19, 11, 8, 6]
    assert largest(0.1, 0.05) == 3


def test_the_budget_that_nothing_meets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = "budget of 0.005 nats per token"
    with pytest.raises(SoftgapError, match=f"nothing meets the {loss}: the cheapest of the heads costs 0.01 already"):
        largest(0.005)
    monkeypatch.setattr(Known, "change", lambda self, heads: {"loss": 0.01, "recall": -0.25})
    recall = "recall budget of 0.1"
    with pytest.raises(SoftgapError, match=f"meets the {recall}: the cheapest of the heads loses 0.25 of recall"):
        largest(1.0, 0.1)
    with pytest.raises(SoftgapError, match=f"the {loss} nor the {recall}: .* costs 0.01 and loses 0.25 of recall"):
        largest(0.005, 0.1)


def test_a_plan_within_a_recall_budget_is_chosen_and_checked_on_different_lists(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, Any]] = []

    def watched(model: Any, read: Any, recall_lists: Any, heads: Any, chosen: Any, workers: Any) -> Any:
        seen.append((len(heads), recall_lists.ids))
        return read_swapped(model, read, recall_lists, heads, chosen, workers)

    scored_on: list[Any] = []

    def scored(*given: Any, recall_lists: Any = None, **settings: Any) -> Any:
        scored_on.append(None if recall_lists is None else recall_lists.ids)
        return head_scores(*given, recall_lists=recall_lists, **settings)

    check, choose, fit = (recall_sequences(small, byte_tokenizer(), 2, seed=seed).ids for seed in range(3))
    monkeypatch.setattr("softgap.linearize.recall.read_swapped", watched)
    monkeypatch.setattr("softgap.linearize.search.head_scores", scored)
    settings: dict[str, Any] = {"budget": 10.0, "length": 64, "score": "divergence", "correct": False, "recalls": 2}
    settings["recall_distance"] = 0
    plan = find_plan(small, byte_tokenizer(), [TEXT], "elu1", recall_budget=0.5, **settings)
    assert (plan.provenance["budget"], plan.provenance["recall_budget"]) == (10.0, 0.5)
    assert torch.equal(scored_on[0], fit)
    *choosing, (_, before), (_, after) = seen
    assert torch.equal(before, after)
    assert torch.equal(before, check)
    assert all(torch.equal(recall_lists, choose) for _, recall_lists in choosing)
    assert (plan.recall["lists"], plan.recall["questions"], plan.recall["decided_on"]) == (2, 24, 2)
    # Every set that was tried was asked, and the plan is the one that both limits allow.
    assert [n for n, _ in choosing] == [0, 1, 5, 7, 8]
    assert len(plan.heads) == 8
    seen.clear()
    free = find_plan(small, byte_tokenizer(), [TEXT], "elu1", **settings)
    assert free.provenance["recall_budget"] is None
    assert scored_on[1] is None
    assert all(torch.equal(recall_lists, check) for _, recall_lists in seen), "nothing is decided by recall"
    assert [n for n, _ in seen] == [0, 8]
    assert free.expected == plan.expected


def point(order: str, units: int, loss: float, recall: float) -> Point:
    change = {"loss": Interval(loss, loss, loss), "recall": Interval(recall, recall, recall)}
    return Point(order, "elu1", units, units, units / 8, change)


def test_the_largest_point_within_both_budgets() -> None:
    points = [
        point("gradient", 2, 0.02, -0.01), point("gradient", 4, 0.08, -0.3), point("gradient", 8, 0.9, -0.5),
        point("random", 2, 0.05, 0.0), point("random", 4, 0.09, -0.1),
    ]  # fmt: skip
    found = Frontier("heads", {"loss": 3.0, "recall": 0.9}, tuple(points))
    assert found.largest(0.1) is points[1]  # as large as the last, and cheaper
    assert found.largest(0.1, 0.2) is points[4]
    assert found.largest(0.1, 0.2, order="gradient") is points[0]
    assert found.largest(1.0) is points[2]
    with pytest.raises(SoftgapError, match=r"the recall budget of 0: the smallest set \(2 heads\) loses 0.01 of"):
        found.largest(0.1, 0.0, order="gradient")
    with pytest.raises(SoftgapError, match=r"budget of 0.01 nats per token: the smallest set \(2 heads\) costs 0.02"):
        found.largest(0.01)
    with pytest.raises(SoftgapError, match="this frontier has gradient: elu1, random: elu1, got greedy: any"):
        found.largest(0.1, order="greedy")
    blind = Frontier("heads", {}, (Point("random", "elu1", 1, 1, 0.1, {"loss": Interval(0.1, 0.1, 0.1)}),))
    with pytest.raises(SoftgapError, match="a recall budget needs recall lists, and none were asked"):
        blind.largest(1.0, 0.1)


def _scores(model: Any, fit: Any) -> Any:
    scores = head_scores(model, fit, "elu1", names=["divergence"])
    return scores.heads, scores.mean("divergence")


def test_pictures_are_drawn(small: Any, texts: Any, tmp_path: Path) -> None:
    fit, held_out, recall_lists = texts
    found = frontier(
        small,
        fit,
        held_out,
        recall_lists,
        "uniform",
        by="groups",
        orders=["divergence"],
        shares=[0.5],
        greedy=False,
        correct=False,
    )
    assert save_figure(draw_frontier(found), tmp_path / "frontier.svg").read_text().count("constant") == 1
    assert found.settings["equal_window"] is None, "one key is twice what a mean keeps"
    settings: dict[str, Any] = {"orders": ["divergence"], "shares": [0.5], "greedy": False, "correct": False}
    found = frontier(small, fit, held_out, None, "elu1", by="groups", **settings)
    window = found.curve("divergence", "window:w=2,sinks=2")[0]
    units = order_units(units_of(small, "groups"), *_scores(small, fit))
    heads = first_heads(units, 2)
    swapped, original = (
        read_swapped(small, held_out, None, x, Substitute(resolve("window:w=2,sinks=2"))).loss for x in (heads, ())
    )
    assert window.change["loss"].value == pytest.approx(float((swapped - original).mean()), abs=1e-6)
    drawn = save_figure(draw_frontier(found), tmp_path / "window.svg").read_text()
    assert drawn.count("divergence: window:w=2,sinks=2 (equal bytes)") == 1
    assert [p.mechanism for p in frontier(small, fit, held_out, None, "window:w=2,sinks=2", **settings).points] == [
        "window:w=2,sinks=2",
        "constant",
    ]
    plan = find_plan(
        small, byte_tokenizer(), [TEXT], "uniform", budget=9.0, length=64, recalls=0, score="divergence", correct=False
    )
    drawn = save_figure(draw_plan(plan, [4, 4], [2, 2], [0, 1]), tmp_path / "plan.svg").read_text()
    assert "8 of 8 heads without softmax, 4 KV groups freed" in drawn


def test_bad_input_is_one_sentence(small: Any, texts: Any) -> None:
    fit, held_out, _ = texts
    with pytest.raises(SoftgapError, match="budget must be above 0 nats per token and finite, got -1"):
        find_plan(small, byte_tokenizer(), [TEXT], "elu1", budget=-1)
    with pytest.raises(SoftgapError, match="recall budget must be between 0 and 1, the largest drop, got 5"):
        find_plan(small, byte_tokenizer(), [TEXT], "elu1", budget=1, recall_budget=5)
    with pytest.raises(SoftgapError, match="a recall budget needs recall lists, got recalls=0"):
        find_plan(small, byte_tokenizer(), [TEXT], "elu1", budget=1, recall_budget=0.1, recalls=0, length=64)
    with pytest.raises(SoftgapError, match="at least 2048 tokens"):
        find_plan(small, byte_tokenizer(), ["short"], "elu1", budget=1)
    with pytest.raises(SoftgapError, match="needs the output correction, got distil=3 and correct=False"):
        find_plan(small, byte_tokenizer(), [TEXT], "elu1", budget=1, distil=3, correct=False)
    with pytest.raises(SoftgapError, match="unknown score"):
        find_plan(small, byte_tokenizer(), [TEXT], "elu1", budget=1, score="luck")
    with pytest.raises(SoftgapError, match="by must be 'heads' or 'groups', got 'layers'"):
        frontier(small, fit, held_out, None, "elu1", by="layers")
    with pytest.raises(SoftgapError, match="an order is a score"):
        frontier(small, fit, held_out, None, "elu1", orders=["luck"])
    with pytest.raises(SoftgapError, match="shares must be above 0"):
        frontier(small, fit, held_out, None, "elu1", shares=[0.0])
    with pytest.raises(SoftgapError, match="unknown engine"):
        frontier(small, fit, held_out, None, "elu1", engine="spark")


def deadly_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whatever kills the worker that unpickles it; workers do not import from the current folder."""
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    return importlib.import_module("deadly")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_cluster_with_a_worker_that_dies_measures_the_same_frontier(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder(tmp_path / "tiny", tiny_llama(max_position_embeddings=512))
    model, tokenizer = load_model(folder, progress=False)
    marker = Path.cwd() / "marker" / "died"
    deadly = deadly_module(tmp_path, monkeypatch)
    sequences = split_sequences(model, tokenizer, [TEXT], length=64)
    fit, held_out = sequences.part(slice(0, 3)), sequences.part(slice(3, 6))
    lists, fit_lists = (recall_sequences(model, tokenizer, 2, pairs=3, seed=seed) for seed in (1, 2))
    options: dict[str, Any] = {"orders": ["gradient", "random"], "shares": [0.5, 1.0], "distil": 2, "by": "groups"}
    options["fit_recall_lists"] = fit_lists
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        local = frontier(model, fit, held_out, lists, "elu1", **options)
        spread = frontier(
            model, fit, held_out, lists, deadly.Substitute(resolve("elu1")), engine="ray", address=cluster,
            folder=tmp_path / "points", **options,
        )  # fmt: skip
        again = frontier(model, fit, held_out, lists, "elu1", folder=tmp_path / "points", **options)
    finally:
        torch.set_num_threads(threads)
    assert int(marker.read_text()) != os.getpid()
    assert {point.order for point in local.points} == {"gradient", "random", "greedy"}
    kinds = {point.mechanism for point in local.points}
    assert {"elu1", "elu1, repaired", "elu1, tuned", "constant"} < kinds
    assert spread.points == again.points == local.points
    assert json.dumps(spread.settings) == json.dumps(local.settings)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("several", [False, True], ids=["one mechanism", "several mechanisms"])
def test_a_cluster_finds_the_same_plan_though_a_worker_dies(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    folder = save_folder(tmp_path / "tiny", sharp_llama(max_position_embeddings=512).float())
    model, tokenizer = load_model(folder, progress=False)
    marker = Path.cwd() / "marker" / "died"
    deadly = deadly_module(tmp_path, monkeypatch)
    options: dict[str, Any] = {"length": 64, "recalls": 3, "recall_budget": 1.0, "tokens": 1024, "budget": 9.0}
    options |= {"distil": 1} if not several else {"correct": False}
    mechanisms: Any = ["elu1", "window:w=8,sinks=2"] if several else deadly.Substitute(resolve("elu1"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        local = find_plan(model, tokenizer, [TEXT], mechanisms if several else "elu1", **options)
        spread = find_plan(
            model, tokenizer, [TEXT], mechanisms, engine="ray", address=cluster, folder=tmp_path / "steps", **options
        )
        resumed = find_plan(model, tokenizer, [TEXT], mechanisms, folder=tmp_path / "steps", **options)
    finally:
        torch.set_num_threads(threads)
    assert several or int(marker.read_text()) != os.getpid()
    saved = []
    for plan, name in ((local, "local"), (spread, "spread"), (resumed, "resumed")):
        folder = plan.save(tmp_path / name / "plan.json").parent
        saved.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert saved[1] == saved[0]
    assert saved[2] == saved[0]
    assert local.heads
    assert local.recall
    assert local.baselines is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_cluster_with_a_worker_that_dies_gives_the_same_scores(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder(tmp_path / "tiny", tiny_llama(max_position_embeddings=512))
    model, tokenizer = load_model(folder, progress=False)
    marker = Path.cwd() / "marker" / "died"
    deadly = deadly_module(tmp_path, monkeypatch)
    sequences = split_sequences(model, tokenizer, [TEXT], length=64).part(slice(0, 4))
    lists = recall_sequences(model, tokenizer, 2, pairs=3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        local = head_scores(model, sequences, "elu1", recall_lists=lists, swapped=[(1, 2)])
        spread = head_scores(
            model, sequences, deadly.Substitute(resolve("elu1")), recall_lists=lists, swapped=[(1, 2)], engine="ray",
            address=cluster,
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    assert int(marker.read_text()) != os.getpid()
    assert spread.heads == local.heads
    for name, values in local.values.items():
        assert values.tobytes() == spread.values[name].tobytes(), name


def test_pickled_tasks_on_another_copy_of_the_model_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What workers do, without a cluster: every task is pickled, ends out of turn, and has a model of its own."""
    ran: list[str] = []
    pickle = pytest.importorskip("ray.cloudpickle")

    def backwards(function: Any, tasks: Any, *, name: str, **_: Any) -> Any:
        for key in reversed(list(tasks)):
            ran.append(name)
            yield key, function(*pickle.loads(pickle.dumps(tasks[key]())))

    monkeypatch.setattr("softgap.cluster.run_tasks", backwards)
    monkeypatch.setattr("softgap.cluster.require_ray", lambda: None)
    monkeypatch.setattr("softgap.cluster._joined", lambda *_, **__: nullcontext())
    folder = save_folder(tmp_path / "tiny", sharp_llama(max_position_embeddings=512).float())
    model, tokenizer = load_model(folder, progress=False)
    options: dict[str, Any] = {"length": 64, "recalls": 3, "recall_budget": 1.0, "tokens": 1024, "budget": 9.0}
    mechanisms = ["elu1", "window:w=8,sinks=2"]
    plans = [
        find_plan(model, tokenizer, [TEXT], mechanisms, correct=False, engine=engine, **options)
        for engine in ("local", "ray")
    ]
    assert set(ran) == {"sequence", "batch"}
    saved = [plan.save(tmp_path / str(i) / "plan.json").read_bytes() for i, plan in enumerate(plans)]
    assert saved[0] == saved[1]
    sequences = split_sequences(model, tokenizer, [TEXT], length=64).part(slice(0, 4))
    lists = recall_sequences(model, tokenizer, 2, pairs=3)
    local, spread = (
        head_scores(model, sequences, "elu1", recall_lists=lists, swapped=[(1, 2)], engine=engine)
        for engine in ("local", "ray")
    )
    assert local.heads == spread.heads
    for name, values in local.values.items():
        assert values.tobytes() == spread.values[name].tobytes(), name
