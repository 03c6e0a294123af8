"""One word for one thing: other words for what docs/glossary.md names are found, in code, pages and help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
# A word that is not ours, and the one that is.
STRANGERS = {
    r"key-value (?:head|group)s?": "KV head, KV group",
    r"feature-maps?": "feature map",
    r"lineari[s]\w+": "linearize, linearization",
    r"log[ -]probs?\b": "log-probability, or logprob in code",
    r"cosine (?:distance|divergence)": "divergence",
    r"replaced heads?": "swapped heads",
    r"time-?steps?\b": "step",
    r"data ?points?": "sample",
    r"feature[ -]functions?": "feature map",
    r"hallucination (?:score|detector)s?": "divergence is neither",
    r"(?<!navi-)\bSAD\b": "divergence",
}
# Where a word is explained, or belongs to somebody else.
EXCEPT = {
    ("docs/architecture.md", "key-value heads"),
    ("src/softgap/attention/feature_maps.py", "feature functions"),
}


def texts() -> list[Path]:
    pages = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")]
    source = REPOSITORY / "src" / "softgap"
    return [*pages, *(path for ending in ("py", "js", "html") for path in source.rglob(f"*.{ending}"))]


def strangers(text: str, where: str = "") -> list[str]:
    """What each strange word in a text should be."""
    spaced = re.sub(r"\s+", " ", text)
    return [
        f"{where}: '{match.group()}' is {ours}"
        for pattern, ours in STRANGERS.items()
        for match in re.finditer(pattern, spaced, flags=re.IGNORECASE if pattern.islower() else 0)
        if (where, match.group().lower()) not in EXCEPT
    ]


def test_the_pages_and_the_code_use_our_words() -> None:
    found = [
        line
        for path in texts()
        for line in strangers(path.read_text(encoding="utf-8"), path.relative_to(REPOSITORY).as_posix())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("heads that share a key-value\nhead", "KV head, KV group"),
        ("a linearised head", "linearize, linearization"),
        ("the log prob of a token", "log-probability, or logprob in code"),
        ("the SAD of a head, not navi-SAD", "divergence"),
    ],
)
def test_strange_words_are_found(text: str, ours: str) -> None:
    (line,) = strangers(text, "page")
    assert line.endswith(ours)


def test_every_word_of_the_glossary_is_explained_once() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8"), flags=re.M)
    words = [word.strip() for row in rows if row not in ("word", "---") for word in row.split(",")]
    assert len(words) > 30
    assert len(set(words)) == len(words)
