"""The process that runs the tests. The program is elsewhere: the tests' names for it are `Remote`s, which ask there."""

import ast
import builtins
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from cory_env.sandbox.inside import Gone, Unplain, Wire, begin

RUN = "run"  # what tests call a run of the program as a script: run(input) is its output
ENDS = (StopIteration, StopAsyncIteration)  # in `all(map(f, …))` they would end what is gone through, not the test


class Program:
    """The program, as seen from here."""

    def __init__(self) -> None:
        self._wire = Wire(os.fdopen(0, "rb"), os.fdopen(1, "wb"), self._number, lambda number: Remote(self, number))

    def _number(self, value: object) -> int:
        if isinstance(value, Remote):
            return int(object.__getattribute__(value, "_number"))
        raise Unplain(f"a {type(value).__name__} cannot be given to the program")

    def ask(self, *request: object) -> Any:
        """Asks for a value.

        Raises:
            Exception: what the program raised, where it is a built-in one; else a `RuntimeError`.
            Gone: the program has ended.
        """
        self._wire.send(request)
        answer = self._wire.receive()
        if not isinstance(answer, tuple) or len(answer) not in (2, 3) or answer[0] is not (len(answer) == 2):
            raise Gone
        if answer[0]:
            return answer[1]
        kind = vars(builtins).get(answer[1])
        if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, ENDS):
            kind = RuntimeError
        raise kind(answer[2])


class Remote:
    """A value of the program that is not plain data, such as a function. Compared, it is equal to itself alone."""

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def _ask(self, what: str, *rest: object) -> Any:
        program: Program = object.__getattribute__(self, "_program")
        return program.ask(what, self, *rest)

    def __call__(self, *arguments: object, **named: object) -> Any:
        return object.__getattribute__(self, "_ask")("call", arguments, named)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            return object.__getattribute__(self, name)
        return object.__getattribute__(self, "_ask")("attribute", name)

    def __setattr__(self, name: str, value: object) -> None:  # as MBPP's tests build lists and trees
        object.__getattribute__(self, "_ask")("set", name, value)

    def __iter__(self) -> Iterator[Any]:
        return iter(object.__getattribute__(self, "_ask")("each"))


def passes(program: Program, setup: str, own: str, test: str) -> bool:
    """Runs one test: it passes where it ends without an exception.

    Args:
        program: what is tested.
        setup: code of the data that tests rely on; it runs here, where names that it lacks are the program's.
        own: a name that is the program's, though the setup may define it.
        test: code.

    Raises:
        Gone: the program has ended.
    """
    namespace: dict[str, Any] = {"__name__": "tests"}
    if setup:
        _find_names(program, namespace, setup)
        exec(compile(setup, "<setup>", "exec"), namespace)
    namespace.pop(own, None)
    _find_names(program, namespace, test)
    exec(compile(test, "<test>", "exec"), namespace)
    return True


def _find_names(program: Program, namespace: dict[str, Any], code: str) -> None:
    """Gives the code those of its names that are neither here nor built in, and that the program has."""
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    for name in sorted(names - set(namespace) - set(vars(builtins))):
        if name == RUN:
            namespace[RUN] = lambda text: program.ask(RUN, text)
            namespace["same_output"] = same_output
        elif name in sys.stdlib_module_names:  # the program's `math` might be one of its own
            namespace[name] = importlib.import_module(name)
        elif name != "same_output":
            with contextlib.suppress(KeyError):  # a name that the code gives itself
                namespace[name] = program.ask("get", name)


def same_output(printed: object, expected: str) -> bool:
    """Whether two outputs are the same but for space at the ends of lines and lines at the end, and numbers' digits.

    Where lines differ they are compared word by word, and numbers with a point as numbers, to 1e-6.
    """
    ours = [line.rstrip() for line in str(printed).rstrip().splitlines()]
    theirs = [line.rstrip() for line in expected.rstrip().splitlines()]
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(ours: str, theirs: str) -> bool:
    first, second = ours.split(), theirs.split()
    return len(first) == len(second) and all(map(_same_word, first, second))


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    if "." not in theirs:
        return False
    with contextlib.suppress(ValueError):
        first, second = float(ours), float(theirs)
        return abs(first - second) <= 1e-6 * max(1.0, abs(second))
    return False


def main(files: Sequence[int], *limits: Any) -> None:
    """Shuts itself in, then runs the tests, one after another.

    Args:
        files: the one that holds the setup, the program's own name and the tests, as JSON; and where `1` or `0` is
            written for each test, as soon as it is known.
        limits: see `begin`.
    """
    setup, own, tests = begin(files[0], *limits)
    program = Program()
    for test in tests:
        try:
            passed = passes(program, setup, own, test)
        except Gone:
            return
        except BaseException:  # a failed assertion, what the program raised, or an error of the test's own
            passed = False
        os.write(files[1], b"1" if passed else b"0")
