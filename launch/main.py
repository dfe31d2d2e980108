"""The `cory` command, which `python -m cory_rllib` is, too."""

if __name__ == "__main__":  # before imports that a user's own `policies.py` could take over
    import runpy

    runpy.run_module("cory_rllib", run_name="__main__")

import atexit
import gc
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from launch.console.cli import Commands

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
        The command's exit code; 2 when there is no such command; 1 if nobody reads on, as in `cory plan | head`.
    """
    atexit.register(gc.freeze)  # else Python's end walks over all that torch and Ray hold, which takes seconds
    code = 0
    try:
        app(argv, prog_name="cory")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
        return 1
    return code
