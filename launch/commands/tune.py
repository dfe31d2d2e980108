"""`cory tune`: searches over settings, such as the exchange period, with Ray Tune."""

import contextlib
import functools
import io
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cluster.placement import count_noun
from launch.console.cli import AllowChanges, ConfigFiles, Continue, Debug, Quiet, Words, local_path
from launch.console.errors import CommandError

if TYPE_CHECKING:
    import pandas as pd

    from launch.display.terminal import ProgressPrinter
    from launch.experiments.search import Search


def tune(
    ctx: typer.Context,
    words: Words = None,
    config: ConfigFiles = None,
    over: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUES", help="A setting to search; may be repeated.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, metavar="N", help="Run every point with N seeds.")] = None,
    concurrent: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum concurrent trials.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=local_path, help="The search's folder. [default: runs/tune-NAME-TIME]"),
    ] = None,
    continue_: Continue = False,
    allow_changes: AllowChanges = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Search over settings for the best held-out combined reward.

    Each --over is a setting with its values; all combinations are tried. Ray's schedulers and search algorithms are for
    tune.Tuner in Python, see docs/tune.md.

    The objective is the held-out combined reward, task reward - eval_kl_coef * KL, averaged over the policies unless
    select_by is set. eval_kl_coef is fixed before the search, so searching over kl_coef does not change the objective.
    After Ctrl-C or a crash, the same command with --out DIR --continue continues unfinished trials from their last
    checkpoints (checkpoint_every). Checkpoints are pickles, which can run code: continue only your own searches.

    Examples:
      cory tune imdb-tiny-paper --over exchange_period=1,5,20,null --seeds 3 select_by=chain
      cory tune imdb-tiny --over lr=1e-5,1e-4 --over exchange_period=1,5 --concurrent 2
      cory tune imdb-tiny --over lr=1e-5,1e-4 --out runs/search --continue

    Exit codes:
      0 all trials are done; 1 some failed; 2 user error; 129, 130, 143 stopped by a signal.
    """
    from launch.cluster import session
    from launch.cluster.gpus import check_gpus
    from launch.console import output
    from launch.console.interrupts import Interrupts
    from launch.display.terminal import ProgressPrinter
    from launch.experiments.search import create_search_folder, is_resumable, pin_start_checkpoint, read_same_search
    from launch.experiments.space import distinct_settings, grid_points
    from launch.run_folder.layout import RUNS, new_folder
    from launch.run_folder.locks import lock_folder
    from launch.run_folder.manifest import own_version
    from launch.run_folder.storage import check_location
    from launch.training import preflight
    from launch.training.source_check import absolute_settings, check_all_sources, write_all_sources
    from launch.training.start import starting_policies
    from policies.settings.resolve import with_chat_date

    if continue_ and not out:
        raise CommandError("--continue requires --out, the folder of the search.")
    if allow_changes and not continue_:
        raise CommandError("--allow-changes requires --continue.")
    search, name = read_search(SimpleNamespace(**ctx.params))
    check_location(str(out or RUNS / f"tune-{name}"), "search")
    earlier = out if continue_ and out and is_resumable(out) else None
    search = read_same_search(earlier, search) if earlier else pin_start_checkpoint(search)
    kinds = distinct_settings(grid_points(search.settings, search.axes))
    session.quiet_libraries(debug)
    for settings in kinds:
        check_gpus(settings)
        if not earlier:
            starting_policies(settings)
            preflight.check_run_settings(settings)
    sources = check_all_sources(
        earlier,
        [("A trial", settings) for settings in kinds],
        preflight.check_run_settings if earlier else preflight.load_task,
        lambda text: print(text, file=sys.stderr),
        allow_changes,
    )
    folder = out or new_folder(f"tune-{name}")
    options = [] if out else ["--out", str(folder)]
    command = shlex.join(["cory", "tune", *(word for word in ctx.meta["words"] if word != "--continue"), *options])
    if earlier:
        lock = lock_folder(folder)
    else:
        search = search._replace(settings=with_chat_date(search.settings))
        lock = create_search_folder(folder, search, f"{command}  # cory-rllib {own_version()}")
    hint = f" Continue with:\n  {command} --continue"
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
                results = run_search(search, folder, resolve_paths, interrupts, debug)
            exit_code = _report_results(results, search, folder, progress)
        except KeyboardInterrupt:
            progress.print(f"Aborted.{hint}" if is_resumable(folder) else "Aborted.", True)
            return interrupts.exit_code
    is_complete = len(results) == search.trials and (results["status"] != STATUS_UNFINISHED).all()
    if interrupts.requested is None or is_complete:
        return exit_code
    progress.print(f"Stopped.{hint}", True)
    return interrupts.exit_code


def read_search(options: Any) -> "tuple[Search, str]":
    """Creates a search from command-line options.

    Returns:
        The search, and the name of its preset or configuration.
    """
    from launch.console.configuration import split_arguments
    from launch.experiments.search import Search
    from launch.experiments.space import SEED_KEY, pin_objective, read_axes

    request = split_arguments(options.words or (), options.config or ())
    request.check_task()
    settings = request.settings()
    seeds = range(settings.seed, settings.seed + (options.seeds or 1))
    more = [f"{SEED_KEY}={','.join(map(str, seeds))}"] if len(seeds) > 1 else []
    search = Search(pin_objective(settings), read_axes([*(options.over or ()), *more]), options.concurrent)
    rules = {
        "Nothing to search. Add a setting and its values, such as --over exchange_period=1,5,null.": not search.keys,
        "test_queries conflicts with a search, which does not evaluate the test split. Train the best point with it.": (
            settings.test_queries is not None
        ),
        "num_passes conflicts with a search, which counts updates. Set num_updates.": settings.num_passes is not None,
        "tracker conflicts with a search, whose trials write TensorBoard files. Set tracker=null.": settings.tracker,
    }
    for message, is_violated in rules.items():
        if is_violated:
            raise CommandError(message)
    return search, request.name


def _describe(search: "Search") -> str:
    from policies.settings.yaml12 import to_cli

    settings = search.settings
    axes = " and ".join(f"{key}={','.join(map(to_cli, values))}" for key, values in search.axes.items())
    return (
        f"A search over {axes}: {count_noun(search.trials, 'trial')} of {count_noun(settings.num_updates, 'update')}.\n"
        f"Objective: held-out task reward - {settings.report_kl_coef:g} KL (select_by={settings.select_by})."
    )


def _report_results(results: "pd.DataFrame", search: "Search", folder: Path, progress: "ProgressPrinter") -> int:
    """Prints the results and writes them into the search's folder; returns the exit code."""
    from launch.console.configuration import settings_to_yaml
    from launch.experiments.outcome import STATUS_FAILED, group_points, write_csv
    from launch.experiments.search import RESULTS_FILE
    from launch.experiments.space import format_point, format_setting_value
    from launch.experiments.tables import points_table
    from policies.files import atomic_write
    from policies.settings.settings import make_settings

    keys = search.keys
    write_csv(results, keys, folder / RESULTS_FILE)
    if results.empty:
        return 0
    points = group_points(results, keys)
    rows = [([*map(format_setting_value, point.iloc[0][keys])], point) for point in points]
    progress.print()
    progress.print(points_table(keys, rows), True)
    progress.print("", True)
    failed = results[results["status"] == STATUS_FAILED]
    for _, trial in failed.iterrows():
        progress.print(f"{trial['trial']} failed ({format_point(trial[[*keys, 'seed']])}): {trial['reason']}", True)
    if not points[0]["complete"].all():
        progress.print("Best      none: no point has all its trials complete", True)
    else:
        values = points[0].iloc[0][keys].to_dict()
        best_settings = make_settings({**search.settings.model_dump(), **values})
        atomic_write(folder / "best.yaml", f"# The best point of {folder.name}\n{settings_to_yaml(best_settings)}")
        progress.print(f"Best      {format_point(values)}: cory train {shlex.quote(str(folder / 'best.yaml'))}", True)
    progress.print(f"Results   {folder / RESULTS_FILE}", True)
    return int(not failed.empty)
