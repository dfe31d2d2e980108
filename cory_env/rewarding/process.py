"""Starts, calls and ends the one child process of a reward, within a time limit.

A process of its own, because a reward may hang, exit, print or load a model. It is started as a fresh interpreter, not
by `multiprocessing`: a Ray worker's `__main__` must not be imported again, and a fork would inherit CUDA and threads.
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

from cory_env.rewards.prepared import TIMEOUT
from cory_env.shadowing import ROOT

# A user's own `cory_env.py` may come first on the search path.
CHILD = f"sys.path.insert(0, {str(ROOT)!r}); from cory_env.rewarding.child import main; sys.path.pop(0); main()"
LOOK_AT_CHILD = 0.2  # seconds between looks at whether the child lives, where its pipe's end is held open by others


@dataclass(frozen=True)
class Batch:
    """Samples to reward. All lists have one length. Prompts and completions are texts, or lists of chat messages."""

    prompts: Sequence[object]
    completions: Sequence[object]
    columns: dict[str, list[object]]

    def __len__(self) -> int:
        return len(self.completions)

    def pick(self, indices: Sequence[int]) -> "Batch":
        """Returns the samples at `indices` only."""
        return Batch(
            prompts=[self.prompts[i] for i in indices],
            completions=[self.completions[i] for i in indices],
            columns={name: [values[i] for i in indices] for name, values in self.columns.items()},
        )


Request = str | Batch
"""A reward's name, which is the first; then samples, which are answered."""


class Reward(float):
    """A task reward that is the weighted sum of what several functions gave.

    Attributes:
        parts: What each gave, by the function's short name.
    """

    parts: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Reply:
    """What came of one call, or of the attempt to load the function.

    Attributes:
        values: One per sample: a finite number, of several functions a `Reward`; or a text that says what came instead.
        error: Why the call as a whole gave no values; empty when it did.
        fatal: Whether no call can ever succeed, because the function cannot be loaded or called.
        killed: Whether the system ended the process by SIGKILL, as it does if memory runs out.
        needs: Once the function is loaded: the arguments that it has no default for.
    """

    values: list[float | str] = field(default_factory=list)
    error: str = ""
    fatal: bool = False
    killed: bool = False
    needs: tuple[str, ...] = ()


class RewardProcess:
    """A child process holding the function `spec`; started on the first call, and again after it had to be ended.

    Attributes:
        needs: The arguments that the function has no default for; known once the child was started.
    """

    def __init__(self, spec: str, timeout: float) -> None:
        """Notes what to start; `timeout` in seconds bounds each call, and loading the function."""
        self.spec = spec
        self.timeout = timeout
        self.needs: tuple[str, ...] = ()
        self._connection: Connection[Request, Reply] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes], Connection[Request, Reply]], RewardProcess] | None
        self._end = None
        self._loaded = False

    def __reduce__(self) -> "tuple[type[RewardProcess], tuple[str, float]]":
        """Makes a copy, or what is pickled, start a child of its own: the pipe to this one's is not shared."""
        return type(self), (self.spec, self.timeout)

    def start(self) -> Reply:
        """Starts the child unless it runs; the reply's `error` says why the function cannot be loaded."""
        self.prepare()
        ready = Reply() if self._loaded else self._load()
        if ready.error:
            self.close()
        return ready

    def prepare(self) -> None:
        """Starts the child, which then loads the function and what that can load ahead, and waits for neither."""
        if self._connection is None:
            self._launch()

    def call(self, batch: Batch) -> Reply:
        """Returns the function's answer on `batch`, or what went wrong; never raises for the function's sake."""
        ready = self.start()
        if ready.error:
            return ready
        assert self._connection is not None
        try:
            with contextlib.suppress(OSError):  # the child ended between two calls; the answer below says so
                self._connection.send(batch)
            return self._receive("ran")
        except BaseException:  # interrupted: the answer to this call must not be taken for the answer to the next
            self.close()
            raise

    def close(self) -> None:
        """Ends the child process, if there is one. The next call starts another."""
        if self._end is not None:
            self._end()
        self._connection = self._process = self._end = None
        self._loaded = False

    def _launch(self) -> None:
        """Starts the child."""
        ours, theirs = Pipe()
        command = [sys.executable, "-P", "-c", f"import sys; {CHILD}", str(theirs.fileno()), str(os.getpid())]
        if threading.current_thread() is threading.main_thread():  # another may end long before the process does
            command.append("--die-with-thread")
        # The parent's search path in its order, with the current folder last: user modules resolve, none is shadowed.
        paths = dict.fromkeys([path or os.getcwd() for path in sys.path] + [os.getcwd()])
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), TIMEOUT: str(self.timeout)},
            stdin=subprocess.DEVNULL,
            stdout=2,  # this process's standard error
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # so that Ctrl-C reaches the parent alone, and the whole group can be ended
        )
        theirs.close()
        self._connection, self._process = ours, process
        self._end = weakref.finalize(self, _end_process, process, ours)
        with contextlib.suppress(OSError):  # the child has ended; the next call says so
            ours.send(self.spec)  # not a word of its command: that is short, and all users of the machine may read it

    def _load(self) -> Reply:
        """Waits until the child has loaded the function."""
        reply = self._receive("took to load")
        self._loaded = not reply.error
        self.needs = reply.needs
        # Failing to load is beyond what skipping samples could mend; a loss of memory may pass.
        return replace(reply, fatal=not reply.killed) if reply.error else reply

    def _receive(self, doing: str) -> Reply:
        """Waits for the child's next message; a child that is late or gone is ended."""
        assert self._connection is not None and self._process is not None
        deadline = time.monotonic() + self.timeout
        try:
            while not self._connection.poll(min(LOOK_AT_CHILD, max(0.0, deadline - time.monotonic()))):
                if self._process.poll() is not None and not self._connection.poll():
                    raise EOFError
                if time.monotonic() >= deadline:
                    self.close()
                    return Reply(error=f"{doing} longer than its time limit of {self.timeout:g} s and was stopped")
            return self._connection.recv()
        except (EOFError, OSError):
            process = self._process
            self.close()
            code = process.returncode
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Reply(error=f"ended its process with {reason}", killed=code == -signal.SIGKILL)


def _end_process(process: subprocess.Popen[bytes], connection: "Connection[Request, Reply]") -> None:
    """Kills the child and what it started, and waits for it."""
    connection.close()
    with contextlib.suppress(ProcessLookupError):  # all of them are gone
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
