"""A full or read-only disk loses only the file being written."""

import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from launch.console.cli import run
from launch.run_folder import manifest
from launch.run_folder.checkpoints import Checkpoints
from launch.run_folder.journal import Journal
from launch.run_folder.run import Run
from tests.launch.conftest import mount

MEGABYTE = b"\0" * 2**20


def test_a_checkpoint_that_does_not_fit_is_removed_and_earlier_ones_remain(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(folder: Path, megabytes: int) -> None:
        for number in range(megabytes):
            (folder / str(number)).write_bytes(MEGABYTE)

    checkpoints = Checkpoints(disk)
    checkpoints.save(1, lambda folder: write(folder, 1))

    def save() -> int:
        checkpoints.save(2, lambda folder: write(folder, 2))
        return 0

    assert run(save, debug=False) == 2
    message = capsys.readouterr().err
    assert "update_000002" in message and "No space left on device. Free disk space" in message
    assert [entry.name for entry in disk.iterdir()] == ["update_000001"]
    assert manifest.verify(disk / "update_000001") is None


def test_a_line_truncated_by_a_full_disk_is_ignored_and_removed_on_resume(disk: Path) -> None:
    journal = Journal(disk / "metrics.jsonl")
    with pytest.raises(OSError) as raised:
        for update in range(1000):
            journal.append({"update": update, "text": "x" * 2**16})
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(journal.path))
    records = journal.read()
    assert [record["update"] for record in records] == list(range(len(records))) and len(records) > 20
    mount("-o", "remount,size=8m", str(disk))
    journal.cut_after(20)
    journal.append({"update": 21})
    assert [record["update"] for record in journal.read()] == list(range(22))


def test_a_read_only_folder_is_rejected(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (disk / "old").mkdir()
    mount("-o", "remount,ro", str(disk))

    def create(path: Path) -> int:
        Run.create(path)
        return 0

    for name in ("old", "new"):
        assert run(lambda name=name: create(disk / name), debug=False) == 2  # type: ignore[misc]
        message = capsys.readouterr().err
        assert str(disk / name) in message and "Read-only file system" in message


def test_a_disk_that_becomes_read_only_fails_the_save_and_keeps_earlier_data(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints, journal = Checkpoints(disk / "checkpoints"), Journal(disk / "metrics.jsonl")
    checkpoints.save(1, lambda folder: (folder / "weights").write_bytes(MEGABYTE))
    journal.append({"update": 1})
    mount("-o", "remount,ro", str(disk))

    def run_step(step: Callable[[], object]) -> int:
        step()
        return 0

    for step in (lambda: journal.append({"update": 2}), lambda: checkpoints.save(2, lambda folder: None)):
        assert run(partial(run_step, step), debug=False) == 2
        message = capsys.readouterr().err
        assert str(disk) in message and "Read-only file system. Free disk space" in message
    assert [record["update"] for record in journal.read()] == [1]
    assert manifest.verify(disk / "checkpoints" / "update_000001") is None
