"""`python -m benchmarks.team --out runs/study-team`: what does a team add?

Does the missing runs, one at a time, and prints the tables. The same command continues after a kill; several processes
can share a folder. `--show` only prints, `--picture FILE` also draws, `--stages 1` ends after the pilot.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.arm_runs import do_missing, run_and_show
from benchmarks.team.analysis import best_rates, read_results
from benchmarks.team.design import MAIN_SEEDS, main_arms, pilot_arms
from benchmarks.team.measuring import Way
from benchmarks.team.runs import Job, Result, execute, list_jobs, measure_partners
from benchmarks.team.tables import draw, print_tables


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; see `run_and_show` for the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.team", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the study's folder")
    parser.add_argument("--show", action="store_true", help="only print what is there")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the picture")
    parser.add_argument("--stages", type=int, default=2, metavar="N", help="end after the first N stages")
    options = parser.parse_args(argv)

    def show() -> None:
        stages, rates = load_stages(options.out)
        print_tables(sys.stdout, stages, rates)
        if options.picture and rates and (results := read_results(stages["main"])):
            draw(options.picture, results, rates)

    return run_and_show(lambda: [] if options.show else run_study(options.out, options.stages), show)


def run_study(
    out: Path,
    num_stages: int = 2,
    run: Callable[[Job], Result] = execute,
    measure_partners: Callable[[Job, Job], Way] = measure_partners,
) -> list[str]:
    """Does the missing runs, stage by stage, and measures teams with partners of other seeds as soon as both are there.

    Args:
        out: The study's folder.
        num_stages: Number of stages to do.
        run: Does a run and writes its result.
        measure_partners: Measures the first LLM of a team with the second one of another seed, and writes the result.

    Returns:
        The messages of runs that failed; the same call repeats them.
    """
    failures: dict[str, str] = {}

    def run_and_measure(job: Job) -> None:
        run(job)
        for one in list_jobs([job.arm], out) if job.arm.seeds == MAIN_SEEDS else []:
            if (other := partner(one)) is not None:
                measure_partners(one, other)

    while do_missing(
        (job for jobs in [*load_stages(out)[0].values()][:num_stages] for job in jobs), run_and_measure, failures
    ):
        pass  # the results of the pilot define the main runs
    return list(failures.values())


def partner(job: Job) -> Job | None:
    """Returns the team of the next seed; None if there is none, it is measured, or weights of either are not there."""
    other = Job(job.arm, job.seed + 1, job.out)
    results = [one.read() if one.study_job.run.exists() else None for one in (job, other)]
    is_trained = all(result is not None and result["ways"] for result in results)
    return other if job.arm.num_llms == 2 and is_trained and not job.partners.exists() else None


def load_stages(out: Path) -> tuple[dict[str, list[Job]], dict[str, float] | None]:
    """Returns the stages that are defined so far, with their runs, and the best rates; None: not known yet."""
    pilot = list_jobs(pilot_arms(), out)
    rates = best_rates(read_results(pilot))
    return {"pilot": pilot} | ({} if rates is None else {"main": list_jobs(main_arms(rates), out)}), rates


if __name__ == "__main__":
    sys.exit(main())
