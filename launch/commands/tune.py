"""`cory tune`: searches over settings, such as the exchange period, with Ray Tune."""

import contextlib
import functools
import importlib.util
import io
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from launch.cluster.placement import count_noun
from launch.console.cli import AllowChanges, ConfigFiles, Continue, Debug, Quiet, Words, local_path
from launch.console.errors import CommandError

if TYPE_CHECKING:
    import pandas as pd

    from launch.display.terminal import ProgressPrinter
    from launch.experiments.search import Search

RESUME_OPTIONS = ("resume", "max_minutes", "allow_changes", "quiet", "debug")
"""Options that can be combined with --resume: they do not define the search."""


def tune(
    ctx: typer.Context,
    words: Words = None,
    config: ConfigFiles = None,
    over: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUES", help="A setting to search; may be repeated.")
    ] = None,
    scheduler: Annotated[
        Literal["asha", "pbt"] | None, typer.Option(help="Stop bad trials early, or clone good ones.")
    ] = None,
    algorithm: Annotated[
        Literal["optuna"] | None, typer.Option("--search", help="Choose values based on earlier results.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of samples from ranges. [default: 1; 4 for pbt]")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, metavar="N", help="Run every point with N seeds.")] = None,
    concurrent: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum concurrent trials.")] = None,
    max_minutes: Annotated[float | None, typer.Option(min=0.01, metavar="M", help="Stop after M minutes.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=local_path, help="The search's folder. [default: runs/tune-NAME-TIME]"),
    ] = None,
    continue_: Continue = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", parser=local_path, help="Continue a search from its checkpoints.")
    ] = None,
    allow_changes: AllowChanges = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Search over settings for the best held-out combined reward.

    --over defines the search space and may be repeated:
      key=1,2,5,null            a list of values; all of them are tried
      key=log:1e-6:1e-4         a range, sampled log-uniformly; --samples sets the number of samples
      key=uniform:0:1           a range, sampled uniformly

    asha stops bad trials early. pbt continues the worst trials as clones of the best, with perturbed values; such a
    search cannot resume. optuna (TPE, extra `optuna`) chooses each trial's values from the results of earlier trials;
    --samples sets the number of trials.

    The objective is the held-out combined reward, task reward - eval_kl_coef * KL, averaged over the policies unless
    select_by is set. eval_kl_coef is fixed before the search, so searching over kl_coef does not change the objective.
    After Ctrl-C or --max-minutes, --resume continues unfinished trials from their last checkpoints (checkpoint_every).
    Checkpoints are pickles, which can run code: resume only your own searches.

    Examples:
      cory tune imdb-tiny --over exchange_period=1,2,5,10,20,null --seeds 3
      cory tune imdb-tiny --over lr=log:1e-5:1e-3 --over exchange_period=1,5 --samples 8 --scheduler asha
      cory tune imdb-tiny --over lr=log:1e-5:1e-3 --search optuna --samples 20 --max-minutes 90
      cory tune --resume runs/search

    Exit codes:
      0 all trials are done; 1 some failed; 2 user error; 129, 130, 143 stopped by a signal.
    """
    from launch.cluster import session
    from launch.cluster.gpus import check_gpus
    from launch.console import output
    from launch.console.interrupts import Interrupts
    from launch.display.terminal import ProgressPrinter
    from launch.experiments.search import (
        Search,
        check_same_search,
        create_search_folder,
        is_resumable,
        pin_start_checkpoint,
        resume_command,
    )
    from launch.experiments.space import distinct_settings, grid_points
    from launch.run_folder.layout import RUNS, new_folder
    from launch.run_folder.locks import lock_folder
    from launch.run_folder.manifest import own_version
    from launch.run_folder.storage import check_location
    from launch.training import preflight, tracking
    from launch.training.source_check import absolute_settings, check_all_sources, write_all_sources

    if allow_changes and not (resume or continue_):
        raise CommandError("--allow-changes requires --resume or --continue.")
    folder, name, is_resuming = resume or out, "", resume is not None
    if resume:
        if any(value for option, value in ctx.params.items() if option not in RESUME_OPTIONS):
            allowed = ", ".join(f"--{option.replace('_', '-')}" for option in RESUME_OPTIONS[1:])
            raise CommandError(f"--resume can only be combined with {allowed}.")
        check_location(str(resume), "search")
        search = Search.read(resume)
    elif continue_ and not out:
        raise CommandError("--continue requires --out, the folder of the search.")
    else:
        search, name = read_search(SimpleNamespace(**ctx.params))
        name = f"tune-{name}"
        check_location(str(folder or RUNS / name), "search")
        if folder and continue_ and is_resumable(folder):
            check_same_search(folder, search)
            search, is_resuming = Search.read(folder), True  # with the stored chat date and start checkpoint
        else:
            search = pin_start_checkpoint(search)
    if is_resuming and not search.can_resume:
        raise CommandError(
            f"{folder} is a search with --scheduler pbt, which cannot resume: Ray would give clones their first values "
            "again. Start it anew with another --out."
        )
    kinds = distinct_settings(grid_points(search.settings, search.axes))
    tracking.check_trackers(search.settings)
    session.quiet_libraries(debug)
    for settings in kinds:
        check_gpus(settings)
        if not is_resuming:
            preflight.check_run_settings(settings)
    sources = check_all_sources(
        folder if is_resuming else None,
        [("A trial", settings) for settings in kinds],
        preflight.check_run_settings if is_resuming else preflight.load_task,
        lambda text: print(text, file=sys.stderr),
        allow_changes,
    )
    folder = folder or new_folder(name)
    if is_resuming:
        lock = lock_folder(folder)
    else:
        from policies.settings.resolve import with_chat_date

        search = search._replace(settings=with_chat_date(search.settings))
        command = shlex.join(["cory", "tune", *ctx.meta["words"]])
        lock = create_search_folder(folder, search, f"{command}  # cory-rllib {own_version()}")
    hint = f" Continue with:\n  {resume_command(folder)}" if search.can_resume else ""
    progress = ProgressPrinter(output.dup_stdout(), search.trials, quiet=quiet, bar=False)

    def stop() -> None:
        progress.print("The search is saved, and stops. Press Ctrl-C again to abort immediately.", True)
        request_stop()

    interrupts = Interrupts(stop)
    with lock, interrupts:
        write_all_sources(folder, sources)
        progress.print(_describe(search))
        progress.print(f"Search folder: {folder}")
        try:
            from launch.experiments.outcome import STATUS_UNFINISHED
            from launch.experiments.tuning import request_stop, run_search

            resolve_paths = functools.partial(absolute_settings, sources=sources.values())
            with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
                results = run_search(search, folder, resolve_paths, interrupts, max_minutes, debug)
            exit_code = _report_results(results, search, folder, progress)
        except KeyboardInterrupt:
            progress.print(f"Aborted.{hint}" if is_resumable(folder) else "Aborted.", True)
            return interrupts.exit_code
    if len(results) < search.trials or (results["status"] == STATUS_UNFINISHED).any():
        progress.print(f"{'The time budget is exhausted.' if interrupts.requested is None else 'Stopped.'}{hint}", True)
        return exit_code if interrupts.requested is None else interrupts.exit_code
    return exit_code


def read_search(options: Any) -> "tuple[Search, str]":
    """Creates a search from command-line options.

    Returns:
        The search, and the name of its preset or configuration.
    """
    from launch.console.configuration import split_arguments
    from launch.experiments.search import Search
    from launch.experiments.space import SEED_KEY, pin_objective, read_axes
    from policies.settings.settings import METADATA

    request = split_arguments(options.words or (), options.config or ())
    request.check_task()
    settings = request.settings()
    axes = read_axes(options.over or ())
    keys = {axis.key for axis in axes}
    pbt, asha = options.scheduler == "pbt", options.scheduler == "asha"
    optuna, seeds = options.algorithm == "optuna", options.seeds or 1
    is_grid = all(axis.scale is None for axis in axes) and not (pbt or optuna)
    fixed = ", ".join(sorted(key for key in keys if not METADATA[key].clone))
    rules = {
        "Nothing to search. Add a setting and its values, such as --over exchange_period=1,5,null.": not axes,
        "--samples requires a range in --over. To repeat points, use --seeds.": (is_grid and options.samples),
        "--seeds conflicts with --over seed. Remove one of them.": options.seeds and SEED_KEY in keys,
        "--seeds conflicts with --scheduler asha, which stops a point's unlucky seeds, so that its mean covers only "
        "the lucky ones. Run the best values with --seeds afterwards.": asha and seeds > 1,
        "--search optuna requires --samples, and conflicts with --scheduler pbt and --seeds.": (
            optuna and (pbt or options.seeds or not options.samples)
        ),
        "--scheduler pbt conflicts with --seeds and --concurrent: each trial has its own seed, and as many trials run "
        "concurrently as fit.": pbt and (options.seeds or options.concurrent),
        "--scheduler pbt requires --samples of at least 2.": pbt and options.samples == 1,
        "test_queries conflicts with a search, which does not evaluate the test split. Train the best point with it.": (
            settings.test_queries is not None
        ),
        f"--scheduler pbt cannot change {fixed} while a trial runs. Remove --scheduler, or use asha.": (pbt and fixed),
        "--scheduler pbt conflicts with --over kl_coef and kl_target, which adapts it. Set kl_target=null, or search "
        "over it.": pbt and "kl_coef" in keys and settings.kl_target is not None,
        f"--scheduler compares trials after evaluations: it requires one eval_every below "
        f"num_updates={settings.num_updates}.": (
            options.scheduler and ("eval_every" in keys or settings.eval_every >= settings.num_updates)
        ),
        "num_passes conflicts with a search, which counts updates. Set num_updates.": settings.num_passes is not None,
        "--search optuna requires the package optuna. Run `pip install optuna`.": (
            optuna and importlib.util.find_spec("optuna") is None
        ),
    }
    for message, is_violated in rules.items():
        if is_violated:
            raise CommandError(message)
    samples = options.samples or (4 if pbt else 1)
    pinned = pin_objective(settings)
    search = Search(pinned, axes, options.scheduler, samples, seeds, options.concurrent, options.algorithm)
    return search, request.name


def _describe(search: "Search") -> str:
    settings = search.settings
    axes = " and ".join(axis.option for axis in search.axes)
    subject = {"bare": "mean of the policies", "chain": "the chain's last answer", "mean": "the mean of the LLMs"}
    return (
        f"A search over {axes}: {count_noun(search.trials, 'trial')} of {count_noun(settings.num_updates, 'update')}.\n"
        f"Objective: held-out task reward - {settings.report_kl_coef:g} KL, {subject[settings.select_by]}."
    )


def _report_results(results: "pd.DataFrame", search: "Search", folder: Path, progress: "ProgressPrinter") -> int:
    """Prints the results and writes them into the search's folder.

    Returns:
        0, or 1 if a trial failed.
    """
    from launch.console.configuration import settings_to_yaml
    from launch.experiments.outcome import STATUS_FAILED, group_points, write_csv
    from launch.experiments.search import RESULTS_FILE
    from launch.experiments.space import format_point, format_setting_value
    from launch.experiments.tables import points_table
    from policies.files import atomic_write
    from policies.settings.settings import make_settings

    keys = [axis.key for axis in search.axes]
    write_csv(results, keys, folder / RESULTS_FILE)
    if results.empty:
        return 0
    points = group_points(results, keys, separate=search.scheduler == "pbt")
    progress.print()
    progress.print(
        points_table(keys, [([*map(format_setting_value, point.iloc[0][keys])], point) for point in points]), True
    )
    progress.print("", True)
    failed = results[results["status"] == STATUS_FAILED]
    for _, trial in failed.iterrows():
        progress.print(f"{trial['trial']} failed ({format_point(trial[[*keys, 'seed']])}): {trial['reason']}", True)
    best = points[0]
    if not best["complete"].all():
        progress.print("Best      none: no point has all its trials complete", True)
    else:
        values = best.iloc[0][keys].to_dict()
        best_settings = make_settings({**search.settings.model_dump(), **values})
        atomic_write(folder / "best.yaml", f"# The best point of {folder.name}\n{settings_to_yaml(best_settings)}")
        progress.print(f"Best      {format_point(values)}: cory train {shlex.quote(str(folder / 'best.yaml'))}", True)
    progress.print(f"Results   {folder / RESULTS_FILE}", True)
    return int(not failed.empty)
