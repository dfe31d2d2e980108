"""Rewards for programs, the tests in the column `tests` that a completion's program passes, and feedback on programs.

    {"query": "Write a function double(x).", "tests": ["assert double(2) == 4", "assert double('ab') == 'abab'"]}

A test is Python code; it passes if it ends without an exception. The program is the completion's first block of code
between lines of ``` that is marked as Python, or else the first that is not marked as another language, or else the
whole completion. Programs run in a sandbox, and the tests' comparisons run in a separate process that the program
cannot reach (docs/own-task.md). A program that fails, hangs or exceeds its limits passes no further tests.

Feedback runs the tests in the column `public_tests` instead, in the same way, and describes the first that fails.
"""

import ast
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from cory_env.message import Message
from cory_env.rewards.prepared import TIMEOUT_VARIABLE, check_with
from cory_env.sandbox.failures import Failure, printable_line, shorten
from cory_env.sandbox.grading import Limits, Submission, find_failures, grade

TIME_SHARE = 0.8  # share of the reward's time limit that programs may use
MAX_FEEDBACK = 300  # characters
UNTESTED = "There are no public tests, so the program was not tested."
FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[{. \t]*([^\s`]*)[^`]*")
PYTHON = re.compile(r"(i?python|py|pypy)[0-9.]*}?", re.IGNORECASE)


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
        entry: The name that the tests use of the program, such as a function's name.
        sandbox: `required`, or `off`: run programs only with time and memory limits.
        seconds: Time limit of a program for all its tests, including its start; lower if many programs reach it.
        memory: Memory limit of a program, in MiB of address space.

    Raises:
        SandboxError: The sandbox does not work here.
        ValueError: A setting is out of range, or a row has no tests.
    """
    limits = _limits(seconds, memory)
    submissions = _submissions(completions, "tests", tests, setup, entry)
    if not all(submission.tests for submission in submissions):
        raise ValueError("The column tests is empty in a row, but must contain code or a list of code.")
    passed = grade(submissions, limits, sandbox, _total_seconds())
    return [sum(verdicts) / len(verdicts) for verdicts in passed]


@wraps(share_passed, assigned=())
def all_passed(*arguments: Any, **settings: Any) -> list[float]:
    """Returns 1.0 if a completion's program passes all tests, else 0.0; takes the arguments of `share_passed`."""
    return [float(share == 1) for share in share_passed(*arguments, **settings)]


@check_with(check_sandbox)
def test_feedback(
    completions: Sequence[str | list[Message]],
    public_tests: Sequence[Sequence[str] | str | None] | None = None,
    setup: Sequence[str | None] | None = None,
    entry: Sequence[str | None] | None = None,
    sandbox: str = "required",
    seconds: str = "10",
    memory: str = "512",
) -> list[str | None]:
    """Returns feedback on each completion's program: why it fails its first failed public test.

    Without public tests, the program is only compiled and, if there is an `entry`, run up to its definition. Its
    feedback is never None then, because nothing says that it is right. The other arguments are those of `share_passed`.

    Args:
        completions: The decoded responses.
        public_tests: The tests that feedback may show: one test, a list of tests, or none, per completion.

    Returns:
        Per completion, a text of at most `MAX_FEEDBACK` characters; None if the program passes all public tests.

    Raises:
        SandboxError: The sandbox does not work here.
        ValueError: A setting is out of range, or the tests of a row are not code.
    """
    limits = _limits(seconds, memory)
    submissions = _submissions(completions, "public_tests", public_tests, setup, entry)
    checks = [
        submission if submission.tests else replace(submission, tests=[f"__compiles__()\n{submission.entry}"])
        for submission in submissions
    ]
    failures = find_failures(checks, limits, sandbox, _total_seconds())
    texts: list[str | None] = []
    for failure, submission in zip(failures, submissions, strict=True):
        if failure:
            texts.append(_feedback_text(failure, submission, memory))
        else:
            texts.append(None if submission.tests else UNTESTED)
    return texts


def _feedback_text(failure: Failure, submission: Submission, memory: str) -> str:
    """Describes a failure, whose texts are untrusted, in at most `MAX_FEEDBACK` characters; `memory` is in MiB."""
    lines = re.split(r"\r\n?|\n", submission.program)  # as Python counts lines
    line = failure.line or 0
    source = printable_line(lines[line - 1].strip()) if 0 < line <= len(lines) else ""
    message = f"the memory limit is {memory} MiB" if failure.error == "MemoryError" else failure.message
    test = _show_test(submission.tests[failure.test]) if submission.tests else ""
    if failure.reason == "exception" and failure.error in ("SyntaxError", "IndentationError", "TabError"):
        test = ""  # no test can pass
    texts = [test, failure.expected, failure.got, failure.call, failure.error, message, source]
    limit = MAX_FEEDBACK - 80  # the rest is for the words around them
    longest = next(size for size in range(limit, 0, -1) if sum(min(len(text), size) for text in texts) <= limit)
    test, expected, got, call, error, message, source = (shorten(text, longest) for text in texts)
    parts = [f"Failed test: {test}"] if test else []
    if error:
        location = f" in line {line}" if 0 < line <= len(lines) else ""
        location += f", `{source}`" if source else ""
        parts.append(error + location + (f": {message}" if message else ""))
    if got:
        parts.append(f"Expected {expected}, got {got}.")
    if call:
        parts.append(f"The last call, {call}.")
    if failure.reason == "time":
        parts.append("The program exceeds the time limit.")
    if failure.reason == "ended":
        parts.append("The program ended without a result.")
    return "\n".join(parts)


def _show_test(test: str) -> str:
    """Returns a test as feedback shows it: for programs that read and print, only their input."""
    match ast.parse(test).body:
        case [ast.Assert(test=ast.Call(func=ast.Name("same_output"), args=[ast.Call(ast.Name("run"), [text]), _]))]:
            return f"input {ast.unparse(text)}"
    return test.strip()


def _submissions(
    completions: Sequence[str | list[Message]],
    column: str,
    tests: Sequence[Sequence[str] | str | None] | None,
    setup: Sequence[str | None] | None,
    entry: Sequence[str | None] | None,
) -> list[Submission]:
    """Returns the completions' programs with their tests, the values of a column."""
    none = [None] * len(completions)
    submissions = []
    for completion, row_tests, row_setup, row_entry in zip(
        completions, tests or none, setup or none, entry or none, strict=True
    ):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        row = read_tests(column, row_tests), row_setup or "", row_entry or ""
        submissions.append(Submission(extract_program(text), *row))
    return submissions


def read_tests(column: str, tests: object) -> list[str]:
    """Returns the tests of a row as a list; empty if they are None.

    Raises:
        ValueError: They are not code.
    """
    test_list = [tests] if isinstance(tests, str) else [] if tests is None else tests
    if not isinstance(test_list, list | tuple) or not all(isinstance(test, str) and test.strip() for test in test_list):
        raise ValueError(f"The column {column} contains {tests!r:.80}, but must be code or a list of code.")
    return list(test_list)


def _total_seconds() -> float:
    """Returns the seconds for all programs of a call."""
    return float(os.environ.get(TIMEOUT_VARIABLE, math.inf)) * TIME_SHARE


def _limits(seconds: str, memory: str) -> Limits:
    limits = Limits(float(seconds), int(memory) * 2**20)
    if not (0 < limits.seconds < math.inf and limits.memory >= 64 * 2**20):
        raise ValueError(
            f"seconds is {seconds} and memory {memory}, but seconds must be above 0 and memory at least 64."
        )
    return limits


def extract_program(completion: str) -> str:
    """Returns the program in a completion."""
    blocks = _code_blocks(completion)
    marked = [code for language, code in blocks if PYTHON.fullmatch(language)]
    unmarked = [code for language, code in blocks if not language]
    return next(iter([*marked, *unmarked]), completion)


def _code_blocks(text: str) -> list[tuple[str, str]]:
    """Returns the blocks of code in a text: their languages, and their code without the fence's own indentation.

    As in Markdown, a block ends at a fence with at least as many marks, but only at one that is not indented further,
    so that a program's docstring may contain fences. A block that does not end takes the rest of the text.
    """
    blocks: list[tuple[str, str]] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        fence = FENCE.fullmatch(line.rstrip())
        if opening is None:
            opening = fence
        elif fence and not fence[3] and fence[2].startswith(opening[2]) and len(fence[1]) <= len(opening[1]):
            blocks.append((opening[3], "".join(line + "\n" for line in lines)))
            opening, lines = None, []
        else:
            indentation = len(line) - len(line.lstrip(" \t"))
            lines.append(line[min(indentation, len(opening[1])) :])
    return [*blocks, (opening[3], "\n".join(lines))] if opening else blocks
