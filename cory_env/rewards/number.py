r"""Parses numbers in text exactly, as fractions, in the notations common in answers to arithmetic problems.

    18   18.0   .5   -3   −3   1,234,567   $1,234.50   -$5   45%   3/4   1 1/2   2.5e3   \frac{3}{4}   \boxed{18}

Percent signs, currencies and units are ignored. A hyphen is a minus sign if it touches the number and nothing before
it: `-3`, `= -3`, but not `5-3`, `2-3 days` or `- 3`. Digits inside a word (`m2`) and exponents (`cm^2`) are not
numbers; a signed exponent, as in `10^-3`, does count as one. Nothing is calculated: in `2 * 3` and `48 / 2` the last
numbers are 3 and 2, but `48/2` is a fraction. Words (`half`) and characters such as ½ are not recognized.

Models may write anything, so parsing takes linear time: a number that is too long, has too large an exponent or divides
by zero counts as unreadable.
"""

import math
import re
from decimal import Decimal
from fractions import Fraction
from numbers import Real

MAX_NUMBER_LENGTH = 1000  # characters of a number, and the largest power of ten

# Quantifiers that end in + never backtrack, so no text makes the search slow. \d matches digits of any script, as int()
# does.
_INTEGER = r"(?: \d{1,3} (?: ,\d{3}(?!\d) )++ | \d++ )"
_NUMBER = re.compile(
    rf"""
    (?: (?<! [-−–A-Za-z\d)\]}}%] ) (?P<minus>[-−–]) (?: \\?[$€£¥] )? | (?<! [A-Za-z\d^] ) (?<! \^\{{ ) )
    (?:
        (?: (?P<integer>{_INTEGER}) [ ] )? (?P<top>{_INTEGER}) / (?P<bottom>{_INTEGER}) (?! \.\d )
      | (?P<decimal> (?: {_INTEGER} (?: \.\d++ )? | (?<! [A-Za-z\d.] ) \.\d++ ) (?: [eE][-+]?\d++ )? )
    )
    """,
    re.VERBOSE,
)
_LATEX_FRACTION = re.compile(rf"(\d[ ]?)? \\[dt]?frac \{{({_INTEGER})\}} \{{({_INTEGER})\}}", re.VERBOSE)


def last_number(text: str) -> Fraction | None:
    """Returns the last number in `text`; None if there is none, or if the last one is unreadable."""
    text = text.replace("{,}", ",").replace("\\,", ",")  # LaTeX's thousands separators
    text = _LATEX_FRACTION.sub(_to_slash_fraction, text)
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return None if last is None else _to_fraction(last)


def _to_slash_fraction(match: re.Match[str]) -> str:
    integer, top, bottom = match.groups()
    return f"{integer.strip()} {top}/{bottom}" if integer else f"{top}/{bottom}"


def _to_fraction(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > MAX_NUMBER_LENGTH:
        return None
    if match["decimal"]:
        decimal = match["decimal"].replace(",", "").lower()
        if abs(int(decimal.partition("e")[2] or 0)) > MAX_NUMBER_LENGTH:
            return None
        value = Fraction(decimal)
    else:
        integer, top, bottom = (int((match[name] or "0").replace(",", "")) for name in ("integer", "top", "bottom"))
        if bottom == 0:
            return None
        value = Fraction(top, bottom)
        if match["integer"] and value >= 1:
            return value  # not a mixed number: the integer before it, and its sign, are another number
        value += integer
    return -value if match["minus"] else value


def gold_number(answer: object) -> Fraction:
    """Returns the number in a data set's column `answer`: after the last `####` if it has a solution before that.

    Raises:
        ValueError: The answer has no number, or an unsupported type (`answer_text`).
    """
    text = answer_text(answer)
    number = last_number(text.rpartition("####")[2])
    if number is None:
        raise ValueError(
            f"The answer {text[-80:]!r} has no number. Write a number, or a solution followed by #### and a number."
        )
    return number


def answer_text(answer: object) -> str:
    """Returns a gold answer as text.

    Args:
        answer: A text, a finite number, or a list with exactly one of these.

    Raises:
        ValueError: `answer` is anything else, such as a list of several answers.
    """
    value = answer[0] if isinstance(answer, (list, tuple)) and len(answer) == 1 else answer
    if isinstance(value, str):
        return value
    if isinstance(value, (Real, Decimal)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise ValueError(
        f"The answer {answer!r:.80} must be a text, a finite number, or a list with one of these. Keep one answer per "
        "row."
    )
