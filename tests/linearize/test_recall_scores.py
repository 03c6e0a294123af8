"""Scores for recall: a planted group comes first, sweeps agree with plain swaps, and a plan keeps what recall needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from softgap.attention import resolve
from softgap.checkpoints import Checkpoints
from softgap.errors import SoftgapError
from softgap.linearize import (
    Budget,
    Sequences,
    Substitute,
    find_plan,
    impact_of_units,
    learn_gates,
    recall_scores,
    recall_sequences,
    swap,
)
from softgap.linearize.allocation import Menu, score_options
from softgap.linearize.candidates import SearchText
from softgap.linearize.frontier import units_of
from softgap.linearize.recall_scores import source_places
from softgap.linearize.search import recall_distances
from softgap.linearize.sequences import cut_sequences, read_swapped
from softgap.probe.tap import observe_attention
from softgap.progress import silent
from support.linearize_cases import sharp_llama
from support.model_examples import byte_tokenizer
from support.planted_recall import CARRIER, WordTokenizer, planted_recall
from support.probe_cases import tiny_with

WINDOW = "window:w=8,sinks=2"
DISTANCE = 60
TEXT = " ".join(f"w{i}" for i in np.random.default_rng(0).integers(20, size=1200))
SEARCH: dict[str, Any] = {
    "by": "groups", "budget": 50.0, "recalls": 4, "recall_distance": DISTANCE, "length": 64, "correct": False,
    "baselines": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def planted() -> tuple[Any, Any, Sequences]:
    model = planted_recall()
    tokenizer: Any = WordTokenizer()
    filler = tokenizer(TEXT)["input_ids"]
    return model, tokenizer, recall_sequences(model, tokenizer, 4, filler=filler, distance=DISTANCE)


def test_the_planted_model_recalls_across_the_distance_through_its_carrier_alone(planted: Any) -> None:
    model, _, lists = planted
    assert read_swapped(model, None, lists, [], None).recall.mean() == 1
    for unit in units_of(model, "groups"):
        recall = read_swapped(model, None, lists, unit, Substitute(resolve(WINDOW))).recall.mean()
        assert recall < 0.1 if unit == CARRIER else recall == 1


@pytest.mark.parametrize("name", ["ablation", "gate", "source_attention", "fisher"])
def test_scores_put_the_planted_group_first(name: str, planted: Any) -> None:
    model, _, lists = planted
    scores = recall_scores(model, lists.part(slice(0, 2)), WINDOW, names=[name], steps=12)
    order = np.argsort(-scores.mean(name))
    assert scores.units[order[0]] == CARRIER
    first, second = scores.mean(name)[order[:2]]
    assert first > 1.3 * second, "by far"


def test_source_attention_of_a_perfect_induction_head_is_one(planted: Any) -> None:
    model, _, lists = planted
    scores = recall_scores(model, lists, WINDOW, names=["source_attention"])
    assert scores.mean("source_attention")[3] == pytest.approx(1, abs=0.05)
    assert scores.mean("source_attention")[:3].max() < 0.1


def test_unrotation_is_what_a_forward_without_rotary_embedding_changes() -> None:
    model = sharp_llama(max_position_embeddings=1024).double()
    lists = recall_sequences(model, byte_tokenizer(), 1, pairs=3, filler=range(5, 90), distance=50)
    score = recall_scores(model, lists, WINDOW, names=["unrotation"]).values["unrotation"][:, 0]
    # The first layer sees embeddings, which do not depend on positions: all tokens at position 0 turn nothing.
    seen: list[Any] = []
    ids = lists.ids[:, :-1]
    with torch.no_grad(), observe_attention(model, lambda call: seen.append(call.output.clone())):
        model(ids, use_cache=False)
        # The mask tells transformers that these are not many texts of one token each.
        model(ids, use_cache=False, position_ids=torch.zeros_like(ids), attention_mask=torch.ones_like(ids))
    assert lists.first is not None
    own, without = (seen[place][0, lists.first[0]] for place in (0, len(seen) // 2))
    change = (own - without).norm(dim=-1) / (own.norm(dim=-1) + without.norm(dim=-1))
    by_head = (1 - change).mean(dim=0).numpy()
    assert score[:2] == pytest.approx([by_head[:2].sum(), by_head[2:].sum()], rel=1e-4)
    assert (score > 0).all()
    assert (score < 2).all()


def test_unrotation_needs_a_rotary_embedding() -> None:
    model = tiny_with("gpt2")
    lists = Sequences(torch.tensor([[5, 6, 7, 5, 6, 7]]), torch.ones(1, 5, dtype=torch.bool), torch.ones(1, 5).bool())
    with pytest.raises(SoftgapError, match="has no rotary embedding"):
        recall_scores(model, lists, WINDOW, names=["unrotation"])


def test_gates_close_everywhere_else_first_and_leave_the_model_as_it_was(planted: Any) -> None:
    model, _, lists = planted
    before = [x.clone() for x in model.parameters()]
    path = learn_gates(model, lists, WINDOW, steps=24)
    assert path.shape == (24, 4)
    assert path[-1, 3] > 0.5
    assert path[-1, :3].max() < 0.05
    assert all(torch.equal(a, b) and b.requires_grad for a, b in zip(before, model.parameters(), strict=True))
    assert np.array_equal(path, learn_gates(model, lists, WINDOW, steps=24)), "the seed decides"


def test_a_plan_within_the_default_recall_budget_keeps_the_planted_group(planted: Any) -> None:
    model, tokenizer, _ = planted
    plan = find_plan(model, tokenizer, [TEXT], WINDOW, **SEARCH)
    assert plan.provenance["recall_budget"] == 0.05
    assert plan.groups == ((0, 0), (0, 1), (1, 0))
    assert plan.expected["recall"].value == 0
    free = find_plan(model, tokenizer, [TEXT], WINDOW, recall_budget=None, **SEARCH)
    assert (1, 1) in free.groups
    assert free.expected["recall"].value < -0.9


def test_a_search_among_several_mechanisms_keeps_the_planted_group(planted: Any) -> None:
    model, tokenizer, _ = planted
    plan = find_plan(model, tokenizer, [TEXT], [WINDOW, "window:w=4,sinks=1"], **SEARCH)
    assert plan.groups == ((0, 0), (0, 1), (1, 0))


def test_a_search_asks_across_several_distances(planted: Any) -> None:
    model, tokenizer, _ = planted
    settings = {**SEARCH, "recall_distance": None}
    plan = find_plan(model, tokenizer, [TEXT], [WINDOW, "window:w=4,sinks=1"], **settings)
    assert plan.groups == ((0, 0), (0, 1), (1, 0))
    # A quarter of the text is too short for the farther distances.
    assert {name: plan.recall[name] for name in ("lists", "questions", "distance", "farthest", "decided_on")} == {
        "lists": 4, "questions": 48, "distance": 128, "farthest": 256, "decided_on": 4,
    }  # fmt: skip
    assert "4 lists (48 questions) across 128 to 256 tokens of other text" in plan.recall_words()


@pytest.mark.parametrize(
    ("given", "lists", "context", "distances"),
    [
        (None, None, 2048, (128, 256, 512, 1024)),
        (None, 3, 2048, (128, 256, 512)),
        (77, None, 2048, (77,)),
        (None, None, 1024, (128, 256, 512)),
        (None, None, 190, (94,)),
        (None, None, 64, (0,)),
    ],
)
def test_distances_are_those_that_text_and_context_allow(
    given: int | None, lists: int | None, context: int, distances: tuple[int, ...], planted: Any, monkeypatch: Any
) -> None:
    model, tokenizer, _ = planted
    monkeypatch.setattr("softgap.linearize.search.context_of", lambda model: context)
    part = Sequences(torch.zeros(2, 600, dtype=torch.long), torch.ones(2, 599, dtype=torch.bool))
    assert recall_distances(model, tokenizer, SearchText(part, part, part), given, lists) == distances


def test_scores_of_options_put_the_planted_group_last(planted: Any) -> None:
    model, tokenizer, lists = planted
    fit = cut_sequences(model, tokenizer(TEXT)["input_ids"], 64, 4)
    menu = Menu.of(model, [Substitute(resolve(WINDOW))])
    text = SearchText(fit, fit, fit, lists)
    (scores,) = score_options(model, text, menu, Checkpoints(None, {}), silent, 0)
    assert scores.argmax() == 3


@pytest.mark.parametrize("pairs", [3, 5])
def test_a_sweep_over_units_equals_swaps_one_by_one(pairs: int) -> None:
    model = sharp_llama(max_position_embeddings=1024)
    lists = recall_sequences(model, byte_tokenizer(), 2, pairs=pairs, filler=range(5, 90), distance=50)
    found = impact_of_units(model, lists, WINDOW)
    assert len(found.units) == 4
    for number, unit in enumerate(found.units):
        for row in range(2):
            with torch.no_grad():
                original = model(lists.ids[row : row + 1]).logits[0].log_softmax(-1)
                with swap(model, list(unit), WINDOW):
                    swapped = model(lists.ids[row : row + 1]).logits[0].log_softmax(-1)
            losses, divergences = [], []
            assert lists.first is not None
            for place in np.flatnonzero(lists.first[row].numpy()):
                right = int(lists.ids[row, place + 1])
                losses.append(float(original[place, right] - swapped[place, right]))
                divergences.append(float((original[place].exp() * (original[place] - swapped[place])).sum()))
            assert found.change["loss"][number, row] == pytest.approx(np.mean(losses), abs=1e-9)
            assert found.change["kl"][number, row] == pytest.approx(np.mean(divergences), abs=1e-9)


def test_the_gate_at_its_ends_is_softmax_or_the_substitute(planted: Any) -> None:
    from softgap.linearize.recall_scores import _GatedUnits
    from softgap.probe.tap import replace_attention

    model, _, lists = planted
    units = units_of(model, "groups")
    part = Substitute(resolve(WINDOW))
    gates = torch.tensor([1.0, 0.0, 1.0, 0.0])
    with torch.no_grad():
        with swap(model, [*units[1], *units[3]], part):
            expected = model(lists.ids[:1]).logits
        with replace_attention(model, _GatedUnits(model, part, units, gates).output):
            assert torch.allclose(model(lists.ids[:1]).logits, expected, atol=1e-4)


def test_output_norms_are_those_of_what_a_group_adds(planted: Any) -> None:
    model, _, lists = planted
    one = lists.part(slice(0, 1))
    norms = recall_scores(model, one, WINDOW, names=["output_norm"]).mean("output_norm")
    written: list[Any] = []
    attention = model.model.layers[1].self_attn
    hook = attention.o_proj.register_forward_pre_hook(lambda module, args: written.append(args[0][0]))
    with torch.no_grad():
        model(one.ids[:, :-1])
    hook.remove()
    added = written[0][:, 128:] @ attention.o_proj.weight.detach()[:, 128:].T
    assert norms[3] == pytest.approx(float(added.norm(dim=-1).mean()), rel=1e-4)


def test_sources_of_answers_are_their_places_in_the_list(planted: Any) -> None:
    _, tokenizer, lists = planted
    words = {number: word for word, number in tokenizer.known.items()}
    ids = lists.ids[0].tolist()
    answers = (np.flatnonzero(lists.first[0].numpy()) + 1).tolist()
    for answer, source in zip(answers, source_places(ids, answers), strict=True):
        assert words[ids[answer - 1]].endswith(":")
        assert ids[source - 1 : source + 1] == ids[answer - 1 : answer + 1]
        assert answer - source > DISTANCE
    with pytest.raises(SoftgapError, match="the answer at place 2 has no source before it"):
        source_places([1, 2, 3], [2])


def test_scores_refuse_what_they_cannot_score(planted: Any) -> None:
    model, _, lists = planted
    with pytest.raises(SoftgapError, match="these sequences ask nothing"):
        recall_scores(model, replace(lists, first=None), WINDOW)
    with pytest.raises(SoftgapError, match="unknown score 'fame'"):
        recall_scores(model, lists, WINDOW, names=["fame"])
    with pytest.raises(SoftgapError, match=r"a unit must be heads of one layer, got \(\(0, 0\), \(1, 0\)\)"):
        impact_of_units(model, lists, WINDOW, units=[((0, 0), (1, 0))])
    with pytest.raises(SoftgapError, match="gates need at least 1 step"):
        learn_gates(model, lists, WINDOW, steps=0)


def test_the_default_recall_budget_is_left_out_where_the_model_does_not_recall() -> None:
    model = sharp_llama(max_position_embeddings=512).float()
    book = " ".join(f"Cart {i} carried {i * 7 % 31} crates of apples over the bridge." for i in range(60))
    settings: dict[str, Any] = {**SEARCH, "recalls": 2, "recall_distance": 0, "score": "divergence"}
    plan = find_plan(model, byte_tokenizer(), [book], "elu1", **settings)
    assert plan.provenance["recall_budget"] is None
    assert "not measurable with this model, which itself recalls 0.0" in plan.provenance["recall_note"]
    unasked = find_plan(model, byte_tokenizer(), [book], "elu1", **{**settings, "recalls": 0})
    assert unasked.provenance["recall_note"] == "Recall is not limited: no recall lists were asked."


def test_the_lower_end_of_the_interval_meets_the_recall_budget() -> None:
    limits = Budget(1.0, 0.05)
    assert limits.allows({"loss": 0.1, "recall": -0.04, "recall_low": -0.05})
    assert not limits.allows({"loss": 0.1, "recall": -0.04, "recall_low": -0.06})
    # The loss alone decides where it is exceeded, and then nobody asks for recall.
    assert not limits.allows({"loss": 2.0})
    with pytest.raises(SoftgapError, match="a recall budget needs recall lists"):
        limits.allows({"loss": 0.1})
    change = {"loss": 0.1, "recall": -0.04, "recall_low": -0.06}
    assert "loses 0.04 of recall (up to 0.06 within its interval)" in str(limits.refusal(change, "it"))
