"""Where what a process prints goes: to the user, or into a log; and what becomes of what cannot be printed."""

import contextlib
import io
import logging
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from launch.console.errors import OWN_PACKAGES, CommandError

STDIN, STDOUT, STDERR = 0, 1, 2


class OutputError(CommandError):
    """The output cannot be written, as on a full disk."""


class ReaderGone(BaseException):
    """Nobody reads the output any more, as in `cory plan | head`; no `except Exception` on the way may hold this up."""


class _Stream(io.FileIO):
    """The file behind a stream: writes all that it is given, and waits for pipes that others set not to block."""

    def write(self, data: Any, /) -> int:
        """Writes all of it; see `_fail` for when it cannot."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left:
                count = super().write(left)
                if count is None:
                    select.select([], [self], [])
                else:
                    left = left[count:]
        except OSError as error:
            self._fail(error)
        return size

    def _fail(self, error: OSError) -> None:
        raise NotImplementedError


class _Output(_Stream):
    """Standard output: the command ends when it cannot be written."""

    def _fail(self, error: OSError) -> NoReturn:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())  # for what is still in a buffer
        os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from error
        raise OutputError(f"The output cannot be written: {error.strerror}.") from error


class _Dispensable(_Stream):
    """A stream that is worth less than the command: what cannot be written is left out."""

    def _fail(self, error: OSError) -> None:
        pass


class _RunOutput(_Dispensable):
    """What a run prints. That some of it is missing is said once on standard error, and in the run's log."""

    def __init__(self) -> None:
        super().__init__(os.dup(STDOUT), "w")
        self._errors = os.dup(STDERR)
        self._told: set[tuple[int, int]] = set()

    def close(self) -> None:
        """Closes both."""
        if not self.closed:
            os.close(self._errors)
        super().close()

    def _fail(self, error: OSError) -> None:
        said = f"Warning: The output cannot be written ({error.strerror}), so it is left out. The command continues.\n"
        for descriptor in (self._errors, STDERR):  # the latter is the log while `output_into` is entered
            with contextlib.suppress(OSError):
                status = os.fstat(descriptor)
                if (file := (status.st_dev, status.st_ino)) not in self._told:
                    self._told.add(file)
                    os.write(descriptor, said.encode())


def prepare_streams() -> None:
    """Prepares the standard streams, once at a command's start, so that no command fails for what its streams lack.

    - A stream that is closed leads nowhere; else the next file that is opened would get its number, and the output.
    - What the encoding of the output lacks is printed as `?`, in child processes too.
    - Standard error may be gone; see `ReaderGone` and `OutputError` for standard output.

    Streams of a notebook's or a test's own stay as they are.
    """
    for descriptor in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
    if sys.stdin is None:
        sys.stdin = os.fdopen(STDIN, closefd=False)
    if sys.stdout is sys.__stdout__:
        sys.stdout = sys.__stdout__ = _wrap(  # type: ignore[misc]
            _Output(STDOUT, "w", closefd=False), sys.stdout
        )
        if not _is_utf(sys.stdout):
            os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding}:{sys.stdout.errors}"
    if sys.stderr is sys.__stderr__:
        sys.stderr = sys.__stderr__ = _wrap(  # type: ignore[misc]
            _Dispensable(STDERR, "w", closefd=False), sys.stderr
        )


def _wrap(file: _Stream, usual: TextIO | None) -> io.TextIOWrapper:
    """Makes a text stream of a file, with the buffering of the `usual` one; that was None if it was closed."""
    if not isinstance(usual, io.TextIOWrapper):
        return io.TextIOWrapper(io.BufferedWriter(file), "utf-8", "replace", write_through=True)
    usual.flush()
    # `surrogateescape` is how Python prints names of files in the locale C; it is of use with UTF-8 only.
    failing = ("strict",) if _is_utf(usual) else ("strict", "surrogateescape")
    return io.TextIOWrapper(
        file if usual.write_through else io.BufferedWriter(file),  # as Python's own with -u
        encoding=usual.encoding,
        errors="replace" if usual.errors in failing else usual.errors,
        line_buffering=usual.line_buffering,
        write_through=usual.write_through,
    )


def _is_utf(stream: TextIO) -> bool:
    return stream.encoding.lower().startswith("utf")


def print_utf8(text: str) -> None:
    """Prints what a program is to read, as UTF-8 whatever the encoding of the output: a `?` would change it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors=sys.stdout.errors)
    print(text, end="")


def own_output() -> TextIO:
    """Returns a stream of its own to standard output, or what a notebook puts there; `output_into` leaves it alone.

    For commands whose work is worth more than what they print: what cannot be written is left out.
    """
    present, encoding = sys.stdout, sys.stdout.encoding
    present.flush()
    if present is not sys.__stdout__:
        return present
    file = _RunOutput()
    return io.TextIOWrapper(io.BufferedWriter(file), encoding=encoding, errors="replace", line_buffering=file.isatty())


@contextlib.contextmanager
def output_into(file: Path) -> Iterator[None]:
    """Appends what this process and its children print to a file: the C++ and threads of Ray heed no other setting.

    A notebook's streams lead elsewhere; meanwhile Python's own take their place.
    """
    kept = [os.dup(descriptor) for descriptor in (STDOUT, STDERR)]
    out, err = (_wrap(_Dispensable(number, "w", closefd=False), sys.__stdout__) for number in (STDOUT, STDERR))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with file.open("ab") as log:
            _point_output_to([log.fileno(), log.fileno()])
        try:
            yield
        finally:
            _point_output_to(kept)
            for descriptor in kept:
                os.close(descriptor)


def _point_output_to(targets: Sequence[int]) -> None:
    for stream in (sys.__stdout__, sys.__stderr__, sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
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
