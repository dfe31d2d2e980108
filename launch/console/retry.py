"""Retrying after temporary errors."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
RETRY_INTERVAL = 2.0
"""Seconds between two attempts."""


def retry(
    action: Callable[[], T],
    seconds: float,
    retry_on: type[Exception] = Exception,
    on_first_failure: Callable[[Exception], None] = lambda error: None,
) -> T:
    """Calls a function until it succeeds, or fails after `seconds`.

    Args:
        action: the function.
        seconds: how long to retry; 0: a single attempt.
        retry_on: exceptions after which to retry; others are raised at once.
        on_first_failure: called with the first such exception.

    Returns:
        The result of `action`.

    Raises:
        Exception: the last exception of `action`.
    """
    deadline = time.monotonic() + seconds
    failed = False
    while True:
        try:
            return action()
        except retry_on as error:
            if time.monotonic() >= deadline:
                raise
            if not failed:
                on_first_failure(error)
            failed = True
        time.sleep(RETRY_INTERVAL)
