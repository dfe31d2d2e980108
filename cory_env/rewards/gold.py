"""Gold answers as a data set's column holds them."""

import math
from decimal import Decimal
from numbers import Real


def answer_text(answer: object) -> str:
    """Returns a gold answer as text.

    Args:
        answer: A text, a finite number, or a list of exactly one of these.

    Raises:
        ValueError: It is anything else, such as a list of several answers.
    """
    value = answer[0] if isinstance(answer, (list, tuple)) and len(answer) == 1 else answer
    if isinstance(value, str):
        return value
    if isinstance(value, (Real, Decimal)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    shown = repr(answer)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise ValueError(
        f"The answer {shown} must be a text, a finite number, or a list of one of these. Keep one answer per row."
    )
