"""The notebooks in examples/ run from beginning to end on the embedded model, and are kept without outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples"
# Generous: other work may share the machine.
PATIENCE = 240
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def unclean(notebook: Any) -> list[str]:
    """Cells that hold an output or a number of a run."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell.id for cell in cells if cell.outputs or cell.execution_count is not None]


def test_there_are_examples() -> None:
    assert len(NOTEBOOKS) >= 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_not_kept(path: Path) -> None:
    assert unclean(nbformat.read(path, 4)) == []


def test_kept_outputs_are_found() -> None:
    notebook = nbformat.read(NOTEBOOKS[0], 4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    first.execution_count = 1
    assert unclean(notebook) == [first.id]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, 4)
    NotebookClient(
        notebook, timeout=PATIENCE, startup_timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not any(output.output_type == "error" for output in shown)
    complaints = [output.text for output in shown if output.output_type == "stream" and output.name == "stderr"]
    # tqdm misses ipywidgets, which these examples do not need.
    assert [text for text in complaints if "TqdmWarning" not in text] == []
    if path.stem.startswith(("1", "2")):
        frames = [output.data["text/html"] for output in shown if "text/html" in output.get("data", {})]
        assert any('sandbox="allow-scripts allow-downloads"' in frame for frame in frames)
        assert all("text/plain" in output.data for output in shown if "data" in output)
