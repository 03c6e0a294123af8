"""Log-probability of each token and entropy of each next-token distribution, from a model's raw logits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from softgap.models.placement import input_device

__all__ = ["TokenScores", "forward_then_logits", "return_constant"]

ROWS = 128

LogitBlocks = Callable[[], Iterator[tuple[int, Float[Tensor, "batch time vocabulary"]]]]


class TokenScores:
    """Scores of the positions of one batch, gathered from the logits of forward after forward.

    The logits of a position are scored when the token behind it is known, which for the last one is a forward later.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        # Copies of logits whose next token is not known yet, and the positions they belong to.
        self._waiting_logits: Float[Tensor, "batch waiting vocabulary"] | None = None
        self._waiting: list[int] = []
        self._scores: Float[Tensor, "quantity batch time"] | None = None
        self._expected = self._stop = 0

    def add(self, first: int, logits: Float[Tensor, "batch time vocabulary"], fed: Int[Tensor, "batch total"]) -> None:
        """Take in the logits of the positions from ``first`` on; ``fed`` are all tokens up to their last position."""
        known, self._expected = logits.shape[1] - 1, fed.shape[1]
        for start in range(0, known, ROWS):
            stop = min(known, start + ROWS)
            self._note(first + start, logits[:, start:stop], fed[:, first + start + 1 : first + stop + 1])
        if len(self._waiting) > self._block:
            self.settle(fed)
        self._hold(first + known, logits[:, -1])

    def settle(self, tokens: Int[Tensor, "batch total"]) -> None:
        """Score every waiting position whose next token is among these."""
        ready = sum(position + 1 < tokens.shape[1] for position in self._waiting)
        start = 0
        while start < ready and self._waiting_logits is not None:
            # Runs of neighbouring positions are scored together.
            first, stop = self._waiting[start], start + 1
            while stop < min(ready, start + ROWS) and self._waiting[stop] == first + stop - start:
                stop += 1
            self._note(first, self._waiting_logits[:, start:stop], tokens[:, first + 1 : first + 1 + stop - start])
            start = stop
        self._drop(ready)

    def close(self, tokens: Int[Tensor, "batch total"]) -> None:
        """Score all that waits, with or without its token: no more will come."""
        self.settle(tokens)
        for i, position in enumerate(self._waiting):
            if self._waiting_logits is not None:
                self._keep(position, _without_tokens(self._waiting_logits[:, i : i + 1]))
        self._waiting, self._waiting_logits = [], None
        if self._scores is not None:
            self._scores = self._scores[..., : self._stop].clone()

    def result(self, tokens: Int[Tensor, "batch total"], n: int) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of positions 0..n-1, NaN where the model gave no logits."""
        self.settle(tokens)
        scores = torch.full((2, len(tokens), n), torch.nan)
        if self._scores is not None:
            known = min(n, self._scores.shape[2])
            scores[..., :known] = self._scores[..., :known]
        # What still waits is scored without its token, and goes on waiting.
        for i, position in enumerate(self._waiting):
            if position < n and self._waiting_logits is not None:
                scores[..., position : position + 1] = _without_tokens(self._waiting_logits[:, i : i + 1])
        return scores[0], scores[1]

    def _hold(self, position: int, logits: Float[Tensor, "batch vocabulary"]) -> None:
        """Keep a copy: the caller may go on to change its logits in place."""
        batch, vocabulary = logits.shape
        if self._waiting_logits is None:
            # As many as will wait at most, made once: fresh memory at every step would cost more than the copy.
            self._waiting_logits = logits.new_empty(batch, self._block + 2, vocabulary)
        self._waiting_logits[:, len(self._waiting)] = logits
        self._waiting.append(position)

    def _drop(self, count: int) -> None:
        """Forget the first ones that wait."""
        if count and self._waiting_logits is not None:
            remaining = len(self._waiting) - count
            self._waiting_logits[:, :remaining] = self._waiting_logits[:, count : count + remaining].clone()
            del self._waiting[:count]

    def _note(self, first: int, logits: Tensor, tokens: Tensor) -> None:
        # Here, since it loads numba.
        from softgap.probe.logit_scores import score

        self._keep(first, torch.stack(score(logits, tokens.to(logits.device))))

    def _keep(self, first: int, scores: Float[Tensor, "quantity batch time"]) -> None:
        """Into one array that grows by doubling: a small tensor for every block would pin the memory between blocks."""
        stop = first + scores.shape[2]
        if self._scores is None or self._scores.shape[2] < stop:
            grown = torch.full((*scores.shape[:2], max(stop, self._expected, 256)), torch.nan)
            if self._scores is not None:
                grown = torch.cat([self._scores, torch.full_like(grown, torch.nan)], dim=2)
            self._scores = grown
        self._scores[..., first:stop] = scores
        self._stop = max(self._stop, stop)


def _without_tokens(logits: Float[Tensor, "batch time vocabulary"]) -> Float[Tensor, "quantity batch time"]:
    """The scores of positions whose next token is not known: entropy alone."""
    from softgap.probe.logit_scores import score

    return torch.stack(score(logits, torch.full(logits.shape[:2], -1, device=logits.device)))


def forward_then_logits(
    model: PreTrainedModel, inputs: dict[str, Any], n: int, rows: int = ROWS, *, begin: int = 0
) -> LogitBlocks:
    """One forward over all n positions now; its logits, a block of ``rows`` at a time, when they are asked for.

    n x vocabulary numbers are never held. The head is the model's own: its forward is called again for each block,
    with the part below the head replaced by what it returned the first time (and past all hooks: it is no new pass).
    Positions before ``begin`` are not needed, and are left out where that saves something.
    """
    base = model.base_model
    if n <= rows or base is model or "logits_to_keep" not in inspect.signature(model.forward).parameters:
        whole = model(**inputs).logits
        return lambda: iter([(0, whole)])
    inputs_of_head: list[Any] = []
    hook = base.register_forward_hook(lambda module, args, output: inputs_of_head.append(output))
    try:
        model(**inputs, logits_to_keep=1)
    finally:
        hook.remove()
    if not inputs_of_head:  # decoders of encoder-decoder models are called past the model around them
        whole = model(**inputs).logits
        return lambda: iter([(0, whole)])

    def blocks() -> Iterator[tuple[int, Float[Tensor, "batch time vocabulary"]]]:
        below = inputs_of_head[-1]
        for start in range(begin, n, rows):
            stop = min(n, start + rows)
            if below[0].device == input_device(model):
                kept = {"logits_to_keep": torch.arange(start, stop, device=below[0].device)}
                answer = below
            else:  # the head of a model on several devices: inputs come where the first layer is
                kept, answer = {}, _rows_of(below, slice(start, stop))
            with return_constant(base, answer):
                logits = model.forward(**inputs, **kept).logits
            yield start, logits

    return blocks


def _rows_of(output: Any, rows: slice) -> Any:
    """What the part below the head returned, for some positions only."""
    hidden = output[0][:, rows]
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    part = copy.copy(output)
    part.last_hidden_state = hidden
    return part


@contextmanager
def return_constant(module: torch.nn.Module, answer: Any) -> Iterator[None]:
    """A module that returns one answer whatever it is asked."""
    original = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda *args, **kwargs: answer
    try:
        yield
    finally:
        if original is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = original
