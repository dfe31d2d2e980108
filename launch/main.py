"""The `cory` command, which `python -m cory_rllib` is, too."""

if __name__ == "__main__":  # before imports that a user's own `policies.py` could take over
    import runpy

    runpy.run_module("cory_rllib", run_name="__main__")

import atexit
import gc
from importlib.metadata import version
from typing import Annotated

import typer

from launch.console.cli import Commands, until_unread

app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version("cory-rllib"))
        raise typer.Exit


@app.callback()
def cory(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    """Reinforcement fine-tuning of language models by several cooperating copies of the model.

    `cory train` trains two agents on film reviews, offline, in a few minutes on two cores. `cory COMMAND --help` says
    more about a command.
    """


def main(argv: list[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The command's exit code; 2 when there is no such command; 141 where nobody reads on.
    """
    atexit.register(gc.freeze)  # else Python's end walks over all that torch and Ray hold, which takes seconds
    return until_unread(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    try:
        app(argv, prog_name="cory")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0
