"""The frontier and the search for a plan: sets that grow, numbers from unseen text, nothing lost when interrupted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from linearize_cases import sharp_llama
from model_examples import byte_tokenizer
from softgap.errors import SoftgapError
from softgap.linearize import find_plan, frontier, heads_of_group, load_plan, lookups, passages_of, swap
from softgap.linearize.orders import ordered, random_order, taken, units_of
from softgap.linearize.search import _largest
from softgap.linearize.together import read_swapped
from softgap.report.linearize_figure import draw_frontier, draw_plan
from softgap.report.pictures import save_figure

TEXT = " ".join(f"Cart {i} carried {i * 7 % 31} crates of apples over the bridge." for i in range(60))


@pytest.fixture(scope="module")
def small() -> Any:
    return sharp_llama(max_position_embeddings=512).float()


@pytest.fixture(scope="module")
def texts(small: Any) -> Any:
    read = passages_of(small, byte_tokenizer(), [TEXT], length=64)
    return read.part(slice(0, 8)), read.part(slice(8, 16)), lookups(small, byte_tokenizer(), 2, pairs=4)


def test_orders_put_the_cheapest_first_and_keep_groups_together(small: Any) -> None:
    heads = [(layer, head) for layer in range(2) for head in range(4)]
    score = np.array([5.0, 0, 1, 2, 9, 9, -8, -3])
    assert ordered(units_of(small, "heads"), heads, score)[:3] == [((1, 2),), ((1, 3),), ((0, 1),)]
    assert ordered(units_of(small, "groups"), heads, score) == [
        tuple(heads_of_group(small, 1, 1)),
        tuple(heads_of_group(small, 0, 1)),
        tuple(heads_of_group(small, 0, 0)),
        tuple(heads_of_group(small, 1, 0)),
    ]
    drawn = random_order(units_of(small, "heads"), rng=np.random.default_rng(0))
    assert sorted(drawn) == units_of(small, "heads")
    assert taken(drawn, 8) == heads


def test_every_point_is_what_a_plain_forward_says(small: Any, texts: Any) -> None:
    fit, held_out, asked = texts
    found = frontier(small, fit, held_out, asked, "elu1", orders=["divergence", "random"], shares=[0.5, 1.0])
    lines = {(p.order, p.mechanism) for p in found.points}
    assert lines == {
        ("divergence", "elu1"), ("divergence", "elu1, repaired"), ("divergence", "mean_ablation"), ("random", "elu1"),
        ("greedy", "elu1"), ("greedy", "elu1, repaired"),
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
    assert set(found.points[0].change) == {"loss", "accuracy", "recall"}


def test_an_interrupted_frontier_goes_on(
    small: Any, texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit, held_out, _ = texts
    settings: dict[str, Any] = {"orders": ["divergence"], "shares": [0.5, 1.0], "greedy": False, "ablation": False}
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


def test_a_plan_is_checked_on_text_that_the_search_never_saw(small: Any, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    plan = find_plan(small, tokenizer, [TEXT], "elu1", budget=10.0, by="groups", length=64, recalls=2, folder=tmp_path)
    assert len(plan.heads) == 8
    assert plan.groups == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert plan.layers == (0, 1)
    assert plan.memory["per_token"] == 0
    assert plan.memory["saved_per_token"] == 4 * 2 * 8 * 4
    read = passages_of(small, tokenizer, [TEXT], length=64)
    unseen = read.part(slice(len(read) - len(read) // 4, None))
    rise = (
        read_swapped(small, unseen, None, plan.heads, plan.substitute).loss
        - read_swapped(small, unseen, None, [], None).loss
    )
    assert plan.expected["loss"].value == pytest.approx(float(rise.mean()), abs=1e-6)
    again = load_plan(plan.save(tmp_path / "plan.json"))
    assert again.expected == plan.expected


def test_a_tighter_budget_gives_a_smaller_plan() -> None:
    class Known:
        """Costs that grow with the square of the set."""

        def rise(self, heads: Any) -> float:
            return 0.01 * len(heads) ** 2

    def silent(stage: str, share: float) -> None:
        pass

    sets = [[(0, head) for head in range(n)] for n in range(21)]
    search: Any = Known()
    sizes = [_largest(search, sets, budget, "heads", silent) for budget in (0.01, 0.1, 1.0, 3.99, 9.0)]
    assert sizes == [1, 3, 10, 19, 20]
    with pytest.raises(
        SoftgapError, match=r"budget of 0.005 nats per token: the cheapest of the heads costs 0.01 already"
    ):
        _largest(search, sets, 0.005, "heads", silent)


def test_pictures_are_drawn(small: Any, texts: Any, tmp_path: Path) -> None:
    fit, held_out, asked = texts
    found = frontier(
        small,
        fit,
        held_out,
        asked,
        "uniform",
        by="groups",
        orders=["divergence"],
        shares=[0.5],
        greedy=False,
        repair=False,
    )
    assert save_figure(draw_frontier(found), tmp_path / "frontier.svg").read_text().count("mean_ablation") == 1
    plan = find_plan(
        small, byte_tokenizer(), [TEXT], "uniform", budget=9.0, length=64, recalls=0, score="divergence", repair=False
    )
    drawn = save_figure(draw_plan(plan, [4, 4], [2, 2], [0, 1]), tmp_path / "plan.svg").read_text()
    assert "8 of 8 heads without softmax, 4 KV groups freed" in drawn


def test_bad_input_is_one_sentence(small: Any, texts: Any) -> None:
    fit, held_out, _ = texts
    with pytest.raises(SoftgapError, match="budget must be above 0 nats per token and finite, got -1"):
        find_plan(small, byte_tokenizer(), [TEXT], "elu1", budget=-1)
    with pytest.raises(SoftgapError, match="at least 2048 tokens"):
        find_plan(small, byte_tokenizer(), ["short"], "elu1", budget=1)
    with pytest.raises(SoftgapError, match="unknown score"):
        find_plan(small, byte_tokenizer(), [TEXT], "elu1", budget=1, score="luck")
    with pytest.raises(SoftgapError, match="by must be 'heads' or 'groups', got 'layers'"):
        frontier(small, fit, held_out, None, "elu1", by="layers")
    with pytest.raises(SoftgapError, match="an order is a score"):
        frontier(small, fit, held_out, None, "elu1", orders=["luck"])
    with pytest.raises(SoftgapError, match="shares must be above 0"):
        frontier(small, fit, held_out, None, "elu1", shares=[0.0])
