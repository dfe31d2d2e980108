"""A child process for a user's code, with a time limit: the parent's side in `ChildProcess`, the child's in `connect`.

A user's code has its own process because it may hang, exit, print or load a model. The process is a fresh interpreter,
not one of `multiprocessing`: a Ray worker's `__main__` must not be imported again, and a fork would inherit CUDA and
threads. Its main thread runs the code. A second thread reads requests and ends the process when the parent is gone, so
that hanging code cannot outlive the run. Standard output goes to the parent's standard error, so `print` is harmless.
"""

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from cory_env.message import escape_surrogates
from cory_env.shadowing import ROOT, UsersModulesFirst

_CHECK_SECONDS = 0.2  # between checks that the child is alive, because others may hold its pipe open
_PARENT_CHECK_SECONDS = 1.0


@dataclass(frozen=True)
class Reply:
    """The result of one request, or of loading the code.

    Attributes:
        values: The results.
        error: Why the whole request failed, as the predicate of a sentence; empty if it succeeded.
        fatal: Whether no request can ever succeed, because the code cannot be loaded or called.
        killed: Whether the system ended the process by SIGKILL, as it does when memory runs out.
        needs: After loading functions: their arguments without a default.
    """

    values: list[Any] = field(default_factory=list)
    error: str = ""
    fatal: bool = False
    killed: bool = False
    needs: tuple[str, ...] = ()


class ChildProcess:
    """A child process. It loads a user's code, reports that, and answers requests one after another."""

    def __init__(self, module: str, first: object, timeout: float, variables: Mapping[str, str] | None = None) -> None:
        """Starts the process without waiting for it.

        Args:
            module: The module whose `main` the process runs.
            first: The first request. It is not in the command line, which has a size limit and is visible to all users.
            timeout: Seconds that each request, and loading the code, may take.
            variables: Further environment variables.
        """
        self._timeout = timeout
        connection, child_connection = Pipe()
        # A user's `cory_env.py` may come first on the search path.
        code = f"sys.path.insert(0, {str(ROOT)!r}); from {module} import main; sys.path.pop(0); main()"
        command = [sys.executable, "-P", "-c", f"import sys; {code}", str(child_connection.fileno()), str(os.getpid())]
        if threading.current_thread() is threading.main_thread():  # other threads may end long before the process
            command.append("--die-with-thread")
        # The parent's search path in its order, with the current folder last: finds user modules, shadows none.
        paths = dict.fromkeys([path or os.getcwd() for path in sys.path] + [os.getcwd()])
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=2,  # this process's standard error
            pass_fds=[child_connection.fileno()],
            start_new_session=True,  # so that Ctrl-C reaches only the parent, and the whole group can be killed
        )
        child_connection.close()
        self._process = process
        self.connection: Connection[Any, Reply] = connection
        self._finalizer = weakref.finalize(self, _end_process, process, self.connection)
        self.send(first)

    @property
    def closed(self) -> bool:
        """Whether the process had to be ended."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Ends the process."""
        self._finalizer()

    def send(self, request: object) -> None:
        """Sends a request without waiting for the reply."""
        with contextlib.suppress(OSError):  # the child has ended; `receive` reports that
            self.connection.send(request)

    def receive(self, activity: str, timeout: float | None = None) -> Reply:
        """Waits for the child's next reply; ends the child after a timeout or if it is gone.

        Args:
            activity: What the child does, in the past tense.
            timeout: Seconds that it may take; None: as each request.
        """
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while (reply := self.poll(activity, deadline, limit, wait=True)) is None:
            pass
        return reply

    def poll(self, activity: str, deadline: float, limit: float, *, wait: bool = False) -> Reply | None:
        """Returns the child's next reply; None if there is none yet, and time is left until the deadline.

        Args:
            deadline: Of `time.monotonic`, `limit` seconds after the request.
            wait: Whether to wait for a moment.
        """
        try:
            if self.connection.poll(min(_CHECK_SECONDS, max(0.0, deadline - time.monotonic())) if wait else 0.0):
                return self.connection.recv()
            if self._process.poll() is not None and not self.connection.poll():
                raise EOFError
        except (EOFError, OSError):
            self.close()
            code = self._process.returncode
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Reply(error=f"ended its process with {reason}", killed=code == -signal.SIGKILL)
        if time.monotonic() < deadline:
            return None
        self.close()
        return Reply(error=f"{activity} longer than its time limit of {limit:g} s and was stopped")


def _end_process(process: subprocess.Popen[bytes], connection: "Connection[Any, Reply]") -> None:
    """Kills the child and its children, and waits for it."""
    connection.close()
    with contextlib.suppress(ProcessLookupError):  # they have all ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def connect() -> "tuple[Connection[Reply, Any], queue.Queue[Any]]":
    """Returns, in the child, the connection for replies and a queue of requests; finds the user's modules from now on.

    The process ends when the parent is gone.
    """
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    # Stopping a Ray job sends SIGTERM to all its processes, but the parent still needs replies to finish its update.
    signal.signal(signal.SIGTERM, lambda *_: None)
    if "--die-with-thread" in sys.argv and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends even code that never yields to Python
    connection: Connection[Reply, Any] = Connection(fd)
    requests: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_read_requests, args=(connection, parent, requests), daemon=True).start()
    sys.meta_path.insert(0, UsersModulesFirst())
    return connection, requests


def describe_exception(error: BaseException) -> str:
    """Returns an exception with the end of its traceback."""
    text = "".join(traceback.format_exception_only(error)).strip()
    text += "\n" + "".join(traceback.format_tb(error.__traceback__)[-5:]).rstrip()
    return escape_surrogates(text)  # of the exception's own text


def _read_requests(connection: "Connection[Reply, Any]", parent: int, requests: "queue.Queue[Any]") -> None:
    try:
        while True:
            while not connection.poll(_PARENT_CHECK_SECONDS):
                if os.getppid() != parent:
                    return
            requests.put(connection.recv())
    except (EOFError, OSError):
        return
    finally:
        os.killpg(os.getpgrp(), signal.SIGKILL)  # its own group: this process and its children
