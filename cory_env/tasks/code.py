"""Code: write a program that passes hidden tests.

The bundled problems ask for short Python functions. User data may have one of these formats, recognized by the columns:

    query, tests, …                             this project's; also public_tests, solution, setup, prefix and entry
                                                (cory_env.rewards.code)
    text or prompt, test_list, …                MBPP, full and sanitized
    prompt, test, entry_point, …                HumanEval, and HumanEval+ as on the hub
    question, input_output, …                   APPS: programs that read and print, and functions

Each problem becomes a query with the columns of the first format. The first of several tests becomes public: feedback
may show it, and the reward uses the others. HumanEval's public tests are the examples in the docstring instead, and its
tests stay complete. A row's own column `public_tests` (`[]`: none) takes precedence in every format.

Prompts do not show the tests, except an example call of MBPP's functions: name and arguments, not the return value. The
reward is the share of hidden tests that the program passes; `cory_env.rewards.code:all_passed` is 1 only if all pass.
Programs run in a sandbox, see docs/tasks.md.
"""

import ast
import builtins
import doctest
import json
from dataclasses import replace
from pathlib import Path

from cory_env.rewards.code import close_prefix
from cory_env.tasks.definition import DataFormat, TaskDefinition
from cory_env.tasks.task import GradedTask, Query

PROBLEMS = Path(__file__).parents[1] / "assets" / "code-problems"
INSTRUCTION = "Answer with one block of Python code.\n"
PROBLEM_COLUMNS = ("tests", "public_tests", "setup", "prefix", "entry", "solution")
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
    tests = query.columns["tests"]
    return _make_problem(query, query.text, [tests] if isinstance(tests, str) else tests)


def _from_mbpp(query: Query) -> Query:
    tests, columns = query.columns["test_list"], query.columns
    setup = columns.get("test_setup_code") or "\n".join(_texts(columns.get("test_imports")))
    solution = columns.get("code")
    text = query.text.rstrip()
    if call := _first_call(_texts(tests), _shadowing_entry(solution, _texts(tests))):
        text += f"\nIt is called like this: {call}"
    return _make_problem(query, text, tests, setup=setup, solution=solution)


def _from_humaneval(query: Query) -> Query:
    entry, columns = str(query.columns["entry_point"]), query.columns
    tests = _split_check(str(columns["test"]), entry)
    return _make_problem(
        query,
        query.text,
        tests,
        _docstring_tests(query.text, entry),
        setup=close_prefix(query.text),
        prefix=query.text,
        entry=entry,
        solution=columns.get("canonical_solution"),
    )


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


def _make_problem(
    query: Query, text: str, tests: object, public_tests: list[str] | None = None, **columns: object
) -> Query:
    """Returns a query with the columns of a problem; its other columns stay available to prompts and rewards.

    Args:
        tests: The tests. Without public tests, the first of several becomes public.
        public_tests: The format's public tests, unless the row has its own.
    """
    code = _texts(tests)
    if not code or not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise _data_error(f"its tests are {tests!r:.80}, but must be code")
    public: object = query.columns.get("public_tests")
    if public is None:
        public = public_tests
    if isinstance(public, str):
        public = [public]
    if public is None:
        public, code = (code[:1], code[1:]) if len(code) > 1 else ([], code)
    if not isinstance(public, list) or len(_texts(public)) < len(public):
        raise _data_error(f"its public_tests are {public!r:.80}, but must be code")
    solution = columns.get("solution", query.columns.get("solution"))
    if not isinstance(solution, str | None):
        raise _data_error(f"its solution {solution!r:.80} is not text")
    for test in [*public, *code]:
        _parse("the test", test)
    columns = {**query.columns, **columns, "tests": code, "public_tests": public}
    _parse("its setup", columns.get("setup") or "")
    if not columns.get("entry") and (entry := _shadowing_entry(solution, [*public, *code])):
        columns["entry"] = entry
    return replace(query, text=text, columns=columns)


def _data_error(problem: str) -> ValueError:
    return ValueError(f"{problem}. Correct the row, or remove it.")


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str) and text.strip()] if isinstance(value, list) else []


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


def _docstring_tests(text: str, entry: str) -> list[str]:
    """Returns the examples in a function's docstring as tests: each call with a literal as result, `>>> f(1)`."""
    try:
        functions = [node for node in ast.parse(close_prefix(text)).body if isinstance(node, ast.FunctionDef)]
        docstring = next((ast.get_docstring(node) for node in functions if node.name == entry), None)
        examples = doctest.DocTestParser().get_examples(docstring or "")
    except ValueError:  # not a well-formed docstring
        return []
    tests = []
    for example in examples:
        try:
            call = ast.parse(example.source.strip(), mode="eval").body
            expected = ast.literal_eval(example.want.strip())
        except (SyntaxError, ValueError):
            continue
        if entry in {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}:
            tests.append(f"assert {ast.unparse(call)} == {expected!r}")
    return tests


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


def _split_check(test: str, entry: str) -> list[str]:
    """Splits HumanEval's function `check` into one test per assertion, or one test if the assertions are not separable.

    Assertions of constants are left out.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError) as error:
        raise _data_error(f"test is not Python ({error})") from error
    check = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None:
        raise _data_error("test has no function check")
    body = [node for node in check.body if not (isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant))]
    assertions = [node for node in body if isinstance(node, ast.Assert)]
    others = [node for node in body if not isinstance(node, ast.Assert)]
    if not assertions or any(isinstance(inner, ast.Assert) for node in others for inner in ast.walk(node)):
        return [f"{test.rstrip()}\ncheck({entry})"]
    tests = []
    for assertion in assertions:
        check.body = [node for node in body if node is assertion or (node in others and node.lineno < assertion.lineno)]
        tests.append(f"{ast.unparse(tree)}\ncheck({entry})")
    return tests


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
        DataFormat("prompt", ("test", "entry_point"), _from_humaneval),
        DataFormat("question", ("input_output",), _from_apps),
    ),
    convert_ungraded=True,
    added_columns=frozenset(PROBLEM_COLUMNS),
)
