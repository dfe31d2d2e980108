"""`cory report`: writes one HTML file about any number of runs, or a study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch.console.errors import CommandError
from launch.console.parser import Parser, local_path, run

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
        nargs="+",
        metavar="RUN|STUDY",
        help="folders or URIs of runs, of which those that differ in the seed alone are one arm; folders of studies",
    )
    parser.add_argument("--out", type=local_path, default=OUT, metavar="FILE", help=f"where to (default: {OUT})")
    parser.add_argument("--png", type=local_path, metavar="DIR", help="also draw every plot into a PNG in this folder")
    parser.add_argument(
        "--claims", type=local_path, metavar="FILE", help="claims that were judged by these runs (docs/report.md)"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    return run(lambda: report(options.runs, options.out, options.png, options.claims), debug=options.debug)


def report(places: Sequence[str | Path], out: Path = OUT, png: Path | None = None, claims: Path | None = None) -> int:
    """Writes the report and says where it is.

    Args:
        places: folders or URIs of runs, finished or not, or folders of studies.
        out: the HTML file, replaced if it exists.
        png: where to draw the plots, too.
        claims: a file of claims that were judged by these runs.

    Raises:
        CommandError: a place holds neither, a file of one is damaged, or nothing can be written there.
        StorageError: storage cannot be read.
    """
    from launch.report.page import page
    from launch.report.runs import address, read
    from launch.report.tables import read_claims
    from launch.run_folder.journal import replace_text
    from launch.run_folder.storage import check_place

    for folder in (out.parent, png or out.parent):
        check_place(str(folder), "report")
    known = [address(place) for place in places]
    if twice := [place for number, place in enumerate(places) if known[number] in known[:number]]:
        raise CommandError(f"{twice[0]} is named twice. Name each run once.")
    if out.is_dir():
        raise CommandError(f"{out} is a folder. Name a file with --out, such as {out / OUT}.")
    runs = read(places)
    if not any(run.updates for run in runs):
        raise CommandError(f"{places[0]} has no metrics yet: its first update is not finished. Try again in a while.")
    made = page(runs, read_claims(claims) if claims else ())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if png is not None:
            png.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"The folder {error.filename} cannot be made: {error.strerror}.") from error
    replace_text(out, made.html)
    print(out)
    if png is not None:
        for plot in made.plots:
            print(plot.save(png))
    return 0
