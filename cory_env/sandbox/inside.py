"""What both processes in the sandbox share: their limits, and the plain data that they exchange, a line of JSON each.

Runs inside the sandbox, where only this folder and the standard library are at hand, so it imports nothing else.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

LONGEST = 4 * 2**20  # bytes of a message; a program's output beyond that is an error
FILES = 64  # open at once


class Gone(Exception):
    """The other side has ended, or no longer says anything that can be read."""


class Unplain(Exception):
    """A value that is not plain data, so that it cannot cross over."""


def begin(file: int, limits: Sequence[int], packages: str, bound: bool) -> Any:
    """Reads what this process is given, then gives up what it may do: it can start no other process and no thread.

    Args:
        file: what it is given, as JSON.
        limits: bytes of its address space, seconds of CPU time, and bytes of any file that it writes.
        packages: folder of installed packages, which may be imported.
        bound: whether it must see to it itself that it dies with its parent, as no sandbox does.

    Returns:
        What it is given.
    """
    sys.setrecursionlimit(10_000)
    with open(file, "rb") as stream:
        content = json.load(stream)
    os.setsid()  # what it sends to its own group reaches nobody else
    if bound:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    memory, seconds, files = limits
    most = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: files,
        resource.RLIMIT_NPROC: 1,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: FILES,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for limit, value in most.items():
        _, allowed = resource.getrlimit(limit)
        value = value if allowed == resource.RLIM_INFINITY else min(value, allowed)
        resource.setrlimit(limit, (value, value))
    sys.path.append(packages)
    return content


class Wire:
    """One end of the line between the two processes."""

    def __init__(
        self,
        read: BinaryIO,
        write: BinaryIO,
        send_other: Callable[[object], int],
        receive_other: Callable[[int], object],
    ) -> None:
        """Takes the two directions.

        Args:
            read: what the other side writes.
            write: what it reads.
            send_other: a value that is no plain data → the number by which it is known on the other side; raises
                `Unplain`.
            receive_other: the other way round.
        """
        self._read, self._write = read, write
        self._send_other, self._receive_other = send_other, receive_other

    def send(self, message: object) -> None:
        """Sends plain data.

        Raises:
            Unplain: it is none, or too much.
            Gone: nobody reads it.
        """
        try:
            line = json.dumps(self._encoded(message)).encode() + b"\n"
        except (RecursionError, ValueError) as error:
            raise Unplain(f"a value cannot be sent: {error}") from error
        if len(line) > LONGEST:
            raise Unplain(f"a value takes more than {LONGEST} bytes")
        try:
            self._write.write(line)
            self._write.flush()
        except OSError as error:
            raise Gone from error

    def receive(self) -> object:
        """Waits for the next message.

        Raises:
            Gone: there is none, or it is not what `send` writes.
        """
        try:
            line = self._read.readline(LONGEST + 1)
            if not line.endswith(b"\n"):
                raise Gone
            return self._decoded(json.loads(line))
        except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise Gone from error

    def _encoded(self, value: object) -> object:
        """JSON that says which type a value has: text, numbers and None are themselves, all else is `[kind, what]`."""
        if value is None or isinstance(value, int | float | str):  # JSON leaves nothing of subclasses
            return value
        if isinstance(value, complex):
            return ["complex", [value.real, value.imag]]
        if isinstance(value, bytes | bytearray):
            return ["bytes", bytes(value).hex()]
        if isinstance(value, dict):
            return ["dict", [[self._encoded(key), self._encoded(item)] for key, item in value.items()]]
        for kind in (list, tuple, frozenset, set):
            if isinstance(value, kind):
                return [kind.__name__, [self._encoded(item) for item in value]]
        return ["other", self._send_other(value)]

    def _decoded(self, value: object) -> object:
        if not isinstance(value, list):
            if isinstance(value, dict):
                raise ValueError("JSON objects are not sent")
            return value
        kind, what = value
        if kind == "complex":
            return complex(*what)
        if kind == "bytes":
            return bytes.fromhex(what)
        if kind == "dict":
            return {self._decoded(key): self._decoded(item) for key, item in what}
        if kind == "other":
            return self._receive_other(int(what))
        make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return make([self._decoded(item) for item in what])
