"""Log-probability of a token and entropy of a next-token distribution, from rows of logits.

With x the logits of a position less their largest and Z = sum exp(x): log p = x - log Z and
H = log Z - sum x exp(x) / Z. On a CPU one compiled pass takes both from a row while it lies in the cache; elsewhere
torch does, operation by operation. Importing this module loads numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from softgap.attention.fused import Rows
from softgap.attention.simd import LANES, compiled, exp, fill, larger, largest, load, multiply_add, total

__all__ = ["score", "score_by_operations"]

# Logits of another dtype that are converted at once: few enough to stay in the cache from one pass to the next.
CACHED = 2**19
# Numbers that are added in float32 before the sum goes on in float64.
ADDED = 64 * LANES

Array = np.ndarray[Any, Any]


def score(
    logits: Float[Tensor, "batch time vocabulary"], tokens: Int[Tensor, "batch time"]
) -> tuple[Float[Tensor, "batch time"], Float[Tensor, "batch time"]]:
    """log p of the given tokens, and the entropy of p in nats; both in float32, token -1 giving NaN."""
    logits, targets = logits.detach(), tokens.clamp(min=0)
    scores = torch.empty(2, *tokens.shape, device=logits.device)
    plain = logits.dtype == torch.float32 and logits.device.type == "cpu"
    step = max(1, logits.shape[1] if plain else CACHED // logits.shape[-1])
    for start in range(0, logits.shape[1], step):
        part = slice(start, start + step)
        x = logits[:, part].float()
        if x.device.type == "cpu":
            of_part = torch.empty(2, *x.shape[:2])
            score_rows(Rows.of(x[:, None]), x.shape[-1], targets[:, part].contiguous().numpy(), of_part.numpy())
        else:
            of_part = score_by_operations(x, targets[:, part])
        scores[..., part] = of_part
    return scores[0].masked_fill_(tokens < 0, torch.nan), scores[1]


def score_by_operations(
    x: Float[Tensor, "batch time vocabulary"], targets: Int[Tensor, "batch time"]
) -> Float[Tensor, "quantity batch time"]:
    """The same by operations of torch, on any device."""
    x = x - x.amax(dim=-1, keepdim=True)
    e = x.exp()
    total = e.sum(dim=-1)
    log_total = total.log()
    logprob = x.gather(-1, targets[..., None])[..., 0] - log_total
    mean = torch.linalg.vecdot(x, e) / total
    if bool(mean.isnan().any()):
        # A token that a model rules out has the logit -inf, and 0 * -inf counts as 0.
        mean = x.mul_(e).nan_to_num_(nan=0.0).sum(dim=-1) / total
    return torch.stack([logprob, log_total - mean])


@compiled
def _greatest(numbers: Array, at: int, size: int) -> Any:
    """The largest of so many numbers from an index on."""
    greatest, whole = np.float32(-np.inf), size - size % LANES
    if whole:
        top = load(numbers, at)
        for i in range(at, at + whole, LANES):
            top = larger(top, load(numbers, i))
        greatest = largest(top)
    for i in range(at + whole, at + size):
        greatest = max(greatest, numbers[i])
    return greatest


@compiled
def _sums(numbers: Array, at: int, size: int, greatest: float) -> tuple[float, float]:
    """sum exp(x) and sum x exp(x) over so many numbers from an index on; fewer than LANES are copied to whole lanes."""
    shift, exponentials, products = fill(-greatest), fill(np.float32(0)), fill(np.float32(0))
    for i in range(at, at + size, LANES):
        x = multiply_add(load(numbers, i), fill(np.float32(1)), shift)
        e = exp(x)
        exponentials = multiply_add(e, fill(np.float32(1)), exponentials)
        # A token that a model rules out has the logit -inf, and 0 * -inf counts as 0.
        products = multiply_add(larger(x, fill(np.float32(-1000))), e, products)
    return np.float64(total(exponentials)), np.float64(total(products))


@compiled
def score_rows(rows: Rows, size: int, targets: Array, scores: Array) -> None:
    """Score rows of ``size`` logits; targets are ``[batch, time]``, scores ``[quantity, batch, time]``."""
    rest = np.empty(LANES, np.float32)
    whole = size - size % LANES
    for b in range(targets.shape[0]):
        for t in range(targets.shape[1]):
            at = b * rows.steps[0] + t * rows.steps[2]
            greatest = _greatest(rows.numbers, at, size)
            exponentials, products = 0.0, 0.0
            for start in range(0, whole, ADDED):
                e, x = _sums(rows.numbers, at + start, min(ADDED, whole - start), greatest)
                exponentials += e
                products += x
            if whole < size:
                rest[:] = -np.inf
                rest[: size - whole] = rows.numbers[at + whole : at + size]
                e, x = _sums(rest, 0, LANES, greatest)
                exponentials += e
                products += x
            log_total = np.log(exponentials)
            scores[0, b, t] = rows.numbers[at + targets[b, t]] - greatest - log_total
            scores[1, b, t] = log_total - products / exponentials
