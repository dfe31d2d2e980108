"""`cory report`: writes one HTML file about any number of runs, or a study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch.console.errors import CommandError, make_folder
from launch.console.parser import Parser, local_path, path_or_uri, run

OUT = Path("report.html")


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0, or 2 after a user's mistake.
    """
    parser = Parser(
        prog="cory report",
        description="Write one HTML file about runs or a study, which needs no network: curves, tables, samples.",
    )
    parser.add_argument(
        "runs",
        type=path_or_uri,
        nargs="+",
        metavar="RUN|STUDY",
        help="folders or URIs of runs, of which those that differ in the seed alone are one arm; folders of studies",
    )
    parser.add_argument("--out", type=local_path, default=OUT, metavar="FILE", help=f"where to (default: {OUT})")
    parser.add_argument("--png", type=local_path, metavar="DIR", help="also draw the plots as PNGs into this folder")
    parser.add_argument(
        "--plots",
        type=lambda text: text.split(","),
        metavar="NAME,NAME",
        help="with --png: draw these alone, such as pareto,'sweep-*' (default: all, a few seconds each)",
    )
    parser.add_argument(
        "--claims", type=local_path, metavar="FILE", help="claims that were judged by these runs (docs/report.md)"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    return run(
        lambda: report(options.runs, options.out, options.png, options.claims, options.plots), debug=options.debug
    )


def report(
    addresses: Sequence[str | Path],
    out: Path = OUT,
    png: Path | None = None,
    claims: Path | None = None,
    plots: Sequence[str] | None = None,
) -> int:
    """Writes the report and says where it is.

    Args:
        addresses: folders or URIs of runs, finished or not, or folders of studies.
        out: the HTML file, replaced if it exists.
        png: where to draw the plots, too.
        claims: a file of claims that were judged by these runs.
        plots: names, or patterns of names, of the plots that are drawn there; None: all.

    Raises:
        CommandError: an address is neither's, a file there is damaged, there is no such plot, or nothing can be
            written.
        StorageError: storage cannot be read.
    """
    from launch.report.page import page
    from launch.report.runs import read
    from launch.report.tables import read_claims
    from launch.run_folder.journal import replace_text
    from launch.run_folder.storage import check_place

    for folder in (out.parent, png or out.parent):
        check_place(str(folder), "report")
    if plots and png is None:
        raise CommandError("--plots chooses among PNGs: say with --png which folder they are drawn into.")
    if out.is_dir():
        raise CommandError(f"{out} is a folder. Name a file with --out, such as {out / OUT}.")
    runs = read(addresses)
    if not any(run.updates for run in runs):
        raise CommandError(
            f"{addresses[0]} has no metrics yet: its first update is not finished. Try again in a while."
        )
    made = page(runs, read_claims(claims) if claims else ())
    drawn = made.named(plots) if plots else made.plots
    for folder in (out.parent, png or out.parent):
        make_folder(folder)
    replace_text(out, made.html)
    print(out)
    if png is not None:
        for plot in drawn:
            plot.save(png / f"{plot.name}.png")
            print(png / f"{plot.name}.png")
    return 0
