"""Why a test failed: what it expected and what it got, or the exception.

Most of this runs in the tester's process, so the program cannot forge it. But the program chooses its values and
messages, so their texts are untrusted: they are bounded, have no control characters, and mean nothing to the grader.
"""

import ast
import builtins
import re
import sys
from typing import Any, NamedTuple

from cory_env.sandbox.protocol import error_message

MAX_TEXT = 300  # characters of each text
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
ENDED = "ended"  # the name of the exception, if a script's process ended without one
RECORD = "<record>"  # a name that no test can use
COMPARISONS = ("same_output", "same_value", "isclose", "allclose", "array_equal")
"""Functions that compare a value, their first argument, with the expected one."""


class Failure(NamedTuple):
    """Why a program fails a test.

    Attributes:
        reason: `value`: an assertion failed; `exception`: the program raised it; `test`: the test's own code raised it;
            `time`: the time limit; `ended`: the program's process ended.
        test: Index of the test.
        expected: The expected value as Python code, if the assertion compares two values.
        got: The value compared with it.
        call: The arguments and the result of the program's last call, if no values are compared.
        error: The exception's type.
        message: The exception's message.
        line: The line of the program that raised the exception, from 1.
    """

    reason: str
    test: int = 0
    expected: str = ""
    got: str = ""
    call: str = ""
    error: str = ""
    message: str = ""
    line: int | None = None


class Raised(NamedTuple):
    """An exception of the program: its type, message and line."""

    name: str
    message: str
    line: int | None


class Operands:
    """Records the values that a test's assertions compare."""

    def __init__(self) -> None:
        self._asserts: list[tuple[ast.Assert, bool]] = []  # with whether the expected value comes first
        self._last: tuple[int, dict[int, object]] = (-1, {})

    def instrument(self, tree: ast.Module) -> None:
        """Lets the assertions in a test's tree record their operands by calling `RECORD`; their verdicts stay."""
        for node in [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]:
            match node.test:
                case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]) as comparison:
                    comparison.left, comparison.comparators = self._wrap(left, 0), [self._wrap(right, 1)]
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[left, right, *_]) as call if (
                    name in COMPARISONS and not any(isinstance(side, ast.Starred) for side in (left, right))
                ):
                    call.args[:2] = self._wrap(left, 0), self._wrap(right, 1)
                case _:
                    continue
            self._asserts.append((node, not _is_computed(left) and _is_computed(right)))
        ast.fix_missing_locations(tree)

    def _wrap(self, node: ast.expr, side: int) -> ast.expr:
        arguments = [ast.Constant(len(self._asserts)), ast.Constant(side), node]
        return ast.copy_location(ast.Call(ast.Name(RECORD, ast.Load()), arguments, []), node)

    def record(self, index: int, side: int, value: object) -> object:
        """Stores one side of an assertion and returns it."""
        if side == 0:
            self._last = (index, {})
        self._last[1][side] = value
        return value

    def compared_by(self, error: BaseException) -> tuple[object, object] | None:
        """Returns the expected value and the value compared with it by the assertion that failed, if recorded."""
        index, sides = self._last
        line, entry = None, error.__traceback__
        while entry:
            if entry.tb_frame.f_code.co_filename == "<test>":
                line = entry.tb_lineno
            entry = entry.tb_next
        if line is None or len(sides) < 2:
            return None
        node, expected_first = self._asserts[index]
        if not node.lineno <= line <= (node.end_lineno or node.lineno):
            return None
        return (sides[0], sides[1]) if expected_first else (sides[1], sides[0])


def _is_computed(node: ast.expr) -> bool:
    """Returns whether an expression uses a name other than those of Python and its standard library."""
    names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return bool(names - set(vars(builtins)) - sys.stdlib_module_names - {RECORD})


def describe_failure(
    error: BaseException,
    operands: Operands,
    raised: tuple[BaseException, Raised] | None,
    last_call: tuple[tuple[Any, ...], dict[str, Any], object] | None,
) -> Failure:
    """Describes why a test ended with an exception.

    Args:
        raised: The program's last exception: the exception raised in the tester, and its details.
        last_call: The arguments, by position and by name, and the result of the last call of the program that returned.
    """
    if raised is not None and raised[0] is error:
        details = raised[1]
        if details.name == ENDED:
            return Failure("ended")
        return Failure(
            "exception", error=printable_line(details.name), message=printable_line(details.message), line=details.line
        )
    if isinstance(error, AssertionError) and (values := operands.compared_by(error)):
        expected, got = _show_pair(*values)
        return Failure("value", expected=expected, got=got)
    call = "" if last_call is None else _show_call(*last_call)
    if isinstance(error, AssertionError):
        return Failure("value", call=call)
    return Failure(
        "test", call=call, error=printable_line(type(error).__name__), message=printable_line(error_message(error))
    )


def _show_call(positional: tuple[Any, ...], keywords: dict[str, Any], result: object) -> str:
    arguments = [*map(_repr, positional), *(f"{name}={_repr(value)}" for name, value in keywords.items())]
    return f"with ({printable_line(', '.join(arguments))}), returned {printable_line(_repr(result))}"


def _show_pair(expected: object, got: object) -> tuple[str, str]:
    """Returns two values as Python code; long ones start shortly before their first difference."""
    texts = _repr(expected), _repr(got)
    differences = (k for k, (first, second) in enumerate(zip(*texts, strict=False)) if first != second)
    common = next(differences, min(map(len, texts)))
    start = common - 20 if common > 40 else 0
    shown = [printable_line(("…" if start else "") + text[start:]) for text in texts]
    return shown[0], shown[1]


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # nested too deeply, or a number with too many digits
        return f"<{type(value).__name__} object>"


def printable_line(text: str, limit: int = MAX_TEXT) -> str:
    """Returns a text in one line, without control characters, at most `limit` characters long.

    It lacks memory addresses, as in `<function f at 0x7f…>`, so that it is the same in every run.
    """
    characters = (" " if c in "\r\n\t" else c for c in shorten(ADDRESS.sub("", text), limit))
    return shorten("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in characters), limit)


def shorten(text: str, limit: int) -> str:
    """Returns a text with its middle left out if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    tail = (limit - 3) // 3
    return f"{text[: limit - 3 - tail]} … {text[len(text) - tail :]}"
