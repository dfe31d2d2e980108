"""The process that runs a program and answers what the tester asks of it. Whatever it says, the tester compares.

Nothing here needs to be safe from the program: it only computes values, and knows neither the tests nor what is right.
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from cory_env.sandbox.inside import LONGEST, Gone, Unplain, Wire, begin

MOST = 100_000  # values of something that is gone through


class Worker:
    """A program, and the values that the tester knows by number."""

    def __init__(self, program: str) -> None:
        """Takes the program's text; nothing of it runs yet."""
        self._program = program
        self._others: list[Any] = []
        # What the program prints must not stand between the answers.
        read, write = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.close(nothing)
        self._wire = Wire(read, write, self._number, self._others.__getitem__)

    def _number(self, value: object) -> int:
        if type(value).__module__ == "numpy":
            raise Unplain("an array or scalar of numpy")
        self._others.append(value)
        return len(self._others) - 1

    def serve(self) -> None:
        """Answers until the tester is gone: `[True, value]`, or `[False, name of the exception, text]`."""
        while True:
            request = self._wire.receive()
            try:
                answer = (True, self._answer(*request))  # type: ignore[misc]
                self._wire.send(answer)
            except BaseException as error:  # a program may raise what it likes
                self._wire.send((False, type(error).__name__, str(error)[:1000]))

    def _answer(self, what: str, of: Any, *rest: Any) -> object:
        if what == "run":
            return self._run(of)
        if what == "get":
            return self._names[of]
        if what == "call":
            arguments, named = rest
            return of(*arguments, **named)
        if what == "attribute":
            return getattr(of, *rest)
        if what == "set":
            setattr(of, *rest)
            return None
        assert what == "each"
        items: Iterable[object] = of
        return list(itertools.islice(items, MOST))

    @cached_property
    def _names(self) -> dict[str, Any]:
        """The program's names, once it has run."""
        names: dict[str, Any] = {"__name__": "solution"}
        exec(compile(self._program, "<program>", "exec"), names)
        return names

    def _run(self, text: str) -> str:
        """What the program prints when it is run as a script that reads `text`."""
        asked, printed = os.memfd_create("asked"), os.memfd_create("printed")
        os.write(asked, text.encode())
        os.lseek(asked, 0, os.SEEK_SET)
        os.dup2(asked, 0)
        os.dup2(printed, 1)
        sys.argv = ["program"]
        sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        with contextlib.suppress(SystemExit):
            exec(compile(self._program, "<program>", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        os.lseek(printed, 0, os.SEEK_SET)
        with open(printed, "rb") as output:
            os.close(asked)
            return output.read(LONGEST).decode(errors="replace")


def main(files: Sequence[int], *limits: Any) -> None:
    """Shuts itself in, then serves.

    Args:
        files: the one that holds the program, as JSON.
        limits: see `begin`.
    """
    program = begin(files[0], *limits)
    with contextlib.suppress(Gone):
        Worker(program).serve()
