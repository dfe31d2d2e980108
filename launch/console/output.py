"""Where what a process prints goes: to the user, or into a log."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from launch.console.errors import OWN_PACKAGES

STDOUT, STDERR = 1, 2


def own_output() -> TextIO:
    """Returns a stream of its own to standard output, or what a notebook puts there; `output_into` leaves it alone."""
    present, encoding = sys.stdout, sys.stdout.encoding
    present.flush()
    if present is not sys.__stdout__:
        return present
    return os.fdopen(os.dup(STDOUT), "w", encoding=encoding, errors="replace")


@contextlib.contextmanager
def output_into(file: Path) -> Iterator[None]:
    """Appends what this process and its children print to a file: the C++ and threads of Ray heed no other setting.

    A notebook's streams lead elsewhere; meanwhile Python's own take their place.
    """
    kept = [os.dup(descriptor) for descriptor in (STDOUT, STDERR)]
    with contextlib.redirect_stdout(sys.__stdout__), contextlib.redirect_stderr(sys.__stderr__):
        with file.open("ab") as log:
            _point_output_to([log.fileno(), log.fileno()])
        try:
            yield
        finally:
            _point_output_to(kept)
            for descriptor in kept:
                os.close(descriptor)


def _point_output_to(targets: Sequence[int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for target, descriptor in zip(targets, (STDOUT, STDERR), strict=True):
        os.dup2(target, descriptor)


class Heard(logging.Handler):
    """Passes this project's own warnings on to the user."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Tells the user."""
        self._tell(f"{record.levelname.capitalize()}: {record.getMessage()}")


@contextlib.contextmanager
def warnings_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Lets `tell` hear the warnings that this project's packages log in this process."""
    heard = Heard(tell)
    loggers = [logging.getLogger(name) for name in OWN_PACKAGES]
    for logger in loggers:
        logger.addHandler(heard)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(heard)
