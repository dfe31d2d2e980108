"""`cory study`: trains several configurations (arms) with several seeds and compares them."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.console.cli import AllowChanges, Debug, Quiet, local_path
from launch.console.errors import CommandError
from policies.files import MissingFolderError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from launch.display.terminal import ProgressPrinter
    from launch.experiments.results import StudyRun
    from launch.experiments.study import Study
    from launch.experiments.study_runs import StudyJob


def study(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME|FILE ARM KEY=VALUE", help="A study, some of its arms, and settings for all arms."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", parser=local_path, help="The study's folder.")] = None,
    tier: Annotated[int | None, typer.Option(min=1, metavar="N", help="Run only the arms of this tier.")] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N|N,N", help="Seeds for all arms: a count or a list (one seed: `3,`).")
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the bundled studies, or a study's arms and their progress, and exit.")
    ] = False,
    allow_changes: AllowChanges = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Train several configurations (arms) with several seeds, and compare them.

    Arms differ only in the settings they list. The same command continues a study: finished runs are skipped, and
    stopped or failed runs resume. DIR/results/ARM/seed_N.json contains a run's data for tables and plots.
    DIR/runs/ARM/seed_N is its run folder, and seed_N.txt beside it contains its output. To divide the runs among
    several terminals, or several machines that share the folder, run the same command in each.

    Examples:
      cory study --list
      cory study imdb --list
      cory study imdb --tier 1 --out runs/study
      cory study imdb cory ppo --seeds 0,1,2 --out runs/study
      cory study mine.yaml --out runs/mine

    Exit codes:
      0 no run is left to start; 1 some runs failed; 2 user error; 129, 130, 143 stopped by a signal.
    """
    from launch.cluster import session
    from launch.console.errors import make_folder
    from launch.console.output import dup_stdout
    from launch.display.terminal import ProgressPrinter
    from launch.experiments.study import bundled_studies, load_study
    from launch.experiments.study_runs import list_jobs
    from launch.run_folder.layout import SOURCES
    from launch.run_folder.storage import check_location
    from launch.training.preflight import load_task
    from launch.training.source_check import check_all_sources, training_kind, write_all_sources
    from policies.files import file_lock

    names = [word for word in words or () if "=" not in word]
    if list_ and not names:
        print("\n".join(f"{name:<12}{about}" for name, about in bundled_studies().items()))
        return 0
    if not names:
        raise CommandError("Missing study: give a name, such as imdb, or a file. `cory study --list` lists the names.")
    plan = load_study(names[0], [word for word in words or () if "=" in word])
    arm_names = names[1:] or list(plan.arms)
    if unknown := [name for name in arm_names if name not in plan.arms]:
        raise CommandError(f"Unknown arm {', '.join(unknown)}. {plan.name} has: {', '.join(plan.arms)}.")
    arms = [arm for arm in plan.arms.values() if arm.name in arm_names and tier in (None, arm.tier)]
    if out is None and not list_:
        raise CommandError("Set the study's folder with --out. Existing results in it are kept.")
    jobs = list_jobs(plan, out or Path(), arms, _parse_seeds(seeds))
    if not jobs:
        raise CommandError(f"No arm of {plan.name} matches. See `cory study --list`.")
    if list_ or out is None:
        progress = ProgressPrinter(dup_stdout(), 0)
        progress.print(plan.about)
        progress.print(_arms_table(plan, jobs))
        if plan.contrasts:
            progress.print(plan.differences_text())
        return 0
    check_location(str(out), "study")
    make_folder(out)
    todo = [job for job in jobs if job.read() is None]
    progress = ProgressPrinter(dup_stdout(), len(jobs), done=len(jobs) - len(todo), quiet=quiet)
    progress.print(f"{plan.about}\nStudy folder: {out}, {len(todo)} of {len(jobs)} runs to do")
    session.quiet_libraries(debug)
    arm_settings = {job.arm.name: plan.settings(job.arm, job.seed) for job in todo}
    errors: dict[str, str] = {}
    with file_lock(out / f".{SOURCES}.lock"):  # other processes may share the study
        sources = check_all_sources(
            out,
            arm_settings.items(),
            load_task,
            lambda text: progress.print(text, True),
            allow_changes,
            errors.__setitem__,
        )
        write_all_sources(out, sources)
    kinds = {name: training_kind(settings) for name, settings in arm_settings.items()}
    skipped = {name: f"Arm {name}: {errors[kind]}" for name, kind in kinds.items() if kind in errors}
    runnable = [job for job in todo if job.arm.name not in skipped]
    if skipped and not runnable and (names[1:] or todo == jobs):
        raise CommandError(next(iter(skipped.values())))
    for message in skipped.values():
        progress.print(f"Skipped: {message}", True)
    jobs = [job for job in jobs if job not in todo or job in runnable]
    return _run_jobs(runnable, jobs, progress, ["--allow-changes"] if allow_changes else []) or int(bool(skipped))


