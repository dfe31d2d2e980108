"""`cory tune`: searches over settings with Ray Tune, such as the exchange period."""

import functools
import importlib.util
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

RESUME_OPTIONS = ("resume", "max_updates", "max_minutes", "allow_changes", "quiet", "debug")
"""Options that do not say what a search is."""


def tune(
    ctx: typer.Context,
    words: Words = None,
    config: ConfigFiles = None,
    over: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUES", help="What to search; may be repeated.")
    ] = None,
    scheduler: Annotated[
        Literal["asha", "pbt"] | None, typer.Option(help="Stop the worst early, or clone the best.")
    ] = None,
    algorithm: Annotated[
        Literal["optuna"] | None, typer.Option("--search", help="Choose values by earlier trials.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Draws from ranges. [default: 1; of pbt 4]")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, metavar="N", help="Run every point with N seeds.")] = None,
    concurrent: Annotated[int | None, typer.Option(min=1, metavar="N", help="Trials at a time, at most.")] = None,
    max_updates: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stop after N updates of all trials.")
    ] = None,
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
    """Search over settings: many trainings, the held-out combined reward of each, and the best.

    What to search, by --over, which may be given several times:
      key=1,2,5,null            these values, every one of them
      key=log:1e-6:1e-4         drawn from a range, evenly in the logarithm; --samples says how many
      key=uniform:0:1           drawn evenly

    asha stops the worst trials early; pbt lets the worst continue as clones of the best, with other values; optuna
    (TPE, extra `optuna`) chooses each trial's values by how those before it ended; --samples says how many there are.

    The objective is the held-out combined reward, task reward - eval_kl_coef * KL, of what select_by says: the mean of
    the policies, unless it is set. eval_kl_coef is fixed before the search, so searching over kl_coef does not move the
    goal. Ctrl-C lets each running trial finish its update, and saves it. Checkpoints are pickles, which can run code:
    resume your own searches only.

    Examples:
      cory tune imdb-tiny --over exchange_period=1,2,5,10,20,null --seeds 3
      cory tune imdb-tiny --over lr=log:1e-5:1e-3 --over exchange_period=1,5 --samples 8 --scheduler asha
      cory tune imdb-tiny --over lr=log:1e-5:1e-3 --search optuna --samples 20 --max-minutes 90
      cory tune --resume runs/search

    Exit codes:
      0 all trials are done; 1 some failed; 2 a user error; 129, 130, 143 a signal stopped it.
    """
    from launch.cluster import session
    from launch.cluster.gpus import check_gpus
    from launch.console import output
    from launch.console.interrupts import Interrupts
    from launch.display.terminal import ProgressPrinter
    from launch.experiments.search import (
        Search,
        check_same,
        create_search_folder,
        is_resumable,
        read_reports,
        resolve_start,
        resume_command,
    )
    from launch.experiments.space import points, unique_kinds
    from launch.run_folder.layout import RUNS, new_folder
    from launch.run_folder.locks import lock_folder
    from launch.run_folder.manifest import own_version
    from launch.run_folder.storage import check_location
    from launch.training import preflight, tracking
    from launch.training.comparable import check_comparable, placed_settings, write_comparable

    if allow_changes and not (resume or continue_):
        raise CommandError("--allow-changes requires --resume or --continue.")
    folder, name, resuming = resume or out, "", resume is not None
    if resume:
        if any(value for option, value in ctx.params.items() if option not in RESUME_OPTIONS):
            allowed = ", ".join(f"--{option.replace('_', '-')}" for option in RESUME_OPTIONS[1:])
            raise CommandError(f"--resume continues a search as it was: besides it, only {allowed} may be given.")
        search = Search.read(resume)
    elif continue_ and not out:
        raise CommandError("--continue needs the search's folder: name it with --out.")
    else:
        search, name = read_search(SimpleNamespace(**ctx.params))
        name = f"tune-{name}"
        check_location(str(folder or RUNS / name), "search")
        if folder and continue_ and is_resumable(folder):
            check_same(folder, search)
            search, resuming = Search.read(folder), True  # with the date and the checkpoint of its start
        else:
            search = resolve_start(search)
    checked = points(search.settings, search.axes)
    tracking.check(search.settings)
    session.quiet_libraries(debug)
    for settings in unique_kinds(checked):
        check_gpus(settings)
        if not resuming:
            preflight.check(settings)
    sources = check_comparable(
        folder if resuming else None,
        [("A trial", settings) for settings in unique_kinds(checked)],
        preflight.check if resuming else preflight.load_task,
        lambda text: print(text, file=sys.stderr),
        allow_changes,
    )
    folder = folder or new_folder(name)
    if resuming:
        lock = lock_folder(folder)
    else:
        search = search._replace(settings=search.settings.with_chat_date())
        command = shlex.join(["cory", "tune", *ctx.meta["words"]])
        lock = create_search_folder(folder, search, f"{command}  # cory-rllib {own_version()}")
    stopping = "Running trials finish their update and are saved. Ctrl-C again aborts at once."
    interrupts = Interrupts(lambda: voice.print(stopping, True))
    with lock, interrupts:
        write_comparable(folder, sources)
        past, total = len(read_reports(folder)), search.trials * search.settings.num_updates
        voice = ProgressPrinter(output.dup_stdout(), total, done=past, quiet=quiet, bar=not debug)
        voice.print(_describe(search))
        voice.print(f"Search folder: {folder}")
        hint = f"Continue with:\n  {resume_command(folder)}"
        try:
            from launch.experiments.callbacks import StopCallback
            from launch.experiments.outcome import STATUS_UNFINISHED
            from launch.experiments.tuning import run_search

            stop = StopCallback(interrupts, max_updates, max_minutes)
            locate = functools.partial(placed_settings, sources=sources.values())
            results = run_search(search, folder, locate, voice, stop, debug)
            exit_code = _report_results(results, search, folder, voice)
        except KeyboardInterrupt:
            voice.print(f"Aborted. {hint}" if is_resumable(folder) else "Aborted.", True)
            return interrupts.exit_code
    if len(results) < search.trials or (results["status"] == STATUS_UNFINISHED).any():
        is_spent = interrupts.requested is None and stop.is_spent
        reason = f"The budget is spent after {count_noun(stop.done.total(), 'update')}." if is_spent else "Stopped."
        voice.print(f"{reason} {hint}", True)
        return exit_code if is_spent else interrupts.exit_code
    return exit_code


