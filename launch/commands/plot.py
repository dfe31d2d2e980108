"""`cory plot RUN...`: draws the curves of a run, or compares runs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from launch.console.cli import Debug, local_path, path_or_uri
from launch.console.errors import CommandError, make_folder


def plot(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", parser=path_or_uri, help="Folders of runs.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=local_path,
            help="Image file. [default: RUN/curves.png; ./curves.png for several runs]",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Draw the curves of a run, or compare runs.

    Several runs are drawn in one picture. Tables show the settings in which they differ, their held-out metrics, and
    the paired differences from the first run, with 95 % intervals: over seeds if runs differ only in the seed,
    otherwise over the queries of the evaluation after training (test_queries).

    Examples:
      cory plot runs/NAME
      cory plot runs/single runs/chain
      cory plot runs/single-* runs/chain-* --out seeds.png
    """
    from launch.display.comparison import ComparedRun, comparison_tables, draw_comparison, group_runs
    from launch.display.plot import FORMATS, draw_run, save_figure
    from launch.display.tables import print_tables
    from launch.run_folder.run import Run

    if out is not None and (out.suffix.removeprefix(".").lower() not in FORMATS or out.is_dir()):
        raise CommandError(f"{out} is not an image file. Use one of the suffixes .{', '.join(FORMATS)}.")
    locations = list(dict.fromkeys(runs))
    run_list = [Run.open(location) for location in locations]
    for run in run_list:
        if not run.metrics:
            raise CommandError(f"{run.path} has no metrics yet. Try again after the first update.")
    if len(run_list) == 1:
        file = out or run_list[0].curves
        make_folder(file.parent)
        draw_run(run_list[0].metrics, run_list[0].settings, file)
    else:
        file = out or Path("curves.png")
        make_folder(file.parent)
        groups = group_runs([ComparedRun(run, name) for run, name in zip(run_list, _names(locations), strict=True)])
        save_figure(draw_comparison(groups), file)
        print_tables(sys.stdout, *comparison_tables(groups))
        print()
    print(file)


def _names(locations: Sequence[str]) -> Sequence[str]:
    """Returns the names of the folders; if two are equal, the paths as the user wrote them."""
    names = [Path(location).resolve().name for location in locations]
    return names if len(set(names)) == len(names) else locations
