"""Whether a program printed what a test expects."""

import contextlib


def same_output(printed: object, expected: str) -> bool:
    """Returns whether two outputs are equal, ignoring trailing space, trailing lines and rounding of decimals.

    Lines are compared word by word. Words with a decimal point are compared as numbers, with a tolerance of 1e-6.
    """
    printed_lines = [line.rstrip() for line in str(printed).rstrip().splitlines()]
    expected_lines = [line.rstrip() for line in expected.rstrip().splitlines()]
    return len(printed_lines) == len(expected_lines) and all(map(_same_line, printed_lines, expected_lines))


def _same_line(printed: str, expected: str) -> bool:
    printed_words, expected_words = printed.split(), expected.split()
    return len(printed_words) == len(expected_words) and all(map(_same_word, printed_words, expected_words))


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if "." not in expected:
        return False
    with contextlib.suppress(ValueError):
        printed_number, expected_number = float(printed), float(expected)
        return abs(printed_number - expected_number) <= 1e-6 * max(1.0, abs(expected_number))
    return False
