"""Runs programs against tests, each shut in, several at once, and says which tests each passes."""

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
from cory_env.sandbox.machine import CODE_ROOT, HERE, TEMPORARY

TESTER_MEMORY = 2 * 2**30  # bytes of address space; the tests are the data's


@dataclass(frozen=True)
class Submission:
    """A program and what it is put to.

    Attributes:
        program: Its text.
        tests: Code, of which each piece passes where it ends without an exception. Names that it lacks are the
            program's, and `run(text)` is what the program prints as a script that reads `text`.
        setup: Code that each test relies on.
        own: A name that is the program's, though the setup may define it.
    """

    program: str
    tests: Sequence[str]
    setup: str = ""
    own: str = ""


@dataclass(frozen=True)
class Limits:
    """What one program may take.

    Attributes:
        seconds: Of wall time, for all tests together; of CPU time the same.
        memory: Bytes of address space.
    """

    seconds: float = 10.0
    memory: int = 512 * 2**20


class Allowance:
    """Time for many programs: each may take its limit, or less, so that all are done in time however many hang."""

    def __init__(self, programs: int, side_by_side: int, limit: float, total: float) -> None:
        """Starts the clock.

        Args:
            programs: how many there are.
            side_by_side: how many run at once.
            limit: seconds of one.
            total: seconds of all.
        """
        self._left, self._side_by_side, self._limit = programs, side_by_side, limit
        self._end = time.monotonic() + total
        self._lock = threading.Lock()

    def next(self) -> float:
        """Seconds of the next program."""
        with self._lock:
            rounds = math.ceil(self._left / self._side_by_side)
            self._left -= 1
            return max(0.0, min(self._limit, (self._end - time.monotonic()) / rounds))


def grade(submissions: Sequence[Submission], limits: Limits, sandbox: str, total: float = math.inf) -> list[list[bool]]:
    """Runs every program, as many at once as there are cores.

    Args:
        submissions: what is run.
        limits: of each program.
        sandbox: `off` runs them with limits of memory and time alone.
        total: seconds for all; where they would take longer, each gets less.

    Returns:
        Per program, which tests it passes, in their order. One that is not reached in time is not passed.

    Raises:
        SandboxError: programs cannot be shut in here.
    """
    if sandbox == "required":
        machine.require_sandbox()
    elif sandbox != "off":
        raise machine.SandboxError(f"sandbox is {sandbox!r}, but must be required or off.")
    cores = len(os.sched_getaffinity(0))
    allowance = Allowance(len(submissions), cores, limits.seconds, total)

    def run(submission: Submission) -> list[bool]:
        return _run(submission, Limits(allowance.next(), limits.memory), sandbox)

    with ThreadPoolExecutor(cores) as threads:
        return list(threads.map(run, submissions))


def _run(submission: Submission, limits: Limits, sandbox: str) -> list[bool]:
    root = str(HERE.parents[1]) if sandbox == "off" else CODE_ROOT
    deadline, seconds = time.monotonic() + limits.seconds, max(1, math.ceil(limits.seconds))
    environment = machine.environment()
    with ExitStack() as stack:
        folder = "/"
        if sandbox == "off":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cory-"))
            environment |= {"HOME": folder, "TMPDIR": folder}
        # Requests go one way, answers the other; the verdict goes to this process, past the program.
        (requests, ask), (answers, answer), (verdict, say) = (_pipe(stack) for _ in range(3))

        def start(side: str, given: object, memory: int, read: IO[bytes], write: IO[bytes], *more: IO[bytes]) -> None:
            """Runs one side; at the end it is killed, with all that it started."""
            file = stack.enter_context(tempfile.TemporaryFile())
            file.write(json.dumps(given).encode())
            file.seek(0)
            files = [file.fileno(), *(other.fileno() for other in more)]
            code = (
                f"import sys; sys.path.insert(0, {root!r}); from cory_env.sandbox.{side} import main; sys.path.pop(0); "
            )
            code += f"main({files}, {[memory, seconds, TEMPORARY]}, {machine.packages()!r}, {sandbox == 'off'})"
            command = [machine.interpreter(), *machine.OPTIONS, "-c", code]
            process = subprocess.Popen(
                command if sandbox == "off" else machine.sandboxed(command),
                stdin=read,
                stdout=write,
                stderr=subprocess.DEVNULL,
                pass_fds=files,
                cwd=folder,
                env=environment,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)

        start("worker", submission.program, limits.memory, requests, answer)
        tests = [submission.setup, submission.own, list(submission.tests)]
        start("tester", tests, TESTER_MEMORY, answers, ask, say)
        for end in (requests, ask, answers, answer, say):
            end.close()
        passed = _read(verdict, len(submission.tests), deadline)
    return [*passed, *[False] * (len(submission.tests) - len(passed))]


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    read, write = os.pipe()
    return stack.enter_context(os.fdopen(read, "rb", 0)), stack.enter_context(os.fdopen(write, "wb", 0))


def _read(verdict: IO[bytes], tests: int, deadline: float) -> list[bool]:
    """Waits for the verdict on each test, until the tester ends or time is up."""
    said = b""
    poll = select.poll()
    poll.register(verdict, select.POLLIN)
    while len(said) < tests and (left := deadline - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            more = verdict.read(tests - len(said))
            if not more:
                break
            said += more
    return [sign == ord("1") for sign in said]
