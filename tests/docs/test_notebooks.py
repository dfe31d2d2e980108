"""The notebooks were run from top to bottom as they stand, and still run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
OF_A_MACHINE = re.compile(r"/(?:home|root|tmp|work|Users)\b")
SAME_ANYWHERE = {"reading-a-study"}
"""Those that train nothing, so print the same on every machine."""


def cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_holds_what_its_cells_printed_and_nothing_of_the_machine(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in cells(notebook)] == [*range(1, len(cells(notebook)) + 1)]
    assert not any(output.output_type == "error" for cell in cells(notebook) for output in cell.outputs)
    text = file.read_text(encoding="utf-8")
    assert not OF_A_MACHINE.search(text)
    assert len(text) < 300_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs_again(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    before = [printed(cell) for cell in cells(notebook)]
    NotebookClient(notebook, timeout=1700, resources={"metadata": {"path": str(file.parent)}}).execute()
    if file.stem in SAME_ANYWHERE:
        assert [printed(cell) for cell in cells(notebook)] == before
