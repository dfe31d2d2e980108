"""A run whose raylet, the Ray process of this machine, is killed."""

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.launch.conftest import start_cory
from tests.launch.training.test_training import BREVITY, SMALL, updates_in


def kill_raylet_in(process: "subprocess.Popen[str]", update: int) -> None:
    """Kills the raylet of a run after an update."""
    assert process.stdout and process.stderr
    while f"\n  {update}/" not in (line := "\n" + process.stdout.readline()):
        assert line != "\n", process.stderr.read()
    (raylet,) = [child for child in psutil.Process(process.pid).children() if child.name() == "raylet"]
    raylet.send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_a_run_whose_raylet_was_killed_exits_at_once_and_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    process = start_cory(
        tmp_path, "train", *SMALL, "num_updates=4", "checkpoint_every=1", "num_runners=1", "--out", "run"
    )
    kill_raylet_in(process, 1)
    process.communicate(timeout=120)
    assert process.returncode == 1  # Ray's exit code: it ends the driver and logs the reason
    assert "raylet" in (tmp_path / "run" / "log.txt").read_text()

    process = start_cory(tmp_path, "train", "--resume", "run")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert updates_in(tmp_path / "run" / "metrics.jsonl") == list(range(5))
