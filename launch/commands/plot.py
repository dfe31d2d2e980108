"""`cory plot RUN`: draws the curves of a run, finished or not, from its `metrics.jsonl`."""

from pathlib import Path

from launch.console.errors import CommandError
from launch.console.parser import Parser, local_path, run


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0, or 2 when there is nothing to draw.
    """
    parser = Parser(prog="cory plot", description="Draw the curves of a run: task reward, KL and combined reward.")
    parser.add_argument(
        "run", metavar="RUN", help="the run's folder, such as runs/imdb-tiny-20250101-120000, or its URI"
    )
    parser.add_argument(
        "--out",
        type=local_path,
        metavar="FILE",
        help="where to draw (default: curves.png in the run's folder; of a run in storage, NAME-curves.png here)",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    return run(lambda: plot(options.run, options.out), debug=options.debug)


def plot(place: str | Path, out: Path | None = None) -> int:
    """Draws the curves and says where they are.

    Raises:
        CommandError: there is no run, or one without metrics, or nothing can be drawn there.
        StorageError: storage cannot be read.
    """
    from launch.display.curves import draw
    from launch.display.drawing import FORMATS
    from launch.run_folder.mirror import read_run

    if out is not None and (out.suffix.removeprefix(".").lower() not in FORMATS or out.is_dir()):
        raise CommandError(f"{out} names no picture. End it in one of .{', .'.join(FORMATS)}.")
    run_directory = read_run(place)
    updates = run_directory.updates()
    if not updates:
        raise CommandError(f"{place} has no metrics yet: its first update is not finished. Try again in a while.")
    own = run_directory.curves if run_directory.storage is None else Path(f"{run_directory.path.name}-curves.png")
    file = out or own
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"The folder {file.parent} cannot be made: {error.strerror}.") from error
    draw(updates, run_directory.settings(), file)
    print(file)
    return 0
