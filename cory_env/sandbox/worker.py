"""The process that runs a program and replies to the tester's requests.

It need not be protected from the program: it only computes values, and knows neither the tests nor the right results.
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from cory_env.sandbox.protocol import MAX_MESSAGE_BYTES, Channel, ChannelClosed, UnsupportedValue, read_and_confine

MAX_ITEMS = 100_000  # of an iterable that the tester requests
PROGRAM = "<program>"  # the program's file name in tracebacks


class ProgramWorker:
    """A program, and the values that the tester knows by number."""

    def __init__(self, program: str) -> None:
        """Stores the program's source code without running it."""
        self._program = program
        self._values: list[Any] = []
        # The program's output must not mix with the replies.
        read, write = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, 0)
        os.dup2(devnull, 1)
        os.close(devnull)
        self._channel = Channel(read, write, self._number, lambda number: self._values[int(number)])

    def _number(self, value: object) -> tuple[int, str]:
        """Stores a value that is not plain data; returns its number and type."""
        if type(value).__module__ == "numpy":
            raise UnsupportedValue("the value is an array or scalar of numpy")
        self._values.append(value)
        return len(self._values) - 1, type(value).__name__

    def serve(self) -> None:
        """Replies until the tester is gone: `[True, value]`, or `[False, *exception_details(error)]`."""
        while True:
            request = self._channel.receive()
            try:
                reply = (True, self._execute(*request))  # type: ignore[misc]
                self._channel.send(reply)
            except BaseException as error:  # a program may raise anything
                self._channel.send((False, *exception_details(error)))

    def _execute(self, operation: str, target: Any, *arguments: Any) -> object:
        if operation == "run":
            return self._run(target)
        if operation == "compile":
            compile(self._program, PROGRAM, "exec")
            return None
        if operation == "get":
            return self._namespace[target]
        if operation == "call":
            positional, keywords = arguments
            return target(*positional, **keywords)
        if operation == "attribute":
            return getattr(target, *arguments)
        if operation == "set":
            setattr(target, *arguments)
            return None
        assert operation == "iterate"
        items: Iterable[object] = target
        return list(itertools.islice(items, MAX_ITEMS))

    @cached_property
    def _namespace(self) -> dict[str, Any]:
        """The program's global names; runs the program on first access."""
        namespace: dict[str, Any] = {"__name__": "solution"}
        exec(compile(self._program, PROGRAM, "exec"), namespace)
        return namespace

    def _run(self, text: str) -> str:
        """Returns the output of the program as a script with `text` as its standard input."""
        stdin, stdout = os.memfd_create("stdin"), os.memfd_create("stdout")
        os.write(stdin, text.encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        sys.argv = ["program"]
        sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        with contextlib.suppress(SystemExit):
            exec(compile(self._program, PROGRAM, "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        os.lseek(stdout, 0, os.SEEK_SET)
        with open(stdout, "rb") as output:
            os.close(stdin)
            return output.read(MAX_MESSAGE_BYTES).decode(errors="replace")


def exception_details(error: BaseException) -> tuple[str, str, int | None]:
    """Returns an exception's type, its message, and the line of the program that raised it.

    The line is None if the program did not raise it, for example if it does not define a name.
    """
    name = type(error).__name__
    if isinstance(error, SyntaxError) and error.filename == PROGRAM:
        return name, str(error.msg)[:1000], error.lineno
    line, entry = None, error.__traceback__
    while entry:
        if entry.tb_frame.f_code.co_filename == PROGRAM:
            line = entry.tb_lineno
        entry = entry.tb_next
    return name, str(error)[:1000], line


def main(files: Sequence[int], *limits: Any) -> None:
    """Limits this process, then serves.

    Args:
        files: File descriptor of the program, as JSON.
        limits: The other arguments of `read_and_confine`.
    """
    program = read_and_confine(files[0], *limits)
    with contextlib.suppress(ChannelClosed):
        ProgramWorker(program).serve()
