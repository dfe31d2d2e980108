"""A queue between an event loop, which submits requests, and the thread that runs the engines."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

QueueItem = list[int] | Exception | None
"""New tokens, the error that ended the response, or None at its end."""


@dataclass(eq=False)
class GenerationRequest:
    """A request for one response to one prompt."""

    policy_id: str
    prompt: Sequence[int]
    temperature: float
    """0: greedy decoding."""
    max_tokens: int
    seed: int
    stop_token_ids: Sequence[int]
    emit: Callable[[QueueItem], None] = field(default=lambda item: None)
    """Receives the tokens and the end of the response."""
    done: bool = False
    """The response is finished or cancelled."""

    def finish(self, error: Exception | None = None) -> None:
        """Ends the response, unless it is done already."""
        if not self.done:
            self.done = True
            self.emit(error)


class Backend(Protocol):
    """A generation backend, used from one thread."""

    def step(self, new: Sequence[GenerationRequest]) -> bool:
        """Adds requests and performs one unit of work: an engine step, or a batch.

        Returns:
            Whether requests are left.
        """
        ...

    def close(self) -> None:
        """Frees the models."""
        ...


class RequestQueue:
    """Runs a backend in its own thread."""

    def __init__(self, backend: Backend) -> None:
        """Starts the thread."""
        self._backend = backend
        self._new: queue.SimpleQueue[GenerationRequest | None] = queue.SimpleQueue()
        self.healthy = True
        """Whether the backend's last step succeeded."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[int], None]:
        """Yields the tokens of a response as they are generated. Closing the generator cancels the request.

        Raises:
            Exception: any error of the backend.
        """
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[QueueItem] = asyncio.Queue()

        def emit(item: QueueItem) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(items.put_nowait, item)

        request.emit = emit
        self._new.put(request)
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            request.done = True

    def close(self) -> None:
        """Stops the thread after its current step and frees the models."""
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
            except Exception as error:  # pending requests fail; later ones may succeed
                busy, self.healthy = False, False
                for request in pending:
                    request.finish(error)
