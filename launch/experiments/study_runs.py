"""The runs of a study: each a `cory train` of its own, and then a small file of results.

DIR/results/ARM/seed_N.json   what is kept of a run that ended (launch/experiments/results.py)
DIR/runs/ARM/seed_N/          its folder
DIR/runs/ARM/seed_N.txt       what it printed
DIR/runs/ARM/seed_N.lock      who does it, so that several processes can share a study
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

from launch.console.errors import IN_JOB, CommandError
from launch.console.interrupts import SIGNALS, Interrupts
from launch.experiments.results import (
    NO_MATTER,
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
from launch.run_folder.status import divergence
from launch.training.training import COLLAPSED
from policies.settings.settings import changed_settings

MAX_FAILURES = 2
"""How often a run continues from its latest checkpoint after processes that it needs have died."""
SIGNAL_EXIT_CODES = tuple(128 + number for number in SIGNALS)
"""Exit codes of a run that a signal stopped."""


@dataclass(frozen=True, eq=False)
class StudyJob:
    """A run of a study, done or to be done."""

    study: Study
    arm: Arm
    seed: int
    folder: Path
    """The study's."""

    @property
    def result(self) -> Path:
        """The file of its results."""
        return result_file(self.folder, self.arm.name, self.seed)

    @property
    def run(self) -> Path:
        """Its run's folder."""
        return self.folder / "runs" / self.arm.name / f"seed_{self.seed}"

    @property
    def output(self) -> Path:
        """What it printed."""
        return self.run.with_suffix(".txt")

    @property
    def words(self) -> list[str]:
        """The words after `cory train`, without the folder."""
        return self.study.words(self.arm, self.seed)

    @property
    def described(self) -> dict[str, Any]:
        """What its result says of the arm, as the study has it: entries of `StudyRun`."""
        return {
            "study": self.study.name,
            "label": self.arm.label,
            "tier": self.arm.tier,
            "arm_index": self.study.arm_index(self.arm),
            "against": self.arm.against,
            "also": list(self.arm.also),
            "differs": self.arm.differs,
        }

    def read(self) -> StudyRun | None:
        """Reads its result, if it has one; what the study says of the arm, such as its label, is as it says today.

        Raises:
            CommandError: it was made with other settings.
        """
        if not self.result.exists():
            return None
        run = read_result(self.result)
        changes = set(changed_settings(run.settings, self.study.settings(self.arm, self.seed))) - NO_MATTER
        if changes:
            raise CommandError(
                f"{self.result} was made with other settings: {', '.join(sorted(changes))}. Remove it, or name another "
                "folder with --out."
            )
        return run._replace(**self.described)

    def claim(self) -> ExitStack | None:
        """Takes the run for this process, until what is returned is closed.

        Returns:
            None where another process does it, or a training that a killed study has left still goes on.
        """
        self.run.parent.mkdir(parents=True, exist_ok=True)
        return None if lock_holder(self.run) else try_lock(self.run.with_suffix(".lock"))


class ProcessResult(NamedTuple):
    """How the process of a run ended."""

    code: int
    printed: str
    """What it printed."""


def list_jobs(study: Study, folder: Path, arms: Sequence[Arm], seeds: Sequence[int] | None = None) -> list[StudyJob]:
    """Returns all runs of some arms in the order in which they are done.

    That is by tier, and then seed by seed, so that whatever is done so far can be compared.

    Args:
        study: what the arms are of.
        folder: the study's.
        arms: of the study.
        seeds: these alone; None: each arm's own.
    """
    found = [StudyJob(study, arm, seed, folder) for arm in arms for seed in seeds or arm.seeds]
    return sorted(found, key=lambda job: (job.arm.tier, job.seed, study.arm_index(job.arm)))


class TrainProcess:
    """Runs `cory train` in a process of its own, and passes the first Ctrl-C, SIGTERM or SIGHUP on to it.

    The run then finishes its update and saves itself; another Ctrl-C or SIGTERM aborts the run at once.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        """Takes what tells the user, once, that a request to stop was heard."""
        self.interrupts = Interrupts(self._pass_on)
        self.interrupts.training = True
        self._tell = tell
        self._process: subprocess.Popen[bytes] | None = None

    def train(self, job: StudyJob, options: Sequence[str] = ()) -> ProcessResult:
        """Does a run that this process has claimed, or continues it, with more options of `cory train`."""
        options = ["--out", str(job.run), "--continue", "--max-failures", str(MAX_FAILURES), "--quiet", *options]
        with job.output.open("a+", encoding="utf-8", errors="replace") as output:
            before = output.seek(0, os.SEEK_END)
            # In a session of its own, so that Ctrl-C reaches it once, from here.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cory_rllib", "train", *job.words, *options],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            if self.interrupts.requested is not None:  # it came before there was a process to pass it on to
                self._process.send_signal(self.interrupts.requested)
            code = self._wait(self._process)
            self._process = None
            output.seek(before)
            return ProcessResult(code, output.read())

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the second signal
                process.send_signal(signal.SIGINT)

    def _pass_on(self) -> None:
        """Hands the first signal on to the run; a job that is stopped has it from Ray, and a second one would abort."""
        self._tell()
        if self._process is not None and self.interrupts.requested is not None and IN_JOB not in os.environ:
            self._process.send_signal(self.interrupts.requested)


def collect_result(job: StudyJob, ended: ProcessResult) -> StudyRun:
    """Makes the result of a run from its folder.

    Raises:
        CommandError: the run failed, so it has none; the message says why.
    """
    run, settings = Run(job.run), job.study.settings(job.arm, job.seed)
    lines = run.updates()
    last = final.read(run.final)
    status, reason = _run_status(run, ended)
    trained = [line for line in lines if "policy" in line]
    cost = Cost(
        tokens=sum(line["tokens"] for line in trained),
        seconds=sum(line["seconds"]["total"] - line["seconds"].get("evaluate", 0.0) for line in trained),
    )
    return StudyRun(
        **job.described,
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
        samples=cast(list[SampleLine], round_significant([line for line in run.samples.read() if line["held_out"]])),
        final=None if last is None or status == "diverged" else final_figures(last, settings.policy_ids),
    )


def _run_status(run: Run, ended: ProcessResult) -> tuple[Status, str | None]:
    """Returns how a run ended, and why.

    Raises:
        CommandError: it failed.
    """
    if ended.code == 0:
        return "done", None
    if ended.code == COLLAPSED:
        return "collapsed", f"stop_on_collapse ended it after update {run.updates()[-1]['update']}."
    lines = [line for line in ended.printed.splitlines() if line.strip()] or [f"exit code {ended.code}"]
    reason = next((line.removeprefix("Error: ") for line in reversed(lines) if line.startswith("Error: ")), lines[-1])
    if ended.code > 0 and divergence(run):
        return "diverged", reason
    raise CommandError(reason if ended.code > 0 else f"Its process was ended by {signal.Signals(-ended.code).name}.")