def read_search(options: Any) -> "tuple[Search, str]":
    """Returns the search that the options describe, and what it is named after.

    Args:
        options: the parameters of `tune`.

    Raises:
        CommandError: they describe none that could be run.
    """
    from launch.console.configuration import split_words
    from launch.experiments.search import Search
    from launch.experiments.space import SEED_KEY, pin_objective, read_axes
    from policies.settings.settings import METADATA

    request = split_words(options.words or (), options.config or ())
    settings = request.settings()
    axes = read_axes(options.over or ())
    keys = {axis.key for axis in axes}
    pbt, asha = options.scheduler == "pbt", options.scheduler == "asha"
    optuna, seeds = options.algorithm == "optuna", options.seeds or 1
    is_grid = all(axis.scale is None for axis in axes) and not (pbt or optuna)
    fixed = ", ".join(sorted(key for key in keys if not METADATA[key].clone))
    rules = {
        "Nothing to search: name a setting and its values, such as --over exchange_period=1,5,null.": not axes,
        "--samples is for ranges, and --over lists its values. To repeat points, use --seeds.": (
            is_grid and options.samples
        ),
        "--seeds conflicts with --over seed. Leave one out.": options.seeds and SEED_KEY in keys,
        "--seeds conflicts with --scheduler asha, which stops a point's unlucky seeds and leaves the mean of the lucky "
        "ones. Run the best values with --seeds afterwards.": asha and seeds > 1,
        "--search optuna chooses one trial after another: it requires --samples and conflicts with --scheduler pbt and "
        "--seeds.": optuna and (pbt or options.seeds or not options.samples),
        "--scheduler pbt conflicts with --seeds and --concurrent: each trial has a seed of its own, and as many run at "
        "a time as fit.": pbt and (options.seeds or options.concurrent),
        "--scheduler pbt clones the best of several trials: it requires --samples of at least 2.": (
            pbt and options.samples == 1
        ),
        "test_queries conflicts with a search, which evaluates no final queries. Train the best point with it.": (
            settings.test_queries is not None
        ),
        f"--scheduler pbt cannot change {fixed} while a trial runs. Leave the scheduler out, or use asha.": (
            pbt and fixed
        ),
        "--scheduler pbt cannot change kl_coef if a controller does. Set kl_control=fixed, or search over kl_target.": (
            pbt and "kl_coef" in keys and settings.kl_control == "adaptive"
        ),
        f"--scheduler compares trials after evaluations: it needs one eval_every, below "
        f"num_updates={settings.num_updates}.": (
            options.scheduler and ("eval_every" in keys or settings.eval_every >= settings.num_updates)
        ),
        "--search optuna needs the package optuna. Run `pip install optuna`.": (
            optuna and importlib.util.find_spec("optuna") is None
        ),
    }
    for message, is_broken in rules.items():
        if is_broken:
            raise CommandError(message)
    samples = options.samples or (4 if pbt else 1)
    pinned = pin_objective(settings)
    search = Search(pinned, axes, options.scheduler, samples, seeds, options.concurrent, options.algorithm)
    return search, request.name


