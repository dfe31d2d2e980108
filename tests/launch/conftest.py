"""The `cory` command as a user runs it, and a run's folder that was recorded without training."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from launch.run_directory import RunDirectory
from policies.settings import Settings

Cory = Callable[..., "subprocess.CompletedProcess[str]"]
CHECKOUT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture
def cory(tmp_path: Path) -> Cory:
    """Runs `cory ...` in a process of its own, in an empty folder."""

    def run(*words: str, module: str = "launch.main") -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", module, *words]
        return subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)

    return run


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB, where this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=2m", "none", str(place))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no right to mount a disk here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def record(folder: Path, settings: Settings, updates: Sequence[int] = range(13)) -> RunDirectory:
    """Writes what a run of `updates` leaves in its folder: an exchange every 5 updates, an evaluation every 6."""
    run = RunDirectory.create(folder)
    run.write_settings(settings, "cory train")
    for update in updates:
        figures: dict[str, dict[str, float | None]] = {}
        for place, module in enumerate(settings.modules):
            kl = 0.1 * update * (1 + 0.2 * place)
            task = 2 * (1 - math.exp(-update / 6)) - 0.1 * place
            figures[module] = {"task_reward": task, "kl": kl, "combined_reward": task - 0.1 * kl}
            figures[module] |= {"response_length": 15.0, "eos_rate": 0.1}
        line: dict[str, object] = {"update": update}
        if update:
            line |= {"policy": figures, "exchanged": update % 5 == 0, "roles": {"pioneer": "llm_1"}}
        if update % 6 == 0:
            line["evaluation"] = {**figures, "mean": figures["llm_1"]}
        run.metrics.append(line)
    return run
