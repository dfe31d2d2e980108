"""Standard output: redirection into a log, and handling of write errors."""

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
    """Standard output cannot be written. A BaseException, so that no `except Exception` catches it."""


class _StdoutFile(io.FileIO):
    """Standard output whose errors are distinguishable from those of other files."""

    def write(self, data: Any, /) -> int:
        """Writes data.

        Raises:
            OutputError: writing failed; later output is discarded.
        """
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            raise OutputError(f"The output cannot be written: {error.strerror}.") from error


def prepare_streams() -> None:
    """Prepares the standard streams of a command. Streams of a notebook or a test are not changed.

    Closed streams are redirected to /dev/null; otherwise the next opened file would get their descriptors. Characters
    that the output's encoding lacks are printed as `?`.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # the stream was closed when Python started
            devnull = os.open(os.devnull, os.O_RDWR)
            os.dup2(devnull, descriptor)
            os.set_inheritable(descriptor, True)
            if devnull != descriptor:
                os.close(devnull)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))
    stdout = sys.stdout
    if stdout is sys.__stdout__ and isinstance(stdout, io.TextIOWrapper):
        stdout.flush()
        file = _StdoutFile(STDOUT, "w", closefd=False)
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(  # type: ignore[misc]
            file if stdout.write_through else io.BufferedWriter(file),  # unbuffered with PYTHONUNBUFFERED
            encoding=stdout.encoding,
            errors="replace",
            line_buffering=stdout.line_buffering,
            write_through=stdout.write_through,
        )


class _LossyStdout(io.FileIO):
    """Standard output of a run. Output that cannot be written is discarded, so that the run continues.

    The first error is reported on standard error, or in the run's log inside `redirect_output`.
    """

    def __init__(self) -> None:
        super().__init__(os.dup(STDOUT), "w")
        self._warned = False

    def write(self, data: Any, /) -> int:
        """Writes data, or discards it after an error."""
        try:
            return super().write(data)
        except OSError as error:
            if not self._warned:
                self._warned = True
                message = f"The output cannot be written ({error.strerror}) and is discarded. The command continues."
                with contextlib.suppress(OSError):
                    os.write(STDERR, f"Warning: {message}\n".encode())
            return len(data)


def dup_stdout() -> TextIO:
    """Returns a duplicate of standard output, or a notebook's stream, which `redirect_output` does not affect.

    For commands that continue if their output cannot be written: such output is discarded.
    """
    stdout, encoding = sys.stdout, sys.stdout.encoding
    stdout.flush()
    if stdout is not sys.__stdout__:
        return stdout
    file = _LossyStdout()
    return io.TextIOWrapper(io.BufferedWriter(file), encoding=encoding, errors="replace", line_buffering=file.isatty())


@contextlib.contextmanager
def redirect_output(file: Path) -> Iterator[None]:
    """Appends the output of this process and its children to a file.

    Redirects the file descriptors, which also covers Ray's C++ code and threads. A notebook's streams are replaced by
    Python's own in the context.
    """
    saved = [os.dup(descriptor) for descriptor in (STDOUT, STDERR)]
    out, err = (os.fdopen(number, "w", 1, "utf-8", "replace", closefd=False) for number in (STDOUT, STDERR))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with file.open("ab") as log:
            _redirect_descriptors([log.fileno(), log.fileno()])
        try:
            yield
        finally:
            _redirect_descriptors(saved)
            for descriptor in saved:
                os.close(descriptor)


def hide_libraries(debug: bool) -> contextlib.AbstractContextManager[None]:
    """Discards the output of this process, such as vLLM's while it starts; with `debug` it stays."""
    return contextlib.nullcontext() if debug else redirect_output(Path(os.devnull))


def _redirect_descriptors(targets: Sequence[int]) -> None:
    for stream in (sys.__stdout__, sys.__stderr__, sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, OutputError):  # the pipe is closed, or the disk is full
                stream.flush()
    for target, descriptor in zip(targets, (STDOUT, STDERR), strict=True):
        os.dup2(target, descriptor)


class WarningHandler(logging.Handler):
    """Forwards warnings of this project's packages to the user."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn = warn

    def emit(self, record: logging.LogRecord) -> None:
        """Forwards the record as one line."""
        self._warn(f"{record.levelname.capitalize()}: {record.getMessage()}")


@contextlib.contextmanager
def forward_warnings(warn: Callable[[str], None]) -> Iterator[None]:
    """Calls `warn` with the warnings that this project's packages log in this process."""
    handler = WarningHandler(warn)
    loggers = [logging.getLogger(name) for name in OWN_PACKAGES]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
