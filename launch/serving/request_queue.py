"""Takes requests from an event loop to the one thread that has the engines to itself, and tokens back."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

QueueItem = list[int] | Exception | None
"""New tokens; what kept the response from being written; or None: it has ended."""


@dataclass(eq=False)
class GenerationRequest:
    """One response to one prompt."""

    policy_id: str
    prompt: Sequence[int]
    temperature: float
    """0: the likeliest token, always."""
    max_tokens: int
    seed: int
    stop_token_ids: Sequence[int]
    put: Callable[[QueueItem], None] = field(default=lambda item: None)
    done: bool = False
    """Nobody waits for more of it."""

    def finish(self, error: Exception | None = None) -> None:
        """Says, once, that there is no more."""
        if not self.done:
            self.done = True
            self.put(error)


class Backend(Protocol):
    """What generates, in one thread."""

    def step(self, new: Sequence[GenerationRequest]) -> bool:
        """Takes more requests and does a part of the work: an engine's step, or a batch.

        Returns:
            Whether something is left to do.
        """
        ...

    def close(self) -> None:
        """Frees the models."""
        ...


class RequestQueue:
    """Runs a backend in a thread of its own."""

    def __init__(self, backend: Backend) -> None:
        """Starts the thread."""
        self._backend = backend
        self._new: queue.SimpleQueue[GenerationRequest | None] = queue.SimpleQueue()
        self.healthy = True
        """Whether the backend did its last step without an error."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[int], None]:
        """Yields a response's tokens as they come. Closing the generator cancels the request.

        Raises:
            Exception: the backend's.
        """
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[QueueItem] = asyncio.Queue()

        def put(item: QueueItem) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(items.put_nowait, item)

        request.put = put
        self._new.put(request)
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            request.done = True

    def close(self) -> None:
        """Lets the thread end after its present step, and frees the models."""
        self._new.put(None)
        self._thread.join()
        self._backend.close()

    def _run(self) -> None:
        busy, pending = False, list[GenerationRequest]()
        while True:
            items = [] if busy else [self._new.get()]
            while not self._new.empty():
                items.append(self._new.get())
            new = [request for request in items if request is not None]
            if len(new) < len(items):
                return
            pending = [request for request in pending if not request.done] + new
            try:
                busy, self.healthy = self._backend.step(new), True
            except Exception as error:  # those who wait are told, and others may come
                busy, self.healthy = False, False
                for request in pending:
                    request.finish(error)
