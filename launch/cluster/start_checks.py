"""What Ray needs to start on this machine, and would wait for, or fail without, for a reason that it does not tell."""

import os
import signal
import socket
import sys
import tempfile

from launch.console.errors import CommandError

REACHED = 10.0
"""Seconds in which a cluster's head has to take a connection."""


def check_environment() -> None:
    """Makes sure that libraries can be imported.

    Raises:
        CommandError: there are no docstrings, no home directory, or no folder for temporary files.
    """
    if sys.flags.optimize > 1:
        raise CommandError("Ray needs docstrings. Run Python without -OO, and without PYTHONOPTIMIZE=2; -O works.")
    if os.path.expanduser("~") == "~":
        raise CommandError("This user has no home directory, which Ray asks for. Set HOME to a folder.")
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise CommandError("No folder for temporary files can be written. Set TMPDIR to one that can.") from error


def check_raylet() -> None:
    """Makes sure that the raylet that this process has started lives: Ray would wait for it for minutes.

    Raises:
        CommandError: it has ended.
    """
    import psutil

    for child in psutil.Process().children():
        if child.name() != "raylet" or child.status() != psutil.STATUS_ZOMBIE:
            continue
        ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            continue
        killed = ended.si_code != os.CLD_EXITED
        how = signal.Signals(ended.si_status).name if killed else f"exit code {ended.si_status}"
        hint = ""
        if how == signal.SIGXFSZ.name:
            hint = (
                " Its object store is larger than the limit on the size of a file: lift that by `ulimit -f unlimited`."
            )
        raise CommandError(f"Ray did not start: its process on this machine, the raylet, ended with {how}.{hint}")


def check_loopback() -> None:
    """Makes sure that processes of this machine reach each other: Ray would try for minutes.

    Raises:
        CommandError: they do not.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=REACHED).close()
    except OSError as error:
        raise CommandError(
            f"Ray's processes cannot reach each other at 127.0.0.1: {error.strerror or error}. Bring the loopback "
            "interface up: `ip link set lo up`."
        ) from error
