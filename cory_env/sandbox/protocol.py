"""Code of both sandboxed processes: their resource limits, and the channel on which they exchange lines of JSON.

Runs inside the sandbox, where only this folder and the standard library are available, so it imports nothing else.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

MAX_MESSAGE_BYTES = 4 * 2**20  # longer output of a program is an error
MAX_OPEN_FILES = 64


class ChannelClosed(Exception):
    """The other process has ended, or sends invalid data."""


class UnsupportedValue(Exception):
    """A value is not plain data, so it cannot be sent."""


def read_and_confine(file: int, limits: Sequence[int], packages: str, die_with_parent: bool) -> Any:
    """Reads this process's input, then limits its resources: it can start neither processes nor threads.

    Args:
        file: File descriptor of the input, as JSON.
        limits: Bytes of address space, seconds of CPU time, and bytes of any file that it writes.
        packages: Folder of installed packages, which may be imported.
        die_with_parent: Whether this process must arrange to die with its parent, because no sandbox does.

    Returns:
        The decoded input.
    """
    sys.setrecursionlimit(10_000)
    with open(file, "rb") as stream:
        content = json.load(stream)
    os.setsid()  # signals to its group reach no other process
    if die_with_parent:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    memory, seconds, file_size = limits
    resource_limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: file_size,
        resource.RLIMIT_NPROC: 1,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for limit, value in resource_limits.items():
        _, maximum = resource.getrlimit(limit)
        value = value if maximum == resource.RLIM_INFINITY else min(value, maximum)
        resource.setrlimit(limit, (value, value))
    sys.path.append(packages)
    return content


class Channel:
    """One end of the connection between the two processes."""

    def __init__(
        self,
        read: BinaryIO,
        write: BinaryIO,
        send_other: Callable[[object], object],
        receive_other: Callable[[Any], object],
    ) -> None:
        """Makes the channel.

        Args:
            read: The stream from the other process.
            write: The stream to the other process.
            send_other: Maps a value that is not plain data to JSON by which the other process knows it, such as its
                number; raises `UnsupportedValue`.
            receive_other: The reverse mapping.
        """
        self._read, self._write = read, write
        self._send_other, self._receive_other = send_other, receive_other

    def send(self, message: object) -> None:
        """Sends plain data.

        Raises:
            UnsupportedValue: The message is not plain data, or too large.
            ChannelClosed: The other process has ended.
        """
        try:
            line = json.dumps(self._encode(message)).encode() + b"\n"
        except (RecursionError, ValueError) as error:
            raise UnsupportedValue(f"a value cannot be sent: {error}") from error
        if len(line) > MAX_MESSAGE_BYTES:
            raise UnsupportedValue(f"a value takes more than {MAX_MESSAGE_BYTES} bytes")
        try:
            self._write.write(line)
            self._write.flush()
        except OSError as error:
            raise ChannelClosed from error

    def receive(self) -> object:
        """Waits for the next message.

        Raises:
            ChannelClosed: The other process has ended, or its message is not one that `send` writes.
        """
        try:
            line = self._read.readline(MAX_MESSAGE_BYTES + 1)
            if not line.endswith(b"\n"):
                raise ChannelClosed
            return self._decode(json.loads(line))
        except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise ChannelClosed from error

    def _encode(self, value: object) -> object:
        """Encodes a value with its type: text, numbers and None are themselves, other values are `[type, content]`."""
        if value is None or isinstance(value, int | float | str):  # JSON drops subclasses
            return value
        if isinstance(value, complex):
            return ["complex", [value.real, value.imag]]
        if isinstance(value, bytes | bytearray):
            return ["bytes", bytes(value).hex()]
        if isinstance(value, dict):
            return ["dict", [[self._encode(key), self._encode(item)] for key, item in value.items()]]
        for kind in (list, tuple, frozenset, set):
            if isinstance(value, kind):
                return [kind.__name__, [self._encode(item) for item in value]]
        return ["other", self._send_other(value)]

    def _decode(self, value: object) -> object:
        if not isinstance(value, list):
            if isinstance(value, dict):
                raise ValueError("JSON objects are not sent")
            return value
        kind, content = value
        if kind == "complex":
            return complex(*content)
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind == "dict":
            return {self._decode(key): self._decode(item) for key, item in content}
        if kind == "other":
            return self._receive_other(content)
        make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return make([self._decode(item) for item in content])
