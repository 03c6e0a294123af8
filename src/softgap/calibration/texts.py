"""From texts to the token sequences a fit reads and those it is judged on: disjoint, at several lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from softgap.errors import ValueInputError
from softgap.inputs import as_items
from softgap.probe.models import Model, Tokenizer

__all__ = ["Corpus", "check_positions", "context_of", "corpus_of", "tokens_needed"]

# Share of the tokens that the fit never sees.
HELD_OUT = 0.25
FEWEST_TOKENS = 2048
LONGEST = 8192
# The fit reads about twice the longest context: one sequence of that length, and as many tokens in shorter ones.
SHORTER = 4
# Texts to judge by, and their length; one more is as long as the longest that is fitted on.
JUDGED, NEAR = 6, 1024


@dataclass(frozen=True)
class Corpus:
    """Token sequences to fit on, and others to judge the fit by, where there is text also one for far positions."""

    fitted: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    far: tuple[tuple[int, ...], ...] = ()

    @property
    def longest(self) -> int:
        """Positions of the longest sequence that is fitted on."""
        return max(map(len, self.fitted))

    @property
    def digest(self) -> str:
        """Hash of all tokens, in their order."""
        whole = hashlib.sha256()
        for part in (self.fitted, self.held_out, self.far):
            for sequence in part:
                whole.update(np.asarray([len(sequence), *sequence], dtype=np.int64).tobytes())
        return whole.hexdigest()[:32]


def tokens_needed(positions: int) -> int:
    """Tokens of text that a fit at this context length asks for, held-out text included."""
    return max(FEWEST_TOKENS, int(np.ceil(positions / (1 - HELD_OUT))))


def corpus_of(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    positions: int | None = None,
) -> Corpus:
    """Cut texts into sequences; the last quarter of the tokens is held out.

    Parameters
    ----------
    texts
        In any number; they are joined in their order.
    positions
        The longest context to fit. None takes the longest that the text and the model allow, up to 8192.
    """
    ids = [token for text in as_items(texts) for token in tokenizer(text, verbose=False)["input_ids"]]
    if len(ids) < FEWEST_TOKENS:
        raise ValueInputError(
            f"a calibration needs at least {FEWEST_TOKENS} tokens of text, got {len(ids)}; give more text, or none to "
            "use text that the model writes itself"
        )
    split = len(ids) - int(HELD_OUT * len(ids))
    if positions is None:
        positions = min(LONGEST, context_of(model), _power_of_two(split))
    check_positions(model, positions)
    if len(ids) < tokens_needed(positions):
        raise ValueInputError(
            f"calibrating up to position {positions} needs {tokens_needed(positions)} tokens of text, got {len(ids)}; "
            "give more text or ask for fewer positions"
        )
    held_out = ids[split:]
    far = (tuple(held_out[:positions]),) if min(positions, len(held_out)) > NEAR else ()
    return Corpus(_fitted(ids[:split], positions), _held_out(held_out, positions), far)


def context_of(model: Model) -> int:
    """Tokens that the model can read, or that a fit would use where it does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or LONGEST


def check_positions(model: Model, positions: int) -> None:
    """Refuse a context that is too short to fit anything, or longer than the model's."""
    least, context = FEWEST_TOKENS // 16, context_of(model)
    if context < least:
        raise ValueInputError(f"a calibration needs a context of {least} tokens, the model has {context}; use another")
    if positions < least:
        raise ValueInputError(f"positions must be at least {least}, got {positions}; ask for more")
    if positions > context:
        raise ValueInputError(
            f"positions must be at most the model's context of {context}, got {positions}; ask for fewer"
        )


def _fitted(ids: Sequence[int], positions: int) -> tuple[tuple[int, ...], ...]:
    """One sequence of the full length, then shorter ones of as many tokens in all, as far as the text reaches."""
    found = [tuple(ids[:positions])]
    rest, length = ids[positions : 2 * positions], max(FEWEST_TOKENS // 16, positions // SHORTER)
    found += [tuple(rest[i : i + length]) for i in range(0, len(rest) - length + 1, length)]
    return tuple(found)


def _held_out(ids: Sequence[int], positions: int) -> tuple[tuple[int, ...], ...]:
    """Some sequences, evenly spread."""
    length = min(positions, NEAR, len(ids))
    n = min(JUDGED, len(ids) // length)
    starts = np.linspace(0, len(ids) - length, n).astype(int)
    return tuple(tuple(ids[start : start + length]) for start in starts)


def _power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1)
