r"""The sandbox's verdicts are those of plain Python, for the programs in the folder `programs`.

A file of programs contains entries like this one:

    #### idiom: open(0) read at once | right
    n = int(open(0).read())
    print(n * n)
    #### tests
    assert same_output(run('2\n'), '4\n')

The header ends with the verdict: `right` programs pass all tests and `wrong` ones fail at least one, plainly and in the
sandbox; `refused` ones pass plainly, but the sandbox must not accept them, for the reason in their first line.
`accepted` ones fail plainly, but not by a fault of the program's, and pass in the sandbox.
`#### setup` before the tests is code that runs before each test, and `#### entry NAME` is a name that refers to the
program even if the setup defines it.

Tests are separated by blank lines. If all lines between two blank lines start with `assert`, each of them is a test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from cory_env.sandbox import machine
from cory_env.sandbox.grading import Limits, Submission, grade
from tests.cory_env import plain_python

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
VERDICTS = ("right", "wrong", "refused", "accepted")
SECONDS = 20.0


class Program(NamedTuple):
    """A program with its tests.

    Attributes:
        name: File, line and idiom.
        idiom: What it is an example of.
        verdict: One of `VERDICTS`.
        submission: The program and its tests.
    """

    name: str
    idiom: str
    verdict: str
    submission: Submission


def load_programs(path: Path) -> list[Program]:
    """Returns the programs of a file."""
    # Only \n ends a line: some programs contain \r and other characters that `splitlines` takes for line ends.
    lines = path.read_bytes().decode().split("\n")
    starts = [number for number, line in enumerate(lines) if line.startswith("#### idiom: ")]
    programs = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        idiom, _, verdict = lines[start].removeprefix("#### idiom: ").rpartition(" | ")
        sections: dict[str, list[str]] = {"program": [], "setup": [], "tests": []}
        section, entry = "program", ""
        for line in lines[start + 1 : end]:
            if line.startswith("#### entry "):
                entry = line.removeprefix("#### entry ")
            elif line.startswith("#### "):
                section = line.removeprefix("#### ")
            else:
                sections[section].append(line)
        source, setup, tests = ("\n".join(sections[key]).rstrip("\n") + "\n" for key in ("program", "setup", "tests"))
        submission = Submission(source, split_tests(tests), setup.strip(), entry)
        programs.append(Program(f"{path.name}:{start + 1} {idiom} ({verdict})", idiom, verdict, submission))
    return programs


def load_all_programs() -> list[Program]:
    return [program for path in sorted(PROGRAMS.glob("*.txt")) for program in load_programs(path)]


def split_tests(text: str) -> list[str]:
    """Splits tests at blank lines, and at every line between two blank lines that hold only assertions."""
    tests = []
    for chunk in filter(None, (chunk.strip("\n") for chunk in text.split("\n\n"))):
        lines = chunk.split("\n")
        tests += lines if all(line.startswith("assert") for line in lines) else [chunk]
    return tests


def run_plainly(submission: Submission) -> list[bool]:
    """Returns which tests a program passes in plain Python; a program that ends the process passes none after that."""
    with tempfile.TemporaryDirectory(prefix="cory-") as folder:
        Path(folder, f"{plain_python.PROGRAM}.py").write_bytes(submission.program.encode())
        tests_file, verdicts_file = Path(folder, "tests.json"), Path(folder, "verdicts.jsonl")
        tests_file.write_text(json.dumps([submission.setup, submission.entry, submission.tests]))
        verdicts_file.touch()
        subprocess.run(
            [sys.executable, "-P", plain_python.__file__, str(ROOT), tests_file.name, verdicts_file.name],
            cwd=folder,
            env=machine.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=plain_python.SECONDS * 2,
        )
        verdicts = [json.loads(line) for line in verdicts_file.read_text().splitlines()]
    return verdicts + [False] * (len(submission.tests) - len(verdicts))


def grade_programs(programs: list[Program]) -> list[list[bool]]:
    try:
        machine.require_sandbox()
    except machine.SandboxError as error:
        pytest.skip(str(error))
    return grade([program.submission for program in programs], Limits(SECONDS), "required")


def test_there_are_many_programs_of_many_idioms_and_a_third_are_wrong() -> None:
    programs = load_all_programs()
    assert {program.verdict for program in programs} == set(VERDICTS)
    assert all(program.submission.tests for program in programs)
    assert len({(program.submission.program, *program.submission.tests) for program in programs}) == len(programs)
    assert len(programs) >= 300
    assert len({program.idiom for program in programs}) >= 60
    assert sum(program.verdict == "wrong" for program in programs) >= len(programs) / 3


def test_the_sandbox_agrees_with_the_stated_verdicts() -> None:
    programs = load_all_programs()[::10]  # each starts several processes
    disagreements = [
        f"{program.name}: {verdicts}"
        for program, verdicts in zip(programs, grade_programs(programs), strict=True)
        if all(verdicts) is (program.verdict in ("wrong", "refused"))
    ]
    assert not disagreements, "\n".join(disagreements)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_sandbox_agrees_with_plain_python() -> None:
    programs = load_all_programs()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        plain_verdicts = list(threads.map(run_plainly, [program.submission for program in programs]))
    misstated = [
        f"{program.name}: plainly {verdicts}"
        for program, verdicts in zip(programs, plain_verdicts, strict=True)
        if all(verdicts) is (program.verdict in ("wrong", "accepted"))
    ]
    assert not misstated, "\n".join(misstated)
    disagreements = [
        f"{program.name}: plainly {plain}, in the sandbox {verdicts}"
        for program, plain, verdicts in zip(programs, plain_verdicts, grade_programs(programs), strict=True)
        if (
            verdicts != plain
            if program.verdict in ("right", "wrong")
            else all(verdicts) is (program.verdict == "refused")
        )
    ]
    assert not disagreements, "\n".join([f"{len(disagreements)} disagreements", *disagreements])
