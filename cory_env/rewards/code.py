"""Rewards for programs: which tests of the column `tests` a completion's program passes.

    {"query": "Write a function double(x).", "tests": ["assert double(2) == 4", "assert double('ab') == 'abab'"]}

A test is Python code that passes where it ends without an exception. In a completion with a block of code between
lines of ``` the first such block is the program, else all of it is. Programs run shut in, a test's comparisons where no
program can reach them (docs/tasks.md). A program that fails, hangs or takes too much passes nothing more.
"""

import ast
import math
import os
import re
from collections.abc import Sequence
from functools import wraps
from typing import Any

from cory_env.message import Message
from cory_env.rewards.prepared import TIMEOUT, check_with
from cory_env.sandbox.grading import Limits, Submission, grade

SHARE = 0.8  # of the time that one call of the reward may take, for programs
BLOCK = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def check(sandbox: str = "required", seconds: str = "10", memory: str = "512") -> None:
    """Finds out whether programs can be run here.

    Raises:
        SandboxError: programs cannot be shut in here.
        ValueError: a setting is no number, or out of range.
    """
    grade([], _limits(seconds, memory), sandbox)


@check_with(check)
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
        tests: Of each, one test or several.
        setup: Code that the tests rely on.
        prefix: A program's beginning; a completion goes on with it, unless it defines `entry` itself.
        entry: What the tests ask of a program, such as a function's name.
        sandbox: `required`, or `off`: run programs with limits of time and memory alone.
        seconds: That a program may take for all its tests, start included; less where many programs use it up.
        memory: MiB of address space that a program may take.

    Raises:
        SandboxError: programs cannot be shut in here.
        ValueError: a setting is out of range, or a row has no tests.
    """
    limits = _limits(seconds, memory)
    nothing = [None] * len(completions)
    submissions = []
    for completion, asked, before, start, name in zip(
        completions, tests, setup or nothing, prefix or nothing, entry or nothing, strict=True
    ):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        pieces = [asked] if isinstance(asked, str) else list(asked)
        if not pieces or not all(isinstance(test, str) and test.strip() for test in pieces):
            raise ValueError(f"The column tests holds {asked!r}, but must be code, or a list of such.")
        submissions.append(Submission(program_of(text, start or "", name or ""), pieces, before or "", name or ""))
    passed = grade(submissions, limits, sandbox, float(os.environ.get(TIMEOUT, math.inf)) * SHARE)
    return [sum(verdicts) / len(verdicts) for verdicts in passed]


@wraps(share_passed, assigned=())
def all_passed(*arguments: Any, **settings: Any) -> list[float]:
    """Returns 1.0 where a completion's program passes all tests, else 0.0; arguments as of `share_passed`."""
    return [float(share == 1) for share in share_passed(*arguments, **settings)]


def _limits(seconds: str, memory: str) -> Limits:
    limits = Limits(float(seconds), int(memory) * 2**20)
    if not (0 < limits.seconds < math.inf and limits.memory >= 64 * 2**20):
        raise ValueError(f"seconds is {seconds} and memory {memory}, but must be above 0 and at least 64.")
    return limits


def program_of(completion: str, prefix: str = "", entry: str = "") -> str:
    """Returns the program in a completion.

    Where it goes on with a prefix it ends with the first line that stands at the margin, after which models invent
    further tasks.
    """
    block = BLOCK.search(completion)
    code = block[1] if block else completion
    if not prefix:
        return code
    if re.search(rf"^(async[ ]+)?(def|class)[ ]+{re.escape(entry)}\b", code, re.MULTILINE):
        return f"{closed(prefix)}\n{code}"  # a later definition counts
    lines = code.splitlines(keepends=True)
    end = next((k for k, line in enumerate(lines) if k and line.strip() and not line[0].isspace()), None)
    return prefix + "".join(lines[:end])


def closed(prefix: str) -> str:
    """Returns a program's beginning as one that can be run, with its last function empty; or nothing."""
    for ending in ("", "\n    pass\n"):
        try:
            ast.parse(prefix + ending)
        except (SyntaxError, ValueError):
            continue
        return prefix + ending
    return ""
