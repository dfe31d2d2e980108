"""`cory plot RUN`: draws the curves of a run from its `metrics.jsonl`, or writes its metrics as CSV."""

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
            help="Image file, for a single run. [default: RUN/curves.png; ./NAME-curves.png for a run in storage]",
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
    """Draw the curves of a run (task reward, KL and combined reward), or write all metrics as CSV.

    --csv writes one row per value, for one or more runs: run, update, split, policy, role, metric, value. Splits:
      train       training responses, by policy or by role
      validation  held-out evaluations during training: each policy alone, their `mean`, and the role `last answer`,
                  which is the chain's last response
      run         metrics of the whole run, such as tokens, seconds and role exchanges

    Examples:
      cory plot runs/NAME
      cory plot runs/a runs/b --csv curves.csv
      cory plot runs/NAME --csv - | grep validation,mean,,combined_reward
    """
    if out is not None and csv is not None:
        raise CommandError("--out conflicts with --csv. Use one of them.")
    if csv is not None:
        _write_csv(runs, csv)
        return
    if out is not None and len(runs) > 1:
        raise CommandError(f"--out {out} is for a single run. Plot several runs with `cory report`.")
    for location in runs:
        _draw(location, out)


def _draw(location: str, out: Path | None) -> None:
    from launch.display.curves import draw_curves
    from launch.display.drawing import FORMATS

    if out is not None and (out.suffix.removeprefix(".").lower() not in FORMATS or out.is_dir()):
        raise CommandError(f"{out} is not an image file. Use one of the suffixes .{', .'.join(FORMATS)}.")
    run = _read_run_with_metrics(location)
    file = out or (run.curves if run.storage is None else Path(f"{run.path.name}-curves.png"))
    make_folder(file.parent)
    draw_curves(run.updates(), run.settings(), file)
    print(file)


def _write_csv(locations: Sequence[str], file: Path) -> None:
    from launch.display.frame import as_csv
    from launch.report.runs import short_run_names
    from launch.run_folder.journal import atomic_write

    if file.is_dir():
        raise CommandError(f"{file} is a folder. Name a file with --csv.")
    locations = list(dict.fromkeys(locations))
    names = short_run_names(locations)
    text = as_csv({name: _read_run_with_metrics(run).updates() for name, run in zip(names, locations, strict=True)})
    if str(file) == "-":
        print(text, end="")
    else:
        make_folder(file.parent)
        atomic_write(file, text)
        print(file)


def _read_run_with_metrics(location: str) -> "Run":
    """Reads a run.

    Raises:
        CommandError: It has no metrics yet.
    """
    from launch.run_folder.status import read_run

    run = read_run(location)
    if not run.updates():
        raise CommandError(f"{location} has no metrics yet. Try again after the first update.")
    return run
