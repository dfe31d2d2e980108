"""The process that runs the tests. The program runs in another process; the tests use it through `RemoteValue`s."""

import ast
import builtins
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from cory_env.sandbox.protocol import Channel, ChannelClosed, UnsupportedValue, read_and_confine

RUN = "run"  # the tests' function that runs the program as a script: run(input) returns its output
# A program's StopIteration would end an iteration in the test, as in `all(map(f, …))`, but not the test.
ITERATION_ENDS = (StopIteration, StopAsyncIteration)


class ProgramProxy:
    """The program's names and values, requested from its process."""

    def __init__(self) -> None:
        self._channel = Channel(
            os.fdopen(0, "rb"), os.fdopen(1, "wb"), self._number, lambda number: RemoteValue(self, number)
        )

    def _number(self, value: object) -> int:
        if isinstance(value, RemoteValue):
            return int(object.__getattribute__(value, "_number"))
        raise UnsupportedValue(f"a {type(value).__name__} cannot be passed to the program")

    def request(self, *message: object) -> Any:
        """Sends a request and returns the value in the reply.

        Raises:
            Exception: The exception that the program raised if it is a built-in one, otherwise a `RuntimeError`.
            ChannelClosed: The program has ended.
        """
        self._channel.send(message)
        reply = self._channel.receive()
        if not isinstance(reply, tuple) or len(reply) not in (2, 3) or reply[0] is not (len(reply) == 2):
            raise ChannelClosed
        if reply[0]:
            return reply[1]
        kind = vars(builtins).get(reply[1])
        if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, ITERATION_ENDS):
            kind = RuntimeError
        raise kind(reply[2])


class RemoteValue:
    """A value of the program that is not plain data, such as a function. It is equal only to itself."""

    def __init__(self, program: ProgramProxy, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def _request(self, operation: str, *arguments: object) -> Any:
        program: ProgramProxy = object.__getattribute__(self, "_program")
        return program.request(operation, self, *arguments)

    def __call__(self, *arguments: object, **keywords: object) -> Any:
        return object.__getattribute__(self, "_request")("call", arguments, keywords)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            return object.__getattribute__(self, name)
        return object.__getattribute__(self, "_request")("attribute", name)

    def __setattr__(self, name: str, value: object) -> None:  # MBPP's tests build lists and trees this way
        object.__getattribute__(self, "_request")("set", name, value)

    def __iter__(self) -> Iterator[Any]:
        return iter(object.__getattribute__(self, "_request")("iterate"))


def run_test(program: ProgramProxy, setup: str, entry: str, test: str) -> bool:
    """Runs one test. It passes if it ends without an exception.

    Args:
        program: The program under test.
        setup: Code from the data that the test requires. It runs in this process; names that it does not define refer
            to the program.
        entry: A name that refers to the program even if the setup defines it.
        test: The test's code.

    Raises:
        ChannelClosed: The program has ended.
    """
    namespace: dict[str, Any] = {"__name__": "tests"}
    if setup:
        _resolve_names(program, namespace, setup)
        exec(compile(setup, "<setup>", "exec"), namespace)
    namespace.pop(entry, None)
    _resolve_names(program, namespace, test)
    exec(compile(test, "<test>", "exec"), namespace)
    return True


def _resolve_names(program: ProgramProxy, namespace: dict[str, Any], code: str) -> None:
    """Adds to the namespace the program's values for names in the code that are neither defined nor built in."""
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    for name in sorted(names - set(namespace) - set(vars(builtins))):
        if name == RUN:
            namespace[RUN] = lambda text: program.request(RUN, text)
            namespace["same_output"] = same_output
        elif name in sys.stdlib_module_names:  # the program might replace `math`
            namespace[name] = importlib.import_module(name)
        elif name != "same_output":
            with contextlib.suppress(KeyError):  # a name that the code itself defines
                namespace[name] = program.request("get", name)


def same_output(printed: object, expected: str) -> bool:
    """Returns whether two outputs are equal, ignoring trailing space, trailing lines and rounding of decimals.

    Lines are compared word by word. Words with a decimal point are compared as numbers, with a tolerance of 1e-6.
    """
    printed_lines = [line.rstrip() for line in str(printed).rstrip().splitlines()]
    expected_lines = [line.rstrip() for line in expected.rstrip().splitlines()]
    return len(printed_lines) == len(expected_lines) and all(map(_same_line, printed_lines, expected_lines))


def _same_line(printed: str, expected: str) -> bool:
    printed_words, expected_words = printed.split(), expected.split()
    return len(printed_words) == len(expected_words) and all(map(_same_word, printed_words, expected_words))


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if "." not in expected:
        return False
    with contextlib.suppress(ValueError):
        printed_number, expected_number = float(printed), float(expected)
        return abs(printed_number - expected_number) <= 1e-6 * max(1.0, abs(expected_number))
    return False


def main(files: Sequence[int], *limits: Any) -> None:
    """Limits this process, then runs the tests one after another.

    Args:
        files: File descriptors: the input (setup, entry and tests, as JSON), and the output, which gets `1` or `0` for
            each test as soon as it ends.
        limits: The other arguments of `read_and_confine`.
    """
    setup, entry, tests = read_and_confine(files[0], *limits)
    program = ProgramProxy()
    for test in tests:
        try:
            passed = run_test(program, setup, entry, test)
        except ChannelClosed:
            return
        except BaseException:  # a failed assertion, an exception of the program, or an error in the test
            passed = False
        os.write(files[1], b"1" if passed else b"0")
