"""Code: write a program that passes hidden tests.

The bundled problems ask for short Python functions. User data may have one of these formats, recognized by the columns:

    query, tests, …                             this project's; also public_tests, solution, setup and entry
                                                (cory_env.rewards.code)
    text or prompt, test_list, …                MBPP, full and sanitized
    question, input_output, …                   APPS: programs that read and print, and functions

Each problem becomes a query with the columns of the first format. The first of several tests becomes public: feedback
may show it, and the reward uses the others. A row's own column `public_tests` (`[]`: none) takes precedence in every
format.

Prompts do not show the tests, except an example call of MBPP's functions: name and arguments, not the return value. The
reward is the share of hidden tests that the program passes; `cory_env.rewards.code:all_passed` is 1 only if all pass.
Programs run in a sandbox, see docs/own-task.md.
"""

import ast
import builtins
import json
from dataclasses import replace
from pathlib import Path

from cory_env.rewards.code import read_tests
from cory_env.tasks.definition import DataFormat, TaskDefinition
from cory_env.tasks.task import GradedTask, Query

PROBLEMS = Path(__file__).parents[1] / "assets" / "code-problems"
INSTRUCTION = "Answer with one block of Python code.\n"
PROBLEM_COLUMNS = ("tests", "public_tests", "setup", "entry", "solution")
SAME_VALUE = """\
def same_value(found, expected):
    found = list(found) if isinstance(found, tuple) else found
    return found == expected or isinstance(expected, list) and len(expected) == 1 and found == expected[0]
"""  # the semantics of APPS' tests, which put some values into lists of one


class Code(GradedTask):
    """The task. If the data has a solution, it is the gold answer."""

    def right_answer(self, query: Query) -> str | None:
        """Returns the solution, if there is one."""
        solution = query.columns.get("solution")
        return solution if isinstance(solution, str) and solution else None


def _from_own_format(query: Query) -> Query:
    return _make_problem(query, query.text, query.columns["tests"])


def _from_mbpp(query: Query) -> Query:
    tests, columns = read_tests("test_list", query.columns["test_list"]), query.columns
    setup = columns.get("test_setup_code") or "\n".join(read_tests("test_imports", columns.get("test_imports")))
    solution = columns.get("code")
    text = query.text.rstrip()
    if call := _first_call(tests, _shadowing_entry(solution, tests)):
        text += f"\nIt is called like this: {call}"
    return _make_problem(query, text, tests, setup=setup, solution=solution)


def _from_apps(query: Query) -> Query:
    columns = query.columns
    cases, solutions = _json(query, "input_output"), _json(query, "solutions") or [None]
    starter = str(columns.get("starter_code") or "")
    if not isinstance(cases, dict) or not isinstance(solutions, list):
        raise _data_error("input_output has no inputs and outputs")
    inputs, outputs = cases.get("inputs"), cases.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise _data_error("input_output does not have as many outputs as inputs")
    pairs = list(zip(inputs, outputs, strict=True))
    name = cases.get("fn_name")
    if name:
        function = f"Solution().{name}" if "class Solution" in starter else name
        tests = [f"assert same_value({function}({_arguments(inputs)}), {expected!r})" for inputs, expected in pairs]
    else:
        tests = [f"assert same_output(run({_lines(inputs)!r}), {_lines(expected)!r})" for inputs, expected in pairs]
    text = query.text.rstrip()
    if starter.strip():
        text += f"\n\nGo on with this code:\n{starter.rstrip()}"
    elif not name:
        text += "\n\nThe program reads standard input and prints."
    return _make_problem(query, text, tests, setup=SAME_VALUE if name else "", solution=solutions[0])


def _make_problem(query: Query, text: str, tests: object, **columns: object) -> Query:
    """Returns a query with the columns of a problem; its other columns stay available to prompts and rewards.

    Args:
        tests: The tests. If the row has no public tests, the first of several becomes public.
    """
    columns = {**query.columns, **columns}
    code, public = read_tests("tests", tests), read_tests("public_tests", columns.get("public_tests"))
    solution = columns.get("solution")
    if not code:
        raise _data_error("it has no tests")
    if columns.get("public_tests") is None and len(code) > 1:
        public, code = code[:1], code[1:]
    if columns.get("prefix"):
        raise _data_error("it has a column prefix, but a program must be complete")
    if not isinstance(solution, str | None):
        raise _data_error(f"its solution {solution!r:.80} is not text")
    for test in [*public, *code]:
        _parse("the test", test)
    _parse("its setup", columns.get("setup") or "")
    entry = columns.get("entry") or _shadowing_entry(solution, [*public, *code])
    named = {"entry": entry} if entry else {}
    return replace(query, text=text, columns={**columns, **named, "tests": code, "public_tests": public})


def _data_error(problem: str) -> ValueError:
    return ValueError(f"{problem}. Correct the row, or remove it.")


def _json(query: Query, column: str) -> object:
    value = query.columns.get(column)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise _data_error(f"{column} is not JSON ({error})") from error


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(values: object) -> str:
    """Returns code for the arguments of a call."""
    return ", ".join(map(repr, values)) if isinstance(values, list) else f"*{values!r}"


def _first_call(tests: list[str], entry: str) -> str:
    """Returns the first call of the entry, or of a function that is not built in, without its expected value."""
    for test in tests:
        for name, call in _named_calls(test):
            if name == entry or not (entry or name in vars(builtins)):
                return ast.unparse(call)
    return ""


def _shadowing_entry(solution: object, tests: list[str]) -> str:
    """Returns the name of a function that the tests call and the solution defines although Python has it, too."""
    try:
        nodes = ast.parse(solution).body if isinstance(solution, str) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    names = (name for test in tests for name, _ in _named_calls(test))
    return next((name for name in names if name in defined and name in vars(builtins)), "")


def _named_calls(test: str) -> list[tuple[str, ast.Call]]:
    """Returns the calls of names in a test, each with its name."""
    return [
        (node.func.id, node)
        for node in ast.walk(_parse("the test", test))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]


def _parse(name: str, code: object) -> ast.Module:
    try:
        return ast.parse(str(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _data_error(f"{name} {str(code)[:80]!r} is not Python ({error})") from error


CODE = TaskDefinition(
    kind=Code,
    prompt="{query}\n\n" + INSTRUCTION,
    observer_prompt="{query}\n\nAn answer that may be wrong:\n\n{reference}\n\n" + INSTRUCTION,
    feedback_prompt="{query}\n\nAn answer that may be wrong:\n\n{reference}\n\n"
    "The result of its tests:\n\n{feedback}\n\n" + INSTRUCTION,
    feedback="cory_env.rewards.code:test_feedback",
    solved_feedback="All public tests pass.",
    reference_separator="\n\nAnother one:\n\n",  # for three or more agents
    reward="cory_env.rewards.code:share_passed",
    sources=(PROBLEMS / "train.jsonl", PROBLEMS / "test.jsonl"),
    formats=(
        DataFormat("query", ("tests",), _from_own_format),
        DataFormat("text", ("test_list",), _from_mbpp),
        DataFormat("prompt", ("test_list",), _from_mbpp),
        DataFormat("question", ("input_output",), _from_apps),
    ),
    convert_ungraded=True,
    added_columns=frozenset(PROBLEM_COLUMNS),
)
