"""Small trained models: tasks with right answers, attention that agrees with softgap's own, cells that resume."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softgap.attention import Visible, attend, resolve
from softgap.errors import StoreError, UnknownNameError, UnsupportedError, ValueInputError
from softgap.theory.separation.small_models import (
    DEFAULT_TASKS,
    TRAINABLE,
    _counting,
    _separation,
    answer,
    expression,
    mix,
    parameters,
    task,
    trainable,
)
from softgap.theory.separation.training import (
    Cell,
    Checkpoint,
    Trained,
    Training,
    score_of,
    stored_cell,
    train_all,
    train_cell,
)

SHORT = Training(steps=4, batch=8, checkpoints=2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", DEFAULT_TASKS)
def test_samples_have_the_shape_the_task_says(name: str) -> None:
    made = task(name)
    x, y = made.sample(5, generator())
    assert x.shape == (5, made.length, made.features)
    assert y.shape == (5,)
    if made.kind == "classes":
        answers = made.sample(300, generator())[1]
        assert set(answers.tolist()) <= set(range(made.outputs))
        assert len(set(answers.tolist())) == made.outputs
    again, other = made.sample(5, generator())[0], made.sample(5, generator(1))[0]
    assert torch.equal(x, again)
    assert not torch.equal(x, other)


def test_recall_asks_for_the_value_of_a_key_that_was_shown() -> None:
    x, y = task("recall-6").sample(20, generator())
    for sequence, value in zip(x, y, strict=True):
        key = sequence[-1, :128].nonzero().item()
        assert sequence[-1, 128:].sum() == 0
        (shown,) = sequence[:-1, int(key)].nonzero()
        assert sequence[shown, 128 + value] == 1
        assert sequence[:-1, :128].sum(1).eq(1).all()


def test_levels_of_the_separation_task_tell_its_classes() -> None:
    x, y = _separation("separation", noise=0).sample(50, generator())
    unit = math.sqrt(math.log(62))
    level = x[:, :, 0].amax(1) / unit
    assert ((level > 0.5) == (y == 1)).all()
    assert (x[:, :, 1:-1] > 0).sum((1, 2)).eq(62).all()
    x, y = _separation("separation_number", noise=0).sample(50, generator())
    assert torch.allclose(x[:, :, 0].amax(1) / unit, y, atol=1e-6)


def test_the_mean_of_all_rows_says_nothing_about_a_spread_level() -> None:
    x, y = _separation("separation_spread", noise=0).sample(400, generator())
    total = x[:, :, 0].sum(1)
    assert abs(total[y == 0].mean() - total[y == 1].mean()) < 0.1 * total.mean()
    assert (x[:, :, 0] > 0).sum(1).tolist() == [8 if one == 0 else 1 for one in y.tolist()]


@pytest.mark.parametrize("name", ["separation", "recall-4"])
def test_without_a_residual_the_answer_passes_through_attention(name: str) -> None:
    made = task(name)
    given = parameters(made, generator())
    x = made.sample(3, generator())[0]
    blind = {**given, "join0": torch.zeros_like(given["join0"])}
    found = answer(blind, made, resolve("softmax"), x)
    assert bool((found == found[0]).all()) is not made.residual


def test_counting_gives_the_share_of_the_first_symbol() -> None:
    x, y = _counting(10, noise=0).sample(30, generator())
    assert torch.allclose(x[:, :, 0].mean(1), y)


@pytest.mark.parametrize("name", ["separation", "separation_spread", "separation_levels", "counting-64"])
def test_noise_is_as_large_as_the_task_says(name: str) -> None:
    made = task(name)
    plain = _counting(64, noise=0) if name.startswith("counting") else _separation(name, noise=0)
    # The noise is drawn last: the same generator gives the same sequences.
    noise = made.sample(40, generator())[0] - plain.sample(40, generator())[0]
    assert made.noise > 0
    assert float(noise.std()) == pytest.approx(made.noise, rel=0.02)
    assert abs(float(noise.mean())) < 0.02 * made.noise


def test_two_perfect_scores_decide_nothing() -> None:
    same = {"softmax": 1.0, "elu1": 1.0}
    for value, words in ((1.0, "too easy"), (0.5, "too hard")):
        ends = trained_with({("separation", name): [value] * 3 for name in ("softmax", "elu1")}, same)
        claims = {claim.name: claim for claim in ends.claims}
        assert claims["trained separation"].verdict == "not decided"
        assert words in claims["trained separation"].condition
        assert claims["a task for linear"].verdict == "not decided"
    ahead = trained_with(
        {("separation", "softmax"): [1.0, 0.99, 1.0], ("separation", "elu1"): [0.5, 0.51, 0.5]},
        same,
    )
    assert ahead.cannot_tell("separation") == ""
    assert ahead.claims[0].verdict == "holds"


def test_verdicts_on_several_tasks_hold_together() -> None:
    names = ("separation", "separation_spread", "separation_levels", "separation_number", "listops")
    scores = {(name, "softmax"): [0.64, 0.66, 0.69] for name in names} | {(n, "elu1"): [0.6, 0.6, 0.6] for n in names}
    together = trained_with(scores, {"softmax": 1.0, "elu1": 1.0})
    alone = trained_with(
        {key: value for key, value in scores.items() if key[0] == "listops"}, {"softmax": 1, "elu1": 1}
    )
    assert together.claims[0].numbers["level"] == pytest.approx(0.99)
    # t with 2 degrees of freedom: 4.303 for one task, 9.925 for five.
    assert alone.claims[0].verdict == "holds"
    assert {claim.verdict for claim in together.claims[:5]} == {"not decided"}


def evaluate(tokens: list[int]) -> int:
    """The value of an expression, by a stack."""
    stack: list[list[int]] = [[]]
    for token in tokens:
        if token == 14:
            operator, *values = stack.pop()
            ordered = sorted(values)
            choices = [ordered[-1], ordered[0], ordered[(len(values) - 1) // 2], sum(values) % 10]
            stack[-1].append(choices[operator - 10])
        elif token >= 10:
            stack.append([token])
        else:
            stack[-1].append(token)
    assert len(stack) == 1
    (value,) = stack[0]
    return value


def test_expressions_have_their_value() -> None:
    drawn = [expression(generator(seed), depth=2) for seed in range(200)]
    assert all(evaluate(tokens) == value for tokens, value in drawn)
    assert {tokens[0] for tokens, _ in drawn} == {10, 11, 12, 13}
    assert max(len(tokens) for tokens, _ in drawn) <= 32
    assert any(sum(token >= 10 for token in tokens) > 2 for tokens, _ in drawn)


@pytest.mark.parametrize("name", TRAINABLE)
def test_trained_attention_is_softgaps_own(name: str) -> None:
    q, k, v = (torch.randn(2, 2, 9, 6, generator=generator(i), dtype=torch.float64) for i in range(3))
    if name == "identity":
        q, k = q.abs(), k.abs()
    everything = Visible(mask=torch.ones(1, 1, 9, 9, dtype=torch.bool))
    expected = attend(name, q, k, v, visible=everything, form="quadratic", dtype=torch.float64).output
    q.requires_grad_()
    found = mix(resolve(name), q, k, v)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-9)
    found.sum().backward()
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()


def test_training_learns_and_leaves_global_randomness_alone() -> None:
    state = torch.random.get_rng_state()
    legacy: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    cell = train_cell("recall-4", "softmax", 0, Training(steps=120, batch=64, checkpoints=4))
    assert cell.score > 3 * task("recall-4").chance
    assert [one.step for one in cell.checkpoints] == [30, 60, 90, 120]
    assert cell.checkpoints[-1].loss < cell.checkpoints[0].loss
    assert all(one.gradient > 0 for one in cell.checkpoints)
    assert list(np.diff([one.seconds for one in cell.checkpoints]) > 0) == [True] * 3
    assert torch.equal(torch.random.get_rng_state(), state)
    after: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    np.testing.assert_array_equal(after[1], legacy[1])


def without_times(cell: Cell) -> Cell:
    return dataclasses.replace(cell, checkpoints=tuple(dataclasses.replace(c, seconds=0) for c in cell.checkpoints))


def test_a_cell_is_a_function_of_its_seed_and_parameters_are_shared() -> None:
    once, again, other = (train_cell("separation", "elu1", seed, SHORT) for seed in (3, 3, 4))
    assert without_times(once) == without_times(again)
    assert once.checkpoints[0].loss != other.checkpoints[0].loss
    made = task("listops")
    assert sum(p.numel() for p in parameters(made, generator()).values()) > 5_000


def test_finished_cells_are_not_trained_again(tmp_path: Path) -> None:
    first, there = stored_cell(tmp_path / "cells", "recall-4", "elu1", 0, SHORT)
    assert not there
    (path,) = (tmp_path / "cells").iterdir()
    again, there = stored_cell(tmp_path / "cells", "recall-4", "elu1", 0, SHORT)
    assert there
    assert again == first
    # Another budget, or half a file, is trained anew.
    _, there = stored_cell(tmp_path / "cells", "recall-4", "elu1", 0, dataclasses.replace(SHORT, steps=5))
    assert not there
    path.write_text(path.read_text()[:50])
    healed, there = stored_cell(tmp_path / "cells", "recall-4", "elu1", 0, SHORT)
    assert not there
    assert without_times(healed) == without_times(first)
    assert sorted((tmp_path / "cells").iterdir()) == [path]


def test_an_interrupted_training_goes_on(tmp_path: Path) -> None:
    def stop(stage: str, part: float) -> None:
        if part >= 0.5:
            raise KeyboardInterrupt

    settings = {"tasks": ["recall-4"], "mechanisms": ["relu"], "seeds": 2, "training": SHORT, "folder": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        train_all(**settings, progress=stop)  # type: ignore[arg-type]
    assert len(list(tmp_path.iterdir())) == 2
    found = train_all(**settings)  # type: ignore[arg-type]
    assert found.resumed == 2
    assert len(found.cells) == 4
    assert train_all(**settings).resumed == 4  # type: ignore[arg-type]


def trained_with(scores: dict[tuple[str, str], list[float]], seconds: dict[str, float]) -> Trained:
    """Results as if they had been trained: the score is reached evenly over four checkpoints."""
    cells = []
    for (name, mechanism), values in scores.items():
        for seed, value in enumerate(values):
            steps = [Checkpoint(i, seconds[mechanism] * i / 4, 1.0, value * i / 4, 1.0) for i in (1, 2, 3, 4)]
            cells.append(Cell(name, mechanism, seed, SHORT, tuple(steps)))
    return Trained(tuple(cells), "elu1", 0)


def test_advantages_and_verdicts_follow_the_scores() -> None:
    found = trained_with(
        {
            ("separation", "softmax"): [0.9, 0.91, 0.92],
            ("separation", "elu1"): [0.6, 0.62, 0.61],
            ("recall-4", "softmax"): [1.0, 1.0, 1.0],
            ("recall-4", "elu1"): [0.98, 1.0, 0.99],
            ("recall-64", "softmax"): [0.9, 0.92, 0.9],
            ("recall-64", "elu1"): [0.1, 0.12, 0.11],
            ("counting-8", "softmax"): [0.8, 0.8, 0.81],
            ("counting-8", "elu1"): [0.7, 0.7, 0.7],
        },
        {"softmax": 4.0, "elu1": 1.0},
    )
    assert found.score("separation", "softmax").value == pytest.approx(0.91)
    assert found.advantage("separation").value == pytest.approx(0.3)
    # In the second that elu1 takes, softmax has come a quarter of its way.
    assert found.advantage("counting-8", equal_time=True).value == pytest.approx(0.8033 / 4 - 0.7, abs=1e-4)
    verdicts = {claim.name: claim for claim in found.claims}
    assert [claim.verdict for claim in verdicts.values()] == ["holds"] * 3
    wins = verdicts["a task for linear"].numbers
    assert wins["advantage of softmax, counting-8, equal time"] == pytest.approx(0.8033 / 4 - 0.7, abs=1e-4)
    assert not any("equal size" in words for words in wins)
    shrinking = trained_with(
        {
            ("recall-4", "softmax"): [1.0, 1.0, 1.0],
            ("recall-4", "elu1"): [0.5, 0.5, 0.52],
            ("recall-64", "softmax"): [0.3, 0.3, 0.3],
            ("recall-64", "elu1"): [0.3, 0.3, 0.3],
        },
        {"softmax": 1.0, "elu1": 1.0},
    )
    assert [claim.verdict for claim in shrinking.claims] == ["does not hold", "does not hold"]
    even = trained_with({("separation", name): [0.9, 0.8] for name in ("softmax", "elu1")}, {"softmax": 1, "elu1": 1})
    assert [claim.verdict for claim in even.claims] == ["does not hold", "does not hold"]
    single = trained_with({("separation", name): [0.9] for name in ("softmax", "elu1")}, {"softmax": 1, "elu1": 1})
    assert [claim.verdict for claim in single.claims] == ["not decided", "not decided"]
    wide = trained_with(
        {("listops", "softmax"): [0.9, 0.5], ("listops", "elu1"): [0.5, 0.6]}, {"softmax": 1.0, "elu1": 1.0}
    )
    assert wide.claims[0].name == "trained listops"
    assert wide.claims[0].verdict == "not decided"
    assert wide.claims[0].condition == "the interval of the difference holds 0"
    json.dumps(found.to_json())


def test_intervals_over_seeds() -> None:
    found = score_of([0.7, 0.8, 0.9])
    # t with 2 degrees of freedom: 4.3027 * 0.1 / sqrt 3.
    assert (found.value, found.high) == pytest.approx((0.8, 0.8 + 0.248414), abs=1e-5)
    assert math.isnan(score_of([0.5]).low)
    assert score_of([0.7, 0.8, 0.9], 0.99).high == pytest.approx(0.8 + 9.9248 * 0.1 / math.sqrt(3), abs=1e-5)


def test_bad_training_input(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="mechanism 'decay' cannot be trained here; choose one of: softmax"):
        trainable("decay")
    with pytest.raises(UnknownNameError, match="unknown task 'recal-4'"):
        task("recal-4")
    with pytest.raises(ValueInputError, match="recall takes 2 to 128 pairs, got 500"):
        task("recall-500")
    with pytest.raises(ValueInputError, match="counting takes a length from 2 to 65536, got 1"):
        task("counting-1")
    with pytest.raises(ValueInputError, match="got softmax alone"):
        train_all(["recall-4"], ["softmax"])
    with pytest.raises(ValueInputError, match="at least one seed and one step, got 0 and 600"):
        train_all(["recall-4"], seeds=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StoreError, match=r"cannot write '.*recall-4_elu1_0\.json': Not a directory; choose another path"
    ):
        stored_cell(tmp_path / "file" / "cells", "recall-4", "elu1", 0, SHORT)
