"""`python -m benchmarks.feedback --out docs/study/feedback`: does feedback between answers pay, at equal tokens?

Does the runs that are missing, stage by stage (benchmarks/feedback/design.py), one at a time, and prints the tables.
The same command continues after a kill. `--show` only prints; `--stages N` ends after the first N stages.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.feedback.analysis import choose, choose_single
from benchmarks.feedback.design import PILOT_SEEDS, Choice, all_arms
from benchmarks.feedback.runs import Job, Result, execute, list_jobs
from benchmarks.feedback.tables import group_results, print_tables
from benchmarks.record import BenchmarkError
from launch.console.interrupts import Interrupts
from launch.run_folder.journal import atomic_write

CHOICE = "choice.json"
NUM_PILOT_STAGES = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; returns 0, 1 if runs failed, 2 if the folder cannot be used, or 128 + a signal's number."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.feedback", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the study's folder")
    parser.add_argument("--show", action="store_true", help="only print what is there")
    parser.add_argument("--stages", type=int, default=4, metavar="N", help="end after the first N stages")
    parser.add_argument(
        "--pilot-seeds",
        type=int,
        default=len(PILOT_SEEDS),
        metavar="N",
        help="choose by the first N pilot seeds",
    )
    options = parser.parse_args(argv)
    interrupts = Interrupts(lambda: None)
    try:
        with interrupts:
            failures = [] if options.show else run_study(options.out, options.stages, options.pilot_seeds)
        print_tables(sys.stdout, load_stages(options.out, options.pilot_seeds), read_choice(options.out))
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped. The same command continues.", file=sys.stderr)
        return interrupts.exit_code
    return 1 if failures else 0


def run_study(out: Path, num_stages: int, num_pilot_seeds: int, run: Callable[[Job], Result] = execute) -> list[str]:
    """Does the missing runs, stage by stage; a stage starts when the pilot has chosen its settings.

    Args:
        out: The study's folder.
        num_stages: Number of stages to do.
        num_pilot_seeds: Number of pilot seeds to choose by.
        run: Does a run and writes its result.

    Returns:
        The messages of runs that failed; the same call repeats them.
    """
    failures: list[str] = []
    for number in range(num_stages):
        if number == NUM_PILOT_STAGES:
            save_choice(out, num_pilot_seeds)
        stages = load_stages(out, num_pilot_seeds)
        if number >= len(stages):
            break
        _, jobs = stages[number]
        for job in jobs:
            if num_pilot_seeds < len(PILOT_SEEDS) and job.seed in PILOT_SEEDS[num_pilot_seeds:]:
                continue
            if job.read() is not None:
                continue
            claim = job.study_job.claim()
            if claim is None:  # another process does it
                continue
            with claim:
                try:
                    run(job)
                    print(f"{job.name}: done", flush=True)
                except BenchmarkError as error:
                    failures.append(str(error))
                    print(f"{job.name} failed: {error}", file=sys.stderr, flush=True)
    return failures


def save_choice(out: Path, num_pilot_seeds: int) -> None:
    """Writes what the pilot chose, unless it is written already or runs are missing."""
    jobs = [job for _, stage_jobs in load_stages(out, num_pilot_seeds) for job in stage_jobs]
    choice = choose(group_results(jobs), num_pilot_seeds)
    if choice is not None and not (out / CHOICE).exists():
        entries = {**choice._asdict(), "pilot_seeds": num_pilot_seeds}
        atomic_write(out / CHOICE, json.dumps(entries, indent=1) + "\n")


def load_stages(out: Path, num_pilot_seeds: int = len(PILOT_SEEDS)) -> list[tuple[str, list[Job]]]:
    """Returns the stages that are defined so far, with their runs."""
    choice = read_choice(out)
    single_stage = next(iter(all_arms(None, None)))
    single = choose_single(group_results(list_jobs(single_stage[1], out)), num_pilot_seeds)
    estimator = single[0] if single is not None else None if choice is None else choice.estimator
    return [(name, list_jobs(arms, out)) for name, arms in all_arms(choice, estimator)]


def read_choice(out: Path) -> Choice | None:
    """Returns what the pilot chose; None if it is not complete."""
    path = out / CHOICE
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    return Choice(**{key: values[key] for key in Choice._fields})


if __name__ == "__main__":
    sys.exit(main())
