"""`cory report`: writes an HTML report about runs or studies."""

from pathlib import Path
from typing import Annotated

import typer

from launch.console.cli import Debug, local_path, path_or_uri
from launch.console.errors import CommandError, make_folder


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN|STUDY...", parser=path_or_uri, help="Folders or URIs of runs; folders of studies."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=local_path,
            help="The HTML file. [default: report.html in the run's folder; for several runs, or one in storage, here]",
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=local_path, help="Also save the plots as PNG files in this folder."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a self-contained HTML report about runs or studies: tables, curves, samples and settings.

    Runs that differ only in the seed form one arm.
    """
    from launch.report.page import render_page
    from launch.report.runs import read_runs
    from launch.run_folder.journal import atomic_write
    from launch.run_folder.storage import check_location, is_uri

    if out is None:
        has_folder = len(runs) == 1 and not is_uri(runs[0]) and Path(runs[0]).is_dir()
        out = Path(runs[0] if has_folder else ".") / "report.html"
    for folder in (out.parent, png or out.parent):
        check_location(str(folder), "report")
    if out.is_dir():
        raise CommandError(f"{out} is a folder. Name a file with --out, such as {out / 'report.html'}.")
    reported_runs = read_runs(runs)
    if not any(run.updates for run in reported_runs):
        raise CommandError(f"{runs[0]} has no metrics yet. Try again after the first update.")
    html, plots = render_page(reported_runs)
    make_folder(out.parent)
    atomic_write(out, html)
    print(out)
    if png is not None:
        make_folder(png)
        for plot in plots:
            plot.save(png / f"{plot.name}.png")
            print(png / f"{plot.name}.png")
