"""Standard output: redirection into a log, and output that cannot be written."""

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


def prepare_streams() -> None:
    """Prepares the standard streams of a command.

    Closed streams are redirected to /dev/null; otherwise the next opened file would get their descriptors. Characters
    that the encoding of standard output lacks are printed as `?`.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # the stream was closed when Python started
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class _LossyOutput(io.FileIO):
    def write(self, data: Any, /) -> int:
        """Writes data. After an error, which is reported once on standard error, all data is discarded."""
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            message = f"The output cannot be written ({error.strerror}) and is discarded. The command continues."
            with contextlib.suppress(OSError):
                os.write(STDERR, f"Warning: {message}\n".encode())
            return len(data)


def dup_stdout() -> TextIO:
    """Returns a duplicate of standard output, or a notebook's stream, which `redirect_output` does not affect.

    For commands that continue if their output cannot be written: such output is discarded.
    """
    stdout: TextIO = sys.stdout
    stdout.flush()
    if stdout is not sys.__stdout__:
        return stdout
    output = io.BufferedWriter(_LossyOutput(os.dup(STDOUT), "w"))
    return io.TextIOWrapper(output, stdout.encoding, "replace", line_buffering=True)


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
            with contextlib.suppress(OSError):  # the pipe is closed, or the disk is full
                stream.flush()
    for target, descriptor in zip(targets, (STDOUT, STDERR), strict=True):
        os.dup2(target, descriptor)


class _WarningHandler(logging.Handler):
    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn = warn

    def emit(self, record: logging.LogRecord) -> None:
        self._warn(f"{record.levelname.capitalize()}: {record.getMessage()}")


@contextlib.contextmanager
def forward_warnings(warn: Callable[[str], None]) -> Iterator[None]:
    """Calls `warn` with the warnings that this project's packages log in this process, as one line each."""
    handler = _WarningHandler(warn)
    with contextlib.ExitStack() as stack:
        for logger in map(logging.getLogger, OWN_PACKAGES):
            logger.addHandler(handler)
            stack.callback(logger.removeHandler, handler)
        yield
