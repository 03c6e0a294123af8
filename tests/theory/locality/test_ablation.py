"""The small models of the locality lab: tasks with known answers, arms that differ as they say, and resumption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from softgap.checkpoints import Checkpoints
from softgap.errors import SoftgapError
from softgap.theory.locality import ablation
from softgap.theory.locality.ablation import (
    ASSIGNMENTS,
    KERNELS,
    Arm,
    Assignment,
    default_arms,
    train_ablation,
    train_arm,
)

SMALL = Assignment("mixed", pairs=4, symbols=6, steps=3, batch=4)


def test_every_question_can_be_answered_from_what_comes_before() -> None:
    for task in ("mixed", "binding"):
        assignment = replace(SMALL, task=task)
        tokens, targets = assignment.sample(20, torch.Generator().manual_seed(0))
        assert tuple(tokens.shape) == (20, assignment.length, 2)
        for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
            stored = row[: -assignment.pairs]
            if task == "mixed":
                value_of = dict(stored)
                assert wanted[0] == -100
                assert wanted[1 : len(stored)] == [value for _, value in stored[:-1]]
            else:
                value_of = {stored[i][0]: stored[i + 1][1] for i in range(0, len(stored), 2)}
                assert set(wanted[: len(stored)]) == {-100}
            asked = row[-assignment.pairs :]
            assert [value_of[key] for key, _ in asked] == wanted[-assignment.pairs :]
            assert {value for _, value in asked} == {assignment.symbols}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("injective", [False, True])
def test_weights_sum_to_one_over_the_keys_that_are_seen(kernel: str, injective: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 2, 9, 4, generator=generator, dtype=torch.float64)
    affine, shift = torch.randn(4, 4, generator=generator, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    seen = ablation._seen(9, 3)
    weights = ablation._mix(Arm(kernel, injective, 3), q, k, seen, affine, shift)
    assert float((weights * ~seen).abs().max()) == 0
    total = weights.sum(-1)
    # A row whose features are all off has no weights, where they are divided by their sum.
    assert bool(((total - 1).abs() < 1e-9).logical_or(total == 0).all())
    assert float((total - 1).abs().min()) < 1e-9
    # Multiples of a query collide where weights are divided by their sum, and only there.
    twice = ablation._mix(Arm(kernel, injective, 3), 2 * q, k, seen, affine, torch.zeros_like(shift))
    once = ablation._mix(Arm(kernel, injective, 3), q, k, seen, affine, torch.zeros_like(shift))
    assert torch.allclose(once, twice) is (kernel != "softmax" and not injective)


def test_a_convolution_is_causal_and_begins_as_none() -> None:
    x = torch.arange(12.0).view(1, 2, 6, 1)
    taps = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    out = ablation._convolve(x, taps)
    assert torch.equal(out[0, 0], x[0, 0])
    assert out[0, 1, :, 0].tolist() == [0, 0, 12, 14, 16, 18]
    weights = ablation._parameters(SMALL, torch.Generator().manual_seed(0))
    tokens, _ = SMALL.sample(2, torch.Generator().manual_seed(1))
    plain, keys, values = (
        ablation._answer(weights, Arm("relu", residual=r), tokens, SMALL) for r in ("none", "keys", "values")
    )
    torch.testing.assert_close(keys, plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(values, plain, atol=1e-5, rtol=0)


def test_the_future_is_never_seen() -> None:
    weights = ablation._parameters(SMALL, torch.Generator().manual_seed(0))
    tokens, _ = SMALL.sample(1, torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[0, 5:, 0] = (other[0, 5:, 0] + 1) % 6
    for arm in default_arms():
        first, second = (ablation._answer(weights, arm, x, SMALL)[0, :5] for x in (tokens, other))
        assert torch.equal(first, second), arm.label


def test_the_default_arms_are_the_grid_of_the_paper() -> None:
    arms = default_arms()
    assert len(arms) == len(set(arms)) == 36
    assert {arm.kernel for arm in arms} == set(KERNELS)
    assert all(Arm(a.kernel, a.injective, a.window) in arms for a in arms)
    assert {arm.residual for arm in default_arms("binding")} == {"none", "values", "keys"}


def test_training_learns_repeats_itself_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    easy = Assignment("mixed", pairs=3, symbols=6, steps=120, batch=16)
    arm = Arm("softmax", residual="values")
    trained = train_arm(arm, 0, easy)
    assert trained.before > 0.8  # chance is a sixth
    assert train_arm(arm, 0, easy) == trained
    assert train_arm(arm, 1, easy) != trained
    store = Checkpoints(tmp_path, {"lab": "locality"})
    first = train_ablation([arm, Arm("identity", True)], assignment=SMALL, seeds=2, checkpoints=store)
    assert len(first.cells) == 4

    def fail(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(ablation, "train_arm", fail)
    again = train_ablation([arm, Arm("identity", True)], assignment=SMALL, seeds=2, checkpoints=store)
    assert again.to_json() == first.to_json()
    with pytest.raises(AssertionError, match="trained again"):
        train_ablation([arm], assignment=replace(SMALL, steps=4), seeds=1, checkpoints=store)


def test_binding_has_no_local_part() -> None:
    cell = train_arm(Arm("relu", residual="keys"), 0, replace(SMALL, task="binding"))
    assert cell.before != cell.before
    assert cell.score == cell.recall


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Assignment("listops"), "unknown task 'listops'"),
        (
            lambda: Assignment(pairs=1),
            "training needs 2 pairs or more, no more pairs than symbols, .* got 1 pairs of 32",
        ),
        (lambda: Arm("exp"), "unknown kernel 'exp'"),
        (lambda: Arm("relu", residual="queries"), "unknown residual 'queries'"),
        (lambda: train_ablation(seeds=0), "an ablation needs at least 1 seed, got 0; 3 give an interval"),
    ],
)
def test_what_cannot_be_trained_is_refused(make: object, sentence: str) -> None:
    assert callable(make)
    with pytest.raises(SoftgapError, match=sentence):
        make()


def test_every_task_has_its_budget() -> None:
    assert {name: a.task for name, a in ASSIGNMENTS.items()} == {"mixed": "mixed", "binding": "binding"}
