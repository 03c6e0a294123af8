"""What a search for a linearization plan costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from softgap.attention import Mechanism
from softgap.costs.probe import LONG, SHORT, Cost, Curve, Probe
from softgap.intervene.substitute import Substitute
from softgap.linearize.allocation import Menu
from softgap.linearize.baselines import FEWEST_TEXTS, LENGTHS
from softgap.linearize.candidates import Candidate, SearchText, split_text
from softgap.linearize.distil import distil_substitute
from softgap.linearize.frontier import DEFAULT_SCORE, units_of
from softgap.linearize.output_correction import fit_output_correction
from softgap.linearize.recall import FEWEST_LISTS
from softgap.linearize.scores import head_scores, unit_scores
from softgap.linearize.search import (
    BASELINE_LISTS,
    FEWEST,
    FIT_LISTS,
    TOKENS,
    default_length,
    options_of,
    recall_distances,
)
from softgap.linearize.sequences import (
    LENGTH,
    Sequences,
    context_of,
    read_swapped,
    recall_sequences,
    split_sequences,
)
from softgap.models.loading import Model, Tokenizer
from softgap.models.tokens import token_ids

__all__ = ["search_cost"]

# Rows of the table of baselines beside one for each kind of substitute: the model, the plan, the plan without its
# correction, two windows, a constant, and random groups.
_ROWS = 7
# Of the plan without its parameters.
PLAN_BYTES = 20_000


def search_cost(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    mechanism: str | Mechanism | Substitute | Sequence[str] | None,
    probe: Probe,
    *,
    by: str = "groups",
    budget_bytes: float | None = None,
    context: int | None = None,
    recall_budget: float | str | None = "auto",
    score: str = DEFAULT_SCORE,
    correct: bool = True,
    distil: int = 0,
    length: int | None = None,
    tokens: int = TOKENS,
    baselines: bool = True,
    **_: Any,
) -> Cost:
    """What ``softgap.linearize.find_plan`` costs on this machine; the parameters are its own.

    A search asks more recall lists where an interval stays wide, and none for candidates whose loss is already too
    high: half of the candidates are taken to be asked as few lists as a search ever asks.
    """
    several = mechanism is None or not isinstance(mechanism, str | Mechanism | Substitute)
    if length is None:
        length = default_length(model, tokenizer, texts) if several else LENGTH
    sequences = split_sequences(model, tokenizer, texts, length=length, tokens=tokens, fewest=FEWEST)
    text = split_text(sequences)
    options = options_of(model, mechanism, text.fit, several=several)
    recalls = recall_budget is not None
    list_tokens, lists_each = _list_sequence(model, tokenizer, text)
    menu = Menu.of(model, options, context) if several else None
    scoring, candidate, candidates = _time_scores(model, text, menu, options[0], by, score, budget_bytes, probe)
    plain, swapped = _time_readings(model, text, candidate, max(length, list_tokens), probe)
    fit, choose, check = ([length] * len(part) for part in (text.fit, text.choose, text.check))
    fit_lists, lists, baseline_lists = (
        [list_tokens] * -(-n // lists_each)
        for n in (FIT_LISTS if recalls or several else 0, FEWEST_LISTS, BASELINE_LISTS)
    )
    asked = (candidates + 1) // 2 if recalls else 0
    stages = {
        "loading": probe.loading,
        "scoring": scoring.over([*fit, *fit_lists]) + (plain.over(fit_lists) if recalls else 0.0),
        "choosing": plain.over(choose) + candidates * swapped.over(choose),
        "asking recall lists": (plain.over(lists) + asked * swapped.over(lists) if asked else 0.0)
        + plain.over(lists) + swapped.over(lists),
        "checking": plain.over(check) + swapped.over(check),
    }  # fmt: skip
    if correct:
        stages["correcting outputs"] = candidates * _correction(model, text, candidate, length, distil, probe)
    if baselines:
        kinds = 0 if menu is None else len(dict.fromkeys(menu.kinds))
        unseen = len(token_ids(tokenizer, texts)) - length * (len(sequences) - len(check))
        lengths = [n for n in {length, *LENGTHS} if n <= min(unseen, context_of(model) or n)]
        reads = [n for n in lengths for _ in range(max(FEWEST_TEXTS, sum(check) // n))]
        stages["baselines"] = (_ROWS + kinds) * swapped.over([*reads, *baseline_lists])
    probe.hold(_parameter_bytes(options))
    return Cost(
        command="linearize",
        stages=stages,
        memory_bytes=probe.memory,
        disk_bytes=PLAN_BYTES + _parameter_bytes(options) // max(1, len(options)),
        counts={"options": len(options), "candidates": candidates, "tokens": sequences.ids.numel()},
        probe_seconds=probe.seconds,
        note="wide intervals of recall ask for up to five times as many lists" if recalls else "",
    )


def _list_sequence(model: Model, tokenizer: Tokenizer, text: SearchText) -> tuple[int, int]:
    """Tokens of a sequence of recall lists of this search, and the lists in it."""
    distances = recall_distances(model, tokenizer, text, None)
    filler = text.check.ids.flatten().tolist()
    sequence = recall_sequences(model, tokenizer, 1, filler=filler, distance=distances)
    return sequence.ids.shape[1], len(distances)


def _beginning(text: Sequences, n: int) -> Sequences:
    """The first ``n`` tokens of the first sequence."""
    first = text.part(slice(0, 1))
    return replace(first, ids=first.ids[:, :n], scored=first.scored[:, : n - 1])


def _time_scores(
    model: Model,
    text: SearchText,
    menu: Menu | None,
    single: Substitute,
    by: str,
    score: str,
    budget_bytes: float | None,
    probe: Probe,
) -> tuple[Curve, Candidate, int]:
    """Seconds of scoring, a candidate from the middle of the search, and how many candidates are evaluated."""
    longest = text.fit.ids.shape[1]
    lengths = [min(n, longest) for n in (SHORT, LONG)]
    if menu is None:
        curve = probe.curve(
            lambda n: head_scores(model, _beginning(text.fit, n), single, names=[score]), lengths, longest
        )
        units = units_of(model, by)
        heads = tuple(sorted(head for unit in units[: max(1, len(units) // 2)] for head in unit))
        return curve, Candidate(heads, single), 1 + math.ceil(math.log2(len(units) + 1))
    found: list[Any] = []

    def scores(n: int) -> None:
        found[:] = [unit_scores(model, _beginning(text.fit, n), menu.options, menu.units)[1].mean(axis=-1)]

    curve = probe.curve(scores, lengths, longest)
    allocations = menu.allocations(found[0])
    candidates = 1 + math.ceil(math.log2(len(allocations)))
    step = len(allocations) // 2
    if budget_bytes is not None:
        candidates = 1 + len(dict.fromkeys(menu.kinds))
        step = allocations.within(budget_bytes) or step
    return curve, allocations.candidate(step), candidates


def _time_readings(
    model: Model, text: SearchText, candidate: Candidate, longest: int, probe: Probe
) -> tuple[Curve, Curve]:
    """Seconds of reading a text with the model as it is, and with the heads of a candidate swapped."""
    lengths = [min(n, text.fit.ids.shape[1]) for n in (SHORT, LONG)]
    plain, swapped = (
        probe.curve(
            lambda n, heads=heads: read_swapped(  # type: ignore[misc]
                model, _beginning(text.fit, n), None, heads, candidate.plain
            ),
            lengths,
            longest,
        )
        for heads in ((), candidate.heads)
    )
    return plain, swapped


def _correction(model: Model, text: SearchText, candidate: Candidate, length: int, distil: int, probe: Probe) -> float:
    """Seconds of the output correction of one candidate, and of distilling into it."""
    n = min(LONG, length)
    beginning = _beginning(text.fit, n)
    corrected, seconds, _ = probe.call(
        lambda: fit_output_correction(model, beginning, candidate.heads, candidate.plain)
    )
    total = seconds / n * length * len(text.fit)
    if distil:
        _, step, _ = probe.call(lambda: distil_substitute(model, beginning, candidate.heads, corrected, steps=2))
        total += distil * step / 2 * length / n
    return total


def _parameter_bytes(options: Sequence[Substitute]) -> int:
    """Bytes of the parameters that the options have."""
    return sum(
        tensor.numel() * tensor.element_size() for option in options for tensor in option.mechanism.parameters.values()
    )
