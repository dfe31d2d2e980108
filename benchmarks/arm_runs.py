"""Runs of a study's arms: one process or several do the missing ones, and each leaves a small file.

OUT/results/ARM/seed_N.json   the result
OUT/runs/ARM/seed_N/          the run's folder
OUT/runs/ARM/seed_N.txt       the output of its commands
OUT/runs/ARM/seed_N.lock      held by the process that works on it
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from benchmarks.record import BenchmarkError
from launch.console.interrupts import Interrupts
from launch.experiments.results import result_file, round_significant
from launch.experiments.study import Arm as StudyArm
from launch.experiments.study import Study
from launch.experiments.study_runs import ProcessResult, StudyJob
from policies.files import atomic_write


class Arm(Protocol):
    """A way to train."""

    @property
    def name(self) -> str:
        """The name of its folder."""

    @property
    def settings(self) -> Mapping[str, Any] | None:
        """The settings that differ from the study's; None: not trained."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of its runs."""


A = TypeVar("A", bound=Arm)


@dataclass(frozen=True)
class ArmRun(Generic[A]):
    """A run of an arm, finished or not."""

    study: ClassVar[str]
    """Name of the study."""
    preset: ClassVar[str]
    shared: ClassVar[Mapping[str, Any]]
    """Settings of all arms, also if they are the preset's, which may change."""

    arm: A
    seed: int
    out: Path
    """Folder of the study."""

    @property
    def name(self) -> str:
        """The arm and the seed."""
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def result(self) -> Path:
        """Path of the result."""
        return result_file(self.out, self.arm.name, self.seed)

    @property
    def study_job(self) -> StudyJob:
        """The same as a run of a study with one arm."""
        name, differs = self.arm.name, dict(self.arm.settings or {})
        arm = StudyArm(name=name, label=name, seeds=self.arm.seeds, differs=differs)
        study = Study(name=self.study, base=self.preset, arms={name: arm}, shared=dict(self.shared))
        return StudyJob(study, arm, self.seed, self.out)


R = TypeVar("R", bound=ArmRun[Any])


def by_seed(jobs: Iterable[R]) -> list[R]:
    """Returns runs ordered by seed, so that arms can be compared before all runs are done."""
    return sorted(jobs, key=lambda job: job.arm.seeds.index(job.seed))


def missing_runs(jobs: Iterable[ArmRun[Any]]) -> str:
    """Returns the runs without a result, by arm."""
    missing: dict[str, list[int]] = {}
    for job in jobs:
        if not job.result.exists():
            missing.setdefault(job.arm.name, []).append(job.seed)
    return "; ".join(f"{arm} {', '.join(map(str, seeds))}" for arm, seeds in missing.items())


def do_missing(jobs: Iterable[R], run: Callable[[R], object], failures: dict[str, str]) -> bool:
    """Does the runs that have no result, except those that another process does or that have failed.

    Args:
        run: Does a run and writes its result.
        failures: By the run's name, the messages of runs that failed; new ones are added.

    Returns:
        Whether any run was done or tried.
    """
    progress = False
    for job in jobs:
        if job.name in failures or job.result.exists() or (lock := job.study_job.claim()) is None:
            continue
        with lock:
            if job.result.exists():
                continue
            progress = True
            try:
                run(job)
                print(f"{job.name}: done", flush=True)
            except BenchmarkError as error:
                failures[job.name] = str(error)
                print(f"{job.name} failed: {error}", file=sys.stderr, flush=True)
    return progress


def run_and_show(run_study: Callable[[], Sequence[str]], show: Callable[[], None]) -> int:
    """Runs a study and prints what is there.

    Args:
        run_study: Returns the messages of runs that failed.

    Returns:
        The exit code: 0, 1 if runs failed, 2 if the folder cannot be used, or 128 + a signal's number.
    """
    interrupts = Interrupts(lambda: None)
    try:
        with interrupts:
            failures = run_study()
        show()
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped. The same command continues.", file=sys.stderr)
        return interrupts.exit_code
    return 1 if failures else 0


def run_command(words: Sequence[str], output: Path) -> ProcessResult:
    """Runs a `cory` command in a session of its own; a signal stops it before KeyboardInterrupt is raised."""
    with output.open("a+", encoding="utf-8", errors="replace") as file:
        start = file.seek(0, 2)
        process = subprocess.Popen(
            [sys.executable, "-m", "cory_rllib", *words],
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
        file.seek(start)
        text = file.read()
    return ProcessResult(code, text)


def write(path: Path, result: Mapping[str, object]) -> None:
    """Writes a result atomically, a line per entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = round_significant(dict(result))
    assert isinstance(rounded, dict)
    lines = [f'"{key}": {json.dumps(value, ensure_ascii=False)}' for key, value in rounded.items()]
    atomic_write(path, "{\n " + ",\n ".join(lines) + "\n}\n")
