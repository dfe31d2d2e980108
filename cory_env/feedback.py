"""Feedback on a response: a text for the agents that see the response, or None if nothing is to be corrected."""

from enum import Enum
from typing import Final


class NoFeedback(Enum):
    """Why there is no feedback on a response."""

    SKIPPED = "skipped"
    NO_ANSWER = "no answer"


SKIPPED: Final = NoFeedback.SKIPPED
"""Stands for the feedback on a response on which the function failed, if such failures are skipped."""
NO_ANSWER: Final = NoFeedback.NO_ANSWER
"""Stands for the feedback on a response that is not an answer to the query, such as a critic's."""
Feedback = str | NoFeedback | None
