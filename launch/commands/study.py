"""`cory study`: many trainings that are compared, arms over seeds, and a small file of results for each."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.console.cli import AllowChanges, Debug, Quiet, local_path
from launch.console.errors import CommandError

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
        typer.Argument(metavar="NAME|FILE ARM KEY=VALUE", help="A study; arms of it; settings of all arms."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", parser=local_path, help="The study's folder.")] = None,
    tier: Annotated[int | None, typer.Option(min=1, metavar="N", help="The arms of one tier alone.")] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N|N,N", help="Seeds of all arms: a count, or a list (of one: `3,`).")
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the studies, or a study's arms and what is done of them; exit.")
    ] = False,
    allow_changes: AllowChanges = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Train arms that differ in what they say and in nothing else, over seeds, and compare them.

    What is done already is not done again, and a run that was stopped or failed continues, so the same command
    continues a study. DIR/results/ARM/seed_N.json keeps of each run what tables and plots need; DIR/runs/ARM/seed_N is
    its folder, which `cory watch` follows, and seed_N.txt beside it what it printed. The same command in several
    terminals, or on several machines with the folder in common, shares the runs out.

    Examples:
      cory study --list
      cory study imdb --list
      cory study imdb --tier 1 --out runs/study
      cory study imdb cory ppo --seeds 0,1,2 --out runs/study
      cory study mine.yaml --out runs/mine

    Exit codes:
      0 nothing is left to begin; 1 some runs failed; 2 a user error; 129, 130, 143 a signal stopped it.
    """
    from launch.cluster import session
    from launch.console.errors import make_folder
    from launch.console.output import dup_stdout
    from launch.display.terminal import ProgressPrinter
    from launch.experiments.study import load, studies
    from launch.experiments.study_runs import list_jobs
    from launch.run_folder.layout import SOURCES
    from launch.run_folder.storage import check_location
    from launch.training.comparable import check_comparable, write_comparable
    from launch.training.preflight import load_task
    from policies.models.cache import locked

    names = [word for word in words or () if "=" not in word]
    if list_ and not names:
        print("\n".join(f"{name:<12}{about}" for name, about in studies().items()))
        return 0
    if not names:
        raise CommandError("Name a study, such as imdb, or a file; `cory study --list` lists those that there are.")
    plan = load(names[0], [word for word in words or () if "=" in word])
    named = names[1:] or list(plan.arms)
    if unknown := [name for name in named if name not in plan.arms]:
        raise CommandError(f"{plan.name} has no arm {', '.join(unknown)}. It has: {', '.join(plan.arms)}.")
    arms = [arm for arm in plan.arms.values() if arm.name in named and tier in (None, arm.tier)]
    if out is None and not list_:
        raise CommandError("Name the study's folder with --out. Results of earlier runs in it are kept.")
    asked = list_jobs(plan, out or Path(), [arm for arm in arms if list_ or not arm.missing], _parse_seeds(seeds))
    if not asked:
        raise CommandError(f"{plan.name} has no such arm, or what they need is missing: see `cory study --list`.")
    if list_ or out is None:
        voice = ProgressPrinter(dup_stdout(), 0)
        voice.print(plan.about)
        voice.print(_arms_table(plan, asked))
        return 0
    check_location(str(out), "study")
    make_folder(out)
    _refresh_results(plan, out)
    todo = [job for job in asked if job.read() is None]
    voice = ProgressPrinter(dup_stdout(), len(asked), done=len(asked) - len(todo), quiet=quiet)
    voice.print(f"{plan.about}\nStudy folder: {out}, {len(todo)} of {len(asked)} runs to do")
    for arm in arms:
        if arm.missing is not None:
            voice.print(f"Left out: {arm.missing}", True)
    session.quiet_libraries(debug)
    asked_for = {f"Arm {job.arm.name}": plan.settings(job.arm, job.seed) for job in todo}.items()
    with locked(out / f".{SOURCES}.lock"):  # other processes may share the study
        sources = check_comparable(out, asked_for, load_task, lambda text: voice.print(text, True), allow_changes)
        write_comparable(out, sources)
    return _run_jobs(todo, asked, voice, ["--allow-changes"] if allow_changes else [])


def _refresh_results(plan: "Study", folder: Path) -> None:
    """Writes what the study says of its arms today, such as labels, into the results that are there.

    Raises:
        CommandError: one was made with other settings, so it is no part of this study.
    """
    from launch.experiments.results import read_available_results, write
    from launch.experiments.study_runs import StudyJob

    for run in read_available_results(folder):
        if run.arm in plan.arms:
            job = StudyJob(plan, plan.arms[run.arm], run.seed, folder)
            if job.read() == run or (claim := job.claim()) is None:  # who does it writes what the study says today
                continue
            with claim:
                if (described := job.read()) is not None:
                    write(job.result, described)


