"""The `cory` command, which `python -m cory_rllib` is, too."""

if __name__ == "__main__":  # before imports that a user's own `policies.py` could take over
    import runpy

    runpy.run_module("cory_rllib", run_name="__main__")

import atexit
import gc
import signal
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from launch.console.cli import Commands
from launch.console.output import OutputError, prepare_streams

UNREAD = 128 + signal.SIGPIPE

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
        The command's exit code; 2 when there is no such command, or the output cannot be written; 141 if nobody reads
        on, as in `cory plan | head`.
    """
    atexit.register(gc.freeze)  # else Python's end walks over all that torch and Ray hold, which takes seconds
    prepare_streams()
    try:
        try:
            app(argv, prog_name="cory")
            code = 0
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            code = 1 if isinstance(ended.code, str) else ended.code or 0
        sys.stdout.flush()
    except OutputError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            return UNREAD
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return code
