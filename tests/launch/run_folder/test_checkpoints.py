"""Checkpoints are atomic, whenever the process is killed."""

import subprocess
import sys
from pathlib import Path

from launch.run_folder.checkpoints import Checkpoints
from tests.launch.conftest import ENVIRONMENT

SLOW_SAVE = """
import sys, time
from pathlib import Path
from launch.run_folder.checkpoints import Checkpoints

def write(folder):
    (folder / "first").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
    (folder / "second").write_text("whole")

Checkpoints(Path(sys.argv[1])).save(2, write)
"""


def write_checkpoint(folder: Path, weights: str = "whole") -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "weights").write_text(weights)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_kill_during_a_save_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    previous = checkpoints.save(1, write_checkpoint)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_SAVE, str(tmp_path)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "writing\n"
    process.kill()
    process.communicate()
    assert checkpoints.latest() == (1, previous)
    assert (previous / "deep" / "weights").read_text() == "whole"
    assert len(names(tmp_path)) == 2  # the unfinished one has another name

    checkpoints.clean()
    assert names(tmp_path) == ["update_000001"]


def test_saving_replaces_an_unfinished_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / ".unfinished-update_000002" / "deep").mkdir(parents=True)
    path = checkpoints.save(2, write_checkpoint)
    assert (path / "deep" / "weights").read_text() == "whole"
    assert names(tmp_path) == ["update_000002"]


def test_the_latest_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for update in range(6):
        checkpoints.save(update, write_checkpoint)
        if update == 1:
            checkpoints.name_best(1)
        checkpoints.prune(keep=2)
    assert names(tmp_path) == ["best", "update_000001", "update_000004", "update_000005"]
    assert checkpoints.best() == (tmp_path / "update_000001").resolve()

    checkpoints.name_best(5)
    checkpoints.prune(keep=2)
    assert names(tmp_path) == ["best", "update_000004", "update_000005"]


def test_best_never_points_to_a_missing_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, write_checkpoint)
    checkpoints.name_best(7)
    assert checkpoints.best() is None


def test_there_is_no_latest_checkpoint_before_the_first_save(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "checkpoints").latest() is None
