"""Distil the original model into the substitutes of all swapped heads together.

An output correction brings each head back to itself. What the model makes of all heads together is another question:
with theta the readouts of the swapped heads and the weights and biases of their fitted maps,
Adam goes down

    KL(p || p_theta) = mean over t of sum_y p_t(y) (log p_t(y) - log p_theta,t(y)),

p_t the next-token distribution of the original model on the same sequences. The model's weights stay as they are, and a
distilled substitute is computed, stored and streamed as any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention import Mechanism
from softgap.deprecation import deprecated_keywords
from softgap.errors import ValueInputError
from softgap.intervene.substitute import Head, Mixture, Readout, Substitute, substitute
from softgap.intervene.swap import swap
from softgap.linearize.output_correction import fit_output_correction
from softgap.linearize.sequences import Sequences
from softgap.models.loading import Model
from softgap.models.placement import freeze_weights
from softgap.models.support import check_measurable
from softgap.models.tensor_files import digest_of
from softgap.progress import Progress, silent

__all__ = ["distil_substitute", "log_probabilities", "sequence_order"]

STEPS = 96
LEARNING_RATE = 6e-4
WARM_UP = 5
# Weights of maps are a tenth of a readout's in size, and their biases move freely: logarithms of features.
PACE = {"query_weight": 0.5, "key_weight": 0.5, "query_bias": 5.0, "key_bias": 5.0}


@deprecated_keywords(asked="recall_lists", read="sequences")
def distil_substitute(
    model: Model,
    sequences: Sequences,
    heads: Sequence[Head],
    mechanism: str | Mechanism | Substitute,
    *,
    recall_lists: Sequences | None = None,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    maps: bool = True,
    seed: int = 0,
    progress: Progress = silent,
) -> Substitute:
    """The substitute with its numbers trained for these heads, all of them swapped together.

    Parameters
    ----------
    sequences
        Sequences to train on, one at a step, in an order drawn anew for every round.
    recall_lists
        Recall lists to train on as well, one per step: otherwise the model loses what text does not ask for.
    mechanism
        Where to begin. Without a readout its output is corrected first, on the same sequences.
    learning_rate
        Of the readouts; maps move in proportion.
    maps
        Whether the maps of the mechanism ``fitted`` are trained too, or the readouts alone.
    seed
        Of the order of the sequences.
    """
    check_measurable(model)
    if steps < 1 or not learning_rate > 0:
        raise ValueInputError(
            f"distillation needs at least 1 step and a rate above 0, got {steps} and {learning_rate:g}"
        )
    start = substitute(mechanism, model)
    if start.readout is None:
        start = fit_output_correction(
            model, sequences, heads, start, progress=lambda stage, share: progress(stage, 0.2 * share)
        )
    trainable = _TrainableSubstitute(start, cast(Readout, start.readout), maps)
    optimiser = torch.optim.Adam(trainable.groups(learning_rate), betas=(0.9, 0.98))
    rates = [float(group["lr"]) for group in optimiser.param_groups]
    training_sets = [part for part in (sequences, recall_lists) if part is not None]
    rows = zip(*(sequence_order(len(part), steps, np.random.default_rng(seed)) for part in training_sets), strict=True)
    for step, drawn_rows in enumerate(rows):
        schedule = min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * schedule
        optimiser.zero_grad()
        with freeze_weights(model):
            divergences = [
                _divergence(model, part.part(slice(row, row + 1)), heads, trainable.substitute())
                for part, row in zip(training_sets, drawn_rows, strict=True)
            ]
        optimiser.step()
        progress(f"distilling, KL {' and '.join(f'{x:.3f}' for x in divergences)}", 0.2 + 0.8 * (step + 1) / steps)
    return trainable.substitute(detached=True)


class _TrainableSubstitute:
    """The numbers of a substitute that are trained, as copies; one dictionary of maps for every mechanism."""

    def __init__(self, start: Substitute, readout: Readout, maps: bool) -> None:
        self._start = start
        self._readout = {name: x.detach().clone().requires_grad_() for name, x in readout.tensors().items()}
        self._mechanisms = [x for _, x in start.parts] if isinstance(start, Mixture) else [start.mechanism]
        self._maps = [
            {name: x.detach().clone().requires_grad_(maps and name in PACE) for name, x in mechanism.parameters.items()}
            for mechanism in self._mechanisms
        ]

    def groups(self, rate: float) -> list[dict[str, object]]:
        """What Adam is given."""
        groups: list[dict[str, object]] = [{"params": [x], "lr": rate} for x in self._readout.values()]
        for maps in self._maps:
            groups += [{"params": [x], "lr": rate * PACE[name]} for name, x in maps.items() if x.requires_grad]
        return groups

    def substitute(self, *, detached: bool = False) -> Substitute:
        """With the present numbers."""
        readout = Readout(**{name: x.detach() if detached else x for name, x in self._readout.items()})
        mechanisms = []
        for mechanism, maps in zip(self._mechanisms, self._maps, strict=True):
            parameters = {name: x.detach() if detached else x for name, x in maps.items()}
            trained = replace(mechanism, parameters=MappingProxyType(parameters))
            if detached and any(x.requires_grad for x in maps.values()):
                trained = replace(trained, origin=digest_of(parameters))  # no longer those of the calibration
            mechanisms.append(trained)
        if isinstance(self._start, Mixture):
            heads = [heads for heads, _ in self._start.parts]
            return Mixture(list(zip(heads, mechanisms, strict=True)), readout)
        return replace(self._start, mechanism=mechanisms[0], readout=readout)


def sequence_order(n: int, steps: int, rng: np.random.Generator) -> Iterator[int]:
    """A sequence for every step: all of them, then all of them in another order, and so on."""
    order: list[int] = []
    for _ in range(steps):
        order = order or [int(i) for i in rng.permutation(n)]
        yield order.pop()


def _divergence(model: Model, text: Sequences, heads: Sequence[Head], head_substitute: Substitute) -> float:
    """KL from the original model on one sequence, its gradient added to the free numbers."""
    with torch.no_grad():
        original_logs = log_probabilities(model, text)
    with torch.enable_grad(), swap(model, heads, head_substitute):
        logs = log_probabilities(model, text)
        # A token that the model rules out counts as 0.
        divergence = (
            torch.where(original_logs > -torch.inf, original_logs.exp() * (original_logs - logs), 0.0)
            .sum(dim=-1)
            .mean()
        )
        divergence.backward()
    return divergence.item()


def log_probabilities(model: Model, text: Sequences) -> Float[Tensor, "next vocabulary"]:
    """Log-probabilities where the next token counts."""
    logits: Tensor = model(text.ids[:, :-1], use_cache=False).logits[0]
    if not bool(text.scored.all()):
        logits = logits[text.scored[0]]
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(dim=-1)
