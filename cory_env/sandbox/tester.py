"""The process that runs the tests. The program runs in another process; the tests use it through proxies (`remote`)."""

import ast
import builtins
import contextlib
import importlib
import json
import os
import sys
import types
from collections import deque
from collections.abc import Sequence
from typing import Any

from cory_env.sandbox.confinement import read_and_confine
from cory_env.sandbox.failures import RECORD, Operands, Raised, describe_failure
from cory_env.sandbox.outputs import same_output
from cory_env.sandbox.peer import Peer
from cory_env.sandbox.protocol import ChannelClosed, take_standard_streams
from cory_env.sandbox.remote import ARITHMETIC, COMPARISONS, NUMBERS, OPERATORS, RemoteObject, is_remote, plain_base

RUN = "run"  # the tests' function that runs the program as a script: run(input) returns its output
COMPILES = "__compiles__"  # the tests' function that only compiles the program
TESTS = "tests"  # the tests' module
LONG_LOOP = 16  # items of an iterator in a row, after which a test hardly looks at anything else in between
# A program's StopIteration would end an iteration in the test, as in `all(map(f, …))` or `all(map(len, …))`, but not
# the test. So it counts only if an item was requested.
ITERATION_ENDS = (StopIteration, StopAsyncIteration)
ITEM_REQUESTS = ("next", "await", "__anext__")
# Their attributes would lead a program to the tests' frames and global names.
OPAQUE = (
    *(types.FunctionType, types.MethodType, types.CodeType, types.FrameType, types.TracebackType, types.ModuleType),
    *(types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, type),
)
READABLE = {
    types.FunctionType: {"__name__", "__qualname__", "__doc__", "__code__", "__defaults__"},
    types.CodeType: {"co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_varnames", "co_name", "co_flags"},
    types.MethodType: {"__name__", "__qualname__", "__doc__"},
    type: {"__name__", "__qualname__", "__doc__"},
}


class ProgramProxy(Peer):
    """The program, from whose process names and values are requested.

    Attributes:
        raised: The last exception of the program: the exception raised here, and its details.
        last_call: The arguments of the last call that returned, by position and by name, and its result.
        hidden: Whether `repr` of the program's objects must not ask the program.
    """

    def __init__(self) -> None:
        super().__init__(*take_standard_streams(), first=1, trusting=False)
        self.raised: tuple[BaseException, Raised] | None = None
        self.last_call: tuple[tuple[Any, ...], dict[str, Any], object] | None = None
        self.hidden = False
        self._ahead: dict[int, tuple[deque[Any], BaseException | None]] = {}  # what iterators gave ahead, by number
        self._iterating: tuple[int | None, int] = (None, 0)  # the iterator of the last requests, and how many they were

    def request(self, operation: str, *arguments: object) -> Any:
        """Lets the program's process execute an operation; see `Peer`."""
        if operation != "next":
            self._iterating = (None, 0)
        return super().request(operation, *arguments)

    def _next(self, iterator: Any) -> Any:
        """Returns the next item of a program's iterator; in a long loop, many at once are requested."""
        number = iterator.__remote__.number
        items, error = self._ahead.pop(number, (deque[Any](), None))
        if not items and error:
            raise error
        if not items:
            length = self._iterating[1] + 1 if self._iterating[0] == number else 1
            self._iterating = (number, length)
            received, error = self.request("next", iterator, 2 ** max(0, min(length - LONG_LOOP, 10)))
            items.extend(received)
        item = items.popleft()
        if items or error:
            self._ahead[number] = (items, error)
        return item

    def received(self, operation: str, error: BaseException, details: list[Any]) -> BaseException:
        """Returns the program's exception, but ends of iterations only from iterators."""
        match details:
            case [str(name), str(message), int() | None as line]:
                if isinstance(error, ITERATION_ENDS) and operation not in ITEM_REQUESTS:
                    error = RuntimeError(message)
                self.raised = (error, Raised(name, message, line))
                return error
        raise ChannelClosed

    def show(self, printed: str) -> None:
        """Prints what the program printed, as a test may redirect it."""
        if printed:
            with contextlib.suppress(ValueError):
                sys.stdout.write(printed)

    def get(self, name: str) -> tuple[bool, Any]:
        """Returns whether the program has a global name, and its value."""
        try:
            return self.request("get", name)
        except KeyError as error:  # of the program itself; it must not look as if the name were missing
            assert self.raised
            self.raised = (RuntimeError(str(error)), self.raised[1])
            raise self.raised[0] from error

    def call(self, target: object, positional: tuple[object, ...], keywords: dict[str, object]) -> Any:
        """Calls a function or class of the program."""
        result = super().call(target, positional, keywords)
        self.last_call = (positional, keywords, result)
        return result

    def run(self, text: str) -> Any:
        """Returns what the program prints as a script that reads the text."""
        result = self.request(RUN, str(text))
        self.last_call = ((text,), {}, result)
        return result

    def operate(self, name: str, target: Any, *operands: Any) -> Any:
        """Applies an operator to an object of the program, unless that left the verdict to the program (`remote`)."""
        ours = bool(operands) and not is_remote(operands[0])
        if name in ("__str__", "__repr__", "__format__") and self.hidden:
            base: Any = plain_base(type(target))
            return base.__repr__(target) if base else f"<{type(target).__name__} object>"
        if name in ("__eq__", "__ne__") and ours:
            content = self.request("content", target) if isinstance(operands[0], list | dict | set) else None
            return (content is not None and content == operands[0]) is (name == "__eq__")
        if name in COMPARISONS and ours:
            return NotImplemented
        if name == "__next__":
            return self._next(target)
        if name == "__contains__" and ours:
            return any(item is operands[0] or item == operands[0] for item in target)
        result = super().operate(name, target, *operands)
        informed = any(operand.__remote__.informed for operand in (target, *operands) if is_remote(operand))
        if (name in ARITHMETIC and (ours or informed)) or (name in NUMBERS and informed):
            if not isinstance(result, RemoteObject) or plain_base(type(result)):
                raise TypeError(f"{name} of a {type(target).__name__} would leave the verdict to the program")
            result.__remote__.informed = True
        return result

    def execute(self, operation: str, target: Any, *arguments: Any) -> Any:
        """Executes what the program requests of an object that a test passed to it, if that is harmless."""
        allowed = False
        if operation in ("attribute", "set", "delete"):
            name = arguments[0]
            # A text of the program's own class could look different in each of these checks.
            is_public = type(name) is str and not name.startswith("_") and not isinstance(target, OPAQUE)
            is_readable = type(name) is str and name in READABLE.get(type(target), ())
            allowed = is_public and type(target).__module__ == TESTS
            allowed = allowed or (operation == "attribute" and (is_public or is_readable))
        elif operation == "call":
            allowed = callable(target)
        elif operation in OPERATORS:
            allowed = not isinstance(target, types.ModuleType | type)
        elif operation == "signature":
            allowed = isinstance(target, types.FunctionType | types.MethodType)
        if not (allowed and self.values.is_given(target)):
            raise AttributeError(f"{operation} {arguments[:1]} of a test's {type(target).__name__} is not possible")
        return super().execute(operation, target, *arguments)


