"""Code: write a program, which hidden tests are put to.

The bundled problems ask for short Python functions. Data of one's own is read in the forms in which problems are
published, by its columns:

    query, tests, …                             our own; also solution, setup, prefix and entry (cory_env.rewards.code)
    text or prompt, test_list, …                MBPP, whole and sanitized
    prompt, test, entry_point, …                HumanEval, and HumanEval+ as on the hub
    question, input_output, …                   APPS: programs that read and print, and functions

What a problem becomes is a query with the columns of our own. The tests stay hidden, but for how a function of MBPP is
called: its name and arguments, not what it returns. The reward is the share of the tests that the program passes;
`cory_env.rewards.code:all_passed` pays for all or nothing. Programs run shut in: see docs/tasks.md.
"""

import ast
import builtins
import json
from dataclasses import replace
from pathlib import Path

from cory_env.rewards.code import closed
from cory_env.tasks.definition import Form, TaskDefinition
from cory_env.tasks.task import GradedTask, Query

PROBLEMS = Path(__file__).parents[1] / "assets" / "code-problems"
INSTRUCTION = "Answer with one block of Python code.\n"
OWN = ("tests", "setup", "prefix", "entry", "solution")
SAME_VALUE = """\
def same_value(found, expected):
    found = list(found) if isinstance(found, tuple) else found
    return found == expected or isinstance(expected, list) and len(expected) == 1 and found == expected[0]
"""  # as the tests of APPS are meant, which put some values into lists of one


class Code(GradedTask):
    """The task. Where the data has a solution it is the gold answer."""

    def right_answer(self, query: Query) -> str | None:
        """Returns the solution, if there is one."""
        solution = query.columns.get("solution")
        return solution if isinstance(solution, str) and solution else None


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
    tests = _checks(str(columns["test"]), entry)
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
        raise _bad("input_output holds no inputs and outputs")
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


def _made(query: Query, text: str, tests: object, **columns: object) -> Query:
    """Makes a problem of our own; what its row holds of other columns stays open to prompts and rewards.

    Raises:
        ValueError: A test is no Python, or there is none.
    """
    code = _texts(tests)
    if not code or not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise _bad(f"its tests are {tests!r:.80}, but must be code")
    solution = columns.get("solution", query.columns.get("solution"))
    if not isinstance(solution, str | None):
        raise _bad(f"its solution {solution!r:.80} is no text")
    for test in code:
        try:
            ast.parse(test)
        except (SyntaxError, ValueError) as error:
            raise _bad(f"the test {test[:80]!r} is not Python ({error})") from error
    return replace(query, text=text, columns={**query.columns, **columns, "tests": code})


def _bad(why: str) -> ValueError:
    return ValueError(f"{why}. Correct the row, or remove it.")


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str) and text.strip()] if isinstance(value, list) else []


def _json(query: Query, column: str) -> object:
    value = query.columns.get(column)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise _bad(f"{column} is not JSON ({error})") from error


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _first_call(tests: list[str]) -> str:
    """Returns the first call of a function that is not built in, as `f(1, 2)`, without what it should return."""
    for test in tests:
        for node in ast.walk(ast.parse(test)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in vars(builtins):
                return ast.unparse(node)
    return ""


def _checks(test: str, entry: str) -> list[str]:
    """Returns a test for each assertion of HumanEval's function `check`; one for all where not all stand by themselves.

    An assertion that is always true is left out.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError) as error:
        raise _bad(f"test is not Python ({error})") from error
    check = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None:
        raise _bad("test has no function check")
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


CODE = TaskDefinition(
    kind=Code,
    prompt="{query}\n\n" + INSTRUCTION,
    observer_prompt="{query}\n\nAn answer that may be wrong:\n\n{reference}\n\n" + INSTRUCTION,
    reference_separator="\n\nAnother one:\n\n",  # three agents or more
    reward="cory_env.rewards.code:share_passed",
    sources=(PROBLEMS / "train.jsonl", PROBLEMS / "test.jsonl"),
    forms=(
        Form("query", ("tests",), _own),
        Form("text", ("test_list",), _mbpp),
        Form("prompt", ("test_list",), _mbpp),
        Form("prompt", ("test", "entry_point"), _humaneval),
        Form("question", ("input_output",), _apps),
    ),
    convert_ungraded=True,
    converted=frozenset(OWN),
)