def _describe(search: "Search") -> str:
    settings = search.settings
    axes = " and ".join(axis.word for axis in search.axes)
    seeds = f", {search.seeds} seeds each" if search.seeds > 1 else ""
    measured = {"bare": "mean of the policies", "chain": "the chain's last answer", "mean": "the mean of the LLMs"}
    return (
        f"A search over {axes}: {search.trials} trials{seeds}, {count_noun(settings.num_updates, 'update')} of "
        f"{settings.queries_per_update} queries each.\n"
        f"Objective: held-out task reward - {settings.report_kl_coef:g} KL, {measured[settings.select_by]}."
    )


def _report_results(results: "pd.DataFrame", search: "Search", folder: Path, voice: "ProgressPrinter") -> int:
    """Prints what was found, and writes it into the search's folder.

    Returns:
        0, or 1 when a trial failed.
    """
    from launch.console.configuration import as_yaml
    from launch.experiments.outcome import STATUS_FAILED, group_points, write_csv
    from launch.experiments.search import RESULTS_FILE
    from launch.experiments.space import format_point, show_value
    from launch.experiments.tables import points_table
    from launch.run_folder.journal import atomic_write
    from policies.settings.settings import make_settings

    keys = [axis.key for axis in search.axes]
    write_csv(results, keys, folder / RESULTS_FILE)
    if results.empty:
        return 0
    points = group_points(results, keys, apart=search.scheduler == "pbt")
    voice.print()
    voice.print(points_table(keys, [([*map(show_value, point.iloc[0][keys])], point) for point in points]), True)
    voice.print("", True)
    failed = results[results["status"] == STATUS_FAILED]
    for _, trial in failed.iterrows():
        voice.print(f"{trial['trial']} failed ({format_point(trial[[*keys, 'seed']])}): {trial['reason']}", True)
    best = points[0]
    if not best["whole"].all():
        voice.print("Best      none: of no point all trials ran to their end", True)
    else:
        values = best.iloc[0][keys].to_dict()
        chosen = make_settings({**search.settings.model_dump(), **values})
        atomic_write(folder / "best.yaml", f"# The best point of {folder.name}\n{as_yaml(chosen)}")
        voice.print(f"Best      {format_point(values)}: cory train {shlex.quote(str(folder / 'best.yaml'))}", True)
    voice.print(f"Results   {folder / RESULTS_FILE}", True)
    return int(not failed.empty)
