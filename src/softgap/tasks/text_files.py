"""Read and check text from files and standard input."""

from __future__ import annotations

import os
from pathlib import Path

from softgap.errors import ValueInputError

__all__ = ["check_text", "decode_utf8", "encodable", "file_text", "shortened"]


def file_text(file: str | os.PathLike[str], instead: str = "") -> str:
    """All of a UTF-8 file; ``instead`` says in a message what else could have been given."""
    try:
        content = Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ValueInputError(f"cannot read '{file}': {reason}; give a text file{instead}") from error
    return decode_utf8(content, f"'{file}'")


def decode_utf8(content: bytes, name: str) -> str:
    """Bytes as UTF-8 text, with or without a byte order mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueInputError(
            f"{name} must be UTF-8 text, got the byte 0x{content[error.start]:02x} at {error.start}; convert it first"
        ) from error


def check_text(text: str, name: str) -> str:
    """The text, if it holds more than spaces and can be written down."""
    if not text.strip():
        raise ValueInputError(f"{name} must hold some text, got {shortened(text)}; write something to read")
    return encodable(text, name)


def encodable(text: str, name: str) -> str:
    """The text, if UTF-8 can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueInputError(f"{name} must be valid UTF-8, got {shortened(text[error.start])}; correct it") from error
    return text


def shortened(value: object) -> str:
    """A value as it is shown in a message."""
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:39]}…"
