"""Sequences that swapped models are evaluated on, and their loss, accuracy and associative recall."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softgap.cluster import Workers
from softgap.errors import ValueInputError
from softgap.inputs import as_items
from softgap.intervals import Interval, interval_of
from softgap.intervene.substitute import Head, Substitute, Swaps
from softgap.intervene.swap import swap
from softgap.models.loading import Model, Tokenizer
from softgap.models.placement import input_device
from softgap.models.support import check_measurable, context_length
from softgap.models.tokens import first_tokens, stream_of, token_ids
from softgap.probe.token_scores import forward_then_logits
from softgap.tasks.generators import draw_pairs

__all__ = [
    "Original",
    "Reading",
    "Sequences",
    "context_of",
    "correct_tokens",
    "cut_sequences",
    "digest_of_sequences",
    "join_readings",
    "read_original",
    "read_swapped",
    "read_under",
    "recall_sequences",
    "score_forward",
    "sequence_places",
    "split_sequences",
]


LENGTH = 512


FEWEST = 16


PAIRS = 12


@dataclass(frozen=True, eq=False)
class Sequences:
    """Token sequences of one length, and which of their next tokens count: place t stands for the token behind it.

    ``first`` marks the first token of every answer, where there are answers.
    """

    ids: Int[Tensor, "text time"]
    scored: Bool[Tensor, "text next"]
    first: Bool[Tensor, "text next"] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Next tokens that count."""
        return int(self.scored.sum())

    def part(self, rows: slice) -> Sequences:
        """Some of them."""
        return Sequences(self.ids[rows], self.scored[rows], None if self.first is None else self.first[rows])

    def answer_shares(
        self, right: Float[Tensor, "*copies text next"]
    ) -> tuple[Float[Tensor, "*copies text"], Float[Tensor, "*copies text"]]:
        """The share of answers whose first token is right, and of those that are right as a whole, text by text.

        ``right`` is 1 where the top token is the right one, else 0.
        """
        if self.first is None:
            raise ValueInputError("these sequences ask nothing, so there are no answers to count; use recall_sequences")
        first = self.first.to(right)
        number = (self.first.to(right.device).cumsum(dim=-1) - 1).clamp(min=0).expand(right.shape)
        wrong = torch.zeros_like(right).scatter_add(-1, number, (1 - right) * self.scored.to(right))
        questions = first.sum(dim=-1)
        answers = torch.arange(right.shape[-1], device=right.device) < questions[:, None]
        return (right * first).sum(dim=-1) / questions, ((wrong == 0) & answers).to(right).sum(dim=-1) / questions


