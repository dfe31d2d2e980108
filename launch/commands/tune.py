"""`cory tune`: searches over settings with Ray Tune, such as the exchange period."""

import argparse
import functools
import importlib.util
import math
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.cluster.room import counted
from launch.console.errors import CommandError, FolderError
from launch.console.parser import Parser, local_path, run

if TYPE_CHECKING:
    from launch.display.terminal import Voice
    from launch.experiments.outcome import TrialResult
    from launch.experiments.search import Search
    from launch.experiments.space import Axis

USAGE = """cory tune [PRESET|FILE] [-c FILE ...] [key=value ...] --over key=VALUES ... [options]
       cory tune --resume DIR"""

EPILOG = """what to search, by --over, which may be given several times:
  key=1,2,5,null            these values, every one of them
  key=log:1e-6:1e-4         drawn from a range, evenly in the logarithm; --samples says how many
  key=uniform:0:1           drawn evenly

The objective is the held-out combined reward, task reward - eval_kl_coef * KL, of what select_by says: the mean of the
policies, unless it is set. eval_kl_coef is fixed before the search, so searching over kl_coef does not move the goal.

examples:
  cory tune imdb-tiny --over exchange_period=1,2,5,10,20,null --seeds 3
  cory tune imdb-tiny --over lr=log:1e-5:1e-3 --over exchange_period=1,5 --samples 8 --scheduler asha
  cory tune imdb-tiny --over lr=log:1e-5:1e-3 --over clip=uniform:0.1:0.3 --search optuna --samples 20 --max-minutes 90
  cory tune --resume runs/search

Ctrl-C lets each running trial finish its update, and saves it.

exit codes:
  0 all trials are done; 1 some failed; 2 a mistake that you can correct; 129, 130, 143 you stopped it.
"""


WITH_RESUME = ("words", "resume", "max_updates", "max_minutes", "allow_changes", "quiet", "debug")
"""Options that do not say what a search is, and the words, by their attribute."""
SPELLED = {"algorithm": "search", "go_on": "continue"}
"""Options that are not spelled as their attribute."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0; 1 when trials failed; 2 after a user's mistake; 129, 130 or 143 when a signal stopped the search.
    """
    words = sys.argv[1:] if argv is None else argv
    options = parse(words)
    return run(lambda: _command(options, words), debug=options.debug)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Reads the command's words; a word that is none of them ends the process."""
    return _parser().parse_intermixed_args(words)


