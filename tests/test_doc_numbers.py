"""Numbers in the README and the docs are those of the sections that they link to, which commands have written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
MEASURED = ("findings.md", "benchmarks.md")
PAGES = [
    "README.md",
    *(
        str(path.relative_to(REPOSITORY))
        for path in sorted((REPOSITORY / "docs").rglob("*.md"))
        if path.name not in MEASURED
    ),
]
LINK = re.compile(r"\]\(([\w./]*?)(findings|benchmarks)\.md#([\w-]+)\)")
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)")
SHARE = re.compile(r"(?<![\w.])(\d+) %")
# What a command aimed at, and names of heads, are no measurements.
NOT_MEASURED = re.compile(r"\((?:aims?|targets?)\b[^)]*\)|\bhead,? \d+\.\d+")
OPENING = "which-heads-of-the-embedded-model-need-softmax"
KINDS = ("constant", "profile", "window", "fitted", "hybrid", "softmax")


def slug(title: str) -> str:
    """The anchor of a heading, as the site makes it."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


def sections() -> dict[str, str]:
    """The measured sections by their anchors."""
    found = {}
    for name in MEASURED:
        page = (REPOSITORY / "docs" / name).read_text(encoding="utf-8")
        for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
            title, _, body = part.partition("\n")
            found[slug(title)] = body
    return found


def paragraphs(page: str) -> list[str]:
    """Paragraphs and items of lists, without blocks of code."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    return re.split(r"\n\s*\n|\n(?=- )", prose)


def unmeasured(page: str, known: dict[str, str]) -> list[str]:
    """Decimals and shares of a page beside a link to a measured section in which no number rounds to them."""
    missing = []
    for paragraph in paragraphs(page):
        anchors = [anchor for _, _, anchor in LINK.findall(paragraph)]
        if not anchors:
            continue
        text, prose = " ".join(known.get(anchor, "") for anchor in anchors), NOT_MEASURED.sub("", paragraph)
        numbers = [float(x) for x in re.findall(r"\d+\.\d+", text)]
        shares = [100 * x for x in numbers] + [float(x) for x in re.findall(r"(\d+(?:\.\d+)?) ?%", text)]
        shown = [(x, float(x), numbers) for x in NUMBER.findall(prose)]
        shown += [(f"{x} %", float(x), shares) for x in SHARE.findall(prose)]
        for words, value, known_numbers in shown:
            decimals = len(words.partition(".")[2])
            # Half a digit, with a little room: a page may round what a command had rounded before.
            if not any(abs(number - value) <= 0.501 * 10**-decimals for number in known_numbers):
                missing.append(f"{words} in '{' '.join(paragraph.split())[:60]}'")
    return missing


@pytest.mark.parametrize("name", PAGES)
def test_numbers_beside_a_link_are_in_the_section_that_it_leads_to(name: str) -> None:
    assert unmeasured((REPOSITORY / name).read_text(encoding="utf-8"), sections()) == []


def test_links_to_measured_sections_lead_there() -> None:
    known = sections()
    for name in PAGES:
        anchors = [anchor for _, _, anchor in LINK.findall((REPOSITORY / name).read_text(encoding="utf-8"))]
        assert [anchor for anchor in anchors if anchor not in known] == []


def test_a_number_that_no_command_wrote_is_found() -> None:
    known = {"cost": "| hybrid | +0.0042 |", "speed": "0.9"}
    page = "It costs 0.004 nats and 0.011 ([cost](docs/findings.md#cost)).\n\nAnd 0.7 without a link."
    assert [words.split()[0] for words in unmeasured(page, known)] == ["0.011"]
    page = "It takes 90 % of the time (aim: 0.5), and 80 % of the memory ([speed](docs/findings.md#speed))."
    assert [words.split()[0] for words in unmeasured(page, known)] == ["80"]


def counts() -> dict[str, tuple[str, str, str]]:
    """Heads by kind, with the ends of the interval, as docs/make/opening.py wrote them."""
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) to (\d+) \|$", sections()[OPENING], flags=re.MULTILINE)
    return {kind: (value, low, high) for kind, value, low, high in rows}


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_the_opening_sentence_counts_the_heads_of_the_findings(name: str) -> None:
    found = counts()
    assert tuple(found) == KINDS
    text = " ".join((REPOSITORY / name).read_text(encoding="utf-8").split())
    value, low, high = found["softmax"]
    assert f"{value} ({low} to {high}) need softmax." in text
    value, low, high = found["window"]
    assert f"{value} ({low} to {high}) a window" in text


def test_the_picture_of_the_readme_shows_as_many_heads_of_each_kind() -> None:
    found = {kind: value for kind, (value, _, _) in counts().items()}
    readme = " ".join((REPOSITORY / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"{found['window']} need a window, {found['hybrid']} a hybrid, {found['fitted']} a fitted map, "
        f"{found['profile']} a positional profile, and {found['softmax']} need softmax"
    ) in readme
    picture = (REPOSITORY / "docs" / "images" / "kinds.svg").read_text(encoding="utf-8")
    legend = [f"{kind} {number}" for kind, number in found.items()]
    assert [words for words in legend if words not in " ".join(picture.split())] == []
    quickstart = (REPOSITORY / "docs" / "quickstart.md").read_text(encoding="utf-8")
    letters = "".join(re.findall(r"^ {1,2}\d ([cpwfhS]+)$", quickstart, flags=re.MULTILINE))
    assert {kind: str(letters.count(letter)) for kind, letter in zip(KINDS, "cpwfhS", strict=True)} == found
