"""The `cory` command, also available as `python -m cory_rllib`."""

if __name__ == "__main__":  # before imports that a user's `policies.py` could shadow
    import runpy

    runpy.run_module("cory_rllib", run_name="__main__")

import atexit
import errno
import gc
import os
import signal
import sys
from importlib.metadata import version
from typing import Annotated, cast

import typer

from launch.console.cli import Commands
from launch.console.errors import user_message
from launch.console.output import STDOUT, prepare_streams

BROKEN_PIPE = 128 + signal.SIGPIPE

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
    """Train LLMs to answer, get feedback and answer again: one model in all turns, or one per role.

    `cory train imdb-tiny` trains two agents on film reviews, offline, in a few minutes on two cores. `cory COMMAND
    --help` describes a command.
    """


def main(argv: list[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the arguments; None: those of the process.

    Returns:
        The command's exit code; 2 if the command is unknown or the output cannot be written; 141 if the output's reader
        has closed the pipe, as in `cory plan | head`.
    """
    atexit.register(gc.freeze)  # otherwise a garbage collection of torch and Ray takes seconds at exit
    prepare_streams()
    try:
        os.write(STDOUT, b"")
    except OSError as error:
        if error.errno == errno.EBADF:  # it is not open for writing
            print(f"Error: The output cannot be written: {error.strerror}.", file=sys.stderr)
            return 2
    try:
        try:
            app(argv, prog_name="cory")
            code = 0
        except SystemExit as system_exit:
            # Typer exits with 1 if the pipe is closed.
            is_pipe_closed = isinstance(system_exit.__context__, BrokenPipeError)
            code = BROKEN_PIPE if is_pipe_closed else cast(int, system_exit.code or 0)
        sys.stdout.flush()
    except OSError as error:
        message = user_message(error)
        if message is None and not isinstance(error, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # Python flushes it again at exit
        if message is None:
            return BROKEN_PIPE
        print(f"Error: {message}", file=sys.stderr)
        return 2
    return code
