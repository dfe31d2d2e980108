"""A run whose raylet is killed, Ray's own process on this machine."""

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.launch.conftest import begin
from tests.launch.training.test_training import BREVITY, SMALL, updates_in


def kill_raylet_in(process: "subprocess.Popen[str]", update: int) -> str:
    """Kills the raylet of a run after an update, and returns what the run had said until then."""
    assert process.stdout and process.stderr
    seen = ""
    while f"\n  {update}/" not in seen:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        seen += line
    (raylet,) = [child for child in psutil.Process(process.pid).children() if child.name() == "raylet"]
    raylet.send_signal(signal.SIGKILL)
    return seen


@pytest.mark.slow
def test_a_run_goes_on_after_its_raylet_was_killed_or_ends_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    words = ("train", *SMALL, "updates=5", "checkpoint_every=1", "num_runners=1", "--out", "run")
    process = begin(tmp_path, *words)
    kill_raylet_in(process, 1)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and "Traceback" not in errors
    assert "the raylet, has died: it was killed, or memory ran out." in errors and "--resume run" in errors

    process = begin(tmp_path, "train", "--resume", "run", "--max-failures", "1")
    kill_raylet_in(process, 3)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "Failure 1 of at most 1: Ray's own process on this machine, the raylet, has died" in rest
    assert updates_in(tmp_path / "run" / "metrics.jsonl") == list(range(6))
