"""`cory plot RUN...`: draws the curves of a run, compares runs, or writes their metrics as CSV."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.console.cli import Debug, local_path, path_or_uri
from launch.console.errors import CommandError, make_folder

if TYPE_CHECKING:
    from launch.run_folder.run import Run


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
    csv: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", parser=local_path, help="Write all metrics to this CSV file instead; - prints them."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Draw the curves of a run, compare runs, or write all metrics as CSV.

    Several runs are drawn in one picture. Tables show the settings in which they differ, their held-out metrics, and
    the paired differences from the first run, with 95 % intervals: over seeds if runs differ only in the seed,
    otherwise over the queries of the evaluation after training (test_queries).

    --csv writes one row per value, for one or more runs: run, update, split, policy, role, metric, value. Splits:
      train       training responses, by policy or by role
      validation  held-out evaluations during training: each policy alone, their `mean`, and the role `last answer`,
                  which is the chain's last response
      run         metrics of the whole run, such as tokens, seconds and role exchanges

    Examples:
      cory plot runs/NAME
      cory plot runs/single runs/chain
      cory plot runs/single-* runs/chain-* --out seeds.png
      cory plot runs/a runs/b --csv curves.csv
      cory plot runs/NAME --csv - | grep validation,mean,,combined_reward
    """
    from launch.display.plot import FORMATS
    from launch.run_folder.run import Run

    if out is not None and csv is not None:
        raise CommandError("--out conflicts with --csv. Use one of them.")
    if out is not None and (out.suffix.removeprefix(".").lower() not in FORMATS or out.is_dir()):
        raise CommandError(f"{out} is not an image file. Use one of the suffixes .{', .'.join(FORMATS)}.")
    if csv is not None and csv.is_dir():
        raise CommandError(f"{csv} is a folder. Name a file with --csv.")
    locations = list(dict.fromkeys(runs))
    run_list = [Run.open(location) for location in locations]
    for run in run_list:
        if not run.metrics:
            raise CommandError(f"{run.path} has no metrics yet. Try again after the first update.")
    names = _short_names(locations)
    if csv is not None:
        _write_csv(run_list, names, csv)
    elif len(run_list) == 1:
        _draw(run_list[0], out or run_list[0].curves)
    else:
        _compare(run_list, names, out or Path("curves.png"))


def _draw(run: "Run", out: Path) -> None:
    from launch.display.plot import draw_run

    make_folder(out.parent)
    draw_run(run.metrics, run.settings, out)
    print(out)


def _compare(runs: "Sequence[Run]", names: Sequence[str], out: Path) -> None:
    from launch.display.comparison import ComparedRun, comparison_tables, draw_comparison, group_runs
    from launch.display.plot import save_figure
    from launch.display.tables import print_tables

    groups = group_runs([ComparedRun(run, name) for run, name in zip(runs, names, strict=True)])
    make_folder(out.parent)
    save_figure(draw_comparison(groups), out)
    print_tables(sys.stdout, *comparison_tables(groups))
    print(f"\n{out}")


def _write_csv(runs: "Sequence[Run]", names: Sequence[str], file: Path) -> None:
    from launch.display.frame import join_frames
    from policies.files import atomic_write

    frames = {name: run.frame() for name, run in zip(names, runs, strict=True)}
    text = join_frames(frames).dropna().to_csv(index=False, lineterminator="\n")
    if str(file) == "-":
        print(text, end="")
    else:
        make_folder(file.parent)
        atomic_write(file, text)
        print(file)


def _short_names(locations: Sequence[str]) -> list[str]:
    """Returns the names of the folders; if two are equal, the paths as the user wrote them."""
    names = [Path(location).resolve().name for location in locations]
    return names if len(set(names)) == len(names) else [*locations]
