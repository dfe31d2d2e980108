"""Trying again what may pass by itself."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
RETRY_SECONDS = 60.0
"""Seconds in which a network or a server may come back, for who only follows what goes on elsewhere."""
PAUSE = 2.0
"""Seconds between two tries."""


def retry(
    step: Callable[[], T],
    seconds: float,
    passing: type[Exception] = Exception,
    tell: Callable[[Exception], None] = lambda error: None,
) -> T:
    """Does something again and again until it succeeds, or fails after so many seconds; with 0 once.

    Args:
        step: what is done.
        seconds: in which it may fail.
        passing: what may pass; other exceptions are raised at once.
        tell: is told of the first failure.

    Returns:
        What `step` returns.

    Raises:
        Exception: the last one that `step` raised.
    """
    deadline = time.monotonic() + seconds
    failed = False
    while True:
        try:
            return step()
        except passing as error:
            if time.monotonic() >= deadline:
                raise
            if not failed:
                tell(error)
            failed = True
        time.sleep(PAUSE)
