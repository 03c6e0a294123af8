"""The search for a plan: as many heads or KV groups as a budget of loss allows, checked on text it never saw.

The text is cut in three: half of the passages to score heads and to fit repairs on, a quarter to choose how many heads
go, a quarter to say what the chosen plan costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from softgap.attention import Mechanism
from softgap.errors import ValueInputError, unknown_name
from softgap.linearize.applying import freed_groups
from softgap.linearize.frontier import BEST
from softgap.linearize.heads import Head, heads_by_layer
from softgap.linearize.kept import Kept
from softgap.linearize.orders import Unit, ordered, taken, units_of
from softgap.linearize.passages import LENGTH, Passages, check_length, digest_of_passages, lookups, passages_of
from softgap.linearize.plan import Plan
from softgap.linearize.repair import repaired
from softgap.linearize.scores import SCORES, head_scores
from softgap.linearize.substitute import Substitute, substitute
from softgap.linearize.together import Reading, read_swapped
from softgap.probe.fingerprint import model_fingerprint
from softgap.probe.layout import attention_layers
from softgap.probe.models import Model, Tokenizer
from softgap.probe.progress import Report
from softgap.probe.provenance import library_versions

__all__ = ["check_search", "find_plan", "memory_of"]

FEWEST = 4
TOKENS = 16384


def find_plan(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    mechanism: str | Mechanism | Substitute,
    *,
    budget: float,
    by: str = "heads",
    score: str = BEST,
    repair: bool = True,
    length: int = LENGTH,
    tokens: int | None = TOKENS,
    recalls: int = 8,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Report = lambda stage, fraction: None,
) -> Plan:
    """The largest plan whose rise in loss stays within the budget.

    Parameters
    ----------
    texts
        What to search on: cut into passages of ``length`` tokens, about ``tokens`` in all.
    mechanism
        What heads become, by name, or as a :class:`Substitute`.
    budget
        Rise in loss that is allowed, in nats per token.
    by
        ``heads`` or ``groups``.
    score
        What ranks the heads; see :data:`SCORES`.
    repair
        Whether swapped heads get a readout.
    folder
        Where finished steps wait, so that the same call goes on after an interruption.
    """
    check_search(budget, score, length, tokens)
    one = substitute(mechanism, model)
    read = passages_of(model, tokenizer, texts, length=length, tokens=tokens, fewest=FEWEST)
    asked = lookups(model, tokenizer, recalls, seed=seed) if recalls else None
    fit, chosen_on, check = _parts(read)
    settings = {
        "fingerprint": model_fingerprint(model),
        "mechanism": one.name,
        "calibration": one.mechanism.origin,
        "text": digest_of_passages(read),
        "length": length,
        "tokens": read.tokens,
        "by": by,
        "score": score,
        "repair": repair,
        "seed": seed,
    }
    kept = Kept(folder, settings)
    search = _Search(model, fit, chosen_on, one, repair, kept)
    order = _order(model, fit, one, settings, kept, progress)
    n = _largest(search, [taken(order, k) for k in range(len(order) + 1)], budget, by, progress)
    heads = taken(order, n)
    used = search.substitute(heads)
    progress("checking the plan on unseen text", 0.95)
    original, swapped = (read_swapped(model, check, asked, some, used) for some in ([], heads))
    return _plan(model, heads, used, original, swapped, {**settings, "budget": budget, "versions": library_versions()})


def check_search(budget: float, score: str, length: int, tokens: int | None) -> None:
    """Refuse what no search can be made with; a command asks before it loads a model."""
    if not 0 < budget < math.inf:
        raise ValueInputError(f"the budget must be above 0 nats per token and finite, got {budget:g}; 0.1 is usual")
    if score not in SCORES:
        raise unknown_name("score", score, SCORES)
    check_length(length)
    if tokens is not None and tokens < 1:
        raise ValueInputError(f"tokens must be at least 1, got {tokens}; {TOKENS} are usual")


def _parts(read: Passages) -> tuple[Passages, Passages, Passages]:
    """Half of the passages to fit on, a quarter to choose on, the last quarter to check on."""
    half, quarter = len(read) // 2, max(1, len(read) // 4)
    bounds = ((0, half), (half, len(read) - quarter), (len(read) - quarter, None))
    fit, chosen_on, check = (read.part(slice(*bound)) for bound in bounds)
    return fit, chosen_on, check


def _order(
    model: Model, fit: Passages, one: Substitute, settings: dict[str, Any], kept: Kept, progress: Report
) -> list[Unit]:
    """All heads or groups, cheapest first by the score; scores that were taken before are used again."""
    name = settings["score"]

    def scored() -> dict[str, Any]:
        found = head_scores(
            model,
            fit,
            one,
            names=[name],
            seed=settings["seed"],
            progress=lambda stage, share: progress(stage, 0.3 * share),
        )
        return {"heads": found.heads, "score": found.mean(name).tolist()}

    scores = kept.made("scores", scored)
    heads = [(int(layer), int(head)) for layer, head in scores["heads"]]
    return ordered(units_of(model, settings["by"]), heads, np.asarray(scores["score"]))


class _Search:
    """The rise in loss of sets of heads, on the quarter of the text that chooses."""

    def __init__(
        self, model: Model, fit: Passages, chosen_on: Passages, one: Substitute, repair: bool, kept: Kept
    ) -> None:
        self._model, self._fit, self._text = model, fit, chosen_on
        self._one, self._repair, self._kept = one, repair, kept
        self._original = self._reading([])

    def substitute(self, heads: Sequence[Head]) -> Substitute:
        """What these heads become, repaired where that is wanted."""
        return repaired(self._model, self._fit, heads, self._one) if self._repair else self._one

    def rise(self, heads: Sequence[Head]) -> float:
        """Mean rise in loss."""
        reading = self._reading(list(heads))
        return float((reading.loss - self._original.loss).mean())

    def _reading(self, heads: list[Head]) -> Reading:
        def make() -> dict[str, Any]:
            chosen = self.substitute(heads) if heads else None
            return read_swapped(self._model, self._text, None, heads, chosen).to_json()

        return Reading.from_json(self._kept.made(["set", heads], make))


def _largest(search: _Search, sets: Sequence[Sequence[Head]], budget: float, by: str, progress: Report) -> int:
    """The largest set within the budget, by bisection: costs grow with the set, up to the noise of the text."""
    first = search.rise(sets[1])
    if first > budget:
        raise ValueInputError(
            f"nothing meets the budget of {budget:g} nats per token: the cheapest of the {by} costs {first:.3g} "
            "already; allow more, or give more text"
        )
    low, high, done = 1, len(sets), 0
    total = max(1, (len(sets) - 1).bit_length())
    while high - low > 1:
        middle = (low + high) // 2
        if search.rise(sets[middle]) <= budget:
            low = middle
        else:
            high = middle
        done += 1
        progress(f"{low} of {len(sets) - 1} {by} fit the budget", min(0.9, 0.3 + 0.6 * done / total))
    return low


def _plan(
    model: Model,
    heads: Sequence[Head],
    used: Substitute,
    original: Reading,
    swapped: Reading,
    provenance: dict[str, Any],
) -> Plan:
    layers = attention_layers(model)
    chosen = heads_by_layer(layers, heads)
    groups = tuple((layer.number, group) for layer, own in chosen for group in freed_groups(layer, own))
    return Plan(
        model=model.name_or_path or model.config.model_type,
        fingerprint=model_fingerprint(model),
        heads=tuple(heads),
        groups=groups,
        layers=tuple(layer.number for layer, own in chosen if len(own) == layer.heads),
        substitute=used,
        original=original.means(),
        expected=swapped.change_from(original),
        memory=memory_of(model, groups, used),
        provenance=provenance,
    )


def memory_of(model: Model, groups: Sequence[tuple[int, int]], used: Substitute) -> dict[str, float]:
    """Bytes of the KV cache per token of context, of the model and under a plan, and of all states at any length."""
    layers = attention_layers(model)
    config: Any = model.config.get_text_config()
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    each = 2 * dim * model.dtype.itemsize
    total = sum(layer.kv_heads for layer in layers)
    features = used.mechanism.feature_dim(dim) or 0
    near = 0 if used.window is None else (used.window - 1) * (2 * dim + features + dim) * 4
    return {
        "per_token_original": float(each * total),
        "per_token": float(each * (total - len(groups))),
        "saved_per_token": float(each * len(groups)),
        "states": float(len(groups) * (features * (dim + 1) * 4 + near)),
    }
