"""Whether the gap survives training: small models with softmax and linear attention on the same tasks and budget."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from scipy import stats
from torch import Tensor
from torch.nn import functional

from softgap.attention import Mechanism
from softgap.checkpoints import write_whole
from softgap.deprecation import DeprecatedAttribute
from softgap.errors import ValueInputError
from softgap.inputs import as_items
from softgap.intervals import Interval, joint_level
from softgap.progress import Progress
from softgap.theory.lab import Claim, Verdict
from softgap.theory.separation.small_models import (
    DEFAULT_TASKS,
    HEADS,
    WIDTH,
    Parameters,
    TrainedTask,
    answer,
    parameters,
    task,
    trainable,
)

__all__ = ["Cell", "Checkpoint", "Trained", "Training", "stored_cell", "train_all", "train_cell"]


_TEST_SAMPLES = 512


@dataclass(frozen=True)
class Training:
    """The budget, the same for every mechanism."""

    steps: int = 600
    batch: int = 32
    rate: float = 3e-3
    checkpoints: int = 10


@dataclass(frozen=True)
class Checkpoint:
    """A model on the way.

    Attributes
    ----------
    seconds
        Processor time spent training until here, which a busy machine does not stretch; drawing data and testing are
        not counted.
    score
        Accuracy, or R^2, on 512 fresh samples, the same at every checkpoint.
    gradient
        Mean norm of the gradient over the steps since the last checkpoint.
    """

    step: int
    seconds: float
    loss: float
    score: float
    gradient: float


@dataclass(frozen=True)
class Cell:
    """One mechanism trained on one task from one seed."""

    task: str
    mechanism: str
    seed: int
    training: Training
    checkpoints: tuple[Checkpoint, ...]

    @property
    def score(self) -> float:
        """At the end."""
        return self.checkpoints[-1].score

    @property
    def seconds(self) -> float:
        """Spent training."""
        return self.checkpoints[-1].seconds

    def score_after(self, seconds: float) -> float:
        """The score of the last checkpoint reached within so many seconds; NaN before the first."""
        reached = [checkpoint.score for checkpoint in self.checkpoints if checkpoint.seconds <= seconds + 1e-9]
        return reached[-1] if reached else math.nan

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def train_cell(name: str, mechanism: str, seed: int, training: Training) -> Cell:
    """Train from scratch with Adam; data and first parameters depend on task and seed only, not on the mechanism."""
    attention, problem = trainable(mechanism), task(name)
    data, start, held_out = (_generator(name, seed, purpose) for purpose in range(3))
    weights = parameters(problem, start)
    test_data = problem.sample(_TEST_SAMPLES, held_out)
    optimiser = torch.optim.Adam(list(weights.values()), lr=training.rate)
    stops = sorted(
        {max(1, round(training.steps * (i + 1) / training.checkpoints)) for i in range(training.checkpoints)}
    )
    seconds, norms, checkpoints = 0.0, [], []
    for step in range(1, training.steps + 1):
        x, y = problem.sample(training.batch, data)
        begun = time.process_time()
        loss = _loss(weights, problem, attention, x, y)
        optimiser.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)))
        optimiser.step()
        seconds += time.process_time() - begun
        if step in stops:
            score = _score(weights, problem, attention, *test_data)
            checkpoints.append(Checkpoint(step, seconds, loss.item(), score, float(np.mean(norms))))
            norms = []
    return Cell(name, mechanism, seed, training, tuple(checkpoints))


def _generator(name: str, seed: int, purpose: int) -> torch.Generator:
    state = np.random.SeedSequence([seed, zlib.crc32(name.encode()), purpose]).generate_state(1)
    return torch.Generator().manual_seed(int(state[0]))


def _loss(
    weights: Parameters, problem: TrainedTask, mechanism: Mechanism, x: Tensor, y: Shaped[Tensor, " sample"]
) -> Float[Tensor, ""]:
    out = answer(weights, problem, mechanism, x)
    return functional.cross_entropy(out, y) if problem.kind == "classes" else functional.mse_loss(out[:, 0], y)


@torch.no_grad()
def _score(
    weights: Parameters, problem: TrainedTask, mechanism: Mechanism, x: Tensor, y: Shaped[Tensor, " sample"]
) -> float:
    out = torch.cat(list(_answers(weights, problem, mechanism, x)))
    if problem.kind == "classes":
        return float((out.argmax(1) == y).double().mean())
    return float(1 - (out[:, 0] - y).square().mean() / y.var(correction=0))


def _answers(weights: Parameters, problem: TrainedTask, mechanism: Mechanism, x: Tensor) -> Iterator[Tensor]:
    for part in x.split(64):
        yield answer(weights, problem, mechanism, part)


def stored_cell(folder: Path | None, name: str, mechanism: str, seed: int, training: Training) -> tuple[Cell, bool]:
    """The cell from ``folder`` if it is there with this budget, else trained and saved; and whether it was there."""
    if folder is None:
        return train_cell(name, mechanism, seed, training), False
    path = folder / f"{name}_{mechanism.replace(':', '_').replace(',', '_')}_{seed}.json"
    request = {
        "training": asdict(training),
        **{"width": WIDTH, "heads": HEADS, "tested": _TEST_SAMPLES, "residual": task(name).residual},
        "noise": task(name).noise,
    }
    stored = _read(path, request)
    if stored is not None:
        return stored, True
    cell = train_cell(name, mechanism, seed, training)
    write_whole(path, json.dumps({"asked": request, "cell": cell.to_json()}) + "\n")
    return cell, False


def _read(path: Path, request: dict[str, Any]) -> Cell | None:
    """A finished cell, unless its budget is another; a file that is no cell is trained again."""
    try:
        document = json.loads(path.read_text())
        if document["asked"] != request:
            return None
        cell = document["cell"]
        checkpoints = tuple(Checkpoint(**values) for values in cell["checkpoints"])
        return Cell(cell["task"], cell["mechanism"], cell["seed"], Training(**cell["training"]), checkpoints)
    except (OSError, ValueError, KeyError, TypeError):
        return None


# Scores that differ by less are called the same.
_SAME = 0.02


@dataclass(frozen=True)
class Score(Interval):
    """Mean over seeds with its t interval (95 % by default); without an interval (NaN) for a single seed."""

    seeds: int
    mean = DeprecatedAttribute("value")

    def to_json(self) -> dict[str, float]:
        """Plain values; the mean is called ``mean``."""
        return {"mean": self.value, "low": self.low, "high": self.high, "seeds": self.seeds}


def score_of(values: Sequence[float], level: float = 0.95) -> Score:
    """The mean of some values over seeds with its t interval; values that are NaN make the mean NaN."""
    array = np.asarray(values, float)
    mean = float(array.mean())
    if len(array) < 2:
        return Score(mean, math.nan, math.nan, len(array), level=level)
    half = float(stats.t.ppf(0.5 + level / 2, len(array) - 1) * array.std(ddof=1) / math.sqrt(len(array)))
    return Score(mean, mean - half, mean + half, len(array), level=level)


@dataclass(frozen=True, eq=False)
class Trained:
    """All trained cells.

    Attributes
    ----------
    rival
        What softmax is compared with: the first other mechanism.
    resumed
        How many cells were found finished.
    """

    cells: tuple[Cell, ...]
    rival: str
    resumed: int

    @property
    def tasks(self) -> tuple[str, ...]:
        """In the order they were trained."""
        return tuple(dict.fromkeys(cell.task for cell in self.cells))

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """In the order they were trained."""
        return tuple(dict.fromkeys(cell.mechanism for cell in self.cells))

    def of(self, name: str, mechanism: str) -> tuple[Cell, ...]:
        """The cells of one task and mechanism, by seed."""
        return tuple(cell for cell in self.cells if (cell.task, cell.mechanism) == (name, mechanism))

    def score(self, name: str, mechanism: str) -> Score:
        """At equal size and equal steps."""
        return score_of([cell.score for cell in self.of(name, mechanism)])

    def advantage(self, name: str, *, equal_time: bool = False, level: float = 0.95) -> Score:
        """Score of softmax minus that of the rival, by seed; after the processor time of the faster one if asked."""
        return score_of(self._differences(name, equal_time), level)

    def _differences(self, name: str, equal_time: bool = False) -> list[float]:
        pairs = zip(self.of(name, "softmax"), self.of(name, self.rival), strict=True)
        differences = []
        for soft, other in pairs:
            limit = min(soft.seconds, other.seconds) if equal_time else math.inf
            differences.append(soft.score_after(limit) - other.score_after(limit))
        return differences

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The verdicts: one per task whose size does not grow, then recall, then whether linear wins anywhere."""
        fixed = [name for name in self.tasks if "-" not in name]
        # Verdicts that are read side by side have to hold together (Bonferroni).
        level = joint_level(len(fixed))
        survivals = [self._survives(name, level) for name in fixed]
        return (*survivals, *filter(None, [self._recall()]), self._linear_wins())

    def cannot_tell(self, name: str) -> str:
        """Why a task cannot tell softmax from the rival: both at the ceiling, or both at chance; empty where it can."""
        scores = [self.score(name, mechanism).value for mechanism in ("softmax", self.rival)]
        if min(scores) > 1 - _SAME:
            return f"both score more than {1 - _SAME:g}: the task is too easy to tell them apart"
        if max(scores) < task(name).chance + _SAME:
            return f"both are within {_SAME:g} of chance: the task is too hard to tell them apart"
        return ""

    def _survives(self, name: str, level: float) -> Claim:
        advantage = self.advantage(name, level=level)
        scores = {mechanism: self.score(name, mechanism) for mechanism in self.mechanisms}
        blind = self.cannot_tell(name)
        verdict: Verdict = "not decided" if blind else _verdict(advantage)
        return Claim(
            f"trained {name}",
            "softgap",
            f"Trained on {name}, softmax attention scores higher than {self.rival}.",
            verdict,
            (blind or _missing(advantage)) if verdict == "not decided" else "",
            {
                **{f"{task(name).measure}, {mechanism}": score.value for mechanism, score in scores.items()},
                "difference at least": advantage.low,
                "at most": advantage.high,
                "level": level,
                "at equal time": self.advantage(name, equal_time=True).value,
            },
        )

    def _recall(self) -> Claim | None:
        lengths = sorted(int(name.partition("-")[2]) for name in self.tasks if name.startswith("recall-"))
        if len(lengths) < 2:
            return None
        advantages = {pairs: self.advantage(f"recall-{pairs}") for pairs in lengths}
        few, many = (self._differences(f"recall-{lengths[i]}") for i in (0, -1))
        growth = score_of([last - first for first, last in zip(few, many, strict=True)])
        verdict = _verdict(growth)
        return Claim(
            "recall",
            "softgap",
            f"The advantage of softmax over {self.rival} in associative recall grows with the number of pairs.",
            verdict,
            _missing(growth) if verdict == "not decided" else "",
            {
                **{f"advantage, {pairs} pairs": advantage.value for pairs, advantage in advantages.items()},
                "growth at least": growth.low,
                "at most": growth.high,
            },
        )

    def _linear_wins(self) -> Claim:
        questions = [(name, timed) for name in self.tasks if not self.cannot_tell(name) for timed in (False, True)]
        # So many comparisons: each interval is wide enough for all of them to hold together (Bonferroni).
        level = joint_level(len(questions))
        advantages = {
            f"{name}, equal {'time' if timed else 'size'}": self.advantage(name, equal_time=timed, level=level)
            for name, timed in questions
        }
        won = {words: advantage.value for words, advantage in advantages.items() if advantage.high < 0}
        lost = bool(advantages) and all(advantage.low > -_SAME for advantage in advantages.values())
        verdict: Verdict = "holds" if won else "does not hold" if lost else "not decided"
        one_seed = all(advantage.seeds < 2 for advantage in advantages.values())
        missing = "one seed has no interval" if one_seed else "some intervals, widened for so many comparisons, hold 0"
        if not advantages:
            missing = "every task is too easy or too hard to tell"
        return Claim(
            "a task for linear",
            "Deng, Song and Zhou 2023, third open question, for trained models",
            f"There is a task here on which trained {self.rival} attention beats softmax.",
            verdict,
            missing if verdict == "not decided" else "",
            {
                f"advantage of softmax, {words}": advantage.value
                for words, advantage in advantages.items()
                if words in won or not won
            },
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "rival": self.rival,
            "cells": [cell.to_json() for cell in self.cells],
            "scores": [
                {
                    "task": name,
                    "kind": task(name).kind,
                    "chance": task(name).chance,
                    **{mechanism: self.score(name, mechanism).to_json() for mechanism in self.mechanisms},
                    "cannot_tell": self.cannot_tell(name),
                    "advantage": self.advantage(name).to_json(),
                    "advantage_at_equal_time": self.advantage(name, equal_time=True).to_json(),
                }
                for name in self.tasks
            ],
        }


