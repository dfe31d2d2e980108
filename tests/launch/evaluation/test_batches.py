"""Batch-wise work resumes where it stopped, but only if it is the same work."""

import io
from pathlib import Path

import pytest

from launch.console.errors import CommandError
from launch.display.terminal import ProgressPrinter
from launch.evaluation.batches import Batches

IDENTITY = {"samples": 2, "settings": {"seed": 0, "temperature": 1.0}}
WORK = ("a", "b", "c")


def run(batches: Batches[str], stop_at: str = "") -> list[str]:
    """Processes the remaining batches, or stops at one of them; returns the batches processed now."""
    processed = []

    def process_batch(batch: str) -> dict[str, object]:
        if batch == stop_at:
            raise KeyboardInterrupt
        processed.append(batch)
        return {"text": batch.upper()}

    with ProgressPrinter(io.StringIO(), len(WORK)) as progress:
        batches.run(process_batch, progress)
    return processed


def test_stopped_work_resumes_after_the_completed_batches(tmp_path: Path) -> None:
    file = tmp_path / "work.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(Batches(file, IDENTITY, WORK), stop_at="c")
    with file.open("a") as out:
        out.write('{"batch": 2, "te')  # killed in the middle of a line
    batches = Batches(file, IDENTITY, WORK)
    assert batches.done == 2
    assert run(batches) == ["c"] and [result["text"] for result in batches.results] == ["A", "B", "C"]
    assert run(Batches(file, IDENTITY, WORK)) == []


def test_other_work_is_rejected_with_its_differences_or_restarted(tmp_path: Path) -> None:
    file = tmp_path / "work.jsonl"
    run(Batches(file, IDENTITY, WORK))
    content = file.read_bytes()
    other = {"samples": 3, "settings": {"seed": 1, "temperature": 1.0}}
    with pytest.raises(CommandError, match=r"contains other work: different samples, seed\. Choose another location"):
        Batches(file, other, WORK[:1])
    assert file.read_bytes() == content
    assert run(Batches(file, other, WORK[:1], restart=True)) == ["a"]