def _run_jobs(
    todo: "Sequence[StudyJob]", jobs: "Sequence[StudyJob]", progress: "ProgressPrinter", options: "Sequence[str]"
) -> int:
    """Trains runs one after the other, except those that another process trains, and prints the results."""
    from launch.experiments.results import write_result
    from launch.experiments.study_runs import TrainProcess, collect_result

    stop_message = "Finishing this update, then saving. Press Ctrl-C again to abort immediately."
    trainer = TrainProcess(lambda: progress.print(stop_message, True))
    failures: list[str] = []
    stop_code = 0
    with progress, trainer.interrupts:
        progress.start_clock()
        for job in todo:
            if stop_code:
                break
            claim = job.claim()
            if claim is None:
                continue
            with claim:
                if job.result.exists():  # another process has finished it in the meantime
                    progress.advance()
                    continue
                progress.stage(f"{job.arm.name}, seed {job.seed}")
                process_result = trainer.train(job, options)
                if trainer.interrupts.requested is not None:
                    stop_code = trainer.interrupts.exit_code
                    if process_result.code:
                        break
                try:
                    run = collect_result(job, process_result)
                    write_result(job.result, run)
                    progress.print(f"{_result_line(run)}  {progress.advance()}")
                except (CommandError, MissingFolderError) as error:
                    failures.append(f"{job.arm.name}, seed {job.seed}, failed: {error}")
                    progress.print(failures[-1])
    done = _report_results(jobs, progress)
    for failure in failures:
        progress.print(failure, True)
    if stop_code:
        progress.print(f"Stopped: {done} of {len(jobs)} runs are done. The same command continues.", True)
        return stop_code
    if remaining := len(jobs) - done - len(failures):
        progress.print(f"No run is left to start: other processes of this study train {remaining} of the runs.", True)
    return 1 if failures else 0


def _report_results(jobs: "Sequence[StudyJob]", progress: "ProgressPrinter") -> int:
    """Prints the results; returns the number of finished runs."""
    from launch.display.tables import metric_format
    from launch.experiments.contrasts import CONTRAST_METRIC, contrasts_table, differences_text, evaluate_contrasts

    runs = [run for job in jobs if (run := job.read()) is not None]
    if runs:
        progress.print()
        progress.print(_summary_table(runs), True)
        contrasts = jobs[0].study.contrasts
        if results := evaluate_contrasts(contrasts, runs):
            heading = metric_format(CONTRAST_METRIC).heading
            progress.print(
                f"Contrasts of {heading}, paired by seed; p of sign-flip tests, Holm-corrected for {len(contrasts)}:"
            )
            progress.print(contrasts_table(results), True)
            progress.print(differences_text(results), True)
    return len(runs)


def _arms_table(plan: "Study", jobs: "Sequence[StudyJob]") -> "Table":
    from launch.display.tables import new_table
    from launch.experiments.study import to_cli_setting

    arms_table = new_table(["arm", "differs from", "in"], ["tier", "done"])
    arms_table.columns[2].no_wrap = False  # wrap the settings rather than the names
    for arm in plan.arms.values():
        if arm_jobs := [job for job in jobs if job.arm is arm]:
            changes = ", ".join(to_cli_setting(*item) for item in arm.changes.items())
            done = sum(job.result.exists() for job in arm_jobs)
            arms_table.add_row(arm.name, arm.against or "", changes, str(arm.tier), f"{done} of {len(arm_jobs)}")
    return arms_table


def _result_line(run: "StudyRun") -> str:
    from launch.display.tables import FINE_PATTERNS, format_number
    from launch.experiments.contrasts import CONTRAST_METRIC

    score = None if run.final is None else run.final["mean"].get(CONTRAST_METRIC)
    text = format_number(score, FINE_PATTERNS[CONTRAST_METRIC])
    return f"{run.arm:<18} seed {run.seed}  combined {text:>6}  {_remark(run)}"


def _summary_table(runs: "Sequence[StudyRun]") -> "Table":
    import pandas as pd

    from launch.display.tables import MAIN_METRICS
    from launch.experiments.measures import final_value, metrics_of
    from launch.experiments.tables import points_table

    points = []
    for _, group in groupby(sorted(runs, key=lambda run: (run.tier, run.arm_index, run.arm)), lambda run: run.arm):
        arm_runs = list(group)
        metrics = metrics_of(arm_runs)
        frame = pd.DataFrame({key: final_value(key)(metrics) for key in MAIN_METRICS})
        frame = frame.reindex([str(run.seed) for run in arm_runs])
        seconds, remarks = [run.cost["seconds"] for run in arm_runs], [_remark(run) for run in arm_runs]
        points.append(([arm_runs[0].label], frame.assign(complete=True, seconds=seconds, remark=remarks)))
    return points_table(["arm"], points)


def _remark(run: "StudyRun") -> str:
    from launch.experiments.measures import run_collapse_signs

    is_done = run.status == "done"
    signs = ", ".join(sorted({sign.signature for sign in run_collapse_signs(run)} - {run.status}))
    if is_done and not signs:
        return ""
    return f"seed {run.seed} {'collapsed' if is_done else f'{run.status}, ended early'}" + f": {signs}" * bool(signs)


def _parse_seeds(text: str | None) -> tuple[int, ...] | None:
    """Parses --seeds: a count or a list."""
    if text is None:
        return None
    numbers = text.removesuffix(",").split(",")
    if not all(number.isdecimal() for number in numbers) or ("," not in text and not int(text)):
        raise CommandError(f"Invalid --seeds {text}: give a count, such as 5, or a list, such as 0,1,2 or 3,")
    return tuple(dict.fromkeys(map(int, numbers))) if "," in text else tuple(range(int(text)))
