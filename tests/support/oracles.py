"""Models that know the answers of generated contexts, or guess them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from softgap.evaluation import sampling
from softgap.tasks.long_context import Context

Next = Callable[[Context, int], int]
"""The token that a model holds most likely at a place of a context."""
END = 2


class Oracle:
    """Stands in for the forward of a model; its cache is the list of tokens that it was given.

    Attributes
    ----------
    calls
        The number of tokens and the cache of every forward.
    """

    def __init__(self, vocabulary: int, next_token: Next | None = None) -> None:
        self.contexts: list[Context] = []
        self.vocabulary = vocabulary
        self.next_token = next_token or (lambda context, place: context.ids[place])
        self.calls: list[tuple[int, Any]] = []

    def __call__(
        self, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = False, logits_to_keep: Any = 0
    ) -> Any:
        assert len(input_ids) == 1
        before = [] if past_key_values is None else past_key_values
        self.calls.append((input_ids.shape[1], past_key_values))
        ids = [*before, *input_ids[0].tolist()]
        context = self._known(ids)
        places = range(len(before), len(ids))
        if isinstance(logits_to_keep, torch.Tensor):
            places = [len(before) + int(place) for place in logits_to_keep]  # type: ignore[assignment]
        elif logits_to_keep:
            places = places[-logits_to_keep:]
        said = [self._said(context, place + 1) for place in places]
        logits = 9.0 * torch.nn.functional.one_hot(torch.tensor([said]), self.vocabulary).float()
        if isinstance(past_key_values, list):
            past_key_values[:] = ids
            ids = past_key_values
        return type("Output", (), {"logits": logits, "past_key_values": ids if use_cache else None})()

    def _said(self, context: Context | None, place: int) -> int:
        if context is None or place >= len(context.ids):
            return END
        return self.next_token(context, place)

    def _known(self, ids: Sequence[int]) -> Context | None:
        """The context that begins with these tokens, or agrees with them in all that no answer holds."""
        for context in reversed(self.contexts):
            answers = {t for q in context.questions for t in range(q.start, q.stop)}
            if len(ids) <= len(context.ids) and all(
                token == context.ids[t] for t, token in enumerate(ids) if t not in answers
            ):
                return context
        return None


@contextmanager
def oracle(model: Any, patch: Any, next_token: Next | None = None) -> Iterator[Oracle]:
    """A model that answers by an oracle, which hears of every context that is drawn."""
    made = Oracle(model.config.vocab_size, next_token)
    original = sampling._Sampler.draw

    def draw(self: Any, *given: Any) -> Context:
        made.contexts.append(original(self, *given))
        return made.contexts[-1]

    with patch.context() as inner:
        inner.setattr(sampling._Sampler, "draw", draw)
        inner.setattr(model, "forward", made)
        yield made


def guess(rng: np.random.Generator) -> Next:
    """Answer with one of the context's answers, drawn anew for every question."""
    drawn: dict[tuple[int, int], tuple[int, ...]] = {}

    def next_token(context: Context, place: int) -> int:
        for number, question in enumerate(context.questions):
            if question.start <= place < question.stop:
                key = (id(context), number)
                if key not in drawn:
                    other = context.questions[int(rng.integers(len(context.questions)))]
                    drawn[key] = context.ids[other.start : other.stop]
                at = place - question.start
                return drawn[key][at] if at < len(drawn[key]) else END
        return context.ids[place]

    return next_token