def _run_jobs(todo: "Sequence[StudyJob]", asked: "Sequence[StudyJob]", voice: "ProgressPrinter", options: "Sequence[str]") -> int:
    """Does what is to be done and no other process does, and shows what was found.

    Args:
        todo: runs to be done.
        asked: all runs that were asked for.
        voice: tells of it.
        options: more ones of `cory train`.
    """
    from launch.experiments.results import write
    from launch.experiments.study_runs import SIGNAL_EXIT_CODES, TrainProcess, collect_result

    stopping = "Finishing this update, then saving. Ctrl-C again aborts at once."
    trainer = TrainProcess(lambda: voice.print(stopping, True))
    failures: list[str] = []
    elsewhere = stopped = 0
    with voice, trainer.interrupts:
        voice.begin()
        for job in todo:
            claim = job.claim()
            if claim is None:
                elsewhere += 1
                continue
            with claim:
                if job.result.exists():  # another process did it meanwhile
                    voice.advance()
                    continue
                voice.stage(f"{job.arm.name}, seed {job.seed}")
                ended = trainer.train(job, options)
                requested = trainer.interrupts.requested is not None
                if ended.code in SIGNAL_EXIT_CODES or (ended.code and requested):
                    stopped = trainer.interrupts.exit_code if requested else ended.code
                    break
                try:
                    run = collect_result(job, ended)
                    write(job.result, run)
                    voice.print(f"{_result_line(run)}  {voice.advance()}")
                except CommandError as error:
                    failures.append(f"{job.arm.name}, seed {job.seed}, failed: {error}")
                    voice.print(failures[-1])
            if requested:
                stopped = trainer.interrupts.exit_code
                break
    done = _report_results(asked, voice)
    for failure in failures:
        voice.print(failure, True)
    if stopped:
        voice.print(f"Stopped: {done} of {len(asked)} runs are done. The same command continues.", True)
        return stopped
    if elsewhere:
        voice.print(f"Nothing is left to begin: other processes of this study do {elsewhere} of the runs.", True)
    return 1 if failures else 0


def _report_results(asked: "Sequence[StudyJob]", voice: "ProgressPrinter") -> int:
    """Shows what was found, and returns of how many runs."""
    from launch.display.tables import metric_format
    from launch.experiments.contrasts import CONTRAST_METRIC, evaluate_contrasts, contrasts_table

    runs = [run for job in asked if (run := job.read()) is not None]
    if runs:
        voice.print()
        voice.print(_summary_table(runs), True)
        contrasts = asked[0].study.contrasts
        if found := evaluate_contrasts(contrasts, runs):
            heading = metric_format(CONTRAST_METRIC).heading
            voice.print(f"Contrasts, {heading}, paired by seed; p by sign flips, after Holm for {len(contrasts)}:")
            voice.print(contrasts_table(found), True)
    return len(runs)


def _arms_table(plan: "Study", asked: "Sequence[StudyJob]") -> "Table":
    """Returns what arms differ in, and how much of them is done."""
    from launch.display.tables import table
    from launch.experiments.study import to_cli_setting

    made = table(["arm", "differs from", "in"], ["tier", "done"])
    made.columns[2].no_wrap = False  # the names stay whole
    for arm in plan.arms.values():
        if own := [job for job in asked if job.arm is arm]:
            changes = ", ".join(to_cli_setting(*item) for item in arm.changes.items())
            done = sum(job.result.exists() for job in own)
            made.add_row(arm.name, arm.against or "", changes, str(arm.tier), f"{done} of {len(own)}")
    return made


def _result_line(run: "StudyRun") -> str:
    """Returns what a run that has just ended found."""
    from launch.display.tables import FINE, MAIN_METRICS, format_number, metric_format

    means = {} if run.final is None else run.final["mean"]
    figures = "  ".join(
        f"{metric_format(key).heading} {format_number(means.get(key), FINE[key]):>6}" for key in MAIN_METRICS
    )
    return f"{run.arm:<18} seed {run.seed}  {figures}  {_remark(run)}"


def _summary_table(runs: "Sequence[StudyRun]") -> "Table":
    """Returns each arm's figures after training, over seeds."""
    import pandas as pd

    from launch.display.tables import MAIN_METRICS
    from launch.experiments.measures import at_end, metrics_of
    from launch.experiments.tables import points_table

    points = []
    for _, group in groupby(sorted(runs, key=lambda run: (run.tier, run.arm_index, run.arm)), lambda run: run.arm):
        arm = list(group)
        metrics = metrics_of(arm)
        frame = pd.DataFrame({key: at_end(key)(metrics) for key in MAIN_METRICS}).reindex(
            [str(run.seed) for run in arm]
        )
        frame = frame.assign(
            whole=True, seconds=[run.cost["seconds"] for run in arm], remark=[_remark(run) for run in arm]
        )
        points.append(([arm[0].label], frame))
    return points_table(["arm"], points)


def _remark(run: "StudyRun") -> str:
    from launch.experiments.measures import collapse

    is_done = run.status == "done"
    signs = ", ".join(sorted({sign.signature for sign in collapse(run)} - {run.status}))
    if is_done and not signs:
        return ""
    return f"seed {run.seed} {'collapsed' if is_done else f'{run.status}, ended early'}" + f": {signs}" * bool(signs)


def _parse_seeds(text: str | None) -> tuple[int, ...] | None:
    """Reads seeds as a count, or as a list."""
    if text is None:
        return None
    numbers = text.removesuffix(",").split(",")
    if not all(number.isdecimal() for number in numbers) or ("," not in text and not int(text)):
        raise CommandError(f"--seeds {text} is neither a count, such as 5, nor seeds, such as 0,1,2 or 3,")
    return tuple(dict.fromkeys(map(int, numbers))) if "," in text else tuple(range(int(text)))
