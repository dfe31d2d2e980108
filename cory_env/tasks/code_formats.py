"""Reads problems in the forms in which they are published, by their columns.

    query, tests, …                             our own; also solution, setup, prefix and entry (cory_env.rewards.code)
    text or prompt, test_list, …                MBPP, whole and sanitized
    prompt, test, entry_point, …                HumanEval, and HumanEval+ as on the hub
    question, input_output, …                   APPS: programs that read and print, and functions

What a problem becomes is a query with the columns of our own. The tests stay hidden, but for how a function of MBPP is
called: its name and arguments, not what it returns.
"""

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from cory_env.rewards.code import closed
from cory_env.tasks.readers import DataError
from cory_env.tasks.rows import QUERY, Source, columns_of
from cory_env.tasks.task import Query

OWN = ("tests", "setup", "prefix", "entry", "solution")
SAME_VALUE = """\
def same_value(found, expected):
    found = list(found) if isinstance(found, tuple) else found
    return found == expected or isinstance(expected, list) and len(expected) == 1 and found == expected[0]
"""  # as the tests of APPS are meant, which put some values into lists of one


@dataclass(frozen=True)
class Format:
    """A form of problems.

    Attributes:
        query: The column that holds the query.
        needs: The columns that every row needs besides.
        convert: Makes a row one of our own.
    """

    query: str
    needs: tuple[str, ...]
    convert: Callable[[Query], Query]


def find_format(source: Source, tested: bool) -> Format:
    """Returns the form of a source, by the columns of its first row; without tests our own, whatever it has.

    Raises:
        DataError: It cannot be read.
    """
    columns = set(columns_of(source))
    for found in FORMATS:
        if columns >= {found.query, *found.needs}:
            return found
    return replace(FORMATS[0], convert=lambda query: query) if not tested else FORMATS[0]


def _own(query: Query) -> Query:
    tests = query.columns["tests"]
    return _made(query, query.text, [tests] if isinstance(tests, str) else tests)


def _mbpp(query: Query) -> Query:
    tests, columns = query.columns["test_list"], query.columns
    setup = columns.get("test_setup_code") or "\n".join(_texts(columns.get("test_imports")))
    text = query.text.rstrip()
    if called := _first_call(_texts(tests)):
        text += f"\nIt is called like this: {called}"
    return _made(query, text, tests, setup=setup, solution=columns.get("code"))


def _humaneval(query: Query) -> Query:
    entry, columns = str(query.columns["entry_point"]), query.columns
    tests = _checks(query, str(columns["test"]), entry)
    return _made(
        query,
        query.text,
        tests,
        setup=closed(query.text),
        prefix=query.text,
        entry=entry,
        solution=columns.get("canonical_solution"),
    )


def _apps(query: Query) -> Query:
    columns = query.columns
    cases, solutions = _json(query, "input_output"), _json(query, "solutions") or [None]
    starter = str(columns.get("starter_code") or "")
    if not isinstance(cases, dict) or not isinstance(solutions, list):
        raise _bad(query, "input_output holds no inputs and outputs")
    pairs = list(zip(cases.get("inputs", ()), cases.get("outputs", ()), strict=False))
    name = cases.get("fn_name")
    if name:
        called = f"Solution().{name}" if "class Solution" in starter else name
        tests = [f"assert same_value({called}(*{given!r}), {expected!r})" for given, expected in pairs]
    else:
        tests = [f"assert same_output(run({_lines(given)!r}), {_lines(expected)!r})" for given, expected in pairs]
    text = query.text.rstrip()
    if starter.strip():
        text += f"\n\nGo on with this code:\n{starter.rstrip()}"
    elif not name:
        text += "\n\nThe program reads standard input and prints."
    return _made(query, text, tests, setup=SAME_VALUE if name else "", solution=solutions[0])


FORMATS = (
    Format(QUERY, ("tests",), _own),
    Format("text", ("test_list",), _mbpp),
    Format("prompt", ("test_list",), _mbpp),
    Format("prompt", ("test", "entry_point"), _humaneval),
    Format("question", ("input_output",), _apps),
)


def _made(query: Query, text: str, tests: object, **columns: object) -> Query:
    """Makes a problem of our own; what its row holds of other columns stays open to prompts and rewards.

    Raises:
        DataError: A test is no Python, or there is none.
    """
    if isinstance(tests, list) and not all(isinstance(test, str) for test in tests):
        raise _bad(query, f"its tests {tests!r:.80} are not all texts")
    code = _texts(tests)
    if not code:
        raise _bad(query, "it has no tests")
    solution = columns.get("solution", query.columns.get("solution"))
    if solution is not None and not isinstance(solution, str):
        raise _bad(query, f"its solution {solution!r:.80} is no text")
    for test in code:
        try:
            ast.parse(test)
        except (SyntaxError, ValueError) as error:
            raise _bad(query, f"the test {test[:80]!r} is not Python ({error})") from error
    return replace(query, text=text, columns={**query.columns, **columns, "tests": code})


def _bad(query: Query, why: str) -> DataError:
    return DataError(f"The data of task code, at {query.text[:60]!r}: {why}. Correct the row, or remove it.")


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str) and text.strip()] if isinstance(value, list) else []


def _json(query: Query, column: str) -> object:
    value = query.columns.get(column)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise _bad(query, f"{column} is not JSON ({error})") from error


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _first_call(tests: list[str]) -> str:
    """Returns the first call of a function that is not built in, as `f(1, 2)`, without what it should return."""
    import builtins

    for test in tests:
        for node in ast.walk(ast.parse(test)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in vars(builtins):
                return ast.unparse(node)
    return ""


def _checks(query: Query, test: str, entry: str) -> list[str]:
    """Returns a test for each assertion of HumanEval's function `check`; one for all where not all stand by themselves.

    An assertion that is always true is left out.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError) as error:
        raise _bad(query, f"test is not Python ({error})") from error
    check = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None:
        raise _bad(query, "test has no function check")
    body = [node for node in check.body if not (isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant))]
    alone = [node for node in body if isinstance(node, ast.Assert)]
    others = [node for node in body if not isinstance(node, ast.Assert)]
    if not alone or any(isinstance(inner, ast.Assert) for node in others for inner in ast.walk(node)):
        return [f"{test.rstrip()}\ncheck({entry})"]
    tests = []
    for chosen in alone:
        check.body = [node for node in body if node is chosen or (node in others and node.lineno < chosen.lineno)]
        tests.append(f"{ast.unparse(tree)}\ncheck({entry})")
    return tests