class Namespace(dict[str, Any]):
    """The global names of a test. Those that it does not define are the program's, the library's, or Python's."""

    def __init__(self, program: ProgramProxy, program_names: frozenset[str]) -> None:
        """Makes the namespace.

        Args:
            program_names: Names that are the program's even if Python or its library has them, too.
        """
        super().__init__(__name__=TESTS)
        self._program, self._program_names = program, program_names

    def __missing__(self, name: str) -> Any:
        if name == RUN:
            return self._program.run
        if name == "same_output":
            return same_output
        if name == COMPILES:
            return lambda: self._program.request("compile", None)
        known = name in sys.stdlib_module_names or hasattr(builtins, name)
        if not known or name in self._program_names:
            exists, value = self._program.get(name)
            if exists:
                if is_remote(value):
                    self[name] = value  # others may be assigned anew
                return value
        if name in sys.stdlib_module_names and not hasattr(builtins, name):
            return importlib.import_module(name)
        raise KeyError(name)


def find_program_names(tests: Sequence[str], setup: str, entry: str) -> frozenset[str]:
    """Returns the names that refer to the program although Python or its library defines them, too.

    These are the entry; names of the library that are used otherwise than for what the library has under them, as in
    `copy(x)`; and, if there is no entry, names of functions that a test calls although it uses nothing else of the
    program, as in `assert sum(10, 15) == 6`.
    """
    names = {entry} - {""}
    for test in tests:
        trees = []
        for code in (setup, test):
            with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
                trees += list(ast.walk(ast.parse(code)))
        bases = {id(node.value): node.attr for node in trees if isinstance(node, ast.Attribute)}
        called = {node.func.id for node in trees if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        defined = _defined_names(trees)
        others = False
        for node in trees:
            if not isinstance(node, ast.Name) or node.id in defined:
                continue
            if node.id in sys.stdlib_module_names:
                if id(node) not in bases or not hasattr(importlib.import_module(node.id), bases[id(node)]):
                    names.add(node.id)
                    others = True
            elif not hasattr(builtins, node.id):
                others = True
        if not entry and not others:
            names |= {name for name in called if hasattr(builtins, name)} - defined
    return frozenset(names)


def _defined_names(nodes: Sequence[ast.AST]) -> set[str]:
    names = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    aliases = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    return names | {(alias.asname or alias.name).partition(".")[0] for alias in aliases}


def run_test(namespace: Namespace, setup: str, entry: str, test: str, operands: Operands | None) -> None:
    """Runs one test. It passes if it ends without an exception.

    Args:
        setup: Code from the data that the test requires. It runs in this process.
        entry: A name that refers to the program even if the setup defines it.
        operands: Records the values that the test's assertions compare.
    """
    if setup:
        exec(compile(setup, "<setup>", "exec"), namespace)
        namespace.pop(entry, None)
    tree = ast.parse(test)
    if operands:
        operands.instrument(tree)
        namespace[RECORD] = operands.record
    exec(compile(tree, "<test>", "exec"), namespace)


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
    names = find_program_names(tests, setup, entry)
    with os.fdopen(files[1], "wb") as results:
        for test in tests:
            operands = Operands() if explain else None
            program.last_call = None
            result: object = True
            try:
                run_test(Namespace(program, names), setup, entry, test, operands)
            except ChannelClosed:
                return
            except BaseException as error:  # a failed assertion, an exception of the program, or an error in the test
                program.hidden = True
                result = operands is not None and describe_failure(error, operands, program.raised, program.last_call)
                program.hidden = False
            results.write(json.dumps(result).encode() + b"\n")
            results.flush()
            if explain and result is not True:
                return
