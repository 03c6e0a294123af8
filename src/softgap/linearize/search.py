"""Search for a plan: the heads or KV groups that a budget of loss or of bytes allows to swap, and what they become.

With one mechanism the search swaps as many heads or groups as the loss allows. With several it chooses for every KV
group among them and softmax (``softgap.linearize.allocation``).

The text is cut in three: half of the sequences to score heads and to fit output corrections on, a quarter to choose how
many heads go, a quarter to say what the chosen plan costs. Where recall is limited, each of the three has recall lists
of its own; those that choose and those that check are as many as ``softgap.linearize.recall`` asks for. Recall is
limited unless the caller turns it off or the model itself does not recall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from softgap.attention import Mechanism
from softgap.checkpoints import Checkpoints
from softgap.cluster import Workers, check_engine, workers_of
from softgap.deprecation import deprecated_keywords
from softgap.errors import ValueInputError, unknown_name
from softgap.inputs import as_items
from softgap.intervene.substitute import Substitute, Swaps, substitute
from softgap.linearize.allocation import CONTEXT, Menu, choose_allocation, default_options, pure_plans, score_options
from softgap.linearize.baselines import LENGTHS, evaluate_baselines, sequences_by_length
from softgap.linearize.candidates import (
    Candidate,
    CandidateCosts,
    SearchText,
    largest_candidate,
    n_checked,
    split_text,
)
from softgap.linearize.frontier import DEFAULT_SCORE, Budget, first_heads, order_units, units_of
from softgap.linearize.plan import Plan, plan_of
from softgap.linearize.recall import FEWEST_LISTS, RecallTest, half_widths
from softgap.linearize.scores import SCORES, head_scores
from softgap.linearize.sequences import (
    LENGTH,
    PAIRS,
    Sequences,
    check_length,
    context_of,
    digest_of_sequences,
    join_readings,
    read_swapped,
    recall_sequences,
    sequence_places,
    split_sequences,
)
from softgap.models.fingerprint import library_versions, model_fingerprint
from softgap.models.loading import Model, Tokenizer
from softgap.models.support import check_measurable
from softgap.models.tokens import first_tokens, stream_of, token_ids
from softgap.progress import Progress, partial_progress, silent

__all__ = ["AUTO", "MEASURABLE_RECALL", "RECALL_BUDGET", "check_search", "find_plan", "options_of", "recall_distances"]

FEWEST = 4
TOKENS = 16384
# The longest sequences that a search with several mechanisms takes by itself.
LONGEST = 2048
BUDGET = 0.1
RECALL_BUDGET = 0.05
"""Drop in recall that is allowed, unless said otherwise."""
MEASURABLE_RECALL = 0.1
"""Recall that the original model must have for a drop to be limited by default."""
AUTO: Literal["auto"] = "auto"
# Lists that head scores and distillation count beside the text; they decide nothing by themselves.
FIT_LISTS = 8
# Lists of every baseline's row: each asks across a distance, and there are ten rows.
BASELINE_LISTS = 48
RECALL_DISTANCES = (128, 256, 512, 1024)
"""Tokens of other text between recall lists and their questions, as many lists in a sequence: the farthest lies beyond
the recent keys of the longest window of the default options."""
# Of the time, where baselines are evaluated after the search.
SEARCH_SHARE = 0.6
# Lists of each kind are drawn from a seed of their own.
CHECK, CHOOSE, FIT = range(3)


@deprecated_keywords(repair="correct", tune="distil")
def find_plan(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    mechanism: str | Mechanism | Substitute | Sequence[str | Mechanism] | None = None,
    *,
    budget: float | None = None,
    budget_bytes: float | None = None,
    context: int | None = None,
    recall_budget: float | Literal["auto"] | None = AUTO,
    by: str | None = None,
    score: str = DEFAULT_SCORE,
    correct: bool = True,
    distil: int = 0,
    length: int | None = None,
    tokens: int | None = TOKENS,
    recalls: int | None = None,
    recall_distance: int | None = None,
    baselines: bool = True,
    seed: int = 0,
    folder: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
    progress: Progress = silent,
) -> Plan:
    """The plan that keeps the least memory within a loss budget, or costs the least loss within a byte budget.

    Parameters
    ----------
    model
        Any causal model of transformers that softgap supports.
    tokenizer
        Its tokenizer.
    texts
        What to search on: cut into sequences of ``length`` tokens, about ``tokens`` in all.
    mechanism
        What heads become, by name, or as a ``Substitute``. Several names let the search choose one for each KV group;
        None lets it choose among a constant, windows, and where the model is calibrated the fitted map and hybrids
        (``softgap.linearize.allocation.default_options``).
    budget
        Rise in loss that is allowed, in nats per token; ``BUDGET`` where no byte budget is given.
    budget_bytes
        Bytes that the KV cache of one sequence with its states may take at ``context`` tokens. It needs several
        mechanisms; a loss budget is then checked and not searched for.
    context
        Tokens at which bytes are counted; None for 8,192, or the model's context where that is shorter.
    recall_budget
        Drop in recall that is allowed, between 0 and 1: the lower end of the 95 % interval of the change must not lie
        below it. ``auto`` is ``RECALL_BUDGET`` (0.05) if there are recall lists and the model itself recalls at least
        ``MEASURABLE_RECALL`` (0.1); otherwise recall is not limited, and ``plan.provenance["recall_note"]`` says why.
        None does not limit it.
    by
        ``heads`` or ``groups``; None for heads with one mechanism and for groups with several.
    score
        What ranks the heads where there is one mechanism; see ``SCORES``. Several are ranked by the Fisher curvature of
        whole KV groups.
    correct
        Whether swapped heads get an output correction.
    distil
        Steps by which every set is distilled after its output correction (``distil_substitute``); 0 for none. A step
        takes the time of about four forwards over a sequence.
    length
        Tokens per sequence; None for 512 with one mechanism and for up to 2,048 with several, since windows longer
        than the sequences cannot be told from softmax.
    tokens
        About how many tokens of the texts to use; None for all.
    recalls
        Recall lists that the plan is checked on, and as many others to choose on where recall is limited. None asks
        as many as a half-width of .02 takes (``softgap.linearize.recall.HALF_WIDTH``), 0 none.
    recall_distance
        Tokens of other text between a recall list and its questions, so that no shorter window holds the answers. None
        takes the lists of a sequence at ``RECALL_DISTANCES``, as far as text and context allow.
    baselines
        Whether to evaluate the baselines of the plan as well (``softgap.linearize.baselines``): the same heads with
        windows of equal memory and with a constant, and random heads; at 512, 2,048 and 8,192 tokens and at
        ``length``, as far as text and context allow.
    seed
        Random seed of the recall lists, the scores and the bootstrap.
    folder
        Where finished steps are saved, so that the same call resumes after an interruption, with either engine.
    engine
        Where sequences are scored and read: "local", or "ray" for the workers of a Ray cluster, which load the model by
        its name. Output corrections and distillation are computed here. With equal threads both give the same bytes.
    address
        Of the Ray cluster; None joins the one that is running, or starts one on this machine.
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
    check_engine(engine)
    if mechanism is not None and not isinstance(mechanism, str | Mechanism | Substitute) and len(mechanism) == 1:
        mechanism = mechanism[0]
    several = mechanism is None or not isinstance(mechanism, str | Mechanism | Substitute)
    by = by or ("groups" if several else "heads")
    limits = check_search(
        budget=budget, budget_bytes=budget_bytes, context=context, recall_budget=recall_budget, by=by, score=score,
        correct=correct, distil=distil, length=length, tokens=tokens, several=several,
    )  # fmt: skip
    if recall_budget not in (None, AUTO) and recalls == 0:
        raise ValueInputError(
            "a recall budget needs recall lists, got recalls=0; leave recalls or the recall budget out"
        )
    if by == "heads" and substitute(mechanism, model).mechanism.options.get("far"):  # type: ignore[arg-type]
        raise ValueInputError("far keys need all query heads of a KV group, got by='heads'; use by='groups'")
    if length is None:
        length = default_length(model, tokenizer, texts) if several else LENGTH
    sequences = split_sequences(model, tokenizer, texts, length=length, tokens=tokens, fewest=FEWEST)
    text = split_text(sequences)
    distances = (0,) if recalls == 0 else recall_distances(model, tokenizer, text, recall_distance, recalls)
    options = options_of(model, mechanism, text.fit, several=several)
    menu = Menu.of(model, options, context) if several else None
    if menu is not None and budget_bytes is not None:
        menu.check_budget(budget_bytes)
    ranked_by = "fisher" if several else score
    settings = _settings(
        model, sequences, options, length=length, by=by, score=ranked_by, repair=correct, tune=distil, seed=seed
    )
    checkpoints = Checkpoints(folder, settings)
    searching, comparing = (partial_progress(progress, *x) for x in ((0.0, SEARCH_SHARE), (SEARCH_SHARE, 1.0)))
    searching = searching if baselines else progress
    with workers_of(model, engine, address) as workers:
        lists = _RecallLists(model, tokenizer, recalls, seed, text, distances, workers)
        limits, note = _limit_recall(limits, recall_budget, lists, checkpoints, searching)
        # A search with several mechanisms always counts recall: heads that text hardly misses may be all of it.
        if recalls != 0 and (several or limits.recall is not None):
            text = replace(text, fit_recall_lists=lists.fit())
        choosing = None if limits.recall is None else lists.test(CHOOSE, checkpoints)
        costs = CandidateCosts(model, text, settings, checkpoints, searching, choosing, limits, workers)
        if menu is not None:
            scores = score_options(model, text, menu, checkpoints, searching, seed, workers)
            found, about = choose_allocation(costs, menu, scores, limits, budget_bytes, searching)
        else:
            found, about = _largest_set(model, text, options[0], settings, checkpoints, costs, limits, searching), {}
        provenance = {**settings, "budget": limits.loss, "recall_budget": limits.recall, **note, **about}
        checking = lists.test(CHECK, checkpoints)
        plan = _evaluate_plan(model, text, found, costs, provenance, checking, distances, searching)
        if not baselines:
            return plan
        ids = _unseen_tokens(token_ids(tokenizer, texts), len(sequences), length)
        pure = {} if menu is None else pure_plans(menu, scores, plan)
        return _with_baselines(plan, model, text, ids, lists, pure, settings, checkpoints, comparing)


