r"""Reads numbers in text exactly, as fractions, in the notations that answers to sums are written in.

    18   18.0   .5   -3   −3   1,234,567   $1,234.50   -$5   45%   3/4   1 1/2   2.5e3   \frac{3}{4}   \boxed{18}

A percent sign, a currency and a unit change nothing. A hyphen is a minus sign where it touches the number and nothing
before it: `-3`, `= -3`, but not `5-3`, `2-3 days` or `- 3`. Digits inside a word (`m2`) and exponents (`cm^2`) are not
numbers of their own; an exponent with a sign, as in `10^-3`, is taken for one. Nothing is calculated: in `2 * 3` and
`48 / 2` the last numbers are 3 and 2, but `48/2` is a fraction. Words (`half`) and characters such as ½ are not read.

Texts come from models that may write anything, so reading takes linear time, and a number that is too long, has too
large an exponent or divides by zero is unreadable instead of slow.
"""

import math
import re
from decimal import Decimal
from fractions import Fraction
from numbers import Real

LONGEST = 1000  # characters of a number, and the largest power of ten

# Quantifiers that end in + never give back what they took, so no text makes the search slow. \d is a digit of any
# script, as int() takes it.
_INTEGER = r"(?: \d{1,3} (?: ,\d{3}(?!\d) )++ | \d++ )"
_NUMBER = re.compile(
    rf"""
    (?: (?<! [-−–A-Za-z\d)\]}}%] ) (?P<minus>[-−–]) (?: \\?[$€£¥] )? | (?<! [A-Za-z\d^] ) (?<! \^\{{ ) )
    (?:
        (?: (?P<whole>{_INTEGER}) [ ] )? (?P<top>{_INTEGER}) / (?P<bottom>{_INTEGER}) (?! \.\d )
      | (?P<decimal> (?: {_INTEGER} (?: \.\d++ )? | (?<! [A-Za-z\d.] ) \.\d++ ) (?: [eE][-+]?\d++ )? )
    )
    """,
    re.VERBOSE,
)
_LATEX_FRACTION = re.compile(rf"(\d[ ]?)? \\[dt]?frac \{{({_INTEGER})\}} \{{({_INTEGER})\}}", re.VERBOSE)


def last_number(text: str) -> Fraction | None:
    """Returns the last number in `text`; None where there is none, or where the last one is unreadable."""
    text = text.replace("{,}", ",").replace("\\,", ",")  # LaTeX's thousands
    text = _LATEX_FRACTION.sub(_as_slash, text)
    last = None
    for found in _NUMBER.finditer(text):
        last = found
    return None if last is None else _value(last)


def _as_slash(found: re.Match[str]) -> str:
    whole, top, bottom = found.groups()
    return f"{whole.strip()} {top}/{bottom}" if whole else f"{top}/{bottom}"


def _value(found: re.Match[str]) -> Fraction | None:
    if len(found[0]) > LONGEST:
        return None
    if found["decimal"]:
        decimal = found["decimal"].replace(",", "").lower()
        if abs(int(decimal.partition("e")[2] or 0)) > LONGEST:
            return None
        value = Fraction(decimal)
    else:
        whole, top, bottom = (int((found[name] or "0").replace(",", "")) for name in ("whole", "top", "bottom"))
        if bottom == 0:
            return None
        value = Fraction(top, bottom)
        if found["whole"] and value >= 1:
            return value  # no mixed number: the one before is another number, and so is its sign
        value += whole
    return -value if found["minus"] else value


def gold_number(answer: object) -> Fraction:
    """Returns the number in a data set's column `answer`: after the last `####`, where there is a solution before it.

    Raises:
        ValueError: There is none, or it is no answer (`answer_text`).
    """
    text = answer_text(answer)
    number = last_number(text.rpartition("####")[2])
    if number is None:
        raise ValueError(
            f"The answer {text[-80:]!r} has no number. Write it as a number, after #### where a solution stands "
            "before it."
        )
    return number


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
    raise ValueError(
        f"The answer {answer!r:.80} must be a text, a finite number, or a list of one of these. Keep one answer a row."
    )
