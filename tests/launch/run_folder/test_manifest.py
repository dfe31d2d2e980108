"""Damaged checkpoints, and those of another format, are detected before they are loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.run_folder import manifest
from launch.run_folder.checkpoints import Checkpoints
from tests.launch.run_folder.test_checkpoints import names, write_checkpoint

WEIGHTS = Path("deep") / "weights"


def truncate(folder: Path) -> None:
    (folder / WEIGHTS).write_text("who")


def change(folder: Path) -> None:
    (folder / WEIGHTS).write_text("whale")


def remove(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def remove_manifest(folder: Path) -> None:
    (folder / manifest.NAME).unlink()


def truncate_manifest(folder: Path) -> None:
    (folder / manifest.NAME).write_text('{"format": 1, "fil')


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (truncate, "has a damaged file deep/weights"),
        (change, "has a damaged file deep/weights"),
        (remove, "lacks its file deep/weights"),
        (remove_manifest, "has no manifest.json"),
        (truncate_manifest, "has a damaged manifest.json"),
    ],
)
def test_a_damaged_checkpoint_is_quarantined_and_the_previous_one_is_used(
    tmp_path: Path, damage: Callable[[Path], None], problem: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    previous, latest = checkpoints.save(1, write_checkpoint), checkpoints.save(2, write_checkpoint)
    assert checkpoints.quarantine_damaged() == []
    damage(latest)
    messages = checkpoints.quarantine_damaged()
    assert messages == [f"{latest} {problem}; it is now damaged_update_000002."]
    assert checkpoints.latest() == (1, previous)
    assert names(tmp_path) == ["damaged_update_000002", "update_000001"]
    assert checkpoints.save(2, write_checkpoint) == latest and manifest.verify(latest) is None


def test_if_all_checkpoints_are_damaged_none_is_left_but_the_folder_is_not_empty(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for update in (1, 2):
        truncate(checkpoints.save(update, write_checkpoint))
    assert len(checkpoints.quarantine_damaged()) == 2
    assert checkpoints.latest() is None and not checkpoints.empty()


def test_a_checkpoint_of_another_format_is_kept_and_reported_with_its_version(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    latest = checkpoints.save(1, write_checkpoint)
    entries = json.loads((latest / manifest.NAME).read_text())
    (latest / manifest.NAME).write_text(json.dumps({**entries, "format": 99, "cory-rllib": "9.9.0"}))
    with pytest.raises(
        manifest.FormatError, match=r"checkpoint format 99, written by cory-rllib 9\.9\.0, but version 0\."
    ):
        checkpoints.quarantine_damaged()
    assert checkpoints.latest() == (1, latest)
