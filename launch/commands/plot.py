"""`cory plot RUN`: draws the curves of a run, finished or not, from its `metrics.jsonl`; or writes them as CSV."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.console.cli import Debug, local_path, path_or_uri
from launch.console.errors import CommandError, make_folder

if TYPE_CHECKING:
    from launch.run_folder.run import Run


def plot(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", parser=path_or_uri, help="Folders or URIs of runs.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=local_path,
            help="Where to draw_curves one run. [default: RUN/curves.png; of a run in storage, NAME-curves.png here]",
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=local_path, help="Write the numbers of all curves here instead; -: print."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Draw the curves of a run: task reward, KL and combined reward; or write all curves as CSV.

    --csv writes a row per number, of several runs into one file: run, update, of, policy, measure, value. `of` says
    what was measured: training (by policy, and by role), held_out (each policy alone, and `mean`), last_response (the
    chain's, held out) or run (tokens, seconds, exchanges).

    Examples:
      cory plot runs/NAME
      cory plot runs/a runs/b --csv curves.csv
      cory plot runs/NAME --csv - | grep held_out,mean,combined_reward
    """
    if out is not None and csv is not None:
        raise CommandError("--out draws and --csv writes numbers: name one of them.")
    if csv is not None:
        _write_csv(runs, csv)
        return
    if out is not None and len(runs) > 1:
        raise CommandError(f"--out {out} is one picture, for one run. `cory report` draws several runs together.")
    for place in runs:
        _draw(place, out)


def _draw(place: str, out: Path | None) -> None:
    from launch.display.curves import draw_curves
    from launch.display.drawing import FORMATS

    if out is not None and (out.suffix.removeprefix(".").lower() not in FORMATS or out.is_dir()):
        raise CommandError(f"{out} names no picture. End it in one of .{', .'.join(FORMATS)}.")
    run_directory = _read_run_with_metrics(place)
    in_storage = run_directory.storage is not None
    file = out or (Path(f"{run_directory.path.name}-curves.png") if in_storage else run_directory.curves)
    make_folder(file.parent)
    draw_curves(run_directory.updates(), run_directory.settings(), file)
    print(file)


def _write_csv(places: Sequence[str], file: Path) -> None:
    from launch.display.frame import as_csv
    from launch.report.runs import short_names
    from launch.run_folder.journal import atomic_write

    if file.is_dir():
        raise CommandError(f"{file} is a folder: name a file with --csv.")
    places = list(dict.fromkeys(places))
    text = as_csv(
        {name: _read_run_with_metrics(place).updates() for name, place in zip(short_names(places), places, strict=True)}
    )
    if str(file) == "-":
        print(text, end="")
    else:
        make_folder(file.parent)
        atomic_write(file, text)
        print(file)


def _read_run_with_metrics(place: str) -> "Run":
    """Returns a run that has something to show."""
    from launch.run_folder.status import read_run

    run_directory = read_run(place)
    if not run_directory.updates():
        raise CommandError(f"{place} has no metrics yet: its first update is not finished. Try again in a while.")
    return run_directory
