"""Rewards for programs: the tests in the column `tests` that a completion's program passes.

    {"query": "Write a function double(x).", "tests": ["assert double(2) == 4", "assert double('ab') == 'abab'"]}

A test is Python code; it passes if it ends without an exception. The program is the completion's first block of code
between lines of ```, or the whole completion if it has no such block. Programs run in a sandbox, and the tests'
comparisons run in a separate process that the program cannot reach (docs/tasks.md). A program that fails, hangs or
exceeds its limits passes no further tests.
"""

import ast
import math
import os
import re
from collections.abc import Sequence
from functools import wraps
from typing import Any

from cory_env.message import Message
from cory_env.rewards.prepared import TIMEOUT_VARIABLE, check_with
from cory_env.sandbox.grading import Limits, Submission, grade

TIME_SHARE = 0.8  # share of the reward's time limit that programs may use
CODE_BLOCK = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def check_sandbox(sandbox: str = "required", seconds: str = "10", memory: str = "512") -> None:
    """Checks that programs can be run on this machine.

    Raises:
        SandboxError: The sandbox does not work here.
        ValueError: A setting is not a number, or out of range.
    """
    grade([], _limits(seconds, memory), sandbox)


@check_with(check_sandbox)
def share_passed(
    completions: Sequence[str | list[Message]],
    tests: Sequence[Sequence[str] | str],
    setup: Sequence[str | None] | None = None,
    prefix: Sequence[str | None] | None = None,
    entry: Sequence[str | None] | None = None,
    sandbox: str = "required",
    seconds: str = "10",
    memory: str = "512",
) -> list[float]:
    """Returns the share of the tests that each completion's program passes.

    Args:
        completions: The decoded responses.
        tests: One test, or a list of tests, per completion.
        setup: Code that the tests require.
        prefix: The program's beginning, which the completion continues unless it defines `entry` itself.
        entry: The name that the tests use of the program, such as a function's name.
        sandbox: `required`, or `off`: run programs only with time and memory limits.
        seconds: Time limit of a program for all its tests, including its start; lower if many programs reach it.
        memory: Memory limit of a program, in MiB of address space.

    Raises:
        SandboxError: The sandbox does not work here.
        ValueError: A setting is out of range, or a row has no tests.
    """
    limits = _limits(seconds, memory)
    none = [None] * len(completions)
    submissions = []
    for completion, row_tests, row_setup, row_prefix, row_entry in zip(
        completions, tests, setup or none, prefix or none, entry or none, strict=True
    ):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        test_list = [row_tests] if isinstance(row_tests, str) else list(row_tests)
        if not test_list or not all(isinstance(test, str) and test.strip() for test in test_list):
            raise ValueError(f"The column tests contains {row_tests!r}, but must be code or a list of code.")
        program = extract_program(text, row_prefix or "", row_entry or "")
        submissions.append(Submission(program, test_list, row_setup or "", row_entry or ""))
    passed = grade(submissions, limits, sandbox, float(os.environ.get(TIMEOUT_VARIABLE, math.inf)) * TIME_SHARE)
    return [sum(verdicts) / len(verdicts) for verdicts in passed]


@wraps(share_passed, assigned=())
def all_passed(*arguments: Any, **settings: Any) -> list[float]:
    """Returns 1.0 if a completion's program passes all tests, else 0.0; takes the arguments of `share_passed`."""
    return [float(share == 1) for share in share_passed(*arguments, **settings)]


def _limits(seconds: str, memory: str) -> Limits:
    limits = Limits(float(seconds), int(memory) * 2**20)
    if not (0 < limits.seconds < math.inf and limits.memory >= 64 * 2**20):
        raise ValueError(
            f"seconds is {seconds} and memory {memory}, but seconds must be above 0 and memory at least 64."
        )
    return limits


def extract_program(completion: str, prefix: str = "", entry: str = "") -> str:
    """Returns the program in a completion.

    A completion that continues a prefix ends before its first unindented line, because models then invent further
    tasks.
    """
    block = CODE_BLOCK.search(completion)
    code = block[1] if block else completion
    if not prefix:
        return code
    if re.search(rf"^(async[ ]+)?(def|class)[ ]+{re.escape(entry)}\b", code, re.MULTILINE):
        return f"{close_prefix(prefix)}\n{code}"  # a later definition counts
    lines = code.splitlines(keepends=True)
    end = next((k for k, line in enumerate(lines) if k and line.strip() and not line[0].isspace()), None)
    return prefix + "".join(lines[:end])


def close_prefix(prefix: str) -> str:
    """Returns a program's beginning as a complete program, with its last function empty; "" if that fails."""
    for ending in ("", "\n    pass\n"):
        try:
            ast.parse(prefix + ending)
        except (SyntaxError, ValueError):
            continue
        return prefix + ending
    return ""
