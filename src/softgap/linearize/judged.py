"""How well a forward predicts: loss, divergence from the unswapped model, and the accuracy of the top token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from softgap.linearize.passages import Passages
from softgap.probe.models import Model
from softgap.probe.token_scores import forward_then_logits

__all__ = ["Judged", "Original", "judge_forward", "read_original", "right_tokens"]

# Logits looked at together: few enough to stay in the processor's cache from one pass to the next.
CACHED = 2**19
# Rows of logits that the head computes at once, over all sequences of a batch.
ROWS = 128


@dataclass(frozen=True, eq=False)
class Judged:
    """Per next token: -log p of the right one, KL(original || this), and whether the top token is the right one."""

    loss: Float[Tensor, "sequence next"]
    kl: Float[Tensor, "sequence next"]
    right: Float[Tensor, "sequence next"]

    def means(self, passages: Passages, copies: int = 1) -> Float[Tensor, "quantity copy text"]:
        """Means over the next tokens that count, for every copy and text: of loss, KL and accuracy.

        Where passages ask for answers, two more follow: the shares of answers whose first token is right, and that are
        right as a whole.
        """
        scored = passages.scored.to(self.loss)
        values = torch.stack([self.loss, self.kl, self.right]).unflatten(1, (copies, len(passages)))
        found: Tensor = (values * scored).sum(dim=-1) / scored.sum(dim=-1)
        if passages.first is None:
            return found
        return torch.cat([found, torch.stack(passages.answered(values[2]))])


@dataclass(frozen=True, eq=False)
class Original:
    """The unswapped model on some passages: its next-token distributions, and how well they predict."""

    probability: Float[Tensor, "text next vocabulary"]
    negative_entropy: Float[Tensor, "text next"]
    judged: Judged


def read_original(model: Model, ids: Int[Tensor, "text time"]) -> Original:
    """One forward over passages, with all distributions kept."""
    n = ids.shape[1] - 1
    blocks = forward_then_logits(model, _inputs(ids), n, rows=max(1, ROWS // len(ids)))
    logs = torch.cat([_numbers(logits) for _, logits in blocks()], dim=1).log_softmax(dim=-1)
    wanted = ids[:, 1:, None]
    loss = -logs.gather(-1, wanted)[..., 0]
    right = (logs.argmax(dim=-1) == wanted[..., 0]).to(loss.dtype)
    probability = logs.exp()
    # A token that a model rules out has probability 0 and log-probability -inf, and counts as 0.
    entropy = (probability * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(dim=-1)
    return Original(probability, entropy, Judged(loss, torch.zeros_like(loss), right))


def judge_forward(model: Model, ids: Int[Tensor, "text time"], original: Original | None, copies: int = 1) -> Judged:
    """One forward over ``copies`` of passages, one behind the other; KL is NaN where no original is given.

    With z the logits, Z = sum exp z and p the original distribution: loss = log Z - z_y, and
    KL = sum p log p - sum p z + log Z sum p, in which it does not matter that rounded p do not quite sum to 1.
    """
    n = ids.shape[1] - 1
    many = ids.repeat(copies, 1)
    found = torch.empty(3, len(many), n, dtype=torch.float64 if model.dtype == torch.float64 else torch.float32)
    for start, logits in forward_then_logits(model, _inputs(many), n, rows=max(1, ROWS // len(many)))():
        stop = start + logits.shape[1]
        for row in range(len(many)):
            base = None if original is None else original.probability[row % len(ids), start:stop]
            found[:, row, start:stop] = _judged_rows(logits[row], many[row, start + 1 : stop + 1], base)
    loss, cross, right = found
    if original is None:
        return Judged(loss, torch.full_like(loss, torch.nan), right)
    return Judged(loss, cross + original.negative_entropy.repeat(copies, 1).to(cross), right)


def right_tokens(model: Model, passages: Passages) -> Float[Tensor, "text next"]:
    """1 where the top token is the right one and counts, else 0; logits are computed from the first such place on."""
    ids = passages.ids
    n = ids.shape[1] - 1
    begin = int(passages.scored.any(dim=0).int().argmax())
    found = torch.zeros(len(ids), n)
    for start, logits in forward_then_logits(model, _inputs(ids), n, rows=max(1, ROWS // len(ids)), begin=begin)():
        stop = start + logits.shape[1]
        right = logits.argmax(dim=-1) == ids[:, start + 1 : stop + 1]
        found[:, start:stop] = (right & passages.scored[:, start:stop]).cpu()
    return found


def _judged_rows(
    logits: Float[Tensor, "next vocabulary"],
    wanted: Int[Tensor, " next"],
    base: Float[Tensor, "next vocabulary"] | None,
) -> Float[Tensor, "quantity next"]:
    """Loss, cross term log Z sum p - sum p z, and whether the top token is right."""
    found = []
    step = max(1, CACHED // logits.shape[-1])
    for start in range(0, len(logits), step):
        z, y = _numbers(logits[start : start + step]), wanted[start : start + step]
        total = z.logsumexp(dim=-1)
        cross = torch.full_like(total, torch.nan)
        if base is not None:
            p = base[start : start + step]
            mean = torch.linalg.vecdot(p, z)
            if bool(mean.isnan().any()):
                mean = torch.where(p > 0, p * z, 0).sum(dim=-1)
            cross = total * p.sum(dim=-1) - mean
        found.append(
            torch.stack([total - z.gather(-1, y[:, None])[:, 0], cross, (z.argmax(dim=-1) == y).to(total.dtype)])
        )
    return torch.cat(found, dim=1)


def _numbers(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _inputs(ids: Int[Tensor, "text time"]) -> dict[str, object]:
    # Nothing is known of what follows the last token.
    return {"input_ids": ids[:, :-1], "use_cache": False}
