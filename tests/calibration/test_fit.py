"""The fit of one layer: what it must find again, what it must leave alone, and what it cannot do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from softgap.attention import attend, attention_weights, compare_outputs, mechanisms
from softgap.attention.mechanism import Mechanism
from softgap.attention.rank import block_spectra, dyadic_blocks
from softgap.attention.rotary import Rotation, TurnTable
from softgap.calibration.fit import (
    WARM_UP,
    LayerText,
    Maps,
    Recipe,
    RowPlan,
    fit_maps,
    landmark_maps,
    log_weights,
    sample_rows,
    softmax_scores,
    weights_kl,
)
from softgap.errors import ValueInputError

DIM, LENGTH, HEADS, KV_HEADS = 8, 320, 4, 2
SCALE = DIM**-0.5
PLAN = RowPlan(blocks=2, rows=32, near=64, far=64)


def random_text(seed: int, *, query_norm: float = 1.0, key_norm: float = 1.0) -> LayerText:
    rng = np.random.default_rng(seed)
    query = query_norm * rng.standard_normal((HEADS, LENGTH, DIM))
    key = key_norm * rng.standard_normal((KV_HEADS, LENGTH, DIM))
    return LayerText(torch.from_numpy(query).float(), torch.from_numpy(key).float())


def as_mechanism(maps: Maps) -> Mechanism:
    return mechanisms()["fitted"].with_parameters(**maps.parameters())


def output(mechanism: str | Mechanism, text: LayerText, seed: int = 9) -> torch.Tensor:
    value = torch.from_numpy(np.random.default_rng(seed).standard_normal((1, KV_HEADS, LENGTH, DIM))).float()
    return attend(mechanism, text.query[None], text.key[None], value, scale=SCALE).output


def mean_divergence(a: str | Mechanism, b: str | Mechanism, text: LayerText) -> float:
    return float(compare_outputs(output(a, text), output(b, text)).divergence[..., 64:].mean())


def relative_error(truth: torch.Tensor, found: torch.Tensor) -> np.ndarray:
    """Relative Frobenius error over the dyadic off-diagonal blocks, per head."""
    blocks = dyadic_blocks(truth.shape[-1])
    wrong, whole = (
        sum(x[:, rows, columns].double().square().sum(dim=(1, 2)) for rows, columns in blocks)
        for x in (truth - found, truth)
    )
    return np.asarray(np.sqrt(np.asarray(wrong) / np.asarray(whole)))


def teacher(seed: int, features: int = 4) -> Maps:
    rng = np.random.default_rng(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).float()

    return Maps(
        query_weight=0.7 * drawn(KV_HEADS, HEADS // KV_HEADS, features, DIM),
        query_bias=drawn(KV_HEADS, HEADS // KV_HEADS, features),
        key_weight=0.7 * drawn(KV_HEADS, features, DIM),
        key_bias=drawn(KV_HEADS, features),
        log_rate=torch.linspace(-7, -2, features).repeat(KV_HEADS, 1),
    )


def test_a_head_that_is_linear_attention_is_found_again() -> None:
    texts, truth = [random_text(seed) for seed in range(4)], teacher(5)
    recipe = Recipe(features=16, steps=800, learning_rate=0.03, rows=PLAN)
    found = fit_maps(texts, recipe, scale=SCALE, target_scores=lambda rows: log_weights(truth, rows))
    held_out = random_text(100)
    assert mean_divergence(as_mechanism(truth), as_mechanism(found), held_out) < 1e-3
    assert mean_divergence(as_mechanism(truth), "uniform", held_out) > 0.05


ROTATION = Rotation.of_pairs(1 / 100 ** (torch.arange(DIM // 2) / (DIM // 2)), DIM)


def test_a_head_that_sees_vectors_before_rotation_is_found_again() -> None:
    """The truth knows nothing of rotated vectors: without the others it cannot be told."""
    texts = [random_text(seed) for seed in range(4)]
    truth = teacher(5)
    behind = {name: functional.pad(getattr(truth, name), (DIM, 0)) for name in ("query_weight", "key_weight")}
    truth = replace(truth, **behind)
    recipe = Recipe(features=16, steps=800, learning_rate=0.05, rows=PLAN)
    found = fit_maps(texts, recipe, scale=SCALE, rotation=ROTATION, target_scores=lambda rows: log_weights(truth, rows))
    held_out = random_text(100)
    assert mean_divergence(truth.mechanism(ROTATION), found.mechanism(ROTATION), held_out) < 1e-3
    assert mean_divergence(truth.mechanism(ROTATION), "uniform", held_out) > 0.05


def test_rows_show_vectors_before_rotation_at_their_own_positions() -> None:
    text = replace(random_text(0), start=700)
    turns = TurnTable(ROTATION, 700 + LENGTH)
    rows = sample_rows([text], RowPlan(blocks=3, rows=4, near=8, far=8), turns=turns, rng=np.random.default_rng(0))
    at = 700 + torch.arange(LENGTH)
    before = {"query": ROTATION.turned(text.query, -at), "key": ROTATION.turned(text.key, -at)}
    for block in range(3):
        seen = {"query": rows.query_seen[block].flatten(0, 1), "key": rows.key_seen[block]}
        for name, by_head in seen.items():
            for head, vectors in enumerate(by_head):
                for vector in vectors:
                    place = (getattr(text, name)[head] - vector[:DIM]).norm(dim=-1).argmin()
                    assert torch.allclose(vector[DIM:], before[name][head, place], atol=1e-5)


def test_a_uniform_head_stays_uniform() -> None:
    texts = [random_text(seed, query_norm=0.0) for seed in range(2)]
    found = fit_maps(texts, Recipe(features=8, steps=60, rows=PLAN), scale=SCALE)
    assert mean_divergence(as_mechanism(found), "uniform", random_text(50, query_norm=0.0)) < 1e-4


def test_a_head_that_looks_up_one_random_token_stays_unfitted() -> None:
    def lookup(seed: int) -> LayerText:
        rng = np.random.default_rng(seed)
        text = random_text(seed, key_norm=3.0)
        # Every query is the key of one earlier token, ten times as long: softmax looks that token up.
        at = torch.from_numpy(rng.integers(0, np.arange(1, LENGTH + 1)))
        query = 10 * text.key[:, at].repeat_interleave(HEADS // KV_HEADS, dim=0)
        return LayerText(query, text.key)

    texts = [lookup(seed) for seed in range(3)]
    found = fit_maps(texts, Recipe(features=4, steps=200, rows=PLAN), scale=SCALE)
    held_out = lookup(60)
    left = mean_divergence("softmax", as_mechanism(found), held_out)
    assert left > 0.5 * mean_divergence("softmax", "uniform", held_out)
    # The floor says that no map of so few features could have done it, and the found one lies above it.
    softmax, fitted = (
        attention_weights(m, held_out.query[None], held_out.key[None], scale=SCALE)[0]
        for m in ("softmax", as_mechanism(found))
    )
    floor = block_spectra(softmax).floor(4)
    assert (floor > 0.7).all()
    assert (relative_error(softmax, fitted) >= floor).all()


def test_fitting_brings_the_weights_nearer_to_softmax() -> None:
    texts = [random_text(seed, query_norm=2.0, key_norm=2.0) for seed in range(3)]
    seen: list[float] = []
    fit_maps(texts, Recipe(features=32, steps=150, rows=PLAN), scale=SCALE, report=lambda _, kl: seen.append(kl))
    assert len(seen) == 150
    assert np.mean(seen[-20:]) < 0.7 * np.mean(seen[:20])


def test_the_same_seed_gives_the_same_map_and_another_seed_another() -> None:
    texts = [random_text(1)]

    def fitted(seed: int, layer: int = 0) -> torch.Tensor:
        return fit_maps(texts, Recipe(features=4, steps=5, seed=seed, rows=PLAN), scale=SCALE, layer=layer).key_weight

    assert torch.equal(fitted(0), fitted(0))
    assert not torch.equal(fitted(0), fitted(1))
    assert not torch.equal(fitted(0), fitted(0, layer=1))


def test_the_weights_of_the_fit_are_those_of_the_mechanism() -> None:
    text, maps = random_text(4), teacher(6)
    rows = sample_rows([text], RowPlan(blocks=1, rows=LENGTH, near=0, far=1, start=0), rng=np.random.default_rng(0))
    assert bool((rows.from_middle[0] == torch.arange(LENGTH) - (LENGTH - 1) / 2).all())
    prior = torch.zeros(()).masked_fill(~rows.seen[0], -torch.inf)
    found = torch.softmax(log_weights(maps, rows)[0] + prior, dim=-1)[..., -LENGTH:].flatten(0, 1)
    truth = attention_weights(as_mechanism(maps), text.query[None], text.key[None], scale=SCALE)[0]
    assert torch.allclose(found, truth, atol=1e-5)


def test_sampled_keys_estimate_the_loss_over_all_keys() -> None:
    """Over many draws the loss with a sample of far keys is near the loss over all of them."""
    texts, maps = [random_text(3, query_norm=2.0)], None
    maps = landmark_maps(texts, 16, SCALE, rng=np.random.default_rng(0))

    def loss(plan: RowPlan) -> float:
        rng = np.random.default_rng(1)
        drawn = [sample_rows(texts, plan, rng=rng) for _ in range(150)]
        return float(
            np.mean([weights_kl(softmax_scores(r, SCALE), log_weights(maps, r), r).mean().item() for r in drawn])
        )

    everything = RowPlan(blocks=1, rows=8, near=LENGTH, far=1)
    sample = RowPlan(blocks=1, rows=8, near=32, far=64)
    assert loss(sample) == pytest.approx(loss(everything), rel=0.1)


def test_keys_behind_a_window_are_not_seen() -> None:
    rows = sample_rows([random_text(2)], PLAN, window=10, rng=np.random.default_rng(0))
    distance = rows.from_middle[:, :, None] - rows.key_from_middle[:, None, :]
    assert bool(((distance >= 0) & (distance < 10))[rows.seen].all())
    assert rows.seen.sum(dim=-1).max() <= 10


@pytest.mark.parametrize("window", [10, 24, 100, 1000])
def test_far_keys_are_drawn_from_the_window(window: int) -> None:
    """The counts of the keys that the first row of a block sees add up to its window, or to its position."""
    plan = RowPlan(blocks=8, rows=4, near=20, far=30)
    rows = sample_rows([random_text(2)], plan, window=window, rng=np.random.default_rng(3))
    counted = (rows.log_count.exp() * rows.seen[:, 0]).sum(dim=-1)
    position = rows.key_position[:, -1] - 3  # the last key of a block is that of its last row
    assert counted.tolist() == pytest.approx([min(window, int(p) + 1) for p in position], rel=1e-5)


def test_each_key_is_drawn_once_and_counts_add_up() -> None:
    """The counts of the keys that the last row of a block sees add up to its position, itself included."""
    rows = sample_rows([random_text(2)], RowPlan(blocks=8, rows=4, near=20, far=30), rng=np.random.default_rng(3))
    seen = rows.seen[:, -1]
    counted = (rows.log_count.exp() * seen).sum(dim=-1)
    position = -rows.key_from_middle.amin(dim=-1) + rows.from_middle[:, -1]
    assert torch.allclose(counted, position + 1, atol=1e-3)


def marked_texts(*lengths: int, generated: tuple[int, ...] = ()) -> list[LayerText]:
    """Texts whose keys hold the text's number in their first dimension."""
    texts = []
    for number, length in enumerate(lengths):
        rng = np.random.default_rng(number)
        query, key = (torch.from_numpy(rng.standard_normal((n, length, DIM))).float() for n in (HEADS, KV_HEADS))
        key[..., 0] = number
        texts.append(LayerText(query, key, generated=number in generated))
    return texts


