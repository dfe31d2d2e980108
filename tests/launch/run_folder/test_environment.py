"""Recording versions and hardware, even if the queried programs hang, fail or are missing."""

import platform
import subprocess
import time
from pathlib import Path

import pytest

from launch.run_folder import environment
from launch.run_folder.environment import hardware, versions

CHECKOUT = Path(__file__).parents[3]


def write_programs(folder: Path, script: str) -> None:
    """Creates scripts that replace the queried programs."""
    for name in ("git", "nvidia-smi"):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


def test_hanging_programs_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_programs(tmp_path, "trap '' TERM; exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(environment, "COMMAND_TIMEOUT", 0.5)
    start = time.monotonic()
    assert hardware()["gpu"] is None and " " not in versions()["cory-rllib"].removeprefix("(a checkout)")
    assert time.monotonic() - start < 20


def test_programs_that_cannot_be_killed_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_programs(tmp_path, "exec sleep 10")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(environment, "COMMAND_TIMEOUT", 0.5)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)  # as if it waited for a faulty device
    start = time.monotonic()
    assert hardware()["gpu"] is None and time.monotonic() - start < 8


def test_the_output_of_a_failed_program_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_programs(tmp_path, "echo NVIDIA-SMI has failed; exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert hardware()["gpu"] is None


def test_a_machine_with_hidden_cpuinfo_is_described_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert hardware()["cpu"] == platform.processor()


def test_gpus_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_programs(tmp_path, "echo one; echo two")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert hardware()["gpu"] == "one, two"


@pytest.mark.skipif(not (CHECKOUT / ".git").exists(), reason="no checkout")
def test_the_version_of_a_checkout_contains_its_commit() -> None:
    command = ["git", "-C", str(CHECKOUT), "rev-parse", "--short=12", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert versions()["cory-rllib"].removesuffix("-dirty").endswith(head)
