"""The piece of a text that each token stands for."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["pieces"]

# A token that is part of a character has no text of its own.
_UNKNOWN = "�"
_LONGEST_CHARACTER = 8


def pieces(text: str, tokens: Sequence[str]) -> list[tuple[str, list[int]]]:
    """The text cut into pieces, each with the indices of the tokens it came from.

    Decoding one token alone may lose a leading space or give half a character, so the tokens are looked up in the text,
    from its end: there the last token ends, while a text that was read begins with a token nothing predicted. Tokens
    that are not in the text (end of a turn) belong to no piece; what no token explains has an empty list.
    """
    found: list[tuple[str, list[int]]] = []
    end, waiting = len(text), 0
    indices: list[int] = []
    for index in reversed(range(len(tokens))):
        start = _start(text, tokens[index], end, waiting)
        if start is None:
            # Behind the text's end only what a decoder leaves out.
            if found or _UNKNOWN in tokens[index]:
                indices.insert(0, index)
                waiting += _LONGEST_CHARACTER if _UNKNOWN in tokens[index] else 0
            continue
        stop = start + len(tokens[index])
        rest = text[stop:end]
        if rest.strip() or (rest and indices):
            found.append((rest, indices))
            rest = ""
        found.append((text[start:stop] + rest, [index]))
        end, waiting, indices = start, 0, []
    if end:
        found.append((text[:end], indices))
    return found[::-1]


def _start(text: str, token: str, end: int, slack: int) -> int | None:
    """Where a token begins that ends at ``end``, or before spaces or up to ``slack`` characters; None if nowhere."""
    if not token or _UNKNOWN in token:
        return None
    close = len(text[:end].rstrip())
    for stop in (end, close):
        if text.endswith(token, 0, stop):
            return stop - len(token)
    if not slack:
        return None
    at = text.rfind(token, max(0, end - len(token) - slack), end)
    return None if at < 0 else at
