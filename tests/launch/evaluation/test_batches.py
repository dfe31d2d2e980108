"""The folder of results, and the progress of work in batches."""

import io
from pathlib import Path

import pytest

from launch.console.errors import CommandError
from launch.display.terminal import ProgressPrinter
from launch.evaluation.batches import MAX_PROGRESS_LINES, open_results, show_progress, write_lines


def test_progress_without_a_bar_has_at_most_so_many_lines() -> None:
    output = io.StringIO()
    with ProgressPrinter(output, 50) as progress:
        assert list(show_progress(iter(range(50)), 50, progress)) == list(range(50))
    lines = output.getvalue().splitlines()
    assert len(lines) == MAX_PROGRESS_LINES and lines[-1] == "  50/50 batches  0:00 left"


def test_work_that_failed_may_be_repeated_in_its_folder_but_results_are_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    with pytest.raises(KeyboardInterrupt), open_results(folder, "evaluation", 1, quiet=True, debug=False):
        print("before the signal")
        raise KeyboardInterrupt
    assert [file.name for file in folder.iterdir() if file.name != ".lock"] == ["log.txt"]
    with open_results(folder, "evaluation", 1, quiet=True, debug=False):
        print("repeated")
        write_lines(folder / "responses.jsonl", [{"reward": float("nan")}])
    with open_results(folder, "evaluation", 1, quiet=True, debug=False):  # killed before it wrote its result
        (folder / "evaluation.json").touch()
    assert (folder / "log.txt").read_text() == "before the signal\nrepeated\n"
    assert (folder / "responses.jsonl").read_text() == '{"reward": null}\n'
    with (
        pytest.raises(CommandError, match=r"out is not empty\. Empty it, or choose another folder with --out\."),
        open_results(folder, "evaluation", 1, quiet=True, debug=False),
    ):
        pass
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CommandError, match="is not empty"), open_results(tmp_path, "probe", 1, quiet=True, debug=False):
        pass
    assert not (tmp_path / ".lock").exists()  # nothing is written into a folder of other files
