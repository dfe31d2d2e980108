"""What every command shares: a parser with short errors, and one way to end."""

import argparse
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT
OWN_PACKAGES = ("cory_env", "policies", "launch")
"""Every exception class that these define carries a message for the user."""


class CommandError(Exception):
    """Something that the user can put right; the message says what, where, and how."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence and the place to look, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        self.exit(2, f"{self.prog}: {message[:1].upper()}{message[1:]}. See `{self.prog} --help`.\n")


def run(command: Callable[[], int], *, debug: bool) -> int:
    """Runs a command and turns what the user can put right into one sentence on stderr.

    Args:
        command: does the work, returns the exit code.
        debug: let the traceback be seen.

    Returns:
        The command's own exit code; 2 after a user's mistake; 130 after Ctrl-C. Other exceptions are defects and pass.
    """
    try:
        return command()
    except KeyboardInterrupt:
        print("Aborted.", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        cause = _cause(error)
        if type(cause).__module__.partition(".")[0] not in OWN_PACKAGES:
            raise
        if debug:
            traceback.print_exception(error)
        print("\n".join([f"Error: {cause}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 2


def _cause(error: Exception) -> BaseException:
    """Returns what a Ray worker raised, freed of the remote traceback that Ray wraps it in."""
    if "ray" not in sys.modules:
        return error
    from ray.exceptions import RayTaskError

    cause: BaseException = error
    while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
        cause = cause.cause
    return cause
