"""Search for a plan that swaps as many heads or KV groups as a budget allows.

The text is cut in three: half of the sequences to score heads and to fit output corrections on, a quarter to choose how
many heads go, a quarter to say what the chosen plan costs. Where recall is limited, each of the three has recall lists
of its own; those that choose and those that check are as many as ``softgap.linearize.recall`` asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from softgap.attention import Mechanism
from softgap.checkpoints import Checkpoints
from softgap.deprecation import deprecated_keywords
from softgap.errors import ValueInputError, unknown_name
from softgap.intervene.state_cache import bounded_layers
from softgap.intervene.substitute import Head, Substitute, substitute
from softgap.intervene.swap import heads_by_layer
from softgap.linearize.baselines import LENGTHS, evaluate_baselines, sequences_by_length
from softgap.linearize.distil import distil_substitute
from softgap.linearize.frontier import DEFAULT_SCORE, Budget, Unit, first_heads, order_units, units_of
from softgap.linearize.output_correction import fit_output_correction
from softgap.linearize.plan import Plan, freed_groups, memory_of, streams
from softgap.linearize.recall import FEWEST_LISTS, RecallTest, half_widths
from softgap.linearize.scores import SCORES, head_scores
from softgap.linearize.sequences import (
    LENGTH,
    PAIRS,
    Reading,
    Sequences,
    check_length,
    digest_of_sequences,
    join_readings,
    read_swapped,
    recall_sequences,
    sequence_places,
    split_sequences,
    token_ids,
)
from softgap.models.fingerprint import library_versions, model_fingerprint
from softgap.models.loading import Model, Tokenizer
from softgap.models.support import check_measurable
from softgap.probe.layout import attention_layers
from softgap.progress import Progress, silent

__all__ = ["check_search", "find_plan"]

FEWEST = 4
TOKENS = 16384
# Lists that head scores and distillation count beside the text; they decide nothing by themselves.
FIT_LISTS = 8
# Of the time, where baselines are evaluated after the search.
SEARCH_SHARE = 0.6
# Lists of each kind are drawn from a seed of their own.
CHECK, CHOOSE, FIT = range(3)


@deprecated_keywords(repair="correct", tune="distil")
def find_plan(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    mechanism: str | Mechanism | Substitute,
    *,
    budget: float,
    recall_budget: float | None = None,
    by: str = "heads",
    score: str = DEFAULT_SCORE,
    correct: bool = True,
    distil: int = 0,
    length: int = LENGTH,
    tokens: int | None = TOKENS,
    recalls: int | None = None,
    baselines: bool = True,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress = silent,
) -> Plan:
    """The largest plan whose rise in loss, and drop in recall where that is limited, stay within the budget.

    Parameters
    ----------
    model
        Any causal model of transformers that softgap supports.
    tokenizer
        Its tokenizer.
    texts
        What to search on: cut into sequences of ``length`` tokens, about ``tokens`` in all.
    mechanism
        What heads become, by name, or as a ``Substitute``.
    budget
        Rise in loss that is allowed, in nats per token.
    recall_budget
        Drop in recall that is allowed, between 0 and 1; None does not limit it.
    by
        ``heads`` or ``groups``.
    score
        What ranks the heads; see ``SCORES``.
    correct
        Whether swapped heads get an output correction.
    distil
        Steps by which every set is distilled after its output correction (``distil_substitute``); 0 for none. A step
        takes the time of about four forwards over a sequence.
    length
        Tokens per sequence.
    tokens
        About how many tokens of the texts to use; None for all.
    recalls
        Recall lists that the plan is checked on, and as many others to choose on where recall is limited. None asks
        as many as a half-width of .02 takes (``softgap.linearize.recall.HALF_WIDTH``), 0 none.
    baselines
        Whether to evaluate the baselines of the plan as well (``softgap.linearize.baselines``): the same heads with
        windows of equal memory and with a constant, and random heads; at 512, 2,048 and 8,192 tokens and at
        ``length``, as far as text and context allow.
    seed
        Random seed of the recall lists, the scores and the bootstrap.
    folder
        Where finished steps are saved, so that the same call resumes after an interruption.
    progress
        Called with the stage in words and the share of the whole that is done.

    Returns
    -------
    Plan
        Heads, KV groups and layers to swap, the expected cost with intervals, the memory saved, and the baselines.

    Raises
    ------
    ValueInputError
        If the text is too short for the search.

    Examples
    --------
    ``tiny-llama`` is a folder with a small random model of two layers with four heads:

    >>> from pathlib import Path
    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> book = Path("book.txt").read_text()
    >>> plan = softgap.linearize.find_plan(
    ...     model, tokenizer, [book], "elu1", budget=0.5, length=64, tokens=1024, recalls=0
    ... )
    >>> 0 < len(plan.heads) <= 8
    True
    >>> sorted(plan.expected)
    ['accuracy', 'loss']
    """
    check_measurable(model)
    limits = check_search(
        budget=budget,
        recall_budget=recall_budget,
        score=score,
        correct=correct,
        distil=distil,
        length=length,
        tokens=tokens,
    )
    head_substitute = substitute(mechanism, model)
    whole = progress
    if baselines:
        progress = lambda stage, share: whole(stage, SEARCH_SHARE * share)  # noqa: E731
    sequences = split_sequences(model, tokenizer, texts, length=length, tokens=tokens, fewest=FEWEST)
    if limits.recall is not None and recalls == 0:
        raise ValueInputError(
            "a recall budget needs recall lists, got recalls=0; leave recalls or the recall budget out"
        )

    def lists(kind: int, skip: int, n: int) -> Sequences:
        return recall_sequences(model, tokenizer, n, seed=3 * seed + kind, skip=skip)

    limited = limits.recall is not None
    text = _split_text(sequences, lists(FIT, 0, FIT_LISTS if recalls is None else recalls) if limited else None)
    settings = _settings(
        model, sequences, head_substitute, length=length, by=by, score=score, repair=correct, tune=distil, seed=seed
    )
    checkpoints = Checkpoints(folder, settings)
    choose = RecallTest(model, partial(lists, CHOOSE), recalls, checkpoints, seed) if limited else None
    search = _Search(model, text, head_substitute, settings, checkpoints, progress, choose)
    order = _order_by_score(model, text, head_substitute, settings, checkpoints, progress)
    heads = _largest_set(search, [first_heads(order, k) for k in range(len(order) + 1)], limits, by, progress)
    stage = "checking the plan on unseen text"
    progress(stage, 0.95)
    check = None
    if recalls != 0:
        check = RecallTest(model, partial(lists, CHECK), recalls, checkpoints, seed)
        check.report = lambda n: progress(f"{stage}, {n} recall lists", 0.97)
    provenance = {**settings, "budget": budget, "recall_budget": recall_budget, "versions": library_versions()}
    plan = _evaluate_plan(model, text, heads, search.substitute(heads), provenance, check, search.lists(heads))
    if not baselines:
        return plan
    ids = _unseen_tokens(token_ids(tokenizer, texts), len(sequences), length)
    by_length, left_out = sequences_by_length(model, ids, [length, *LENGTHS], text.check.tokens)
    recall_lists = None if recalls == 0 else lists(CHECK, 0, FEWEST_LISTS if recalls is None else recalls)
    evaluated = evaluate_baselines(
        model,
        [(plan.heads, plan.substitute)],
        # At the length of the search the texts are those that the plan was checked on.
        dict(sorted({**by_length, length: text.check}.items())),
        recall_lists,
        fit=text.fit,
        units=units_of(model, by),
        seed=seed,
        left_out=left_out,
        checkpoints=checkpoints,
        progress=lambda stage, share: whole(stage, SEARCH_SHARE + (1 - SEARCH_SHARE) * share),
    )
    return replace(plan, baselines=evaluated)


def _unseen_tokens(ids: Sequence[int], n_sequences: int, length: int) -> Sequence[int]:
    """The end of the text, from the first sequence on that the plan is checked on."""
    places = sequence_places(len(ids) // length, n_sequences)
    return ids[int(places[n_sequences - _quarter(n_sequences)]) * length :]


def _quarter(n_sequences: int) -> int:
    """How many sequences a plan is checked on."""
    return max(1, n_sequences // 4)


def _settings(model: Model, sequences: Sequences, head_substitute: Substitute, **options: Any) -> dict[str, Any]:
    """Everything that scores and costs of sets depend on; a budget does not change them."""
    return {
        "fingerprint": model_fingerprint(model),
        "mechanism": head_substitute.name,
        "calibration": head_substitute.mechanism.origin,
        "parameters": head_substitute.digest,
        "text": digest_of_sequences(sequences),
        "tokens": sequences.tokens,
        **options,
    }


def check_search(
    *,
    budget: float,
    recall_budget: float | None,
    score: str,
    correct: bool,
    distil: int,
    length: int,
    tokens: int | None,
) -> Budget:
    """Refuse what no search can be made with; a command asks before it loads a model."""
    limits = Budget(budget, recall_budget)
    if score not in SCORES:
        raise unknown_name("score", score, SCORES)
    if distil < 0 or (distil and not correct):
        raise ValueInputError(
            f"distillation takes 0 steps or more and needs the output correction, got distil={distil} and "
            f"correct={correct}; leave one out"
        )
    check_length(length)
    if tokens is not None and tokens < 1:
        raise ValueInputError(f"tokens must be at least 1, got {tokens}; {TOKENS} are usual")
    return limits


@dataclass(frozen=True, eq=False)
class _SearchText:
    """Sequences to fit on, to choose on and to check on, and recall lists to fit on."""

    fit: Sequences
    choose: Sequences
    check: Sequences
    fit_recall_lists: Sequences | None = None


def _split_text(sequences: Sequences, recall: Sequences | None) -> _SearchText:
    """Half of the sequences to fit on, a quarter to choose on, the last quarter to check on."""
    half, quarter = len(sequences) // 2, _quarter(len(sequences))
    bounds = ((0, half), (half, len(sequences) - quarter), (len(sequences) - quarter, None))
    fit, choose, check = (sequences.part(slice(*bound)) for bound in bounds)
    return _SearchText(fit, choose, check, recall)


def _order_by_score(
    model: Model,
    text: _SearchText,
    head_substitute: Substitute,
    settings: dict[str, Any],
    checkpoints: Checkpoints,
    progress: Progress,
) -> list[Unit]:
    """All heads or groups, cheapest first by the score; scores that were taken before are used again.

    Where recall is limited, recall lists count beside the text: heads that text hardly misses may be all of recall.
    """
    name = settings["score"]

    def make() -> dict[str, Any]:
        scores_of_heads = head_scores(
            model,
            text.fit,
            head_substitute,
            recall_lists=text.fit_recall_lists,
            names=[name],
            seed=settings["seed"],
            progress=lambda stage, share: progress(stage, 0.3 * share),
        )
        return {"heads": scores_of_heads.heads, "score": scores_of_heads.mean(name).tolist()}

    scores = checkpoints.find_or_make(
        ["scores", digest_of_sequences(text.fit_recall_lists)] if text.fit_recall_lists else "scores", make
    )
    heads = [(int(layer), int(head)) for layer, head in scores["heads"]]
    return order_units(units_of(model, settings["by"]), heads, np.asarray(scores["score"]))


class _Search:
    """What sets of heads cost, on the quarter of the text and the recall lists that choose."""

    def __init__(
        self,
        model: Model,
        text: _SearchText,
        head_substitute: Substitute,
        settings: dict[str, Any],
        checkpoints: Checkpoints,
        progress: Progress,
        recall: RecallTest | None,
    ) -> None:
        self._model, self._text, self._plain, self._recall = model, text, head_substitute, recall
        self._settings, self._checkpoints, self._progress = settings, checkpoints, progress
        self._substitutes: dict[tuple[Head, ...], Substitute] = {}
        self.share = 0.3
        if recall is not None:
            recall.report = lambda n: progress(f"asking {n} recall lists", self.share)
        self._original = self._reading([])

    def substitute(self, heads: Sequence[Head]) -> Substitute:
        """The substitute of these heads, with corrected outputs and distilled where asked; computed once for a set."""
        if not self._settings["repair"]:
            return self._plain
        key = tuple(heads)
        if key not in self._substitutes:
            self._substitutes[key] = fit_output_correction(self._model, self._text.fit, heads, self._plain)
            if self._settings["tune"]:
                self._substitutes[key] = distil_substitute(
                    self._model, self._text.fit, heads, self._substitutes[key],
                    recall_lists=self._text.fit_recall_lists, steps=self._settings["tune"], seed=self._settings["seed"],
                    progress=lambda stage, share: self._progress(stage, self.share),
                )  # fmt: skip
        return self._substitutes[key]

    def change(self, heads: Sequence[Head]) -> dict[str, float]:
        """Rise in loss, and changes in accuracy and recall."""
        before, after = [self._original], [self._reading(list(heads))]
        if self._recall is not None:
            original, swapped = self._recall.compare(heads, lambda: self.substitute(heads))
            before.append(original)
            after.append(swapped)
        means = join_readings(before).means(), join_readings(after).means()
        return {name: means[1][name] - means[0][name] for name in means[0]}

    def lists(self, heads: Sequence[Head]) -> int:
        """On how many recall lists it was decided whether these heads may go; 0 where recall is not limited."""
        if self._recall is None:
            return 0
        return len(self._recall.compare(heads, lambda: self.substitute(heads))[0].recall)

    def _reading(self, heads: list[Head]) -> Reading:
        def make() -> dict[str, Any]:
            head_substitute = self.substitute(heads) if heads else None
            return read_swapped(self._model, self._text.choose, None, heads, head_substitute).to_json()

        return Reading.from_json(self._checkpoints.find_or_make(["set", heads], make))


def _largest_set(
    search: _Search, sets: Sequence[Sequence[Head]], limits: Budget, by: str, progress: Progress
) -> Sequence[Head]:
    """The largest set within the budget, by bisection: costs grow with the set, up to the noise of the text."""
    first = search.change(sets[1])
    if not limits.allows(first):
        raise limits.refusal(first, f"the cheapest of the {by}")
    low, high, done = 1, len(sets), 0
    total = max(1, (len(sets) - 1).bit_length())
    while high - low > 1:
        middle = (low + high) // 2
        if limits.allows(search.change(sets[middle])):
            low = middle
        else:
            high = middle
        done += 1
        search.share = min(0.9, 0.3 + 0.6 * done / total)
        progress(f"{low} of {len(sets) - 1} {by} fit the budget", search.share)
    return sets[low]


def _evaluate_plan(
    model: Model,
    text: _SearchText,
    heads: Sequence[Head],
    head_substitute: Substitute,
    provenance: dict[str, Any],
    recall: RecallTest | None,
    decided_on: int,
) -> Plan:
    """The plan of these heads, with what they cost on text that the search never saw.

    Recall is checked on at least as many lists as it was decided on.
    """
    original, swapped = (
        read_swapped(model, text.check, None, swapped_heads, head_substitute) for swapped_heads in ([], heads)
    )
    recall_record: dict[str, float] = {}
    if recall is not None:
        before, after = recall.compare(heads, lambda: head_substitute, fewest=max(FEWEST_LISTS, decided_on))
        original, swapped = join_readings([original, before]), join_readings([swapped, after])
        widths = half_widths(before, after)
        recall_record = {
            "lists": len(before.recall),
            "questions": len(before.recall) * PAIRS,
            "half_width": widths["change"],
            "half_width_original": widths["original"],
            **({"decided_on": decided_on} if decided_on else {}),
        }
    bounded = bounded_layers(model)
    by_layer = heads_by_layer(attention_layers(model), heads)
    freed = [
        (layer, layer_heads)
        for layer, layer_heads in by_layer
        if streams(head_substitute) and layer.number not in bounded
    ]
    groups = tuple((layer.number, group) for layer, layer_heads in freed for group in freed_groups(layer, layer_heads))
    return Plan(
        model=model.name_or_path or model.config.model_type,
        fingerprint=model_fingerprint(model),
        heads=tuple(heads),
        groups=groups,
        layers=tuple(layer.number for layer, layer_heads in freed if len(layer_heads) == layer.heads),
        substitute=head_substitute,
        original=original.means(),
        expected=swapped.change_from(original),
        recall=recall_record,
        memory=memory_of(model, groups, head_substitute),
        provenance=provenance,
    )
