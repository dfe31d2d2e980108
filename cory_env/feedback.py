"""Feedback on a response: a text for the agents that see the response, or None if nothing is to be corrected."""

from enum import Enum
from typing import Final, Literal


class Skipped(Enum):
    """The type of `SKIPPED`."""

    SKIPPED = "skipped"


SKIPPED: Final = Skipped.SKIPPED
"""Stands for the feedback on a response on which the function failed, if such failures are skipped."""
Feedback = str | Literal[Skipped.SKIPPED] | None
