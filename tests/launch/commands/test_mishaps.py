"""`cory train` with a full disk and with a reward whose process dies: one message each, and the run can continue."""

import subprocess
from pathlib import Path

import pytest

from tests.launch.conftest import Cory, mount
from tests.launch.training.test_training import SMALL, updates_in

REWARD = """
import os

def brevity(completions):
    if os.path.exists("fail"):
        os._exit(3)
    return [-float(len(completion)) for completion in completions]
"""


def error_of_rejected(result: "subprocess.CompletedProcess[str]") -> str:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.slow
def test_a_full_disk_and_a_dying_reward_process_lose_no_checkpoint(cory: Cory, tmp_path: Path, disk: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARD)
    mount("-o", "remount,size=40m", str(disk))  # room for the untrained policies, not for Adam's moments
    message = error_of_rejected(cory("train", *SMALL, "num_runners=1", "checkpoint_every=1", "--out", "disk/run"))
    checkpoints = disk / "run" / "checkpoints"
    assert "update_000001: No space left on device" in message and "Update 0 is saved. Resume with:" in message
    assert sorted(entry.name for entry in checkpoints.iterdir()) == ["best", "update_000000"]

    mount("-o", "remount,size=400m", str(disk))
    (tmp_path / "fail").touch()
    message = error_of_rejected(cory("train", "--resume", "disk/run"))
    assert "my_rewards:brevity failed on sample 0 of 8" in message and "ended its process" in message
    assert "Update 0 is saved. Resume with:\n  cory train --resume disk/run" in message
    assert updates_in(disk / "run" / "metrics.jsonl") == [0]
    assert sorted(entry.name for entry in checkpoints.iterdir()) == ["best", "update_000000"]


KILLED = """
import os, signal

def brevity(completions):
    if len(completions) == 8:  # the batch of an update
        with open("calls", "a+") as calls:
            calls.write("call\\n")
            calls.seek(0)
            count = len(calls.readlines())
        if count <= 3:
            os.kill(os.getpid(), signal.SIGKILL)
    return [-float(len(completion)) for completion in completions]
"""


@pytest.mark.slow
def test_a_reward_process_that_is_killed_repeatedly_is_a_retryable_failure(cory: Cory, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(KILLED)
    result = cory("train", *SMALL, "--max-failures", "1", "--out", "run")
    assert result.returncode == 0, result.stderr
    assert "Failure 1 of at most 1: The reward my_rewards:brevity failed at 3 attempts on a batch of 8" in result.stdout
    assert "it ended its process with signal SIGKILL" in result.stdout and "Resuming after update 0." in result.stdout
    assert updates_in(tmp_path / "run" / "metrics.jsonl") == [0, 1, 2, 3]
