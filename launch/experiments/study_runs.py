"""The runs of a study: each is a separate `cory train` process that results in a small file.

DIR/results/ARM/seed_N.json   the result of a finished run (launch/experiments/results.py)
DIR/runs/ARM/seed_N/          its run folder
DIR/runs/ARM/seed_N.txt       its output
DIR/runs/ARM/seed_N.lock      held by the process that trains it, so that several processes can share a study
"""

import datetime
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from cory_env.home import IN_JOB
from launch.console.errors import CommandError
from launch.console.interrupts import SIGNALS, Interrupts
from launch.experiments.results import (
    MACHINE_SETTINGS,
    Cost,
    Status,
    StudyRun,
    final_figures,
    read_result,
    result_file,
    round_significant,
)
from launch.experiments.study import Arm, Study
from launch.run_folder import final
from launch.run_folder.environment import hardware, versions
from launch.run_folder.locks import lock_holder, try_lock
from launch.run_folder.records import SampleLine
from launch.run_folder.run import Run
from launch.run_folder.status import DIVERGED, read_status
from policies.settings.settings import changed_settings

MAX_FAILURES = 2
"""Number of times that a run restarts from its latest checkpoint after one of its processes died."""
SIGNAL_EXIT_CODES = tuple(128 + number for number in SIGNALS)


@dataclass(frozen=True, eq=False)
class StudyJob:
    """A run of a study, finished or not."""

    study: Study
    arm: Arm
    seed: int
    folder: Path

    @property
    def result(self) -> Path:
        """Path of the result file."""
        return result_file(self.folder, self.arm.name, self.seed)

    @property
    def run(self) -> Path:
        """Path of the run folder."""
        return self.folder / "runs" / self.arm.name / f"seed_{self.seed}"

    @property
    def output(self) -> Path:
        """Path of the file with its output."""
        return self.run.with_suffix(".txt")

    @property
    def words(self) -> list[str]:
        """Arguments of `cory train`, without the folder."""
        return self.study.words(self.arm, self.seed)

    @property
    def arm_fields(self) -> dict[str, Any]:
        """The fields of `StudyRun` that describe the study and the arm."""
        return {
            "study": self.study.name,
            "label": self.arm.label,
            "tier": self.arm.tier,
            "arm_index": self.study.arm_index(self.arm),
            "differs": self.arm.differs,
        }

    def read(self) -> StudyRun | None:
        """Reads the result, if there is one; fields such as the label come from the current study file."""
        if not self.result.exists():
            return None
        run = read_result(self.result)
        changes = set(changed_settings(run.settings, self.study.settings(self.arm, self.seed))) - MACHINE_SETTINGS
        if changes:
            raise CommandError(
                f"{self.result} was created with other settings: {', '.join(sorted(changes))}. Remove it, or choose "
                "another folder with --out."
            )
        return run._replace(**self.arm_fields)

    def claim(self) -> ExitStack | None:
        """Locks the run for this process.

        Returns:
            The lock, or None if another process trains the run. It may be a `cory train` that outlived a killed study.
        """
        self.run.parent.mkdir(parents=True, exist_ok=True)
        return None if lock_holder(self.run) else try_lock(self.run.with_suffix(".lock"))


class ProcessResult(NamedTuple):
    """The exit code and output of a run's process."""

    code: int
    output: str


def list_jobs(study: Study, folder: Path, arms: Sequence[Arm], seeds: Sequence[int] | None = None) -> list[StudyJob]:
    """Returns the runs of some arms in the order of execution.

    They are ordered by tier and then by seed, so that arms can be compared before the study is complete.
    """
    jobs = [StudyJob(study, arm, seed, folder) for arm in arms for seed in seeds or arm.seeds]
    return sorted(jobs, key=lambda job: (job.arm.tier, job.seed, study.arm_index(job.arm)))


class TrainProcess:
    """Runs `cory train` in a subprocess and forwards the first Ctrl-C, SIGTERM or SIGHUP to it.

    The run then finishes its update and saves a checkpoint. Another Ctrl-C or SIGTERM aborts the run at once.
    """

    def __init__(self, on_interrupt: Callable[[], None]) -> None:
        """Creates the runner; `on_interrupt` is called once, at the first signal."""
        self.interrupts = Interrupts(self._forward_signal)
        self.interrupts.training = True
        self._on_interrupt = on_interrupt
        self._process: subprocess.Popen[bytes] | None = None

    def train(self, job: StudyJob, options: Sequence[str] = ()) -> ProcessResult:
        """Starts or continues a run that this process has claimed."""
        options = ["--out", str(job.run), "--continue", "--max-failures", str(MAX_FAILURES), "--quiet", *options]
        with job.output.open("a+", encoding="utf-8", errors="replace") as output:
            start = output.seek(0, os.SEEK_END)
            # In its own session, so that it receives Ctrl-C only once, from this process.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cory_rllib", "train", *job.words, *options],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            if self.interrupts.requested is not None:  # the signal came before the process was started
                self._process.send_signal(self.interrupts.requested)
            code = self._wait(self._process)
            self._process = None
            output.seek(start)
            return ProcessResult(code, output.read())

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the second signal
                process.send_signal(signal.SIGINT)

    def _forward_signal(self) -> None:
        """Forwards the first signal to the run, except in a Ray job, where Ray signals it; a second one would abort."""
        self._on_interrupt()
        if self._process is not None and self.interrupts.requested is not None and IN_JOB not in os.environ:
            self._process.send_signal(self.interrupts.requested)


def collect_result(job: StudyJob, process_result: ProcessResult) -> StudyRun:
    """Creates the result of a run from its folder."""
    run, settings = Run(job.run), job.study.settings(job.arm, job.seed)
    lines = run.metrics
    final_responses = final.read_final(run.final)
    status, reason = _run_status(run, process_result)
    training_lines = [line for line in lines if "policy" in line]
    cost = Cost(
        tokens=sum(line["tokens"] for line in training_lines),
        seconds=sum(line["seconds"]["total"] - line["seconds"].get("evaluate", 0.0) for line in training_lines),
    )
    if status == "diverged":
        final_responses = None
    return StudyRun(
        **job.arm_fields,
        arm=job.arm.name,
        seed=job.seed,
        status=status,
        reason=reason,
        settings=settings,
        command=shlex.join(["cory", "train", *job.words]),
        versions=versions(),
        hardware=hardware(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cost=cast(Cost, round_significant(cost)),
        metrics=lines,
        samples=cast(list[SampleLine], round_significant([line for line in run.samples if line["held_out"]])),
        final=None if final_responses is None else final_figures(final_responses, settings.policy_ids),
    )


def _run_status(run: Run, process_result: ProcessResult) -> tuple[Status, str | None]:
    """Returns the status of a run and the reason, if it is not `done`."""
    code = process_result.code
    if code == 0:
        return "done", None
    lines = [line for line in process_result.output.splitlines() if line.strip()] or [f"exit code {code}"]
    reason = next((line.removeprefix("Error: ") for line in reversed(lines) if line.startswith("Error: ")), lines[-1])
    if code > 0 and run.exists() and read_status(run).state == DIVERGED:
        return "diverged", reason
    raise CommandError(reason if code > 0 else f"Its process was killed by {signal.Signals(-code).name}.")
