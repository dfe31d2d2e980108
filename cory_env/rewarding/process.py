"""Starts, calls and ends the child process of a reward and its feedback function, within a time limit.

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
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import MappingProxyType

from cory_env.rewards.prepared import TIMEOUT_VARIABLE
from cory_env.shadowing import ROOT

# A user's `cory_env.py` may come first on the search path.
CHILD = f"sys.path.insert(0, {str(ROOT)!r}); from cory_env.rewarding.child import main; sys.path.pop(0); main()"
CHILD_CHECK_SECONDS = 0.2  # between checks that the child is alive, because others may hold its pipe open


REWARD, FEEDBACK = "reward", "feedback"
"""The functions of a child process."""


@dataclass(frozen=True)
class Batch:
    """Samples for a function. All lists have the same length. Prompts and completions are texts or lists of messages.

    Attributes:
        prompts: The queries.
        completions: The decoded responses.
        columns: Further arguments.
        function: The function to call, `reward` or `feedback`.
    """

    prompts: Sequence[object]
    completions: Sequence[object]
    columns: dict[str, list[object]]
    function: str = REWARD

    def __len__(self) -> int:
        return len(self.completions)

    def pick(self, indices: Sequence[int]) -> "Batch":
        """Returns a batch of the samples at `indices`."""
        return Batch(
            prompts=[self.prompts[i] for i in indices],
            completions=[self.completions[i] for i in indices],
            columns={name: [values[i] for i in indices] for name, values in self.columns.items()},
            function=self.function,
        )


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
    """The child process of a reward. It starts on the first call, and again after it had to be ended.

    Attributes:
        needs: The functions' arguments without a default; known after the child has started.
    """

    def __init__(self, specs: Mapping[str, str], timeout: float) -> None:
        """Makes the object without starting the child.

        Args:
            specs: The specs of the functions by name (`Batch.function`).
            timeout: Seconds that each call, and loading the functions, may take.
        """
        self.specs = dict(specs)
        self.timeout = timeout
        self.needs: tuple[str, ...] = ()
        self._connection: Connection[RewardRequest, Reply] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: (
            weakref.finalize[[subprocess.Popen[bytes], Connection[RewardRequest, Reply]], RewardProcess] | None
        ) = None
        self._loaded = False

    def __reduce__(self) -> "tuple[type[RewardProcess], tuple[dict[str, str], float]]":
        """Makes copies start their own child, because the pipe to this child cannot be shared."""
        return type(self), (self.specs, self.timeout)

    def start(self) -> Reply:
        """Starts the child unless it runs. If the function cannot be loaded, the reply's `error` is the reason."""
        self.prepare()
        ready = Reply() if self._loaded else self._load()
        if ready.error:
            self.close()
        return ready

    def prepare(self) -> None:
        """Starts the child, which loads the function and calls its `prepare`; does not wait for that."""
        if self._connection is None:
            self._launch()

    def call(self, batch: Batch) -> Reply:
        """Returns the function's reply for `batch`; errors of the function are in the reply, not raised."""
        ready = self.start()
        if ready.error:
            return ready
        assert self._connection is not None
        try:
            with contextlib.suppress(OSError):  # the child ended between two calls; the reply below reports that
                self._connection.send(batch)
            return self._receive("ran")
        except BaseException:  # interrupted: the reply to this call must not be taken for the reply to the next
            self.close()
            raise

    def close(self) -> None:
        """Ends the child process, if there is one. The next call starts another."""
        if self._finalizer is not None:
            self._finalizer()
        self._connection = self._process = self._finalizer = None
        self._loaded = False

    def _launch(self) -> None:
        connection, child_connection = Pipe()
        command = [sys.executable, "-P", "-c", f"import sys; {CHILD}", str(child_connection.fileno()), str(os.getpid())]
        if threading.current_thread() is threading.main_thread():  # other threads may end long before the process
            command.append("--die-with-thread")
        # The parent's search path in its order, with the current folder last: finds user modules, shadows none.
        paths = dict.fromkeys([path or os.getcwd() for path in sys.path] + [os.getcwd()])
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), TIMEOUT_VARIABLE: str(self.timeout)},
            stdin=subprocess.DEVNULL,
            stdout=2,  # this process's standard error
            pass_fds=[child_connection.fileno()],
            start_new_session=True,  # so that Ctrl-C reaches only the parent, and the whole group can be killed
        )
        child_connection.close()
        self._connection, self._process = connection, process
        self._finalizer = weakref.finalize(self, _end_process, process, connection)
        with contextlib.suppress(OSError):  # the child has ended; the next call reports that
            connection.send(self.specs)  # not in the command line, which has a size limit and is visible to all users

    def _load(self) -> Reply:
        """Waits until the child has loaded the function."""
        reply = self._receive("took to load")
        self._loaded = not reply.error
        self.needs = reply.needs
        # Skipping samples cannot help if loading fails; a lack of memory may be temporary.
        return replace(reply, fatal=not reply.killed) if reply.error else reply

    def _receive(self, activity: str) -> Reply:
        """Waits for the child's next message; ends the child after a timeout or if it is gone."""
        assert self._connection is not None and self._process is not None
        deadline = time.monotonic() + self.timeout
        try:
            while not self._connection.poll(min(CHILD_CHECK_SECONDS, max(0.0, deadline - time.monotonic()))):
                if self._process.poll() is not None and not self._connection.poll():
                    raise EOFError
                if time.monotonic() >= deadline:
                    self.close()
                    return Reply(error=f"{activity} longer than its time limit of {self.timeout:g} s and was stopped")
            return self._connection.recv()
        except (EOFError, OSError):
            process = self._process
            self.close()
            code = process.returncode
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Reply(error=f"ended its process with {reason}", killed=code == -signal.SIGKILL)


def _end_process(process: subprocess.Popen[bytes], connection: "Connection[RewardRequest, Reply]") -> None:
    """Kills the child and its children, and waits for it."""
    connection.close()
    with contextlib.suppress(ProcessLookupError):  # they have all ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
