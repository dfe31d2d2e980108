"""`python -m benchmarks.team --out docs/study/team`: what does a team add?

Does the missing runs, one at a time, and prints the tables. The same command continues after a kill; several processes
can share a folder. `--show` only prints, `--picture FILE` also draws, `--stages 1` ends after the pilot.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.record import BenchmarkError
from benchmarks.team.analysis import best_rates, read_results
from benchmarks.team.design import main_arms, pilot_arms
from benchmarks.team.measuring import Way
from benchmarks.team.runs import Job, Result, execute, list_jobs, measure_partners
from benchmarks.team.tables import draw, print_tables
from launch.console.interrupts import Interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; returns 0, 1 if runs failed, 2 if the folder cannot be used, or 128 + a signal's number."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.team", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the study's folder")
    parser.add_argument("--show", action="store_true", help="only print what is there")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the picture")
    parser.add_argument("--stages", type=int, default=2, metavar="N", help="end after the first N stages")
    options = parser.parse_args(argv)
    interrupts = Interrupts(lambda: None)
    failures: list[str] = []
    try:
        with interrupts:
            if not options.show:
                failures = run_study(options.out, options.stages)
        stages, rates = load_stages(options.out)
        print_tables(sys.stdout, stages, rates)
        if options.picture and rates and (results := read_results(stages["main"])):
            draw(options.picture, results, rates)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped. The same command continues.", file=sys.stderr)
        return interrupts.exit_code
    return 1 if failures else 0


def run_study(
    out: Path,
    num_stages: int = 2,
    run: Callable[[Job], Result] = execute,
    measure_partners: Callable[[Job, Job], Way] = measure_partners,
) -> list[str]:
    """Does the missing runs, stage by stage, then measures teams with partners of other seeds.

    Args:
        out: The study's folder.
        num_stages: Number of stages to do.
        run: Does a run and writes its result.
        measure_partners: Measures the first LLM of a team with the second one of another seed, and writes the result.

    Returns:
        The messages of runs that failed; the same call repeats them.
    """
    failures: dict[str, str] = {}
    stage = 0
    while stage < len(stages := [*load_stages(out)[0].values()][:num_stages]):
        for job in stages[stage]:
            if job.result.exists() or (lock := job.study_job.claim()) is None:  # another process does it
                continue
            with lock:
                try:
                    run(job)
                    print(f"{job.name}: done", flush=True)
                except BenchmarkError as error:
                    failures[job.name] = str(error)
                    print(f"{job.name} failed: {error}", file=sys.stderr, flush=True)
        stage += 1
    for job, other in (pair for jobs in stages[1:] for pair in missing_partners(jobs)):
        measure_partners(job, other)
    return list(failures.values())


def missing_partners(jobs: Sequence[Job]) -> Iterator[tuple[Job, Job]]:
    """Yields each team with the one of the next seed, the last with the first, if they are trained but not measured."""
    for job in jobs:
        seeds = job.arm.seeds
        other = job._replace(seed=seeds[(seeds.index(job.seed) + 1) % len(seeds)])
        if job.arm.num_llms == 2 and not job.partners.exists():
            results = [one.read() for one in (job, other)]
            if all(result is not None and result["ways"] for result in results):
                yield job, other


def load_stages(out: Path) -> tuple[dict[str, list[Job]], dict[str, float] | None]:
    """Returns the stages that are defined so far, with their runs, and the best rates; None: not known yet."""
    pilot = list_jobs(pilot_arms(), out)
    rates = best_rates(read_results(pilot))
    return {"pilot": pilot} | ({} if rates is None else {"main": list_jobs(main_arms(rates), out)}), rates


if __name__ == "__main__":
    sys.exit(main())