def drawn_texts(texts: list[LayerText], plan: RowPlan) -> np.ndarray:
    rows = sample_rows(texts, plan, rng=np.random.default_rng(0))
    return np.bincount(rows.key[:, 0, -1, 0].long().numpy(), minlength=len(texts)) / plan.blocks


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6])
def test_generated_text_gets_its_share_of_the_blocks(share: float) -> None:
    texts = marked_texts(300, 100, 60, 20, generated=(2, 3))
    drawn = drawn_texts(texts, RowPlan(blocks=4000, rows=2, near=4, far=4, generated=share))
    expected = [(1 - share) * 0.75, (1 - share) * 0.25, share * 0.75, share * 0.25]
    assert drawn == pytest.approx(expected, abs=0.03)
    assert drawn[2:].sum() == 0 if share == 0 else drawn[2:].min() > 0


def test_texts_of_one_kind_are_drawn_by_their_length_whatever_the_share() -> None:
    for generated in ((), (0, 1)):
        texts = marked_texts(300, 100, generated=generated)
        assert drawn_texts(texts, RowPlan(blocks=4000, rows=2, near=4, far=4)) == pytest.approx([0.75, 0.25], abs=0.03)


@pytest.mark.parametrize("moved", [0.0, 0.3, 1.0])
def test_blocks_are_moved_as_often_as_the_plan_says_and_never_too_far(moved: float) -> None:
    texts = marked_texts(400, 100)
    plan = RowPlan(blocks=600, rows=2, near=4, far=4, moved=moved)
    turns = TurnTable(ROTATION, 400)
    rows = sample_rows(texts, plan, turns=turns, rng=np.random.default_rng(0))
    number = rows.key[:, 0, -1, 0].long()
    # The second half of what features see is the vector before rotary embedding: a move leaves it alone.
    assert torch.equal(rows.key_seen[..., DIM:], turns.before(rows.key, rows.key_position.long()))
    # The nearest turned copy of the last key shows how far its block was moved.
    candidates = torch.arange(301)
    key, seen = rows.key[:, 0, -1], rows.key_seen[:, 0, -1, :DIM]
    turned = ROTATION.turned(key[:, None].expand(-1, 301, -1), candidates)
    distance = (turned - seen[:, None]).norm(dim=-1)
    by = distance.argmin(dim=1)
    assert float(distance.min(dim=1).values.max()) < 1e-4
    assert bool((by[number == 0] == 0).all())  # the longest text has no room
    short = by[number == 1]
    assert float((short > 0).float().mean()) == pytest.approx(moved, abs=0.12)
    if moved == 1:
        assert short.min() < 40
        assert short.max() > 260
    # All rows and keys of a block move together, so that scores stay.
    query = rows.query_seen[..., :DIM]
    scores = torch.einsum("bkgrd,bknd->bkgrn", query, rows.key_seen[..., :DIM])
    assert torch.allclose(scores, torch.einsum("bkgrd,bknd->bkgrn", rows.query, rows.key), atol=1e-3)


