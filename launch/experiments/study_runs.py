"""The runs of a study: each a `cory train` of its own, and then a small file of results.

DIR/results/ARM/seed_N.json   what is kept of a run that ended (launch/experiments/results.py)
DIR/runs/ARM/seed_N/          its folder; of its checkpoints the last one's policies stay
DIR/runs/ARM/seed_N.old-1/    what lay there before, made with other settings
DIR/runs/ARM/seed_N.txt       what it printed
DIR/runs/ARM/seed_N.lock      who does it, so that several processes can share a study
"""

import datetime
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self, cast

from launch.console.errors import IN_JOB, CommandError
from launch.console.interrupts import SIGNALS, Interrupts
from launch.experiments.results import (
    NO_MATTER,
    Cost,
    Status,
    StudyRun,
    final_figures,
    kept_samples,
    read_one,
    result_file,
    rounded,
    write,
)
from launch.experiments.study import Arm, Study, word
from launch.models.trained import POLICIES
from launch.run_folder import final, manifest
from launch.run_folder.checkpoints import ONLY_POLICIES
from launch.run_folder.environment import hardware, versions
from launch.run_folder.locations import NAMED, located
from launch.run_folder.locks import FolderHandle, lock_holder, try_lock
from launch.run_folder.records import SampleLine
from launch.run_folder.run import Run
from launch.run_folder.status import divergence
from launch.training.training import COLLAPSED
from policies.settings.settings import Settings, changed_settings

FAILURES = 2
"""How often a run goes on from its latest checkpoint after processes that it needs have died."""
STOPPED = tuple(128 + number for number in SIGNALS)
"""Exit codes of a run that a signal stopped."""


@dataclass(frozen=True, eq=False)
class Job:
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
    def begun(self) -> bool:
        """Whether its run goes on from a checkpoint."""
        run = Run(self.run)
        return run.exists() and not run.checkpoints.empty()

    @property
    def output(self) -> Path:
        """What it printed."""
        return self.run.with_suffix(".txt")

    @property
    def settings(self) -> Settings:
        """Its settings, as the study says."""
        return self.study.settings(self.arm, self.seed)

    @property
    def words(self) -> list[str]:
        """The words after `cory train`, without the folder."""
        return self.study.words(self.arm, self.seed)

    def located(self, paths: Mapping[str, str]) -> Settings:
        """Returns its settings with files that are there, or as its run names them.

        Args:
            paths: where files lay when the study began, by their names.
        """
        if not self.begun:
            return located(self.settings, paths, needed=())
        held = Run(self.run).settings()
        return self.settings.model_copy(update={key: getattr(held, key) for key in NAMED})

    def found(self) -> StudyRun | None:
        """Reads its result, if it has one; what the study says of the arm, such as its label, is as it says today.

        Raises:
            CommandError: it was made with other settings.
        """
        if not self.result.exists():
            return None
        found = read_one(self.result)
        other = set(changed_settings(found.settings, self.settings)) - NO_MATTER
        if other:
            raise CommandError(
                f"{self.result} was made with other settings: {', '.join(sorted(other))}. Remove it, or name another "
                "folder with --out."
            )
        return found._replace(**self.described)

    def set_aside(self, paths: Mapping[str, str]) -> Path | None:
        """Renames its run's folder if training cannot go on with that: it has other settings, or policies alone.

        Args:
            paths: where files lay when the study began, by their names.

        Returns:
            What it is called now; None where there was no need.
        """
        run = Run(self.run)
        if not run.exists():
            return None
        asked = located(self.settings, paths, needed=())
        with suppress(CommandError):  # else its settings cannot be read
            changed = set(changed_settings(run.settings(), self.settings))
            same = changed & set(changed_settings(run.settings(), asked)) <= {*NO_MATTER, "final_queries"}
            if same and not any(run.checkpoints.folder.glob(f"*/{ONLY_POLICIES}")):
                return None
        number = 1
        while (aside := self.run.with_suffix(f".old-{number}")).exists():
            number += 1
        return self.run.rename(aside)

    @property
    def described(self) -> dict[str, Any]:
        """What its result says of the arm, as the study has it: entries of `StudyRun`."""
        return {
            "study": self.study.name,
            "label": self.arm.label,
            "tier": self.arm.tier,
            "place": self.study.place(self.arm),
            "against": self.arm.against,
            "also": list(self.arm.also),
            "differs": self.arm.differs,
        }

    def claim(self) -> ExitStack | None:
        """Takes the run for this process, until what is returned is closed.

        Returns:
            None where another process does it, or a training that a killed study has left still goes on.

        Raises:
            NoLocks: the folder's file system has no locks.
        """
        self.run.parent.mkdir(parents=True, exist_ok=True)
        claim = try_lock(self.run.with_suffix(".lock"))
        if claim is not None and lock_holder(self.run) is not None:
            claim.close()
            return None
        return claim


class Ended(NamedTuple):
    """How the process of a run ended."""

    code: int
    printed: str
    """What it printed."""
    resumed: bool
    """It went on with a run."""
    wall_seconds: float


def jobs(study: Study, folder: Path, arms: Sequence[Arm], seeds: Sequence[int] | None = None) -> list[Job]:
    """Returns all runs of some arms in the order in which they are done.

    That is by tier, and then seed by seed, so that whatever is done so far can be compared.

    Args:
        study: what the arms are of.
        folder: the study's.
        arms: of the study.
        seeds: these alone; None: each arm's own.
    """
    found = [Job(study, arm, seed, folder) for arm in arms for seed in (arm.seeds if seeds is None else seeds)]
    return sorted(found, key=lambda job: (job.arm.tier, job.seed, study.place(job.arm)))


