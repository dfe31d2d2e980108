"""The `cory` command, also available as `python -m cory_rllib`."""

if __name__ == "__main__":  # before imports that a user's `policies.py` could shadow
    import runpy

    runpy.run_module("cory_rllib", run_name="__main__")

import atexit
import gc
import os
import sys
from importlib.metadata import version
from typing import Annotated, cast

import typer

from launch.console.cli import Commands
from launch.console.errors import user_message
from launch.console.output import STDOUT, prepare_streams

app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def _print_version(enabled: bool) -> None:
    if enabled:
        print(version("cory-rllib"))
        raise typer.Exit


@app.callback()
def cory(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement fine-tuning of language models by several cooperating copies of the model.

    `cory train imdb-tiny` trains two agents on film reviews, offline, in a few minutes on two cores. `cory COMMAND
    --help` describes a command.
    """


def main(argv: list[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the arguments; None: those of the process.

    Returns:
        The command's exit code; 2 if the command is unknown or the output cannot be written.
    """
    atexit.register(gc.freeze)  # otherwise a garbage collection of torch and Ray takes seconds at exit
    prepare_streams()
    try:
        try:
            app(argv, prog_name="cory")
            code = 0
        except SystemExit as system_exit:
            code = cast(int, system_exit.code or 0)
        sys.stdout.flush()
    except OSError as error:
        message = user_message(error)
        if message is None and not isinstance(error, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # Python flushes it again at exit
        if message is None:  # as in `cory plan | head`; Typer does the same
            return 1
        print(f"Error: {message}", file=sys.stderr)
        return 2
    return code