def test_a_plan_without_moves_draws_what_it_drew_before_there_were_any() -> None:
    texts, turns = [random_text(1), random_text(2)], TurnTable(ROTATION, LENGTH)
    one, other = np.random.default_rng(0), np.random.default_rng(0)
    for _ in range(2):  # the second draw shows that the first took no more random numbers
        still = sample_rows(texts, replace(PLAN, moved=0.0), turns=turns, rng=one)
        plain = sample_rows(texts, PLAN, rng=other)
    assert torch.equal(still.key, plain.key)
    assert torch.equal(still.key_seen[..., :DIM], plain.key_seen)
    assert torch.equal(still.query_seen[..., :DIM], plain.query_seen)


def test_a_map_that_saw_random_offsets_holds_there() -> None:
    """Queries and keys that are alike before rotary embedding: at an offset a map that never saw one does worse."""
    text = random_text(3, query_norm=3.0)
    at = torch.arange(LENGTH)
    short = LayerText(ROTATION.turned(text.query[:, :80], at[:80]), ROTATION.turned(text.key[:, :80], at[:80]))
    long = LayerText(ROTATION.turned(text.query, at), ROTATION.turned(text.key, at))
    plan = RowPlan(blocks=8, rows=4, near=32, far=16)
    turns = TurnTable(ROTATION, LENGTH)
    losses = []
    for moved in (0.0, 1.0):
        recipe = Recipe(features=8, steps=60, rows=replace(plan, moved=moved))
        maps = fit_maps(
            [short, replace(long, generated=True)],
            replace(recipe, rows=replace(recipe.rows, generated=0.0)),
            scale=SCALE,
            rotation=ROTATION,
        )
        rows = sample_rows(
            [short, replace(long, generated=True)],
            replace(plan, blocks=64, moved=1.0, generated=0.0),
            turns=turns,
            rng=np.random.default_rng(5),
        )
        losses.append(weights_kl(softmax_scores(rows, SCALE), log_weights(maps, rows), rows).mean().item())
    assert losses[1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generated": 1.0}, "the share of generated text must be at least 0 and below 1, got 1; 0 leaves it out"),
        ({"generated": -0.1}, "the share of generated text must be at least 0 and below 1, got -0.1; 0 leaves it out"),
        ({"moved": 1.5}, "the share of blocks at random offsets must be from 0 to 1, got 1.5; 0 leaves them out"),
        ({"moved": float("nan")}, "the share of blocks at random offsets must be from 0 to 1, got nan; 0 leaves them"),
    ],
)
def test_shares_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueInputError, match=f"^{message}"):
        RowPlan(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"features": 1}, "features must be from 2 to 8192, got 1; 128 is usual"),
        ({"steps": 0}, "steps must be at least 1, got 0; 450 is usual"),
    ],
)
def test_a_recipe_out_of_range_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueInputError, match=message):
        Recipe(**settings)


@pytest.mark.parametrize("dim", [8, 64, 128, 256])
def test_a_step_moves_log_features_by_no_more_at_many_dimensions(dim: int) -> None:
    rng = np.random.default_rng(0)
    query, key = (torch.from_numpy(rng.standard_normal((n, 64, dim))).float() for n in (HEADS, KV_HEADS))
    texts, recipe = [LayerText(query, key)], Recipe(features=4, steps=1, learning_rate=0.1)
    start, begun = (landmark_maps(texts, 4, dim**-0.5, rng=np.random.default_rng(0)) for _ in range(2))
    maps = fit_maps(texts, recipe, scale=dim**-0.5, start=begun)  # which changes it in place
    # The first step of Adam moves every weight by its rate; a log feature of a vector of ones moves by their sum.
    moved = (maps.key_weight - start.key_weight).abs().sum(dim=-1).max().item()
    assert moved * dim**0.5 == pytest.approx(0.1 / WARM_UP * min(dim, 64), rel=0.01)
