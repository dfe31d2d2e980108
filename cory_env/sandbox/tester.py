"""The process that runs the tests. The program runs in another process; the tests use it through `RemoteValue`s."""

import ast
import builtins
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from cory_env.sandbox.failures import RECORD, Operands, Raised, describe_failure
from cory_env.sandbox.protocol import Channel, ChannelClosed, UnsupportedValue, read_and_confine

RUN = "run"  # the tests' function that runs the program as a script: run(input) returns its output
COMPILES = "__compiles__"  # the tests' function that only compiles the program
# A program's StopIteration would end an iteration in the test, as in `all(map(f, …))`, but not the test.
ITERATION_ENDS = (StopIteration, StopAsyncIteration)


class ProgramProxy:
    """The program's names and values, requested from its process.

    Attributes:
        raised: The last exception of the program: the exception raised here, and its details.
        last_call: The last request that called the program and returned, and its result.
    """

    def __init__(self) -> None:
        self.raised: tuple[BaseException, Raised] | None = None
        self.last_call: tuple[tuple[Any, ...], object] | None = None
        self._channel = Channel(
            os.fdopen(0, "rb"),
            os.fdopen(1, "wb"),
            self._number,
            lambda content: RemoteValue(self, int(content[0]), str(content[1])[:40]),
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
        if not isinstance(reply, tuple) or len(reply) not in (2, 4) or reply[0] is not (len(reply) == 2):
            raise ChannelClosed
        if reply[0]:
            if message[0] in ("call", RUN):
                self.last_call = (message, reply[1])
            return reply[1]
        raised = Raised(str(reply[1]), str(reply[2]), reply[3] if type(reply[3]) is int else None)
        kind = vars(builtins).get(raised.name)
        if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, ITERATION_ENDS):
            kind = RuntimeError
        try:
            error: Exception = kind(raised.message)
        except TypeError:  # a type that requires more arguments, such as UnicodeDecodeError
            error = RuntimeError(raised.message)
        self.raised = (error, raised)
        raise error


class RemoteValue:
    """A value of the program that is not plain data, such as a function. It is equal only to itself."""

    def __init__(self, program: ProgramProxy, number: int, kind: str) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_kind", kind)

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_kind')} object>"

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


def run_test(program: ProgramProxy, setup: str, entry: str, test: str, operands: Operands | None) -> None:
    """Runs one test. It passes if it ends without an exception.

    Args:
        program: The program under test.
        setup: Code from the data that the test requires. It runs in this process; names that it does not define refer
            to the program.
        entry: A name that refers to the program even if the setup defines it.
        test: The test's code.
        operands: Records the values that the test's assertions compare.

    Raises:
        ChannelClosed: The program has ended.
    """
    namespace: dict[str, Any] = {"__name__": "tests"}
    if setup:
        _resolve_names(program, namespace, setup)
        exec(compile(setup, "<setup>", "exec"), namespace)
    namespace.pop(entry, None)
    _resolve_names(program, namespace, test)
    tree = ast.parse(test)
    if operands:
        operands.instrument(tree)
        namespace[RECORD] = operands.record
    program.last_call = None
    exec(compile(tree, "<test>", "exec"), namespace)


def _resolve_names(program: ProgramProxy, namespace: dict[str, Any], code: str) -> None:
    """Adds to the namespace the program's values for names in the code that are neither defined nor built in."""
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    for name in sorted(names - set(namespace) - set(vars(builtins))):
        if name == RUN:
            namespace[RUN] = lambda text: program.request(RUN, text)
            namespace["same_output"] = same_output
        elif name == COMPILES:
            namespace[COMPILES] = lambda: program.request("compile", None)
        elif name in sys.stdlib_module_names:  # the program might replace `math`
            namespace[name] = importlib.import_module(name)
        elif name != "same_output":
            try:
                namespace[name] = program.request("get", name)
            except KeyError:
                if program.raised and program.raised[1].line is not None:  # the program's own exception
                    raise
                # Otherwise the code itself defines the name.


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
        files: File descriptors: the input (setup, entry, tests and `explain`, as JSON), and the output, which gets a
            line of JSON for each test as soon as it ends: `true` or `false`. With `explain`, a `Failure` takes the
            place of `false`, and no tests follow it.
        limits: The other arguments of `read_and_confine`.
    """
    setup, entry, tests, explain = read_and_confine(files[0], *limits)
    program = ProgramProxy()
    with os.fdopen(files[1], "wb") as results:
        for test in tests:
            operands = Operands() if explain else None
            result: object = True
            try:
                run_test(program, setup, entry, test, operands)
            except ChannelClosed:
                return
            except BaseException as error:  # a failed assertion, an exception of the program, or an error in the test
                result = operands is not None and describe_failure(error, operands, program.raised, program.last_call)
            results.write(json.dumps(result).encode() + b"\n")
            results.flush()
            if explain and result is not True:
                return
