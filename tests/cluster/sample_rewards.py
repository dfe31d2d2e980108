"""A reward that waits while a file exists."""

import time
from pathlib import Path


def brevity(completions: list[str], hold: str) -> list[float]:
    """Rewards short responses, after the file `hold` is removed."""
    time.sleep(0.3)
    while Path(hold).exists():
        time.sleep(0.05)
    return [-float(len(text)) for text in completions]
