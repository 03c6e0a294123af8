"""What heads are judged on: passages of text of one length, and lookups whose answers stand in their own context.

Recall is the share of answers whose *first* token is the model's top token: once that is known, the rest of a word may
be easy, and teacher forcing gives it away. The share of answers all of whose tokens are right stands beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softgap.errors import ValueInputError
from softgap.inputs import as_items
from softgap.probe.models import Model, Tokenizer
from softgap.tasks.words import draw_pairs

__all__ = ["Passages", "digest_of_passages", "lookups", "passages_of"]

LENGTH = 512
FEWEST = 16
PAIRS = 12


@dataclass(frozen=True, eq=False)
class Passages:
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

    def part(self, chosen: slice) -> Passages:
        """Some of them."""
        return Passages(self.ids[chosen], self.scored[chosen], None if self.first is None else self.first[chosen])

    def answered(
        self, right: Float[Tensor, "*copies text next"]
    ) -> tuple[Float[Tensor, "*copies text"], Float[Tensor, "*copies text"]]:
        """The share of answers whose first token is right, and of those that are right as a whole, text by text.

        ``right`` is 1 where the top token is the right one, else 0.
        """
        if self.first is None:
            raise ValueInputError("these passages ask nothing, so there are no answers to count; use lookups")
        first = self.first.to(right)
        number = (self.first.cumsum(dim=-1) - 1).clamp(min=0).expand(right.shape)
        wrong = torch.zeros_like(right).scatter_add(-1, number, (1 - right) * self.scored.to(right))
        asked = first.sum(dim=-1)
        answers = torch.arange(right.shape[-1], device=right.device) < asked[:, None]
        return (right * first).sum(dim=-1) / asked, ((wrong == 0) & answers).to(right).sum(dim=-1) / asked


def passages_of(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    length: int = LENGTH,
    tokens: int | None = None,
    fewest: int = 1,
) -> Passages:
    """Cut texts into passages of ``length`` tokens; what is left over at their end is not used.

    Parameters
    ----------
    texts
        In any number; they are joined in their order.
    tokens
        Use about so many tokens, in passages spread evenly over the text; None uses all.
    fewest
        How many passages are needed at least.
    """
    check_length(length)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context and length > context:
        raise ValueInputError(
            f"passages can have at most the model's context of {context} tokens, got {length}; shorten them"
        )
    ids = [token for text in as_items(texts) for token in tokenizer(text, verbose=False)["input_ids"]]
    whole = len(ids) // length
    if whole < fewest:
        raise ValueInputError(
            f"the text must have at least {fewest * length} tokens ({fewest} passage{'s' * (fewest > 1)} of {length}), "
            f"got {len(ids)}; give more text or choose shorter passages"
        )
    wanted = whole if tokens is None else min(whole, max(fewest, tokens // length))
    chosen = np.linspace(0, whole - 1, wanted).round().astype(int)
    rows = torch.tensor(ids[: whole * length]).view(whole, length)[torch.from_numpy(chosen)].to(model.device)
    return Passages(rows, torch.ones(len(rows), length - 1, dtype=torch.bool, device=model.device))


def check_length(length: int) -> None:
    """Refuse passages too short to predict anything in."""
    if length < FEWEST:
        raise ValueInputError(f"passages must have at least {FEWEST} tokens, got {length}; {LENGTH} is usual")


def lookups(
    model: Model, tokenizer: Tokenizer, n: int, *, pairs: int = PAIRS, seed: int = 0, skip: int = 0
) -> Passages:
    """Lists of ``key: value`` lines, each list given twice in another order; the second time its values count.

    They can be known only from the first time. Sequences are filled up at the end, where causal attention of what
    counts does not see it. ``skip`` leaves out the first lists of this seed, so that further ones are others.
    """
    if n < 1:
        raise ValueInputError(f"lookups need at least 1 list, got {n}")
    made = [_lookup(tokenizer, pairs, np.random.default_rng([seed, number])) for number in range(skip, skip + n)]
    longest = max(len(ids) for ids, _, _ in made)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context and longest > context:
        raise ValueInputError(
            f"lookups of {pairs} pairs have {longest} tokens, and the model's context is {context}; ask for fewer pairs"
        )
    rows = torch.tensor([ids + [ids[-1]] * (longest - len(ids)) for ids, _, _ in made], device=model.device)
    scored, first = torch.zeros(2, n, longest - 1, dtype=torch.bool, device=model.device)
    for number, (_, answers, beginnings) in enumerate(made):
        scored[number, torch.tensor(answers, device=scored.device) - 1] = True
        first[number, torch.tensor(beginnings, device=first.device) - 1] = True
    return Passages(rows, scored, first)


def digest_of_passages(*passages: Passages) -> str:
    """Hash of the tokens and of which of them count."""
    whole = hashlib.sha256()
    for part in passages:
        whole.update(str(tuple(part.ids.shape)).encode())
        whole.update(part.ids.cpu().numpy().astype(np.int64).tobytes())
        whole.update(part.scored.cpu().numpy().tobytes())
        if part.first is not None:
            whole.update(part.first.cpu().numpy().tobytes())
    return whole.hexdigest()[:32]


def _lookup(tokenizer: Tokenizer, pairs: int, rng: np.random.Generator) -> tuple[list[int], list[int], list[int]]:
    """Tokens, the places of those that count, and of the first token of every answer."""
    drawn = draw_pairs(pairs, "words", rng=rng)
    ids: list[int] = list(tokenizer("Words and their partners.\n")["input_ids"])
    answers: list[int] = []
    beginnings: list[int] = []
    for turn in range(2):
        for i in rng.permutation(pairs):
            key, value = drawn[i]
            ids += _bare(tokenizer, f"{key}:")
            answer = _bare(tokenizer, f" {value}")
            if turn:
                beginnings.append(len(ids))
                answers += range(len(ids), len(ids) + len(answer))
            ids += [*answer, *_bare(tokenizer, "\n")]
    return ids, answers, beginnings


def _bare(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
