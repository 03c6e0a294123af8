"""Findings documents, results of labs and quantities of heads from files, as pages and sections of reports."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser

from softgap.cli import main
from softgap.errors import StoreError, ValueInputError
from softgap.report import Column, Document, Picture, Table, notebook_html, read_columns, save_document, write_explorer
from softgap.report import documents as report_documents
from softgap.report.columns import calibration_columns
from softgap.report.documents import read_documents
from softgap.theory import Claim
from support.cli_examples import failure
from support.explorer_examples import HOSTILE, opened, save_study, settle, story

SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"><script>alert(1)</script>'
    b'<rect width="9" height="9"/></svg>'
)
DOCUMENT = Document(
    title="Groups compared",
    verdict="No difference between calm and wild was found.",
    tables=(Table(("head", "g", "p"), (("1.2", 0.31, 0.2), ("3.5", float("nan"), 0.9)), "By head"),),
    pictures=(Picture("null.svg", SVG, "The null"),),
    notes=(("permutations", "999"),),
)


@pytest.mark.parametrize("result", report_documents._FIGURES)
def test_the_figure_of_every_lab_is_there(result: str) -> None:
    module, name = report_documents._FIGURES[result]
    assert callable(getattr(import_module(f"softgap.report.{module}"), name))


def test_documents_are_kept_as_they_are(tmp_path: Path) -> None:
    save_document(DOCUMENT, tmp_path)
    save_document(Document("Another", "Nothing."), tmp_path, "b")
    found = read_documents(tmp_path)
    assert [document.title for document in found] == ["Another", "Groups compared"]
    assert found[1].pictures == DOCUMENT.pictures
    assert found[1].tables[0].rows == (("1.2", 0.31, 0.2), ("3.5", None, 0.9))
    assert found[1].notes == DOCUMENT.notes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "x"}, "does not hold findings of softgap"),
        ({"version": 2}, "findings format 2, but this softgap reads up to 1"),
        ({"pictures": [{"file": "../secret.svg"}]}, "must be a plain file name"),
        ({"pictures": [{"file": "gone.svg"}]}, "the figure 'gone.svg' is not in"),
        ({"tables": [{"columns": ["a"], "rows": [[1, 2]]}]}, "a row must have 1 cells, one per column, got 2"),
    ],
)
def test_documents_that_cannot_be_read(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = save_document(DOCUMENT, tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(StoreError, match=words):
        read_documents(tmp_path)


def test_findings_beside_a_study_are_a_section_of_its_report(browser: Browser, tmp_path: Path) -> None:
    study = save_study(tmp_path / "study", [story()])
    hostile = Document(HOSTILE[0], HOSTILE[1], (Table((HOSTILE[2],), ((HOSTILE[0],),), HOSTILE[1]),))
    save_document(DOCUMENT, study)
    save_document(hostile, study, "z")
    with opened(browser, write_explorer(study).path) as page:
        section = page.locator(".findings").last
        assert "No difference between calm and wild" in section.inner_text()
        assert section.locator("img").evaluate("(image) => image.complete && image.naturalWidth") == 40
        assert section.locator("td").all_inner_texts() == ["1.2", "0.31", "0.2", "3.5", "–", "0.9"]
        assert HOSTILE[0] in page.locator(".findings").first.inner_text()
        assert page.locator("#map .cell").count() == 24


def test_a_lab_opens_in_the_same_look(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "lab"
    folder.mkdir()
    claims = [
        Claim("a", "Paper, eq. 1", "Linear attention is injective.", "holds only when", "keys differ", {"margin": 0.1}),
        Claim("b", "softgap", "Softmax separates.", "holds", "", {"share": 0.5}),
    ]
    values = {"lab": "injectivity", "settings": {"seed": 3}, "claims": [claim.to_json() for claim in claims]}
    (folder / "result.json").write_text(json.dumps(values))
    (folder / "figure.svg").write_bytes(SVG)
    assert main(["report", str(folder)]) == 0
    made = browser.new_context()
    page = made.new_page()
    page.goto((folder / "report.html").as_uri())
    assert page.locator("h2").inner_text() == "Lab: injectivity"
    assert page.locator(".verdict").inner_text() == "Of 2 claims, 1 hold under a condition, 1 hold."
    assert "holds only when keys differ" in page.locator("table").inner_text()
    assert page.locator("img").count() == 1
    assert "script-src" not in (folder / "report.html").read_text()
    assert "<script" not in (folder / "report.html").read_text()
    made.close()


def test_a_lab_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "result.json").write_text("{}")
    assert "is not the result of a softgap lab" in failure(["report", str(tmp_path)], capsys)
    (tmp_path / "result.json").write_text('{"lab": "focus", "claims": []}')
    assert "calibration need a study" in failure(["report", str(tmp_path), "--sample", "a"], capsys)


def test_quantities_from_a_file_are_in_the_map_and_the_table(browser: Browser, tmp_path: Path) -> None:
    study = save_study(tmp_path / "study", [story()])
    file = tmp_path / "impact.csv"
    lines = [f"{layer},{head},{0.1 * layer - 0.01 * head}" for layer in range(4) for head in range(5)]
    file.write_text("\n".join(["layer,head,swap impact", *lines, "3,5,"]))
    with opened(browser, write_explorer(study, heads=[file]).path) as page:
        page.locator("#quantity").select_option(label="swap impact")
        settle(page)
        assert "from 'impact.csv'" in page.locator("#map-caption").inner_text()
        label = page.locator('#map .cell[data-row="13"]').get_attribute("aria-label")
        assert label is not None
        assert label.endswith("swap impact 0.190")
        assert "swap impact" in page.locator("#heads thead").inner_text()
        numbers = page.evaluate("quantityNow().numbers.map((value) => (value === value ? value : null))")
        assert numbers[5] is None
        np.testing.assert_allclose(numbers[6:11], [0.1, 0.09, 0.08, 0.07, 0.06])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "got no rows"),
        ("layer,head\n0,0\n", "at least one quantity, got layer, head"),
        ("layer,impact\n0,1\n", "must have the columns layer, head"),
        ("layer,head,impact\n0,x,1\n", "line 2: invalid literal"),
        ("layer,head,impact\n0,0,much\n", "line 2: could not convert"),
    ],
)
def test_files_of_heads_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "heads.csv"
    path.write_text(text)
    with pytest.raises(ValueInputError, match=words):
        read_columns(path)


def test_a_file_of_another_models_heads(tmp_path: Path) -> None:
    with pytest.raises(ValueInputError, match="no value for any of the 24 heads of this study"):
        Column("impact", {(40, 1): 1.0}, source="'x.csv'").to_json(story())
    with pytest.raises(StoreError, match=r"cannot read '.*gone.csv'"):
        read_columns(tmp_path / "gone.csv")


def test_the_gap_that_a_calibration_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    by_head = tuple(tuple(None if h == 2 else 0.1 * i for h in range(6)) for i in range(4))
    held = SimpleNamespace(by_head=by_head, explained_by_head=())
    loaded = SimpleNamespace(held_out=held, fingerprint="abc", digest="0123456789abcdef")
    monkeypatch.setattr("softgap.calibration.Calibration.load", lambda path: loaded)
    values = calibration_columns("c.safetensors", story())[0].to_json(story())["values"]
    assert values[:4] == [0.0, 0.0, None, 0.0]
    assert values[18] == 0.3
    assert len(calibration_columns("c.safetensors", story())) == 1
    held.explained_by_head = tuple(tuple(-0.5 for _ in range(6)) for _ in range(4))
    labels = [column.label for column in calibration_columns("c.safetensors", story())]
    assert labels == ["gap closed by the calibration", "energy explained by the calibration"]


def test_results_show_themselves_in_a_notebook() -> None:
    run = story(steps=20)
    shown = run._repr_html_()
    assert shown is not None
    assert shown.startswith('<iframe title="softgap: Trajectories" sandbox="allow-scripts allow-downloads"')
    # Nothing of the page can end the attribute that holds it.
    assert shown.count('"') == 12
    assert shown.count("<") == 2
    document = notebook_html(DOCUMENT)
    assert document is not None
    assert "No difference between calm and wild" in document
    assert repr(run).startswith("<Trajectories 'fox'")


def test_a_notebook_without_the_extra_shows_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("softgap.report.page.distribution", absent)
    assert story(steps=5)._repr_html_() is None
