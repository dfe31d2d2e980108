"""Where responses are asked for from an event loop, and written by a thread that has the engines to itself."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(eq=False)
class Ask:
    """One response that is asked for."""

    policy: str
    prompt: Sequence[int]
    temperature: float
    """0: the likeliest token, always."""
    max_tokens: int
    seed: int
    stop_token_ids: Sequence[int]
    say: Callable[[list[int] | Exception | None], None] = field(default=lambda told: None)
    """Takes new tokens, and at the end None, or what kept the response from being written."""
    done: bool = False
    """Nobody waits for more of it."""

    def end(self, error: Exception | None = None) -> None:
        """Says, once, that there is no more."""
        if not self.done:
            self.done = True
            self.say(error)


class Backend(Protocol):
    """What writes responses, in one thread."""

    def work(self, new: Sequence[Ask]) -> bool:
        """Takes more asks, and does a part of the work: an engine's step, or a batch.

        Returns:
            Whether something is left to do.
        """
        ...

    def drop(self) -> None:
        """Forgets all that is left to do."""
        ...

    def close(self) -> None:
        """Frees the models."""
        ...


class Desk:
    """Takes asks from coroutines to a backend's thread, and tokens back."""

    def __init__(self, backend: Backend) -> None:
        """Starts the thread."""
        self._backend = backend
        self._new: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._open: set[asyncio.Queue[list[int] | Exception | None]] = set()
        self._refused: Exception | None = None
        self._broken = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def works(self) -> bool:
        """Whether there is somebody who answers."""
        return self._thread.is_alive() and not self._broken

    async def response(self, ask: Ask) -> AsyncGenerator[list[int], None]:
        """Yields a response's tokens as they come; who leaves early needs no more of them.

        Raises:
            Exception: what kept the engine from going on, or what `refuse` was told.
        """
        if self._refused is not None:
            raise self._refused
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[list[int] | Exception | None] = asyncio.Queue()
        ask.say = lambda item: _call(loop, told, item)
        self._open.add(told)
        self._new.put(ask)
        try:
            while (item := await told.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._open.discard(told)
            ask.done = True

    def refuse(self, error: Exception) -> None:
        """Ends the responses that are being written, and refuses others; called from the event loop."""
        self._refused = error
        for told in self._open:
            told.put_nowait(error)

    def close(self) -> None:
        """Lets the thread end after its present step, and frees the models."""
        self._new.put(None)
        self._thread.join()
        self._backend.close()

    def _run(self) -> None:
        busy, asked = False, list[Ask]()
        while True:
            new = [] if busy else [self._new.get()]
            while not self._new.empty():
                new.append(self._new.get())
            asks = [ask for ask in new if ask is not None]
            if len(asks) < len(new):
                return
            asked = [ask for ask in asked if not ask.done] + asks
            try:
                busy = self._backend.work(asks)
            except Exception as error:  # of an engine: those who wait are told, and others may come
                for ask in asked:
                    ask.end(error)
                busy = False
                try:
                    self._backend.drop()
                except Exception:  # later ones are told what `work` raises again
                    self._broken = True


def _call(loop: asyncio.AbstractEventLoop, told: asyncio.Queue[list[int] | Exception | None], item: object) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(told.put_nowait, item)  # type: ignore[arg-type]