def _parser() -> Parser:
    parser = Parser(
        prog="cory tune",
        usage=USAGE,
        description="Search over settings: many trainings, the held-out combined reward of each, and the best.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="PRESET|FILE, key=value", help="as for `cory train`")
    parser.add_argument(
        "-c", "--config", action="append", default=[], type=local_path, metavar="FILE", help="YAML of settings"
    )
    parser.add_argument("--over", action="append", default=[], metavar="key=VALUES", help="what to search")
    parser.add_argument(
        "--scheduler",
        choices=("asha", "pbt"),
        help="asha: stop the worst trials early; pbt: let the worst continue as clones of the best, with other values",
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="draws from ranges (default: 1); under pbt, the trials (default: 4)"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="run every point with so many seeds, for intervals")
    parser.add_argument(
        "--search",
        choices=("optuna",),
        dest="algorithm",
        help="optuna: choose each trial's values by how those before it ended (TPE; extra `optuna`); --samples says "
        "how many trials (default: all lists, and random draws from ranges)",
    )
    parser.add_argument(
        "--max-updates", type=int, metavar="N", help="stop and save all after so many updates of all trials together"
    )
    parser.add_argument("--max-minutes", type=float, metavar="M", help="stop and save all after so many minutes")
    parser.add_argument("--concurrent", type=int, metavar="N", help="trials at a time, at most (default: all that fit)")
    parser.add_argument("--out", type=local_path, metavar="DIR", help="the search's (default: runs/tune-NAME-TIME)")
    parser.add_argument(
        "--continue", action="store_true", dest="go_on", help="if --out holds this search already, go on with it"
    )
    parser.add_argument(
        "--resume",
        type=local_path,
        metavar="DIR",
        help="continue a search: unfinished and failed trials go on from their checkpoints. Checkpoints are "
        "pickles, which can run code: resume your own searches only",
    )
    parser.add_argument(
        "--allow-changes",
        action="store_true",
        help="continue a search although its queries, model, tokenizer or templates are not what it began with",
    )
    parser.add_argument("--quiet", action="store_true", help="print only what was found")
    parser.add_argument("--debug", action="store_true", help="show libraries' logs and tracebacks")
    return parser


def _command(options: argparse.Namespace, words: Sequence[str]) -> int:
    from launch.cluster import session
    from launch.cluster.gpus import check_gpus
    from launch.console import output
    from launch.console.interrupts import Interrupts
    from launch.display.terminal import Voice
    from launch.experiments.outcome import UNFINISHED
    from launch.experiments.search import (
        Search,
        begun,
        check_free,
        check_same,
        create,
        read_reports,
        resolve_start,
        resume_command,
    )
    from launch.experiments.space import points, unique_kinds
    from launch.run_folder.layout import RUNS, new_folder
    from launch.run_folder.locks import folder_watched, lock_folder
    from launch.run_folder.manifest import own_version
    from launch.run_folder.storage import check_place
    from launch.training import preflight, tracking
    from launch.training.comparable import check_comparable, placed_settings, write_comparable

    if options.allow_changes and not (options.resume or options.go_on):
        raise CommandError("--allow-changes requires --resume or --continue.")
    if options.resume:
        _check_resume(options)
        search, folder, name, resume = Search.read(options.resume), options.resume, "", True
    else:
        if options.go_on and not options.out:
            raise CommandError("--continue needs the search's folder: name it with --out.")
        search, name = read_search(options)
        folder, name = options.out, f"tune-{name}"
        check_place(str(folder or RUNS / name), "search")
        resume = options.go_on and begun(folder)
        if resume:
            check_same(folder, search)
            search = Search.read(folder)  # with the date and the checkpoint of its start
        elif folder is not None:
            check_free(folder)
    if not resume:
        search = resolve_start(search)
    checked = points(search.settings, search.axes)
    tracking.check(search.settings)
    session.quiet_libraries(options.debug)
    for settings in unique_kinds(checked):
        check_gpus(settings)
        if not resume:
            preflight.check(settings)
    kinds = check_comparable(
        folder if resume else None,
        unique_kinds(checked),
        preflight.check if resume else preflight.load_task,
        lambda text: print(text, file=sys.stderr),
        options.allow_changes,
    )
    if not resume:
        search = search._replace(settings=search.settings.with_chat_date())
    origin = f"{shlex.join(['cory', 'tune', *words])}  # cory-rllib {own_version()}"
    new = folder is None or not folder.exists()
    folder = folder or new_folder(name)
    lock = lock_folder(folder) if resume else create(folder, search, origin)
    write_comparable(folder, kinds)
    past = len(read_reports(folder)) if resume else 0
    total = search.trials * search.settings.updates
    voice = Voice(output.own_output(), total, done=past, quiet=options.quiet, bar=not options.debug)
    voice.say(_describe(search))
    voice.say(f"Search folder: {folder}" + (" (going on)" if resume else ""))
    stopping = "Running trials finish their update and are saved. Ctrl-C again aborts at once."
    interrupts = Interrupts(lambda: voice.say(stopping, True))
    go_on = f"Go on with:\n  {resume_command(folder)}"
    started = time.monotonic()
    with lock, interrupts:
        try:
            from launch.experiments.callbacks import Budget
            from launch.experiments.tuning import run_search

            budget = Budget(options.max_updates or math.inf, options.max_minutes or math.inf)
            locate = functools.partial(placed_settings, sources=kinds.values())
            with folder_watched(folder, lambda path: f"Go on with: {resume_command(path)}") as handle:
                results = run_search(search, handle, locate, voice, interrupts, budget, options.debug)
                exit_code = report(results, search, folder, voice, time.monotonic() - started)
        except KeyboardInterrupt:
            voice.say(f"Aborted. {go_on}" if begun(folder) else "Aborted.", True)
            return interrupts.exit_code
        except CommandError as error:
            if new and not begun(folder) and not isinstance(error, FolderError):  # as where there is no room
                shutil.rmtree(folder)
            raise
        if any(result.status == UNFINISHED for result in results) or len(results) < search.trials:
            spent = interrupts.requested is None and budget.spent
            reason = f"The budget is spent after {counted(budget.done, 'update')}." if spent else "Stopped."
            voice.say(f"{reason} {go_on}", True)
            return exit_code if spent else interrupts.exit_code
    return exit_code


def _check_numbers(options: argparse.Namespace) -> None:
    for name in ("samples", "seeds", "concurrent", "max_updates"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise CommandError(f"--{name.replace('_', '-')} {value}: at least 1.")
    if options.max_minutes is not None and not 0 < options.max_minutes < math.inf:
        raise CommandError(f"--max-minutes {options.max_minutes:g}: above 0.")


def _check_resume(options: argparse.Namespace) -> None:
    """Refuses what would change a search that goes on, and no budget."""
    fixed = (name for name, value in vars(options).items() if value and name not in WITH_RESUME)
    given = [*options.words, *(f"--{SPELLED.get(name, name)}" for name in fixed)]
    if given:
        raise CommandError(
            f"A search goes on as it was: leave out {', '.join(given)}. Only a budget, "
            "--allow-changes, --quiet and --debug go with --resume."
        )
    _check_numbers(options)


def read_search(options: argparse.Namespace, folder: Path = Path()) -> "tuple[Search, str]":
    """Returns the search that the options describe, and what it is named after.

    Args:
        options: as parsed.
        folder: that paths of files of settings are relative to.

    Raises:
        CommandError: they describe none that could be run.
    """
    from launch.console.configuration import asked
    from launch.experiments.search import Search
    from launch.experiments.space import SEED, check_evaluations, pin_objective, read_axes, refuse_unused
    from policies.settings.settings import ABOUT

    request = asked(options.words, options.config, folder)
    settings = request.settings()
    axes = read_axes(options.over)
    if not axes:
        raise CommandError("Nothing to search: name a setting and its values, such as --over exchange_period=1,5,null.")
    _check_numbers(options)
    refuse_unused(settings, axes)
    pbt = options.scheduler == "pbt"
    optuna = options.algorithm == "optuna"
    if optuna:
        _check_optuna(options, axes)
    samples = options.samples or (4 if pbt else 1)
    listed = all(axis.scale is None for axis in axes)
    if options.samples and listed and not (pbt or optuna):
        raise CommandError("--samples is for ranges, and --over lists its values. To repeat points, use --seeds.")
    if options.seeds and SEED in (axis.key for axis in axes):
        raise CommandError("--seeds and --over seed say the same twice. Leave one out.")
    if pbt:
        if samples < 2:
            raise CommandError("--scheduler pbt needs a population: --samples 2 or more.")
        if options.seeds or options.concurrent:
            raise CommandError(
                "--seeds and --concurrent do not go with --scheduler pbt: each trial has a seed of its own, and as "
                "many run at a time as fit. Leave them out."
            )
        keys = {axis.key for axis in axes}
        if "kl_coef" in keys and settings.kl_control == "adaptive":
            raise CommandError(
                "--scheduler pbt cannot change kl_coef where a controller does. Set kl_control=fixed, or search over "
                "kl_target."
            )
        for key in sorted(key for key in keys if not ABOUT[key].clone):
            raise CommandError(
                f"--scheduler pbt cannot change {key} while a trial runs. Leave the scheduler out, or use asha. It can "
                f"change: {', '.join(name for name, known in ABOUT.items() if known.clone)}."
            )
    if options.scheduler == "asha" and (options.seeds or 1) > 1:
        raise CommandError(
            "--seeds does not go with --scheduler asha, which stops a point's unlucky seeds and leaves the mean of the "
            "lucky ones. Search with one seed, then run the best values with --seeds and without a scheduler."
        )
    if options.scheduler:
        check_evaluations(settings, options.scheduler, axes)
    found = Search(
        pin_objective(settings),
        axes,
        options.scheduler,
        samples,
        options.seeds or 1,
        options.concurrent,
        options.algorithm,
    )
    return found, request.name


def _check_optuna(options: argparse.Namespace, axes: "list[Axis]") -> None:
    if importlib.util.find_spec("optuna") is None:
        raise CommandError(
            "--search optuna needs the package optuna, which is not installed. Run `pip install optuna`."
        )
    if options.scheduler == "pbt" or options.seeds:
        raise CommandError(
            "--search optuna goes with neither --scheduler pbt nor --seeds: it chooses one trial after another. Leave "
            "them out; run the best values with --seeds afterwards."
        )
    if not options.samples:
        raise CommandError("--search optuna needs a number of trials: --samples 20, for example.")
    for axis in axes:
        if any(isinstance(value, list) for value in axis.values):
            raise CommandError(f"--over {axis.word}: --search optuna cannot choose among lists. Leave it out.")


def _describe(search: "Search") -> str:
    axes = " and ".join(axis.word for axis in search.axes)
    seeds = f", {search.seeds} seeds each" if search.seeds > 1 else ""
    chosen = " Each is chosen by how those before it ended." if search.algorithm else ""
    how = {None: "", "asha": " Bad ones are stopped early.", "pbt": " Bad ones continue as clones of good ones."}
    settings = search.settings
    whose = {"bare": "mean of the policies", "chain": "of the chain's last answer", "mean": "of the mean of the LLMs"}
    updates = counted(settings.updates, "update")
    return (
        f"A search over {axes}: {search.trials} trials{seeds}, {updates} of {settings.queries} queries "
        f"each.{chosen}{how[search.scheduler]}\n"
        f"Objective: held-out task reward - {settings.report_kl_coef:g} KL, {whose[settings.select_by]}."
    )


def report(results: "list[TrialResult]", search: "Search", folder: Path, voice: "Voice", seconds: float) -> int:
    """Prints what was found, and writes it into the search's folder.

    Returns:
        0, or 1 when a trial failed.
    """
    from launch.console.configuration import as_yaml
    from launch.display.drawing import save
    from launch.experiments.objective_plot import draw_objective
    from launch.experiments.outcome import FAILED, group_points, points_table, write_csv
    from launch.experiments.search import RESULTS
    from launch.experiments.space import show_point
    from launch.run_folder.journal import replace_text
    from policies.settings.settings import make_settings

    write_csv(results, folder / RESULTS)
    if not results:
        return 0
    apart = search.scheduler == "pbt"
    points = group_points(results, apart)
    save(draw_objective(points, search.axes, apart), folder / "objective.png")
    voice.say()
    voice.say(points_table(points, search.axes), True)
    voice.say("", True)
    failed = [result for result in results if result.status == FAILED]
    for result in failed:
        point = show_point({**result.values, "seed": result.seed})
        voice.say(f"{result.trial} failed ({point}): {result.reason}", True)
    best = points[0]
    if not best.complete:
        voice.say("Best      none: of no point all trials ran to their end", True)
    else:
        chosen = make_settings({**search.settings.model_dump(), **best.values})
        replace_text(folder / "best.yaml", f"# The best point of {folder.name}\n{as_yaml(chosen)}")
        voice.say(f"Best      {show_point(best.values)}: cory train {shlex.quote(str(folder / 'best.yaml'))}", True)
    voice.say(f"Results   {folder / RESULTS}, objective.png", True)
    voice.say(f"Took      {seconds / 60:.1f} min")
    return 1 if failed else 0
