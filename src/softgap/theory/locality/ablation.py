"""Small models trained with linear attention of every kernel, injective or not, with and without what makes it local.

Two tasks need something local and something global. *mixed* (one layer): tokens that carry a key and a value, each
answered by the value of the token before (local); then keys alone, each answered by its value (global). *binding* (two
layers): keys and values are tokens of their own, so that a value has to be bound to the key before it. Width 32,
causal:

    w_tj = phi(q_t).phi(k_j) / sum_i phi(q_t).phi(k_i)                    or, injective,
    w_tj = s phi(q_t).phi(k_j) - mean_i s phi(q_t).phi(k_i) + 1 / n,
    o_t  = sum_j w_tj v_j + sum_{i < 3} r_i v_{t-i}                       with the local residual r of each head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from softgap.checkpoints import Checkpoints
from softgap.errors import ValueInputError, unknown_name
from softgap.progress import Progress, silent
from softgap.theory.separation.training import Score, score_of

__all__ = [
    "ASSIGNMENTS",
    "KERNELS",
    "TASKS",
    "Ablation",
    "Arm",
    "Assignment",
    "TrainedArm",
    "default_arms",
    "train_ablation",
    "train_arm",
]


KERNELS = ("softmax", "relu", "relu_affine", "leaky_relu", "identity")


TASKS = ("mixed", "binding")


RESIDUALS = ("none", "values", "keys")


_WIDTH, _HEADS, _TAPS = 32, 2, 3


_TESTED = 512


# What no target is asked of.
_NOTHING = -100


@dataclass(frozen=True)
class Assignment:
    """The task of an arm and its budget.

    Attributes
    ----------
    task
        ``mixed`` or ``binding``.
    pairs
        Keys with their values in a sequence, and keys that are asked afterwards.
    symbols
        How many keys there are, and how many values.
    """

    task: str = "mixed"
    pairs: int = 16
    symbols: int = 32
    steps: int = 400
    batch: int = 32
    rate: float = 1e-2

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise unknown_name("task", self.task, TASKS)
        if not 2 <= self.pairs <= self.symbols or self.steps < 1 or self.batch < 1:
            raise ValueInputError(
                f"training needs 2 pairs or more, no more pairs than symbols, and steps and batch from 1, got "
                f"{self.pairs} pairs of {self.symbols} symbols, {self.steps} steps and a batch of {self.batch}"
            )

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return (2 if self.task == "mixed" else 3) * self.pairs

    @property
    def layers(self) -> int:
        """Layers that the task needs."""
        return 1 if self.task == "mixed" else 2

    def sample(
        self, count: int, generator: torch.Generator
    ) -> tuple[Int[Tensor, "sample time 2"], Int[Tensor, "sample time"]]:
        """The key and the value of every token (``symbols`` where it has none), and its target (-100 for none)."""
        keys = torch.rand(count, self.symbols, generator=generator).argsort(1)[:, : self.pairs]
        values = torch.randint(self.symbols, (count, self.pairs), generator=generator)
        order = torch.rand(count, self.pairs, generator=generator).argsort(1)
        blank = torch.full_like(keys, self.symbols)
        if self.task == "mixed":
            stored = torch.stack([keys, values], dim=-1)
            before = torch.cat([torch.full_like(values[:, :1], _NOTHING), values[:, :-1]], dim=1)
        else:
            stored = torch.stack([torch.stack([keys, blank], -1), torch.stack([blank, values], -1)], dim=2).flatten(
                1, 2
            )
            before = torch.full(stored.shape[:2], _NOTHING)
        asked = torch.stack([keys.gather(1, order), blank], dim=-1)
        return torch.cat([stored, asked], dim=1), torch.cat([before, values.gather(1, order)], dim=1)


ASSIGNMENTS = {"mixed": Assignment(), "binding": Assignment("binding", pairs=4, symbols=8, steps=800)}


"""What every task is trained with unless other numbers are given."""


@dataclass(frozen=True, order=True)
class Arm:
    """One cell of the ablation.

    Attributes
    ----------
    kernel
        phi, or softmax.
    injective
        Normalised by subtraction, as InLine attention is, and not by division; softmax is injective anyway.
    window
        Keys that a query sees; 0 for all.
    residual
        ``none``, ``values`` (the local residual of InLine attention) or ``keys`` (a short convolution on the keys).
    """

    kernel: str
    injective: bool = False
    window: int = 0
    residual: str = "none"

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise unknown_name("kernel", self.kernel, KERNELS)
        if self.residual not in RESIDUALS:
            raise unknown_name("residual", self.residual, RESIDUALS)

    @property
    def label(self) -> str:
        """In words."""
        parts = [self.kernel, "injective" if self.injective else "", f"window {self.window}" if self.window else ""]
        parts.append("" if self.residual == "none" else f"residual on {self.residual}")
        return ", ".join(part for part in parts if part)


def default_arms(task: str = "mixed", windows: Sequence[int] = (8, 0)) -> tuple[Arm, ...]:
    """For ``mixed`` every kernel, normalisation, window and residual on values; for ``binding`` the three residuals."""
    kernels = [(kernel, injective) for kernel in KERNELS for injective in (False, True)]
    kernels.remove(("softmax", True))
    if task == "binding":
        kernels = [("softmax", False), ("relu", False), ("identity", True)]
        return tuple(Arm(*kernel, 0, residual) for kernel in kernels for residual in RESIDUALS)
    return tuple(
        Arm(*kernel, window, residual) for kernel in kernels for window in windows for residual in RESIDUALS[:2]
    )


@dataclass(frozen=True)
class TrainedArm:
    """One arm trained from one seed, with its accuracies on 512 fresh sequences.

    Attributes
    ----------
    recall
        Of keys that are asked: the global part.
    before
        Of the value before: the local part of ``mixed``; NaN for ``binding``.
    """

    arm: Arm
    seed: int
    recall: float
    before: float
    loss: float

    @property
    def score(self) -> float:
        """The mean of both, or the one that there is."""
        return float(np.nanmean([self.recall, self.before]))


@dataclass(frozen=True, eq=False)
class Ablation:
    """All trained arms of one task."""

    cells: tuple[TrainedArm, ...]
    assignment: Assignment

    @property
    def arms(self) -> tuple[Arm, ...]:
        """In the order they were trained."""
        return tuple(dict.fromkeys(cell.arm for cell in self.cells))

    def scores(self, arm: Arm, part: str = "score") -> list[float]:
        """``score``, ``recall`` or ``before``, by seed."""
        return [getattr(cell, part) for cell in sorted(self.cells, key=lambda c: c.seed) if cell.arm == arm]

    def difference(self, pairs: Sequence[tuple[Arm, Arm]], part: str = "score") -> Score:
        """Mean over pairs of arms of the first one's accuracy minus the second's, with its t interval over seeds."""
        rows = [np.subtract(self.scores(first, part), self.scores(second, part)) for first, second in pairs]
        return score_of(np.mean(rows, axis=0).tolist()) if rows else score_of([math.nan])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        parts = ("score", "recall", "before")
        return {
            "assignment": asdict(self.assignment),
            "arms": [
                {**asdict(arm), "label": arm.label, **{part: self.scores(arm, part) for part in parts}}
                for arm in self.arms
            ],
        }


def train_ablation(
    arms: Sequence[Arm] | None = None,
    *,
    assignment: Assignment | None = None,
    seeds: int = 3,
    checkpoints: Checkpoints | None = None,
    progress: Progress = silent,
) -> Ablation:
    """Train every arm from every seed; cells that ``checkpoints`` holds are read and not trained again."""
    if seeds < 1:
        raise ValueInputError(f"an ablation needs at least 1 seed, got {seeds}; 3 give an interval")
    problem = assignment or ASSIGNMENTS["mixed"]
    store = checkpoints or Checkpoints(None, {})
    runs = [(arm, seed) for seed in range(seeds) for arm in arms or default_arms(problem.task)]
    cells = []
    for number, (arm, seed) in enumerate(runs):
        progress(f"training on {problem.task}: {arm.label}", number / len(runs))
        step = {"trained": asdict(arm), "seed": seed, "assignment": asdict(problem)}
        cell = store.find_or_make(step, lambda arm=arm, seed=seed: asdict(train_arm(arm, seed, problem)))  # type: ignore[misc]
        cells.append(TrainedArm(arm, seed, cell["recall"], cell["before"], cell["loss"]))
    return Ablation(tuple(cells), problem)


def train_arm(arm: Arm, seed: int, assignment: Assignment) -> TrainedArm:
    """Train from scratch with Adam; data and first parameters depend on the seed only, not on the arm."""
    data, start, held_out = (torch.Generator().manual_seed(3 * seed + purpose) for purpose in range(3))
    weights = _parameters(assignment, start)
    optimiser = torch.optim.Adam(list(weights.values()), lr=assignment.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, assignment.steps)
    loss = math.nan
    for _ in range(assignment.steps):
        tokens, targets = assignment.sample(assignment.batch, data)
        value = functional.cross_entropy(
            _answer(weights, arm, tokens, assignment).flatten(0, 1), targets.flatten(), ignore_index=_NOTHING
        )
        optimiser.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimiser.step()
        schedule.step()
        loss = value.item()
    tokens, targets = assignment.sample(_TESTED, held_out)
    with torch.no_grad():
        right = (_answer(weights, arm, tokens, assignment).argmax(-1) == targets).double()
    asked = targets[:, -assignment.pairs :].numel()
    others = (targets != _NOTHING).sum() - asked
    recall = right[:, -assignment.pairs :].sum() / asked
    before = right[:, : -assignment.pairs].sum() / others
    return TrainedArm(arm, seed, float(recall), float(before), loss)


def _parameters(assignment: Assignment, generator: torch.Generator) -> dict[str, Tensor]:
    """The same for every arm: what an arm does not use gets no gradient."""

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) / math.sqrt(rows)).requires_grad_()

    dim = _WIDTH // _HEADS
    weights = {name: matrix(assignment.symbols + 1, _WIDTH) for name in ("key", "value")}
    weights |= {"position": matrix(assignment.length, _WIDTH), "out": matrix(_WIDTH, assignment.symbols)}
    for layer in range(assignment.layers):
        for name in ("query", "key", "value", "join"):
            weights[f"{name}{layer}"] = matrix(_WIDTH, _WIDTH)
        weights[f"up{layer}"], weights[f"down{layer}"] = matrix(_WIDTH, 2 * _WIDTH), matrix(2 * _WIDTH, _WIDTH)
        weights[f"affine{layer}"], weights[f"shift{layer}"] = matrix(dim, dim), torch.zeros(dim, requires_grad=True)
        taps = torch.zeros(_HEADS, _TAPS)
        weights[f"residual{layer}"] = taps.clone().requires_grad_()
        taps[:, 0] = 1.0  # a convolution on keys begins as none
        weights[f"taps{layer}"] = taps.requires_grad_()
    return weights


def _answer(
    weights: dict[str, Tensor], arm: Arm, tokens: Int[Tensor, "sample time 2"], assignment: Assignment
) -> Float[Tensor, "sample time symbol"]:
    embedded = sum(functional.embedding(tokens[..., i], weights[name]) for i, name in enumerate(("key", "value")))
    # Rows of an embedding are drawn as small as those of a matrix; tokens shall be as large as their sum.
    h = embedded * math.sqrt(assignment.symbols / _WIDTH) + weights["position"]
    seen = _seen(assignment.length, arm.window)
    for layer in range(assignment.layers):
        z = functional.rms_norm(h, (_WIDTH,))
        q, k, v = (
            (z @ weights[f"{name}{layer}"]).unflatten(-1, (_HEADS, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        if arm.residual == "keys":
            k = _convolve(k, weights[f"taps{layer}"])
        mixed = _mix(arm, q, k, seen, weights[f"affine{layer}"], weights[f"shift{layer}"]) @ v
        if arm.residual == "values":
            mixed = mixed + _convolve(v, weights[f"residual{layer}"])
        h = h + mixed.transpose(1, 2).flatten(2) @ weights[f"join{layer}"]
        z = functional.rms_norm(h, (_WIDTH,))
        h = h + functional.relu(z @ weights[f"up{layer}"]) @ weights[f"down{layer}"]
    return functional.rms_norm(h, (_WIDTH,)) @ weights["out"]


def _seen(length: int, window: int) -> Bool[Tensor, "time time"]:
    behind = torch.arange(length)[:, None] - torch.arange(length)
    return (behind >= 0) & (behind < (window or length))


def _convolve(x: Float[Tensor, "sample head time dim"], taps: Float[Tensor, "head tap"]) -> Tensor:
    """sum_i taps_i x_{t-i}, causal."""
    time = x.shape[2]
    late = torch.stack([functional.pad(x, (0, 0, i, 0))[:, :, :time] for i in range(taps.shape[1])], dim=-1)
    return (late * taps[:, None, None]).sum(dim=-1)


def _mix(
    arm: Arm, q: Tensor, k: Tensor, seen: Bool[Tensor, "time time"], affine: Tensor, shift: Tensor
) -> Float[Tensor, "sample head time time"]:
    """The weights of every query over the keys it sees."""
    scale = 1 / math.sqrt(q.shape[-1])
    if arm.kernel == "softmax":
        return (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf).softmax(dim=-1)
    q, k = (_phi(arm.kernel, x, affine, shift) for x in (q, k))
    scores = (q @ k.transpose(-1, -2)).masked_fill(~seen, 0.0)
    if not arm.injective:
        total = scores.sum(dim=-1, keepdim=True)
        tiny = 1e-6
        return scores / torch.where(total.abs() < tiny, torch.where(total < 0, -tiny, tiny), total)
    count = seen.sum(dim=-1, keepdim=True).to(scores)
    # As in the code of the paper, scores are divided by the number of keys, so that weights do not grow with it.
    scores = scores * scale / count
    return (scores - scores.sum(dim=-1, keepdim=True) / count + 1 / count).masked_fill(~seen, 0.0)


def _phi(kernel: str, x: Tensor, affine: Tensor, shift: Tensor) -> Tensor:
    if kernel == "relu":
        return functional.relu(x)
    if kernel == "relu_affine":
        return functional.relu(x @ affine + shift)
    return functional.leaky_relu(x) if kernel == "leaky_relu" else x
