"""The exception for invalid settings, and a check of their values."""

import re
from typing import get_args

OTHER_NOTATION = re.compile(r"[-+]?0[xob]\w*|[-+\d.e]*_[-+\d.e_]*", re.ASCII | re.IGNORECASE)
"""Numbers that are not decimal: in hexadecimal, octal or binary digits, or with underscores."""


class SettingsError(ValueError):
    """A setting is unknown, invalid, or conflicts with another; the message names a fix."""


def check_number(value: object, annotation: object) -> None:
    """Rejects values that pydantic would convert to a number, or to another one than was meant.

    Args:
        value: the value of a setting, not validated yet.
        annotation: the setting's type.

    Raises:
        ValueError: `value` is true or false (pydantic: 1 or 0) or a text such as `1_000` or `0x10`, or a list with
            such a text, but the setting is a number, or may be a list of numbers.
    """
    kinds = {annotation, *get_args(annotation)}
    numbers = {int, float} & {*kinds, *(item for kind in kinds for item in get_args(kind))}
    if isinstance(value, bool) and {int, float} & kinds:
        raise ValueError("should be a number, not true or false")
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    if numbers and any(map(OTHER_NOTATION.fullmatch, texts)):
        raise ValueError("should be a decimal number, such as 16 or 1e-5, without underscores")
