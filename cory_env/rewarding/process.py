"""Starts, calls and ends the child process of rewards and a feedback function, within a time limit.

A reward has its own process because it may hang, exit, print or load a model. The process is a fresh interpreter, not
one of `multiprocessing`: a Ray worker's `__main__` must not be imported again, and a fork would inherit CUDA and
threads.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import MappingProxyType

from cory_env.rewards.prepared import TIMEOUT_VARIABLE
from cory_env.shadowing import ROOT

# A user's `cory_env.py` may come first on the search path.
CHILD = f"sys.path.insert(0, {str(ROOT)!r}); from cory_env.rewarding.child import main; sys.path.pop(0); main()"
CHILD_CHECK_SECONDS = 0.2  # between checks that the child is alive, because others may hold its pipe open


REWARD, FEEDBACK = "reward", "feedback"
"""Functions of a child process; the others are the rewards of single roles, by `role_reward`."""


def role_reward(role: str) -> str:
    """Returns the name of the function that rewards only the responses of a role."""
    return f"reward of {role}"


@dataclass(frozen=True)
class Batch:
    """Samples for a function.

    Attributes:
        columns: The function's possible arguments, lists of the same length: `prompts` (the queries) and `completions`,
            both texts or lists of messages, and the columns of the data.
        function: The name of the function to call.
    """

    columns: dict[str, Sequence[object]]
    function: str = REWARD

    def __len__(self) -> int:
        return len(self.columns["completions"])

    def pick(self, index: int) -> "Batch":
        """Returns a batch of one sample."""
        return Batch({name: [values[index]] for name, values in self.columns.items()}, self.function)


RewardRequest = Mapping[str, str] | Batch
"""First the specs of the functions, then samples, each of which gets a reply."""


class SampleError(str):
    """Why a function failed on a sample, as the predicate of a sentence."""

    __slots__ = ()


class Reward(float):
    """A task reward that is the weighted sum of several functions.

    Attributes:
        parts: Each function's value, by the function's short name.
    """

    parts: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Reply:
    """The result of one call, or of loading the function.

    Attributes:
        values: One per sample: a finite number (a `Reward` if there are several functions), feedback (a text or
            None), or a `SampleError`.
        error: Why the whole call failed; empty if it succeeded.
        fatal: Whether no call can ever succeed, because the function cannot be loaded or called.
        killed: Whether the system ended the process by SIGKILL, as it does when memory runs out.
        needs: After loading: the functions' arguments without a default.
    """

    values: list[float | str | None] = field(default_factory=list)
    error: str = ""
    fatal: bool = False
    killed: bool = False
    needs: tuple[str, ...] = ()


class RewardProcess:
    """A child process of a reward. It loads the functions, reports that, prepares them, and answers batches."""

    def __init__(self, specs: Mapping[str, str], timeout: float) -> None:
        """Starts the process without waiting for it.

        Args:
            specs: The specs of the functions by name (`Batch.function`).
            timeout: Seconds that each call, and loading the functions, may take.
        """
        self._timeout = timeout
        connection, child_connection = Pipe()
        command = [sys.executable, "-P", "-c", f"import sys; {CHILD}", str(child_connection.fileno()), str(os.getpid())]
        if threading.current_thread() is threading.main_thread():  # other threads may end long before the process
            command.append("--die-with-thread")
        # The parent's search path in its order, with the current folder last: finds user modules, shadows none.
        paths = dict.fromkeys([path or os.getcwd() for path in sys.path] + [os.getcwd()])
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), TIMEOUT_VARIABLE: str(timeout)},
            stdin=subprocess.DEVNULL,
            stdout=2,  # this process's standard error
            pass_fds=[child_connection.fileno()],
            start_new_session=True,  # so that Ctrl-C reaches only the parent, and the whole group can be killed
        )
        child_connection.close()
        self._process = process
        self._connection: Connection[RewardRequest, Reply] = connection
        self._finalizer = weakref.finalize(self, _end_process, process, self._connection)
        self._send(specs)  # not in the command line, which has a size limit and is visible to all users

    @property
    def closed(self) -> bool:
        """Whether the process had to be ended."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Ends the process."""
        self._finalizer()

    def call(self, batch: Batch) -> Reply:
        """Returns the function's reply for `batch`; errors of the function are in the reply, not raised."""
        try:
            self._send(batch)
            return self.receive("ran")
        except BaseException:  # interrupted: the reply to this call must not be taken for the reply to the next
            self.close()
            raise

    def _send(self, request: RewardRequest) -> None:
        with contextlib.suppress(OSError):  # the child has ended; `receive` reports that
            self._connection.send(request)

    def receive(self, activity: str) -> Reply:
        """Waits for the child's next message; ends the child after a timeout or if it is gone."""
        deadline = time.monotonic() + self._timeout
        try:
            while not self._connection.poll(min(CHILD_CHECK_SECONDS, max(0.0, deadline - time.monotonic()))):
                if self._process.poll() is not None and not self._connection.poll():
                    raise EOFError
                if time.monotonic() >= deadline:
                    self.close()
                    return Reply(error=f"{activity} longer than its time limit of {self._timeout:g} s and was stopped")
            return self._connection.recv()
        except (EOFError, OSError):
            self.close()
            code = self._process.returncode
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Reply(error=f"ended its process with {reason}", killed=code == -signal.SIGKILL)


def _end_process(process: subprocess.Popen[bytes], connection: "Connection[RewardRequest, Reply]") -> None:
    """Kills the child and its children, and waits for it."""
    connection.close()
    with contextlib.suppress(ProcessLookupError):  # they have all ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
