"""Retrying after temporary errors."""

import time
from collections.abc import Callable

RETRY_INTERVAL = 2.0
"""Seconds between two attempts."""


def retry(action: Callable[[], object], seconds: float) -> None:
    """Calls a function until it succeeds; raises its exception if it still fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            action()
            return
        except Exception:
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_INTERVAL)
