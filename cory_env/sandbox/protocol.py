"""The connection between the two sandboxed processes: lines of JSON."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

MAX_MESSAGE_BYTES = 4 * 2**20  # longer output of a program is an error
MAX_DEPTH = 10_000  # frames of the code that encodes values


class ChannelClosed(Exception):
    """The other process has ended, or sends invalid data."""


class UnsupportedValue(Exception):
    """A value cannot be sent."""


class Channel:
    """One end of the connection."""

    def __init__(self, read: BinaryIO, write: BinaryIO) -> None:
        self._read, self._write = read, write

    def send(self, message: object) -> None:
        """Sends JSON."""
        line = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        if len(line) > MAX_MESSAGE_BYTES:
            raise UnsupportedValue(f"a value takes more than {MAX_MESSAGE_BYTES} bytes")
        try:
            self._write.write(line)
            self._write.flush()
        except OSError as error:
            raise ChannelClosed from error

    def receive(self) -> object:
        """Waits for the next message."""
        try:
            line = self._read.readline(MAX_MESSAGE_BYTES + 1)
            if not line.endswith(b"\n"):
                raise ChannelClosed
            with unlimited():
                return json.loads(line.decode("utf-8", "surrogatepass"))
        except (OSError, ValueError, RecursionError) as error:
            raise ChannelClosed from error

    def close(self) -> None:
        """Closes this end."""
        self._read.close()
        self._write.close()


def error_message(error: BaseException) -> str:
    """Returns the beginning of an exception's message; "" if it has none."""
    try:
        return str(error)[:1000]
    except Exception:
        return ""


def take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Returns standard input and output for a channel, and lets the process itself read and write nothing instead."""
    streams = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    os.close(devnull)
    return streams


@contextmanager
def unlimited() -> Iterator[None]:
    """Lifts Python's limits of recursion and of integers' digits, which a program may have set for itself."""
    depth, digits = sys.getrecursionlimit(), sys.get_int_max_str_digits()
    sys.setrecursionlimit(max(depth, MAX_DEPTH))
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.setrecursionlimit(depth)
        sys.set_int_max_str_digits(digits)
