"""`python -m benchmarks.feedback --out runs/study-feedback`: does feedback between answers pay, at equal tokens?

Does the runs that are missing, stage by stage (benchmarks/feedback/design.py), one at a time, and prints the tables.
The same command continues after a kill. `--show` only prints; `--stages N` ends after the first N stages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.arm_runs import do_missing, run_and_show
from benchmarks.feedback.analysis import chain_names, choose, choose_single, find_finalists, single_names
from benchmarks.feedback.design import Choice, chain_pilots, main_arms, other_arms, single_pilots
from benchmarks.feedback.runs import Job, Result, execute, list_jobs
from benchmarks.feedback.tables import group_results, print_tables

NUM_STAGES = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; see `run_and_show` for the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.feedback", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the study's folder")
    parser.add_argument("--show", action="store_true", help="only print what is there")
    parser.add_argument("--stages", type=int, default=NUM_STAGES, metavar="N", help="end after the first N stages")
    options = parser.parse_args(argv)
    return run_and_show(
        lambda: [] if options.show else run_study(options.out, options.stages),
        lambda: print_tables(sys.stdout, *load_stages(options.out)),
    )


def run_study(out: Path, num_stages: int = NUM_STAGES, run: Callable[[Job], Result] = execute) -> list[str]:
    """Does the missing runs, stage by stage; a stage starts when the pilot has chosen its settings.

    Args:
        out: The study's folder.
        num_stages: Number of stages to do.
        run: Does a run and writes its result.

    Returns:
        The messages of runs that failed; the same call repeats them.
    """
    failures: dict[str, str] = {}
    while do_missing((job for _, jobs in load_stages(out)[0][:num_stages] for job in jobs), run, failures):
        pass  # results define further runs
    return list(failures.values())


def load_stages(out: Path) -> tuple[list[tuple[str, list[Job]]], Choice | None]:
    """Returns the stages that are defined so far, with their runs, and what the pilot chose; None: not complete."""
    jobs = list_jobs(single_pilots(), out)
    finalists = find_finalists(group_results(jobs), list(single_names()), "one_answer")
    jobs = list_jobs(single_pilots(finalists), out)
    stages = [("pilot, single agents", jobs)]
    results = group_results(jobs)
    single = choose_single(results)
    if single is None:
        return stages, None
    estimator = single[0]
    jobs = list_jobs(chain_pilots(estimator), out)
    finalists = find_finalists(group_results(jobs), list(chain_names(estimator)), "chain")
    jobs = list_jobs(chain_pilots(estimator, finalists), out)
    stages.append(("pilot, chains", jobs))
    choice = choose({**results, **group_results(jobs)})
    if choice is not None:
        stages += [("main", list_jobs(main_arms(choice), out)), ("others", list_jobs(other_arms(choice), out))]
    return stages, choice


if __name__ == "__main__":
    sys.exit(main())
