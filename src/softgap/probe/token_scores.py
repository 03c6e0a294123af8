"""Log-probability of each token and entropy of each next-token distribution, from a model's raw logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["TokenScores", "forward_then_logits", "score"]

ROWS = 128
CACHED = 2**18

LogitBlocks = Callable[[], Iterator[tuple[int, Float[Tensor, "batch time vocabulary"]]]]


def score(
    logits: Float[Tensor, "batch time vocabulary"], tokens: Int[Tensor, "batch time"]
) -> tuple[Float[Tensor, "batch time"], Float[Tensor, "batch time"]]:
    """log p of the given tokens, and the entropy of p in nats; both in float32, token -1 giving NaN.

    With x the logits less their largest, Z = sum exp(x): log p = x - log Z and H = log Z - sum x exp(x) / Z.
    """
    rows, wanted = logits.flatten(0, 1), tokens.flatten()
    chosen = torch.empty(len(rows), device=logits.device)
    entropy = torch.empty_like(chosen)
    # A few rows at a time stay in the cache from one pass to the next.
    step = max(1, CACHED // rows.shape[-1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        x = rows[part].float()
        x = x - x.amax(dim=-1, keepdim=True)
        chosen[part] = x.gather(-1, wanted[part].clamp(min=0)[:, None])[:, 0]
        e = x.exp()
        total = e.sum(dim=-1)
        log_total = total.log()
        chosen[part] -= log_total
        mean = x.mul_(e).sum(dim=-1) / total
        if bool(mean.isnan().any()):
            # A token that a model rules out has the logit -inf, and 0 * -inf counts as 0.
            mean = x.nan_to_num_(nan=0.0).sum(dim=-1) / total
        entropy[part] = log_total - mean
    return chosen.masked_fill_(wanted < 0, torch.nan).view_as(tokens), entropy.view_as(tokens)


class TokenScores:
    """Scores of the positions of one batch, gathered from the logits of forward after forward.

    The logits of a position are scored when the token behind it is known, which for the last one is a forward later.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._waiting: list[tuple[int, Float[Tensor, "batch 1 vocabulary"]]] = []
        self._done: list[tuple[int, Tensor, Tensor]] = []

    def add(self, first: int, logits: Float[Tensor, "batch time vocabulary"], fed: Int[Tensor, "batch total"]) -> None:
        """Take in the logits of the positions from ``first`` on; ``fed`` are all tokens up to their last position."""
        known = logits.shape[1] - 1
        for start in range(0, known, ROWS):
            stop = min(known, start + ROWS)
            self._note(first + start, logits[:, start:stop], fed[:, first + start + 1 : first + stop + 1])
        # A copy: the caller may go on to change its logits in place.
        self._waiting.append((first + known, logits[:, -1:].clone()))
        if len(self._waiting) > self._block:
            self.settle(fed)

    def settle(self, tokens: Int[Tensor, "batch total"]) -> None:
        """Score every waiting position whose next token is among these."""
        ready = [entry for entry in self._waiting if entry[0] + 1 < tokens.shape[1]]
        self._waiting = [entry for entry in self._waiting if entry[0] + 1 >= tokens.shape[1]]
        while ready:
            # Runs of neighbouring positions are scored together.
            run = 1
            while run < min(len(ready), ROWS) and ready[run][0] == ready[0][0] + run:
                run += 1
            first = ready[0][0]
            logits = torch.cat([logits for _, logits in ready[:run]], dim=1)
            self._note(first, logits, tokens[:, first + 1 : first + 1 + run])
            ready = ready[run:]

    def close(self, tokens: Int[Tensor, "batch total"]) -> None:
        """Score all that waits, with or without its token: no more will come."""
        self.settle(tokens)
        for position, logits in self._waiting:
            self._note(position, logits, torch.full((len(tokens), 1), -1))
        self._waiting = []

    def result(self, tokens: Int[Tensor, "batch total"], n: int) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of positions 0..n-1, NaN where the model gave no logits."""
        self.settle(tokens)
        batch = len(tokens)
        # What still waits is scored without its token, and goes on waiting.
        waiting = [(at, *score(x, torch.full((batch, 1), -1, device=x.device))) for at, x in self._waiting]
        logprob, entropy = torch.full((2, batch, n), torch.nan)
        for first, chosen, spread in [*self._done, *waiting]:
            stop = min(n, first + chosen.shape[1])
            logprob[:, first:stop] = chosen[:, : stop - first]
            entropy[:, first:stop] = spread[:, : stop - first]
        return logprob, entropy

    def _note(self, first: int, logits: Tensor, tokens: Tensor) -> None:
        chosen, entropy = score(logits, tokens.to(logits.device))
        self._done.append((first, chosen.cpu(), entropy.cpu()))


def forward_then_logits(model: PreTrainedModel, inputs: dict[str, Any], n: int) -> LogitBlocks:
    """One forward over all n positions now; its logits, a block at a time, when they are asked for.

    n x vocabulary numbers are never held. The head is the model's own: its forward is called again for each block,
    with the part below the head replaced by what it returned the first time (and past all hooks: it is no new pass).
    """
    base = model.base_model
    if n <= ROWS or base is model or "logits_to_keep" not in inspect.signature(model.forward).parameters:
        whole = model(**inputs).logits
        return lambda: iter([(0, whole)])
    kept: list[Any] = []
    hook = base.register_forward_hook(lambda module, args, output: kept.append(output))
    try:
        model(**inputs, logits_to_keep=1)
    finally:
        hook.remove()

    def blocks() -> Iterator[tuple[int, Float[Tensor, "batch time vocabulary"]]]:
        with _answering(base, kept[-1]):
            for start in range(0, n, ROWS):
                positions = torch.arange(start, min(n, start + ROWS), device=model.device)
                yield start, model.forward(**inputs, logits_to_keep=positions).logits

    return blocks


@contextmanager
def _answering(module: torch.nn.Module, answer: Any) -> Iterator[None]:
    """A module that returns one answer whatever it is asked."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda *args, **kwargs: answer
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own
