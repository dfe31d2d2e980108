"""`cory plot RUN`: draws the curves of a run, finished or not, from its `metrics.jsonl`."""

from pathlib import Path

from launch.command import CommandError, Parser, run


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0, or 2 when there is nothing to draw.
    """
    parser = Parser(prog="cory plot", description="Draw the curves of a run: task reward, KL and combined reward.")
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="the run's folder, such as runs/imdb-tiny-20250101-120000"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to draw (default: curves.png in the run's folder)"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    return run(lambda: plot(options.run, options.out), debug=options.debug)


def plot(folder: Path, out: Path | None = None) -> int:
    """Draws the curves and says where they are.

    Raises:
        CommandError: the folder holds no run, or a run without metrics.
    """
    from launch.curves import draw
    from launch.run_directory import RunDirectory

    run_directory = RunDirectory.open(folder)
    updates = run_directory.updates()
    if not updates:
        raise CommandError(f"{folder} has no metrics yet: its first update is not finished. Try again in a while.")
    file = out or run_directory.curves
    draw(updates, run_directory.settings(), file)
    print(file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