class Performer:
    """Does jobs one after another, while it is entered as a context.

    The first Ctrl-C, SIGTERM or SIGHUP lets the run finish its update and save itself; another Ctrl-C or SIGTERM aborts
    the run at once.
    """

    def __init__(
        self, tell: Callable[[], None], paths: Mapping[str, str] = MappingProxyType({}), allow_changes: bool = False
    ) -> None:
        """Makes ready.

        Args:
            tell: tells the user, once, that a request to stop was heard.
            paths: where files lay when the study began, by their names.
            allow_changes: runs may resume although what they are made from differs.
        """
        self.paths = paths
        self._allowed = ["--allow-changes"] if allow_changes else []
        self.interrupts = Interrupts(self._pass_on)
        self.interrupts.training = True
        self._tell = tell
        self._process: subprocess.Popen[bytes] | None = None
        self._code: int | None = None  # of a run that a signal stopped, this process's own or another's

    def __enter__(self) -> Self:
        self.interrupts.__enter__()
        return self

    def __exit__(self, *what: object) -> None:
        self.interrupts.__exit__(*what)

    @property
    def stopped(self) -> int | None:
        """The exit code, once a signal has asked to stop."""
        return self._code if self._code or self.interrupts.requested is None else self.interrupts.exit_code

    def perform(self, job: Job, folder: FolderHandle) -> StudyRun | None:
        """Does a run that this process has claimed, or goes on with it, and writes its result.

        Args:
            job: the run.
            folder: the study's.

        Returns:
            The result; None when the run was stopped.

        Raises:
            FolderError: the study's folder was renamed or removed, so the run has no result.
        """
        ended = self._train(job)
        folder.check()
        if ended.code in STOPPED:
            self._code = ended.code
            return None
        if ended.code and self.stopped is not None:  # stopped before it could listen to signals
            return None
        made = collect(job, ended)
        write(job.result, made)
        if made.status != "failed":
            keep_policies(Run(job.run))
        return made

    def _train(self, job: Job) -> Ended:
        """Runs `cory train` in a process."""
        resumed = job.begun
        options = ["--out", str(job.run), "--continue", "--max-failures", str(FAILURES), "--quiet", *self._allowed]
        settings, present = job.settings, job.located(self.paths)
        files = [word(key, value) for key in NAMED if (value := getattr(present, key)) != getattr(settings, key)]
        command = [sys.executable, "-m", "cory_rllib", "train", *job.words, *files, *options]
        started = time.monotonic()
        with job.output.open("a+", encoding="utf-8", errors="replace") as output:
            before = output.seek(0, os.SEEK_END)
            # In a session of its own, so that Ctrl-C reaches it once, from here.
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
            )
            if self.interrupts.requested is not None:  # it came before there was a process to pass it on to
                self._process.send_signal(self.interrupts.requested)
            code = self._wait(self._process)
            self._process = None
            output.seek(before)
            printed = output.read()
        return Ended(code, printed, resumed, time.monotonic() - started)

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


def collect(job: Job, ended: Ended) -> StudyRun:
    """Makes the result of a run from its folder."""
    run, settings = Run(job.run), job.settings
    lines = run.updates()
    last = final.read(run.final)
    status, reason = _status(run, ended)
    trained = [line for line in lines if "policy" in line]
    cost = Cost(
        tokens=sum(line["tokens"] for line in trained),
        seconds=sum(line["seconds"]["total"] - line["seconds"].get("evaluate", 0.0) for line in trained),
        wall_seconds=ended.wall_seconds,
        resumed=ended.resumed,
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
        cost=cast(Cost, rounded(cost)),
        metrics=lines,
        samples=kept_samples(cast(list[SampleLine], run.samples.read())),
        final=None if last is None or status in ("diverged", "failed") else final_figures(last, settings.modules),
    )


def _status(run: Run, ended: Ended) -> tuple[Status, str | None]:
    """Returns how a run ended, and why."""
    if ended.code == 0:
        return "done", None
    if ended.code == COLLAPSED:
        return "collapsed", f"stop_on_collapse ended it after update {run.updates()[-1]['update']}."
    if ended.code < 0:
        return "failed", f"Its process was ended by {signal.Signals(-ended.code).name}."
    lines = [line for line in ended.printed.splitlines() if line.strip()] or [f"exit code {ended.code}"]
    reason = next((line.removeprefix("Error: ") for line in reversed(lines) if line.startswith("Error: ")), lines[-1])
    return "diverged" if divergence(run) else "failed", reason


def keep_policies(run: Run) -> None:
    """Drops the checkpoints of a run that has ended, but for the policies of the latest one.

    With these, `cory evaluate`, `generate` and `export` work, but `--resume` does not. The optimizers' state, twice as
    large, goes.
    """
    latest = run.checkpoints.latest()
    if latest is None:
        return
    for entry in run.checkpoints.folder.iterdir():
        if entry.is_symlink():
            entry.unlink()
        elif entry != latest[1]:
            shutil.rmtree(entry)
    (latest[1] / ONLY_POLICIES).touch()
    for file in latest[1].rglob("*"):
        kept = file.relative_to(latest[1]).as_posix()
        if file.is_file() and kept not in (manifest.NAME, ONLY_POLICIES) and not kept.startswith(POLICIES):
            file.unlink()
