"""The notebooks were run from top to bottom in their current form, and still run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
MACHINE_PATH = re.compile(r"/(?:home|root|tmp|work|Users)\b")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_has_the_outputs_of_one_run_and_no_machine_paths(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code_cells(notebook)] == [*range(1, len(code_cells(notebook)) + 1)]
    assert not any(output.output_type == "error" for cell in code_cells(notebook) for output in cell.outputs)
    text = file.read_text(encoding="utf-8")
    assert not MACHINE_PATH.search(text)
    assert len(text) < 300_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_still_runs(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    NotebookClient(notebook, timeout=1700, resources={"metadata": {"path": str(file.parent)}}).execute()
