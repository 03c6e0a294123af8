"""Training one small model: what it scored along the way, how long it took, and its cell on disk."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

from softgap.attention import Mechanism
from softgap.errors import StoreError
from softgap.theory.separation.trained_model import HEADS, WIDTH, Parameters, answer, parameters, trainable
from softgap.theory.separation.trained_tasks import TrainedTask, task

__all__ = ["Cell", "Checkpoint", "Training", "stored_cell", "train_cell"]

_TESTED = 512


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
        reached = [one.score for one in self.checkpoints if one.seconds <= seconds + 1e-9]
        return reached[-1] if reached else math.nan

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def train_cell(name: str, mechanism: str, seed: int, training: Training) -> Cell:
    """Train from scratch with Adam; data and first parameters depend on task and seed only, not on the mechanism."""
    chosen, made = trainable(mechanism), task(name)
    data, start, held = (_generator(name, seed, purpose) for purpose in range(3))
    given = parameters(made, start)
    tested = made.sample(_TESTED, held)
    optimiser = torch.optim.Adam(list(given.values()), lr=training.rate)
    stops = sorted(
        {max(1, round(training.steps * (i + 1) / training.checkpoints)) for i in range(training.checkpoints)}
    )
    seconds, norms, found = 0.0, [], []
    for step in range(1, training.steps + 1):
        x, y = made.sample(training.batch, data)
        begun = time.process_time()
        loss = _loss(given, made, chosen, x, y)
        optimiser.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(given.values(), 1.0)))
        optimiser.step()
        seconds += time.process_time() - begun
        if step in stops:
            score = _score(given, made, chosen, *tested)
            found.append(Checkpoint(step, seconds, loss.item(), score, float(np.mean(norms))))
            norms = []
    return Cell(name, mechanism, seed, training, tuple(found))


def _generator(name: str, seed: int, purpose: int) -> torch.Generator:
    state = np.random.SeedSequence([seed, zlib.crc32(name.encode()), purpose]).generate_state(1)
    return torch.Generator().manual_seed(int(state[0]))


def _loss(
    given: Parameters, made: TrainedTask, mechanism: Mechanism, x: Tensor, y: Shaped[Tensor, " sample"]
) -> Float[Tensor, ""]:
    out = answer(given, made, mechanism, x)
    return functional.cross_entropy(out, y) if made.kind == "classes" else functional.mse_loss(out[:, 0], y)


@torch.no_grad()
def _score(
    given: Parameters, made: TrainedTask, mechanism: Mechanism, x: Tensor, y: Shaped[Tensor, " sample"]
) -> float:
    out = torch.cat(list(_batched(given, made, mechanism, x)))
    if made.kind == "classes":
        return float((out.argmax(1) == y).double().mean())
    return float(1 - (out[:, 0] - y).square().mean() / y.var(correction=0))


def _batched(given: Parameters, made: TrainedTask, mechanism: Mechanism, x: Tensor) -> Iterator[Tensor]:
    for part in x.split(64):
        yield answer(given, made, mechanism, part)


def stored_cell(folder: Path | None, name: str, mechanism: str, seed: int, training: Training) -> tuple[Cell, bool]:
    """The cell from ``folder`` if it is there with this budget, else trained and saved; and whether it was there."""
    if folder is None:
        return train_cell(name, mechanism, seed, training), False
    path = folder / f"{name}_{mechanism.replace(':', '_').replace(',', '_')}_{seed}.json"
    asked = {
        "training": asdict(training),
        **{"width": WIDTH, "heads": HEADS, "tested": _TESTED, "residual": task(name).residual},
        "noise": task(name).noise,
    }
    there = _read(path, asked)
    if there is not None:
        return there, True
    cell = train_cell(name, mechanism, seed, training)
    partial = path.with_name(f".{path.name}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"asked": asked, "cell": cell.to_json()}) + "\n")
        partial.replace(path)
    except OSError as error:
        raise StoreError(f"cannot write to '{folder}': {error.strerror or error}; choose another folder") from error
    return cell, False


def _read(path: Path, asked: dict[str, Any]) -> Cell | None:
    """A finished cell, unless its budget is another; a file that is no cell is trained again."""
    try:
        document = json.loads(path.read_text())
        if document["asked"] != asked:
            return None
        cell = document["cell"]
        found = tuple(Checkpoint(**one) for one in cell["checkpoints"])
        return Cell(cell["task"], cell["mechanism"], cell["seed"], Training(**cell["training"]), found)
    except (OSError, ValueError, KeyError, TypeError):
        return None
