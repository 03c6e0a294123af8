"""Files gone wrong: valid ones with bits flipped, cut, spliced, or with their values dropped, renamed and retyped."""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from softgap.errors import SoftgapError

Reader = Callable[[Path], object]
LONGEST_SECONDS = 20

# Values of every kind, and those that readers stumble over.
STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["../../escaped", "/tmp/escaped", "..", "a\0b", "\ud800", "1e999", "NaN", ""]),
    st.sampled_from([[], {}, [[]], [{}], {"a": []}, [1, "a", None], 10**400, -1, 2**31, 2**63, 0.5]),
)


# What happens to bytes, where (in millionths of the file), how many of them, and what is put in their place. What is
# drawn does not depend on the file.
Damage = tuple[str, int, int, bytes]
DAMAGES = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "repeat", "zero", "replace"]),
        st.integers(0, 999_999),
        st.integers(1, 64),
        st.binary(max_size=200),
    ),
    min_size=1,
    max_size=3,
)


def damaged_bytes(content: bytes, damages: Sequence[Damage]) -> bytes:
    """A file with some of its bytes changed, cut off, repeated or replaced."""
    found = bytearray(content)
    for how, place, size, other in damages:
        at = place * len(found) // 1_000_000
        if how == "flip" and found:
            found[at] ^= 1 << size % 8
        elif how == "cut":
            del found[at:]
        elif how == "insert":
            found[at:at] = other[:16]
        elif how == "repeat":
            found[at:at] = found[at : at + size]
        elif how == "zero":
            found[at : at + size] = bytes(len(found[at : at + size]))
        else:
            found = bytearray(other)
    return bytes(found)


@st.composite
def damaged_document(draw: st.DrawFn, document: Any) -> Any:
    """A JSON document in which a few values are dropped, renamed, retyped or nested deeply."""
    found = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(found))
        if not places:
            return draw(STRANGE)
        parent, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(["drop", "rename", "retype", "nest", "repeat"]))
        value = parent[key]
        if how == "drop":
            del parent[key]
        elif how == "rename" and isinstance(parent, dict):
            parent[draw(st.text(max_size=5))] = parent.pop(key)
        elif how == "nest":
            for _ in range(draw(st.integers(1, 30))):
                value = [value]
            parent[key] = value
        elif how == "repeat" and isinstance(parent, list):
            parent.append(value)
        else:
            parent[key] = copy.deepcopy(draw(STRANGE))
    return found


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a document with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def json_bytes(document: Any) -> bytes:
    """A document as JSON, with whatever JSON cannot hold escaped."""
    return json.dumps(document).encode()


def check_reader(root: Path, files: dict[str, bytes], read: Reader) -> None:
    """Read files that went wrong: an answer or a sentence of softgap, in time, and nothing written outside.

    ``root`` is a folder of its own; the files lie in ``root/inside``.
    """
    inside = root / "inside"
    for name, content in files.items():
        (inside / name).parent.mkdir(parents=True, exist_ok=True)
        (inside / name).write_bytes(content)
    before = sorted(root.rglob("*"))
    with in_time():
        try:
            read(inside)
        except SoftgapError as error:
            said = str(error)
            assert said
            assert "\n" not in said or len(said.splitlines()) < 20
    assert sorted(root.rglob("*")) == before
    assert not Path("/tmp/escaped").exists()


@contextmanager
def in_time() -> Iterator[None]:
    """Fail whoever hangs."""

    def late(*_: object) -> None:
        raise AssertionError(f"a reader took longer than {LONGEST_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