def _with_baselines(
    plan: Plan,
    model: Model,
    text: SearchText,
    ids: Sequence[int],
    lists: _RecallLists,
    pure: dict[str, Swaps],
    settings: dict[str, Any],
    checkpoints: Checkpoints,
    progress: Progress,
) -> Plan:
    """The plan with its baselines, on ``ids`` that the search never saw."""
    length = settings["length"]
    by_length, left_out = sequences_by_length(model, ids, [length, *LENGTHS], text.check.tokens)
    evaluated = evaluate_baselines(
        model,
        plan.substitute.swaps(plan.heads),
        # At the length of the search the texts are those that the plan was checked on.
        dict(sorted({**by_length, length: text.check}.items())),
        lists.check(),
        fit=text.fit,
        units=units_of(model, settings["by"]),
        pure=pure,
        seed=settings["seed"],
        left_out=left_out,
        checkpoints=checkpoints,
        workers=lists.workers,
        progress=progress,
    )
    return replace(plan, baselines=replace(evaluated, lists=evaluated.lists * len(lists.distances)))


@dataclass(frozen=True, eq=False)
class _RecallLists:
    """Recall lists of a search; those to fit on, to choose on and to check on come from seeds of their own.

    A sequence holds one list for each distance.
    """

    model: Model
    tokenizer: Tokenizer
    recalls: int | None
    seed: int
    text: SearchText
    distances: tuple[int, ...]
    workers: Workers | None = None

    def draw(self, use: int, skip: int, n: int) -> Sequences:
        """At least ``n`` lists after the first ``skip``, in whole sequences."""
        part = (self.text.check, self.text.choose, self.text.fit)[use]
        filler = part.ids[:, len(first_tokens(self.tokenizer)) :].flatten().tolist()
        each = len(self.distances)
        return recall_sequences(
            self.model, self.tokenizer, -(-n // each), seed=3 * self.seed + use, skip=skip // each, filler=filler,
            distance=self.distances,
        )  # fmt: skip

    def fit(self) -> Sequences:
        return self.draw(FIT, 0, FIT_LISTS if self.recalls is None else self.recalls)

    def check(self) -> Sequences | None:
        if self.recalls == 0:
            return None
        return self.draw(CHECK, 0, BASELINE_LISTS if self.recalls is None else self.recalls)

    def test(self, use: int, checkpoints: Checkpoints) -> RecallTest | None:
        if self.recalls == 0:
            return None
        return RecallTest(
            self.model, partial(self.draw, use), self.recalls, checkpoints, self.seed, len(self.distances),
            self.workers,
        )  # fmt: skip


def _limit_recall(
    limits: Budget,
    recall_budget: float | Literal["auto"] | None,
    lists: _RecallLists,
    checkpoints: Checkpoints,
    progress: Progress,
) -> tuple[Budget, dict[str, str]]:
    """The limits with the recall budget that holds for this model, and a note where the default one does not."""
    if recall_budget != AUTO:
        return limits, {}
    if lists.recalls == 0:
        return replace(limits, recall=None), {"recall_note": "Recall is not limited: no recall lists were asked."}
    asked = lists.fit()

    def make() -> dict[str, float]:
        progress("asking the original model for recall", 0.0)
        return {"recall": read_swapped(lists.model, None, asked, [], None, lists.workers).means()["recall"]}

    own = checkpoints.find_or_make(["own recall", digest_of_sequences(asked)], make)["recall"]
    if own >= MEASURABLE_RECALL:
        return limits, {}
    note = (
        f"Recall is not limited: it is not measurable with this model, which itself recalls {own:.2f} "
        f"(at least {MEASURABLE_RECALL:g} is needed)."
    )
    progress(note, 0.0)
    return replace(limits, recall=None), {"recall_note": note}


def recall_distances(
    model: Model, tokenizer: Tokenizer, text: SearchText, given: int | None, lists: int | None = None
) -> tuple[int, ...]:
    """The distances of the lists in a sequence: the one given, or as many as text, context and lists allow."""
    if given is not None:
        return (given,)
    first = len(first_tokens(tokenizer))
    filler = min(part.ids[:, first:].numel() for part in (text.fit, text.choose, text.check))
    context = context_of(model)
    # A list with its questions; lists differ somewhat in their length.
    size = 0 if context is None else 5 * recall_sequences(model, tokenizer, 4).ids.shape[1] // 4
    found: list[int] = []
    for distance in RECALL_DISTANCES[: lists or len(RECALL_DISTANCES)]:
        room = filler if context is None else min(filler, context - (len(found) + 1) * size)
        if room < distance:
            return tuple(found) or (max(0, room),)
        found.append(distance)
    return tuple(found)


def default_length(model: Model, tokenizer: Tokenizer, texts: Sequence[str]) -> int:
    """Tokens per sequence where windows are compared: as many as text and context allow, at most 2,048."""
    n_tokens = len(token_ids(tokenizer, texts))
    longest = min(LONGEST, context_of(model) or LONGEST)
    length = LENGTH
    while 2 * length <= longest and 4 * FEWEST * length <= n_tokens:
        length *= 2
    return length


def options_of(model: Model, mechanism: Any, fit: Sequences, *, several: bool) -> list[Substitute]:
    """What heads may become: what was named, or the default options."""
    if not several:
        return [substitute(mechanism, model)]
    if mechanism is None:
        return default_options(model, fit)
    return [substitute(name, model) for name in as_items(mechanism)]


def _unseen_tokens(ids: Sequence[int], n_sequences: int, length: int) -> Sequence[int]:
    """The end of the text, from the first sequence on that the plan is checked on."""
    body = stream_of(ids).body(length)
    places = sequence_places(len(ids) // body, n_sequences)
    return ids[int(places[n_sequences - n_checked(n_sequences)]) * body :]


def _settings(model: Model, sequences: Sequences, options: Sequence[Substitute], **others: Any) -> dict[str, Any]:
    """Everything that scores and costs of candidates depend on; a budget does not change them."""
    names = [option.name for option in options]
    return {
        "fingerprint": model_fingerprint(model),
        "mechanism": names[0] if len(names) == 1 else names,
        "calibration": next((x.mechanism.origin for x in options if x.mechanism.origin), ""),
        "parameters": "".join(option.digest for option in options),
        "text": digest_of_sequences(sequences),
        "tokens": sequences.tokens,
        **others,
    }


def check_search(
    *,
    budget: float | None,
    recall_budget: float | Literal["auto"] | None,
    score: str,
    correct: bool,
    distil: int,
    length: int | None,
    tokens: int | None,
    by: str,
    budget_bytes: float | None = None,
    context: int | None = None,
    several: bool = False,
) -> Budget:
    """Refuse what no search can be made with; a command asks before it loads a model."""
    limits = Budget(
        BUDGET if budget is None and budget_bytes is None else budget,
        RECALL_BUDGET if recall_budget == AUTO else recall_budget,
    )
    if budget_bytes is not None and not 0 <= budget_bytes < math.inf:
        raise ValueInputError(f"the byte budget must be at least 0 and finite, got {budget_bytes:g}")
    if context is not None and context < 1:
        raise ValueInputError(f"context must be at least 1 token, got {context}; {CONTEXT:,} is usual")
    if score not in SCORES:
        raise unknown_name("score", score, SCORES)
    if several and by != "groups":
        raise ValueInputError(f"several mechanisms are chosen for whole KV groups, got by='{by}'; use by='groups'")
    if several and score != DEFAULT_SCORE:
        raise ValueInputError(
            f"several mechanisms are ranked by the Fisher curvature of KV groups, got '{score}'; leave the score out"
        )
    if not several and (budget_bytes is not None or context is not None):
        raise ValueInputError(
            "a byte budget needs several mechanisms to choose among, got one; name several, or leave the mechanism out"
        )
    if distil < 0 or (distil and not correct):
        raise ValueInputError(
            f"distillation takes 0 steps or more and needs the output correction, got distil={distil} and "
            f"correct={correct}; leave one out"
        )
    if length is not None:
        check_length(length)
    if tokens is not None and tokens < 1:
        raise ValueInputError(f"tokens must be at least 1, got {tokens}; {TOKENS} are usual")
    return limits


def _largest_set(
    model: Model,
    text: SearchText,
    head_substitute: Substitute,
    settings: dict[str, Any],
    checkpoints: Checkpoints,
    costs: CandidateCosts,
    limits: Budget,
    progress: Progress,
) -> Candidate:
    """As many heads or groups as the budget allows, the cheapest by their score first.

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
            engine=costs.workers or "local",
            progress=lambda stage, share: progress(stage, 0.3 * share),
        )
        return {"heads": scores_of_heads.heads, "score": scores_of_heads.mean(name).tolist()}

    scores = checkpoints.find_or_make(
        ["scores", digest_of_sequences(text.fit_recall_lists)] if text.fit_recall_lists else "scores", make
    )
    heads = [(int(layer), int(head)) for layer, head in scores["heads"]]
    by = settings["by"]
    order = order_units(units_of(model, by), heads, np.asarray(scores["score"]))
    return largest_candidate(
        costs,
        len(order) + 1,
        lambda n: Candidate(tuple(first_heads(order, n)), head_substitute),
        limits,
        first=f"the cheapest of the {by}",
        words=lambda n: f"{n} of {len(order)} {by} fit the budget",
        progress=progress,
    )


def _evaluate_plan(
    model: Model,
    text: SearchText,
    found: Candidate,
    costs: CandidateCosts,
    provenance: dict[str, Any],
    recall: RecallTest | None,
    distances: Sequence[int],
    progress: Progress,
) -> Plan:
    """The plan of a candidate, with what it costs on text that the search never saw.

    Recall is checked on at least as many lists as it was decided on.
    """
    stage = "checking the plan on unseen text"
    progress(stage, 0.95)
    heads, head_substitute, decided_on = found.heads, costs.substitute(found), costs.lists(found)
    original, swapped = (read_swapped(model, text.check, None, x, head_substitute, costs.workers) for x in ((), heads))
    recall_record: dict[str, float] = {}
    if recall is not None:
        before, after = recall.compare(
            heads, lambda: head_substitute, key=found.key, fewest=max(FEWEST_LISTS, decided_on)
        )
        original, swapped = join_readings([original, before]), join_readings([swapped, after])
        widths = half_widths(before, after)
        recall_record = {
            "lists": len(before.recall) * len(distances),
            "questions": len(before.recall) * len(distances) * PAIRS,
            "distance": distances[0],
            **({"farthest": distances[-1]} if len(distances) > 1 else {}),
            "half_width": widths["change"],
            "half_width_original": widths["original"],
            **({"decided_on": decided_on} if decided_on else {}),
        }
    return plan_of(
        model,
        heads,
        head_substitute,
        original=original.means(),
        expected=swapped.change_from(original),
        recall=recall_record,
        provenance={**provenance, "versions": library_versions()},
    )
