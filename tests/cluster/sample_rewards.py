"""A reward that waits while a test changes something."""

import time
from pathlib import Path


def brevity(completions: list[str], hold: str) -> list[float]:
    """Pays for short responses after a moment, and not before there is no file `hold`."""
    time.sleep(0.3)
    while Path(hold).exists():
        time.sleep(0.05)
    return [-float(len(text)) for text in completions]
