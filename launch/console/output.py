"""Where what a process prints goes: to the user, or into a log; and what becomes of what cannot be printed."""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from launch.console.errors import OWN_PACKAGES

STDOUT, STDERR = 1, 2


class OutputError(BaseException):
    """Standard output cannot be written; no `except Exception` on the way may hold this up."""


class _Output(io.FileIO):
    """Standard output, whose errors are told from those of other files."""

    def write(self, data: Any, /) -> int:
        """Writes.

        Raises:
            OutputError: it cannot be written; what is still in a buffer leads nowhere.
        """
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            raise OutputError(f"The output cannot be written: {error.strerror}.") from error


def prepare_streams() -> None:
    """Prepares the standard streams of a command; those that a notebook or a test puts there stay as they are.

    A closed one leads nowhere: else the next file that is opened would get its number. What the encoding of the output
    lacks is printed as `?`.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # it was closed when Python started
            devnull = os.open(os.devnull, os.O_RDWR)
            os.dup2(devnull, descriptor)
            os.set_inheritable(descriptor, True)
            if devnull != descriptor:
                os.close(devnull)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))
    usual = sys.stdout
    if usual is sys.__stdout__ and isinstance(usual, io.TextIOWrapper):
        usual.flush()
        file = _Output(STDOUT, "w", closefd=False)
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(  # type: ignore[misc]
            file if usual.write_through else io.BufferedWriter(file),  # as Python has it with PYTHONUNBUFFERED
            encoding=usual.encoding,
            errors="replace",
            line_buffering=usual.line_buffering,
            write_through=usual.write_through,
        )


class _RunOutput(io.FileIO):
    """What a run prints, which is worth less than the run: what cannot be written is left out, and that is said once,
    on standard error, or in the run's log while `redirect_output` is entered.
    """

    def __init__(self) -> None:
        super().__init__(os.dup(STDOUT), "w")
        self._warned = False

    def write(self, data: Any, /) -> int:
        """Writes what can be written."""
        try:
            return super().write(data)
        except OSError as error:
            if not self._warned:
                self._warned = True
                reason = f"The output cannot be written ({error.strerror}), so it is left out. The command continues."
                with contextlib.suppress(OSError):
                    os.write(STDERR, f"Warning: {reason}\n".encode())
            return len(data)


def dup_stdout() -> TextIO:
    """Returns a stream of its own to standard output, or what a notebook puts there; `redirect_output` leaves it alone.

    For commands whose work is worth more than what they print: what cannot be written is left out.
    """
    present, encoding = sys.stdout, sys.stdout.encoding
    present.flush()
    if present is not sys.__stdout__:
        return present
    file = _RunOutput()
    return io.TextIOWrapper(io.BufferedWriter(file), encoding=encoding, errors="replace", line_buffering=file.isatty())


@contextlib.contextmanager
def redirect_output(file: Path) -> Iterator[None]:
    """Appends what this process and its children print to a file: the C++ and threads of Ray heed no other setting.

    A notebook's streams lead elsewhere; meanwhile Python's own take their place.
    """
    saved = [os.dup(descriptor) for descriptor in (STDOUT, STDERR)]
    out, err = (os.fdopen(number, "w", 1, "utf-8", "replace", closefd=False) for number in (STDOUT, STDERR))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with file.open("ab") as log:
            _point_output_to([log.fileno(), log.fileno()])
        try:
            yield
        finally:
            _point_output_to(saved)
            for descriptor in saved:
                os.close(descriptor)


def _point_output_to(targets: Sequence[int]) -> None:
    for stream in (sys.__stdout__, sys.__stderr__, sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, OutputError):  # nobody reads on, or the disk is full
                stream.flush()
    for target, descriptor in zip(targets, (STDOUT, STDERR), strict=True):
        os.dup2(target, descriptor)


class WarningHandler(logging.Handler):
    """Passes this project's own warnings on to the user."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Tells the user."""
        self._tell(f"{record.levelname.capitalize()}: {record.getMessage()}")


@contextlib.contextmanager
def forward_warnings(tell: Callable[[str], None]) -> Iterator[None]:
    """Lets `tell` hear the warnings that this project's packages log in this process."""
    handler = WarningHandler(tell)
    loggers = [logging.getLogger(name) for name in OWN_PACKAGES]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
