"""axe-core finds nothing serious in the explorer: light, dark, phone, with a range chosen, and for a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from support.explorer_examples import labelled_runs, opened, report_of, settle, story, violations


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_of(tmp_path_factory.mktemp("one"), story())


@pytest.mark.parametrize(
    "context",
    [
        {"color_scheme": "light"},
        {"color_scheme": "dark"},
        {"color_scheme": "light", "viewport": {"width": 360, "height": 740}},
    ],
    ids=["light", "dark", "phone"],
)
def test_no_serious_violation(browser: Browser, report: Path, context: dict[str, Any]) -> None:
    with opened(browser, report, bypass_csp=True, **context) as page:
        assert violations(page) == []
        page.evaluate("update({ range: [20, 40], cursor: 25 })")
        settle(page)
        assert violations(page) == []


def test_no_serious_violation_in_a_study(browser: Browser, tmp_path: Path) -> None:
    path = report_of(tmp_path, *labelled_runs(4))
    with opened(browser, path, bypass_csp=True) as page:
        assert violations(page) == []


def test_violations_are_found(browser: Browser, report: Path) -> None:
    with opened(browser, report, bypass_csp=True) as page:
        page.evaluate("document.getElementById('search').parentElement.replaceWith(document.getElementById('search'))")
        page.evaluate("document.getElementById('search').removeAttribute('placeholder')")
        assert any("label" in line for line in violations(page))