def _verdict(difference: Score) -> Verdict:
    if difference.seeds < 2:
        return "not decided"
    if difference.low > 0:
        return "holds"
    return "does not hold" if difference.high < _SAME else "not decided"


def _missing(difference: Score) -> str:
    return "one seed has no interval" if difference.seeds < 2 else "the interval of the difference holds 0"


def train_all(
    tasks: Sequence[str] | None = None,
    mechanisms: Sequence[str] | None = None,
    *,
    seeds: int = 5,
    training: Training | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train every mechanism on every task from every seed; finished cells in ``folder`` are read, not trained again.

    Parameters
    ----------
    mechanisms
        Beside softmax; elu1 by default. The first one is the rival of the comparisons.
    """
    names = as_items(tasks or DEFAULT_TASKS)
    mechanisms = tuple(dict.fromkeys(("softmax", *as_items(mechanisms or ("elu1",)))))
    budget = training or Training()
    if seeds < 1 or budget.steps < 1:
        raise ValueInputError(f"training needs at least one seed and one step, got {seeds} and {budget.steps}")
    if len(mechanisms) < 2:
        raise ValueInputError("training compares softmax with another mechanism, got softmax alone; add one")
    for name in mechanisms:
        trainable(name)
    for name in names:
        task(name)
    runs = [(name, mechanism, seed) for name in names for seed in range(seeds) for mechanism in mechanisms]
    cells, resumed = [], 0
    for done, (name, mechanism, seed) in enumerate(runs):
        if progress is not None:
            progress(f"training {mechanism} on {name}", done / len(runs))
        cell, was_stored = stored_cell(folder, name, mechanism, seed, budget)
        cells.append(cell)
        resumed += was_stored
    return Trained(tuple(cells), mechanisms[1], resumed)
