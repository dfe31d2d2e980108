"""The batch script for Slurm, with commands in place of Slurm's, Ray's and `cory` that note how they are called."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.nodes import wait_until
from launch.console.cli import parse_command
from launch.console.configuration import resolve_settings
from tests.launch.conftest import CHECKOUT

SCRIPT = CHECKOUT / "docs" / "examples" / "slurm.sh"
(EXAMPLE,) = re.findall(r"^#   sbatch docs/examples/slurm\.sh (.*)$", SCRIPT.read_text(), re.MULTILINE)
NOTE = '#!/bin/bash\necho "${0##*/} $*" >>"$CALLS"\n'
SAVE = "trap 'sleep 1; echo saved >>\"$CALLS\"; exit 143' TERM\n"
COMMANDS = {
    "scontrol": '#!/bin/bash\n[ "$*" = "show hostnames one,two" ] && echo one && echo two\n',
    "srun": NOTE + "exec sleep 60\n",
    "ray": "#!/bin/bash\nexit 0\n",
    "python": f'#!/bin/bash\n[ "$1" = - ] || exec {sys.executable} "$@"\n',  # what follows - asks Ray for its nodes
    "cory": NOTE + SAVE + '[ -s "$RAY_AUTH_TOKEN_PATH" ] || exit 9\neval "$ENDS"\n',
}


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """The file that lists the calls of the fake commands in `bin`."""
    for name, text in COMMANDS.items():
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(text)
        command.chmod(0o755)
    return tmp_path / "calls"


def start_job(calls: Path, ends: str) -> "subprocess.Popen[str]":
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "one,two", "SLURM_CPUS_PER_TASK": "2"}
    own = {"PATH": f"{calls.parent / 'bin'}:{os.environ['PATH']}", "HOME": str(calls.parent)}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *EXAMPLE.split()],
        cwd=calls.parent,
        env={**os.environ, **slurm, **own, "CALLS": str(calls), "ENDS": ends},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_every_node_joins_the_cluster_and_the_resumed_run_returns_its_exit_code(calls: Path) -> None:
    job = start_job(calls, "exit 3")
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 3, errors
    called = calls.read_text().splitlines()
    joined = [line for line in called if line.startswith("srun")]
    assert len(joined) == 2
    for node, how in (("one", "--head --node-ip-address=one --port=20007"), ("two", "--address=one:20007")):
        (line,) = [line for line in joined if f"--nodelist={node} " in line]
        assert how in line and "--cpus-per-task=2" in line
    (trained,) = [line for line in called if line.startswith("cory")]
    assert trained == f"cory train {EXAMPLE} --continue"
    requested = parse_command("train", trained.split()[2:])
    assert requested.continue_ and requested.out == "/shared/runs/one"
    preset, *pairs = requested.words
    assert resolve_settings(preset, [], pairs).num_runners == 4
    assert not list(calls.parent.glob(".cory-slurm-*"))


def test_a_job_that_slurm_ends_waits_until_the_run_is_saved(calls: Path) -> None:
    job = start_job(calls, "while :; do sleep 0.1; done")
    wait_until(lambda: calls.exists() and "cory train" in calls.read_text(), 60)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 143, errors
    assert calls.read_text().endswith("saved\n")
