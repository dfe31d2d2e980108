"""`cory plot RUN`: draws the curves of a run, finished or not, from its `metrics.jsonl`; or writes them as CSV."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.console.errors import CommandError, make_folder
from launch.console.output import print_utf8
from launch.console.parser import Parser, local_path, path_or_uri, run

if TYPE_CHECKING:
    from launch.run_folder.run import Run

EPILOG = """--csv writes a row per number, of several runs into one file: run, update, of, policy, measure, value. `of`
says what was measured: training (by policy, and by role), held_out (each policy alone, and `mean`), last_answer (the
chain's, held out) or run (tokens, seconds, exchanges).

examples:
  cory plot runs/NAME
  cory plot runs/a runs/b --csv curves.csv
  cory plot runs/NAME --csv - | grep held_out,mean,combined_reward
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0, or 2 when there is nothing to draw.
    """
    parser = Parser(
        prog="cory plot",
        description="Draw the curves of a run: task reward, KL and combined reward; or write all curves as CSV.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs",
        type=path_or_uri,
        nargs="+",
        metavar="RUN",
        help="the run's folder, such as runs/imdb-tiny-20250101-120000, or its URI",
    )
    parser.add_argument(
        "--out",
        type=local_path,
        metavar="FILE",
        help="where to draw (default: curves.png in the run's folder; of a run in storage, NAME-curves.png here)",
    )
    parser.add_argument(
        "--csv", type=local_path, metavar="FILE", help="write the numbers of all curves here instead; -: print them"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    return run(lambda: _command(options.runs, options.out, options.csv), debug=options.debug)


def _command(places: Sequence[str], out: Path | None, csv: Path | None) -> int:
    if out is not None and csv is not None:
        raise CommandError("--out draws and --csv writes numbers: name one of them.")
    if csv is not None:
        return write_csv(places, csv)
    if out is not None and len(places) > 1:
        raise CommandError(f"--out {out} is one picture, for one run. `cory report` draws several runs together.")
    for place in places:
        plot(place, out)
    return 0


def plot(place: str | Path, out: Path | None = None) -> int:
    """Draws the curves and says where they are.

    Raises:
        CommandError: there is no run, or one without metrics, or nothing can be drawn there.
        StorageError: storage cannot be read.
    """
    from launch.display.curves import draw
    from launch.display.drawing import FORMATS

    if out is not None and (out.suffix.removeprefix(".").lower() not in FORMATS or out.is_dir()):
        raise CommandError(f"{out} names no picture. End it in one of .{', .'.join(FORMATS)}.")
    run_directory = _with_metrics(place)
    in_storage = run_directory.storage is not None
    file = out or (Path(f"{run_directory.path.name}-curves.png") if in_storage else run_directory.curves)
    make_folder(file.parent)
    draw(run_directory.updates(), run_directory.settings(), file)
    print(file)
    return 0


def write_csv(places: Sequence[str], file: Path) -> int:
    """Writes the numbers of all curves, and says where they are.

    Args:
        places: folders or URIs of runs.
        file: where to, replaced if it exists; `-`: the standard output.

    Raises:
        CommandError: there is no run, or one without metrics, or nothing can be written there.
        StorageError: storage cannot be read.
    """
    from launch.display.frame import as_csv
    from launch.report.runs import names
    from launch.run_folder.journal import replace_text

    if file.is_dir():
        raise CommandError(f"{file} is a folder: name a file with --csv.")
    places = list(dict.fromkeys(places))
    text = as_csv({name: _with_metrics(place).updates() for name, place in zip(names(places), places, strict=True)})
    if str(file) == "-":
        print_utf8(text)
    else:
        make_folder(file.parent)
        replace_text(file, text)
        print(file)
    return 0


def _with_metrics(place: str | Path) -> "Run":
    """Returns a run that has something to show."""
    from launch.run_folder.status import read_run

    run_directory = read_run(place)
    if not run_directory.updates():
        raise CommandError(f"{place} has no metrics yet: its first update is not finished. Try again in a while.")
    return run_directory
