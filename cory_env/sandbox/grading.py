"""Runs sandboxed programs against tests, several at once: which tests each program passes, and why it fails one."""

import json
import math
import os
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO

from cory_env.sandbox import machine
from cory_env.sandbox.failures import Failure
from cory_env.sandbox.machine import CODE_ROOT, HERE, TEMPORARY

TESTER_MEMORY = 2 * 2**30  # bytes of address space; the tests come from the data
MAX_RESULT_BYTES = 2**16  # of one test


@dataclass(frozen=True)
class Submission:
    """A program and its tests.

    Attributes:
        program: The program's source code.
        tests: Code of the tests; a test passes if it ends without an exception. Names that a test does not define refer
            to the program, `run(text)` returns the output of the program as a script with `text` as its input, and
            `__compiles__()` only compiles the program.
        setup: Code that each test requires.
        entry: A name that refers to the program even if the setup defines it.
    """

    program: str
    tests: Sequence[str]
    setup: str = ""
    entry: str = ""


@dataclass(frozen=True)
class Limits:
    """Resource limits of one program.

    Attributes:
        seconds: Wall time for all tests together; also the limit of CPU time.
        memory: Bytes of address space.
    """

    seconds: float = 10.0
    memory: int = 512 * 2**20


Outcome = tuple[list[bool], Failure | None]
"""Whether a program passes each test; and, if that is asked for, why it fails the first one that it fails."""


class TimeBudget:
    """Divides a total time limit among programs, so that all finish in time even if many of them hang."""

    def __init__(self, programs: int, parallel: int, limit: float, total: float) -> None:
        """Starts the clock.

        Args:
            limit: Maximum seconds per program.
        """
        self._remaining, self._parallel, self._limit = programs, parallel, limit
        self._deadline = time.monotonic() + total
        self._lock = threading.Lock()

    def next(self) -> float:
        """Returns the time limit of the next program, in seconds."""
        with self._lock:
            rounds = math.ceil(self._remaining / self._parallel)
            self._remaining -= 1
            return max(0.0, min(self._limit, (self._deadline - time.monotonic()) / rounds))


def grade(submissions: Sequence[Submission], limits: Limits, sandbox: str, total: float = math.inf) -> list[list[bool]]:
    """Runs all programs, one per core at a time.

    Args:
        sandbox: `required`, or `off` to run programs only with memory and time limits.
        total: Seconds for all programs; if they would take longer, each program's time limit is reduced.

    Returns:
        Per program, whether it passes each test. Tests that are not reached in time are not passed.
    """
    return [passed for passed, _ in _run_all(submissions, limits, sandbox, total, explain=False)]


def find_failures(
    submissions: Sequence[Submission], limits: Limits, sandbox: str, total: float = math.inf
) -> list[Failure | None]:
    """Runs each program's tests up to the first that fails; takes the arguments of `grade`.

    Returns:
        Per program, why the first failed test fails; None if all tests pass.
    """
    return [failure for _, failure in _run_all(submissions, limits, sandbox, total, explain=True)]


def _run_all(
    submissions: Sequence[Submission], limits: Limits, sandbox: str, total: float, *, explain: bool
) -> list[Outcome]:
    if sandbox == "required":
        machine.require_sandbox()
    elif sandbox != "off":
        raise machine.SandboxError(f"sandbox is {sandbox!r}, but must be required or off.")
    cores = len(os.sched_getaffinity(0))
    budget = TimeBudget(len(submissions), cores, limits.seconds, total)
    with ThreadPoolExecutor(cores) as threads:
        return list(threads.map(lambda s: _run(s, Limits(budget.next(), limits.memory), sandbox, explain), submissions))


def _run(submission: Submission, limits: Limits, sandbox: str, explain: bool) -> Outcome:
    root = str(HERE.parents[1]) if sandbox == "off" else CODE_ROOT
    deadline, seconds = time.monotonic() + limits.seconds, max(1, math.ceil(limits.seconds))
    environment = machine.environment()
    with ExitStack() as stack:
        folder = "/"
        if sandbox == "off":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cory-"))
            environment |= {"HOME": folder, "TMPDIR": folder}
        # The tester sends requests and the worker replies; test results go to this process only.
        (request_in, request_out), (reply_in, reply_out), (results_in, results_out) = (_pipe(stack) for _ in range(3))

        def start(
            module: str, content: object, memory: int, read: IO[bytes], write: IO[bytes], *outputs: IO[bytes]
        ) -> None:
            """Starts one process, which is killed when the stack closes."""
            file = stack.enter_context(tempfile.TemporaryFile())
            file.write(json.dumps(content).encode())
            file.seek(0)
            files = [file.fileno(), *(output.fileno() for output in outputs)]
            code = f"import sys; sys.path.insert(0, {root!r}); from cory_env.sandbox.{module} import main; "
            code += "sys.path.pop(0); "
            code += f"main({files}, {[memory, seconds, TEMPORARY]}, {machine.packages()!r}, {sandbox == 'off'})"
            command = [machine.interpreter(), *machine.OPTIONS, "-c", code]
            process = subprocess.Popen(
                command if sandbox == "off" else machine.sandbox_command(command),
                stdin=read,
                stdout=write,
                stderr=subprocess.DEVNULL,
                pass_fds=files,
                cwd=folder,
                env=environment,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)

        runs_as_script = any("run" in test for test in (submission.setup, *submission.tests))
        start("worker", [submission.program, runs_as_script], limits.memory, request_in, reply_out)
        tests = [submission.setup, submission.entry, list(submission.tests), explain]
        start("tester", tests, TESTER_MEMORY, reply_in, request_out, results_out)
        for pipe in (request_in, request_out, reply_in, reply_out, results_out):
            pipe.close()
        results, in_time = _read_results(results_in, len(submission.tests), deadline)
    passed = [result is True for result in results] + [False] * (len(submission.tests) - len(results))
    if all(passed):
        return passed, None
    if results and isinstance(results[-1], list):
        return passed, Failure(*results[-1])._replace(test=len(results) - 1)
    return passed, Failure("ended" if in_time else "time", test=len(results))


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    read, write = os.pipe()
    return stack.enter_context(os.fdopen(read, "rb", 0)), stack.enter_context(os.fdopen(write, "wb", 0))


def _read_results(results_in: IO[bytes], num_tests: int, deadline: float) -> tuple[list[object], bool]:
    """Waits for the results of the tests; returns those that came, and whether the tester ended before the deadline.

    A result is True, False, or the fields of a `Failure`, which is the last one.
    """
    output, in_time = b"", True
    poll = select.poll()
    poll.register(results_in, select.POLLIN)
    while output.count(b"\n") < num_tests and len(output) < num_tests * MAX_RESULT_BYTES:
        if (seconds := deadline - time.monotonic()) <= 0:
            in_time = False
            break
        if poll.poll(seconds * 1000):
            chunk = results_in.read(MAX_RESULT_BYTES)
            if not chunk:
                break
            output += chunk
    lines = output.split(b"\n")[:-1]
    return [json.loads(line) for line in lines[:num_tests]], in_time
