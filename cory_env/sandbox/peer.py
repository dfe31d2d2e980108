"""Requests between the two sandboxed processes: each uses the other's objects through proxies (`remote`)."""

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, BinaryIO

from cory_env.sandbox.protocol import Channel, ChannelClosed, UnsupportedValue, error_message, unlimited
from cory_env.sandbox.remote import OPERATORS
from cory_env.sandbox.values import CONTAINERS, Values


class Peer:
    """One of the two processes, as the other's counterpart."""

    def __init__(self, read: BinaryIO, write: BinaryIO, first: int, *, trusting: bool) -> None:
        """Makes the connection.

        Args:
            first: See `Values`.
            trusting: See `Values`.
        """
        self._channel = Channel(read, write)
        self.values = Values(self, first, trusting=trusting)
        self._lock = threading.RLock()  # a program's threads may call functions of the tests

    def request(self, operation: str, *arguments: object) -> Any:
        """Lets the other process execute an operation; returns its result, or raises its exception.

        Meanwhile, the other process may request something, too.
        """
        with self._lock:
            self._send("request", operation, arguments)
            while True:
                match self._receive():
                    case ["request", str(other), tuple(others)]:
                        self._answer(other, others)
                    case ["value", str(printed), value]:
                        self.show(printed)
                        return value
                    case ["error", str(printed), BaseException() as error, cause, context, bool(hidden), *details]:
                        self.show(printed)
                        error.__cause__, error.__context__, error.__suppress_context__ = cause, context, hidden
                        raise self.received(operation, error, details)
                    case _:
                        raise ChannelClosed

    def received(self, operation: str, error: BaseException, details: list[Any]) -> BaseException:
        """Returns what `request` raises if the other process raised an exception, described by `describe`."""
        return error

    def show(self, printed: str) -> None:
        """Prints what the other process printed meanwhile."""

    def printed(self) -> str:
        """Returns what this process printed since the last call."""
        return ""

    def serve(self) -> None:
        """Executes what the other process requests, until that ends, which raises `ChannelClosed`."""
        while True:
            match self._receive():
                case ["request", str(operation), tuple(arguments)]:
                    self._answer(operation, arguments)
                case _:
                    raise ChannelClosed

    def _answer(self, operation: str, arguments: tuple[Any, ...]) -> None:
        try:
            value = self.execute(operation, *arguments)
            self._send("value", self.printed(), value)
        except ChannelClosed:
            raise
        except BaseException as error:  # a program may raise anything
            details = self.describe(error)
            causes = (error.__cause__, error.__context__, error.__suppress_context__)
            try:
                self._send("error", self.printed(), error, *causes, *details)
            except UnsupportedValue:  # such as a message of megabytes
                self._send("error", "", RuntimeError(details[1]), None, None, False, *details)

    def execute(self, operation: str, target: Any, *arguments: Any) -> Any:
        """Executes what the other process requests."""
        if operation == "await":
            return self._event_loop.run_until_complete(target)
        return OPERATIONS[operation](target, *arguments)

    @cached_property
    def _event_loop(self) -> Any:
        import asyncio

        return asyncio.new_event_loop()

    def describe(self, error: BaseException) -> tuple[str, str, int | None]:
        """Returns an exception's type and message, and the line of the program that raised it."""
        return type(error).__name__, error_message(error), None

    def call(self, target: object, positional: tuple[object, ...], keywords: dict[str, object]) -> Any:
        """Calls a function or class of the other process."""
        return self.request("call", target, positional, tuple(keywords.items()))

    def operate(self, name: str, target: object, *operands: object) -> Any:
        """Applies an operator to an object of the other process."""
        return self.request(name, target, *operands)

    def _send(self, *message: object) -> None:
        with unlimited():
            try:
                self._channel.send(self.values.encode(message))
            except BaseException:
                self.values.rollback()
                raise
            self.values.commit()

    def _receive(self) -> list[Any]:
        message = self._channel.receive()
        try:
            with unlimited():
                return self.values.decode(message)
        except Exception as error:  # not a message that `Values.encode` makes
            raise ChannelClosed from error


def _next_items(iterator: Any, count: int) -> tuple[tuple[Any, ...], BaseException | None]:
    """Returns the next items of an iterator, 1 to `count`, and the exception that came after them."""
    items = [next(iterator)]
    try:
        while len(items) < count:
            items.append(next(iterator))
    except BaseException as error:
        return tuple(items), error
    return tuple(items), None


def _content(target: Any) -> Any:
    """Returns an object of a class that extends a container as that container; None for others."""
    return next((kind(target) for kind in CONTAINERS.values() if isinstance(target, kind)), None)


def _parameters(target: Any) -> tuple[Any, ...]:
    import inspect

    parameters = inspect.signature(target).parameters.values()
    return tuple((part.name, part.kind.value, part.default is not part.empty) for part in parameters)


OPERATIONS: dict[str, Callable[..., Any]] = {
    **OPERATORS,
    "call": lambda target, positional, keywords: target(*positional, **dict(keywords)),
    "attribute": getattr,
    "set": setattr,
    "delete": delattr,
    "next": _next_items,
    "content": _content,
    "signature": _parameters,
}
"""What one process may request of an object of the other, by name."""