def split_sequences(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    length: int = LENGTH,
    tokens: int | None = None,
    fewest: int = 1,
) -> Sequences:
    """Cut texts into sequences of ``length`` tokens; what is left over at their end is not used.

    Parameters
    ----------
    texts
        In any number; they are joined in their order.
    tokens
        Use about so many tokens, in sequences spread evenly over the text; None uses all.
    fewest
        How many sequences are needed at least.
    """
    check_length(length)
    context = context_of(model)
    if context and length > context:
        raise ValueInputError(
            f"sequences can have at most the model's context of {context} tokens, got {length}; shorten them"
        )
    ids = token_ids(tokenizer, texts)
    n_whole = len(ids) // ids.body(length)
    if n_whole < fewest:
        raise ValueInputError(
            f"the text must have at least {fewest * ids.body(length)} tokens ({fewest} sequence{'s' * (fewest > 1)} of "
            f"{length}), got {len(ids)}; give more text or choose shorter sequences"
        )
    return cut_sequences(model, ids, length, n_whole if tokens is None else max(fewest, tokens // length))


def context_of(model: Model) -> int | None:
    """The longest text that a model is made for, in tokens; None where its configuration does not say."""
    return context_length(model)


def cut_sequences(model: Model, ids: Sequence[int], length: int, count: int) -> Sequences:
    """So many sequences of ``length`` tokens, or as many as there are, spread evenly over the tokens.

    First tokens of a ``TokenStream`` are the first of every sequence, and do not count.
    """
    stream = stream_of(ids)
    body = stream.body(length)
    places = sequence_places(len(stream) // body, count)
    rows = torch.tensor([stream.sequence(place * body, length) for place in places.tolist()])
    scored = torch.ones(len(rows), length - 1, dtype=torch.bool)
    scored[:, : max(0, len(stream.first) - 1)] = False
    return Sequences(rows.to(input_device(model)), scored.to(input_device(model)))


def sequence_places(n_whole: int, count: int) -> Int[np.ndarray, " sequence"]:
    """Which of the sequences that a text has are used, where ``count`` are wanted."""
    places: np.ndarray = np.linspace(0, n_whole - 1, min(n_whole, count)).round().astype(int)
    return places


def check_length(length: int) -> None:
    """Refuse sequences too short to predict anything in."""
    if length < FEWEST:
        raise ValueInputError(f"sequences must have at least {FEWEST} tokens, got {length}; {LENGTH} is usual")


def recall_sequences(
    model: Model,
    tokenizer: Tokenizer,
    n: int,
    *,
    pairs: int = PAIRS,
    seed: int = 0,
    skip: int = 0,
    filler: Sequence[int] = (),
    distance: int | Sequence[int] = 0,
) -> Sequences:
    """Lists of ``key: value`` lines, each list given twice in another order; the second time its values count.

    They can be known only from the first time. Sequences are filled up at the end, where causal attention of what
    counts does not see it.

    Parameters
    ----------
    n, skip
        So many sequences, without the first ones of this seed, so that further ones are others.
    filler, distance
        Put ``distance`` tokens of other text between the two times, from a random place of ``filler``: then every
        value lies at least so far behind its question, and no shorter window holds it. With several distances a
        sequence has one list of ``pairs`` for each, the farthest first, and all questions at its end.
    """
    distances = sorted(as_items(distance))  # type: ignore[arg-type]
    if n < 1:
        raise ValueInputError(f"associative recall needs at least 1 list, got {n}")
    if not distances or distances[0] < 0 or distances[-1] > len(filler):
        raise ValueInputError(
            f"distance must be from 0 to the {len(filler)} tokens of other text that there are, got {distance}"
        )
    drawn = []
    for number in range(skip, skip + n):
        rng = np.random.default_rng([seed, number])
        drawn.append(_recall_sequence(tokenizer, pairs, rng, filler, distances))
    longest = max(len(ids) for ids, _, _ in drawn)
    context = context_of(model)
    if context and longest > context:
        raise ValueInputError(
            f"recall lists of {pairs} pairs have {longest} tokens, and the model's context is {context}; ask for "
            "fewer pairs"
        )
    rows = torch.tensor([ids + [ids[-1]] * (longest - len(ids)) for ids, _, _ in drawn], device=input_device(model))
    scored, first = torch.zeros(2, n, longest - 1, dtype=torch.bool, device=input_device(model))
    for number, (_, answers, beginnings) in enumerate(drawn):
        scored[number, torch.tensor(answers, device=scored.device) - 1] = True
        first[number, torch.tensor(beginnings, device=first.device) - 1] = True
    return Sequences(rows, scored, first)


def digest_of_sequences(*sequences: Sequences) -> str:
    """Hash of the tokens and of which of them count."""
    digest = hashlib.sha256()
    for part in sequences:
        digest.update(str(tuple(part.ids.shape)).encode())
        digest.update(part.ids.cpu().numpy().astype(np.int64).tobytes())
        digest.update(part.scored.cpu().numpy().tobytes())
        if part.first is not None:
            digest.update(part.first.cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def _recall_sequence(
    tokenizer: Tokenizer, pairs: int, rng: np.random.Generator, filler: Sequence[int], distances: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, the places of those that count, and of the first token of every answer; distances in ascending order."""
    heading = "Words and their partners.\n"
    again, end = _token_ids(tokenizer, f"\n{heading}"), _token_ids(tokenizer, "\n")
    words = [
        (_token_ids(tokenizer, f"{key}:"), _token_ids(tokenizer, f" {value}"))
        for key, value in draw_pairs(pairs * len(distances), "words", rng=rng)
    ]
    lists = [words[i * pairs : (i + 1) * pairs] for i in range(len(distances))]

    def lines(pairs_of_list: Sequence[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
        return [pairs_of_list[i] for i in rng.permutation(pairs)]

    ids: list[int] = [*first_tokens(tokenizer), *_token_ids(tokenizer, heading)]
    sizes = [sum(len(key) + len(value) + len(end) for key, value in each) for each in lists]
    gaps = _recall_gaps(distances, sizes, len(again))
    for each, gap in zip(lists[::-1], gaps[::-1], strict=True):
        for key, value in lines(each):
            ids += [*key, *value, *end]
        if gap or len(lists) > 1:
            start = int(rng.integers(len(filler) - gap + 1))
            ids += [*filler[start : start + gap], *again]
    answers: list[int] = []
    beginnings: list[int] = []
    for each in lists:
        for key, value in lines(each):
            ids += key
            beginnings.append(len(ids))
            answers += range(len(ids), len(ids) + len(value))
            ids += [*value, *end]
    return ids, answers, beginnings


def _recall_gaps(distances: Sequence[int], sizes: Sequence[int], heading: int) -> list[int]:
    """Tokens of other text behind each list, so that its questions come at least a distance behind it.

    Between a list and its questions stand the nearer lists, their questions, which are as long, and all headings.
    """
    gaps, between = [], 0
    for distance, size in zip(distances, sizes, strict=True):
        gaps.append(max(0, distance - between))
        between += gaps[-1] + heading + 2 * size
    return gaps


def _token_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# Logits looked at together: few enough to stay in the processor's cache from one pass to the next.
CACHED = 2**19


# Rows of logits that the head computes at once, over all sequences of a batch.
ROWS = 128


@dataclass(frozen=True, eq=False)
class PredictionScores:
    """Per next token: -log p of the right one, KL(original || this), and whether the top token is the right one."""

    loss: Float[Tensor, "sequence next"]
    kl: Float[Tensor, "sequence next"]
    right: Float[Tensor, "sequence next"]

    def means(self, sequences: Sequences, copies: int = 1) -> Float[Tensor, "quantity copy text"]:
        """Means over the next tokens that count, for every copy and text: of loss, KL and accuracy.

        Where sequences ask for answers, two more follow: the shares of answers whose first token is right, and that are
        right as a whole.
        """
        scored = sequences.scored.to(self.loss)
        values = torch.stack([self.loss, self.kl, self.right]).unflatten(1, (copies, len(sequences)))
        means: Tensor = (values * scored).sum(dim=-1) / scored.sum(dim=-1)
        if sequences.first is None:
            return means
        return torch.cat([means, torch.stack(sequences.answer_shares(values[2]))])


@dataclass(frozen=True, eq=False)
class Original:
    """The unswapped model on some sequences: its next-token distributions, and how well they predict."""

    probability: Float[Tensor, "text next vocabulary"]
    negative_entropy: Float[Tensor, "text next"]
    scores: PredictionScores


def read_original(model: Model, ids: Int[Tensor, "text time"]) -> Original:
    """One forward over sequences, with all distributions kept."""
    n = ids.shape[1] - 1
    blocks = forward_then_logits(model, _inputs(ids), n, rows=max(1, ROWS // len(ids)))
    logs = torch.cat([_numbers(logits) for _, logits in blocks()], dim=1).log_softmax(dim=-1)
    next_ids = ids[:, 1:, None]
    loss = -logs.gather(-1, next_ids)[..., 0]
    right = (logs.argmax(dim=-1) == next_ids[..., 0]).to(loss.dtype)
    probability = logs.exp()
    # A token that a model rules out has probability 0 and log-probability -inf, and counts as 0.
    entropy = (probability * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(dim=-1)
    return Original(probability, entropy, PredictionScores(loss, torch.zeros_like(loss), right))


def score_forward(
    model: Model, ids: Int[Tensor, "text time"], original: Original | None, copies: int = 1
) -> PredictionScores:
    """One forward over ``copies`` of sequences, one behind the other; KL is NaN where no original is given.

    With z the logits, Z = sum exp z and p the original distribution: loss = log Z - z_y, and
    KL = sum p log p - sum p z + log Z sum p, in which it does not matter that rounded p do not quite sum to 1.
    """
    n = ids.shape[1] - 1
    copied_ids = ids.repeat(copies, 1)
    scores = torch.empty(3, len(copied_ids), n, dtype=torch.float64 if model.dtype == torch.float64 else torch.float32)
    for start, logits in forward_then_logits(model, _inputs(copied_ids), n, rows=max(1, ROWS // len(copied_ids)))():
        stop = start + logits.shape[1]
        for row in range(len(copied_ids)):
            base = None if original is None else original.probability[row % len(ids), start:stop]
            scores[:, row, start:stop] = _score_rows(logits[row], copied_ids[row, start + 1 : stop + 1], base)
    loss, cross, right = scores
    if original is None:
        return PredictionScores(loss, torch.full_like(loss, torch.nan), right)
    return PredictionScores(loss, cross + original.negative_entropy.repeat(copies, 1).to(cross), right)


def correct_tokens(model: Model, sequences: Sequences) -> Float[Tensor, "text next"]:
    """1 where the top token is the right one and counts, else 0; logits are computed from the first such place on."""
    ids = sequences.ids
    n = ids.shape[1] - 1
    begin = int(sequences.scored.any(dim=0).int().argmax())
    correct = torch.zeros(len(ids), n)
    for start, logits in forward_then_logits(model, _inputs(ids), n, rows=max(1, ROWS // len(ids)), begin=begin)():
        stop = start + logits.shape[1]
        right = logits.argmax(dim=-1) == ids[:, start + 1 : stop + 1]
        correct[:, start:stop] = (right & sequences.scored[:, start:stop]).cpu()
    return correct


def _score_rows(
    logits: Float[Tensor, "next vocabulary"],
    next_ids: Int[Tensor, " next"],
    base: Float[Tensor, "next vocabulary"] | None,
) -> Float[Tensor, "quantity next"]:
    """Loss, cross term log Z sum p - sum p z, and whether the top token is right."""
    blocks = []
    step = max(1, CACHED // logits.shape[-1])
    for start in range(0, len(logits), step):
        z, y = _numbers(logits[start : start + step]), next_ids[start : start + step]
        total = z.logsumexp(dim=-1)
        cross = torch.full_like(total, torch.nan)
        if base is not None:
            p = base[start : start + step]
            mean = torch.linalg.vecdot(p, z)
            if bool(mean.isnan().any()):
                mean = torch.where(p > 0, p * z, 0).sum(dim=-1)
            cross = total * p.sum(dim=-1) - mean
        blocks.append(
            torch.stack([total - z.gather(-1, y[:, None])[:, 0], cross, (z.argmax(dim=-1) == y).to(total.dtype)])
        )
    return torch.cat(blocks, dim=1)


def _numbers(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _inputs(ids: Int[Tensor, "text time"]) -> dict[str, object]:
    # Nothing is known of what follows the last token.
    return {"input_ids": ids[:, :-1], "use_cache": False}


# Tokens in one forward.
BATCH_TOKENS = 2048


TEXT_METRICS = ("loss", "accuracy")


RECALL_METRICS = ("recall", "whole_answers")


@dataclass(frozen=True, eq=False)
class Reading:
    """What a model gets right, per text and per list of associative recall.

    ``recall`` is the share of a list's answers whose first token is right, ``whole_answers`` of those of which every
    token is.
    """

    loss: Float[np.ndarray, " text"]
    accuracy: Float[np.ndarray, " text"]
    recall: Float[np.ndarray, " list"]
    whole_answers: Float[np.ndarray, " list"]

    def change_from(self, original: Reading, *, seed: int = 0) -> dict[str, Interval]:
        """Rise in loss and changes in accuracy and recall, with intervals over texts and recall lists."""
        changes = {}
        for name in (*TEXT_METRICS, *RECALL_METRICS):
            values = getattr(self, name) - getattr(original, name)
            if len(values):
                changes[name] = interval_of(values, rng=np.random.default_rng(seed))
        return changes

    def means(self) -> dict[str, float]:
        """Means over texts."""
        values = {name: getattr(self, name) for name in (*TEXT_METRICS, *RECALL_METRICS)}
        return {name: float(x.mean()) for name, x in values.items() if len(x)}

    def to_json(self) -> dict[str, list[float]]:
        """As plain data."""
        return {name: getattr(self, name).tolist() for name in (*TEXT_METRICS, *RECALL_METRICS)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Reading:
        """From plain data."""
        return cls(**{name: np.asarray(data[name], dtype=float) for name in (*TEXT_METRICS, *RECALL_METRICS)})


def read_swapped(
    model: Model,
    sequences: Sequences | None,
    recall_lists: Sequences | None,
    heads: Sequence[Head],
    head_substitute: Substitute | None,
    workers: Workers | None = None,
) -> Reading:
    """Evaluate text and recall lists with these heads swapped, whichever is given; no heads is the original model."""
    swaps = [(heads, head_substitute)] if heads and head_substitute is not None else []
    return read_under(model, sequences, recall_lists, swaps, workers)


def read_under(
    model: Model,
    sequences: Sequences | None,
    recall_lists: Sequences | None,
    swaps: Swaps,
    workers: Workers | None = None,
) -> Reading:
    """Evaluate text and recall lists under several swaps at once, here or batch by batch on workers."""
    check_measurable(model)
    text, lists = _batches(sequences), _batches(recall_lists)
    tasks = [(swaps, part, asks) for parts, asks in ((text, False), (lists, True)) for part in parts]
    if workers is not None:
        results = workers.map(_read_batch_under, tasks, name="batch")
    else:
        with torch.inference_mode(), _swapped(model, swaps):
            results = [_read_batch(model, part, asks) for _, part, asks in tasks]
    loss, _, accuracy = _concatenate(results[: len(text)]) if text else np.zeros((3, 0))
    recall, whole_answers = _concatenate(results[len(text) :]) if lists else np.zeros((2, 0))
    return Reading(loss, accuracy, recall, whole_answers)


def _read_batch(model: Model, part: Sequences, asks: bool) -> Float[Tensor, "quantity text"]:
    """Loss, KL and accuracy of texts, or the shares of right answers of recall lists."""
    if asks:
        return torch.stack(part.answer_shares(correct_tokens(model, part)))
    return score_forward(model, part.ids, None).means(part)[:, 0]


def _read_batch_under(model: Model, swaps: Swaps, part: Sequences, asks: bool) -> Float[Tensor, "quantity text"]:
    """On a worker: one batch."""
    with torch.inference_mode(), _swapped(model, swaps):
        return _read_batch(model, part, asks)


@contextmanager
def _swapped(model: Model, swaps: Swaps) -> Iterator[None]:
    with ExitStack() as stack:
        for heads, head_substitute in swaps:
            stack.enter_context(swap(model, heads, head_substitute))
        yield


def join_readings(readings: Sequence[Reading]) -> Reading:
    """Several readings of one model as one, texts and lists one after the other."""
    return Reading(
        **{name: np.concatenate([getattr(x, name) for x in readings]) for name in (*TEXT_METRICS, *RECALL_METRICS)}
    )


def _batches(sequences: Sequences | None) -> list[Sequences]:
    if sequences is None:
        return []
    size = max(1, BATCH_TOKENS // sequences.ids.shape[1])
    return [sequences.part(slice(start, start + size)) for start in range(0, len(sequences), size)]


def _concatenate(parts: Sequence[Float[torch.Tensor, "quantity text"]]) -> Float[np.ndarray, "quantity text"]:
    return torch.cat(list(parts), dim=1).double().cpu().numpy()
