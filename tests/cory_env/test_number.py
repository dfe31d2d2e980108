"""Parsing the last number of a text, as graders of answers do."""

import re
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from cory_env.rewards.answer import first_line_is_right, last_is_right
from cory_env.rewards.mathematics import gold_text
from cory_env.rewards.number import gold_number, last_number

READABLE = {
    "18": "18",
    "The answer is 18.": "18",
    "18.0": "18",
    "007": "7",
    "0.10": "1/10",
    ".5": "1/2",
    "is .5.": "1/2",
    "...5": "5",
    "It ends.5": "5",
    "1.2.3": "3",
    # thousands
    "1,234,567": "1234567",
    "1,234.50": "2469/2",
    "1{,}000": "1000",
    r"1\,000": "1000",
    "1, 2, 3": "3",
    "12,34": "34",
    "1,2345": "2345",
    "1234,567": "567",
    # signs
    "-3": "-3",
    "\N{MINUS SIGN}3": "-3",
    "\N{EN DASH}3": "-3",
    "= -3": "-3",
    "(-3)": "-3",
    "**-3**": "-3",
    "+3": "3",
    "5-3": "3",
    "5 - 3": "3",
    "5 - -3": "-3",
    "x-3": "3",
    "(5)-3": "3",
    "2\N{EN DASH}3 days": "3",
    "it is\N{EM DASH}3": "3",
    "it is--3": "3",
    # currency, percent, units, words
    "$18": "18",
    "-$18": "-18",
    "$-18": "-18",
    r"-\$18.50": "-37/2",
    "€1,200": "1200",
    "Rs.500": "500",
    "$.50": "1/2",
    "45%": "45",
    "45 %": "45",
    "18 apples": "18",
    "18kg": "18",
    "the 18th": "18",
    "18 m2": "18",
    "18 cm^2": "18",
    "18 cm^{2}": "18",
    "18 cm²": "18",
    "答案是18个": "18",
    "答案是-18": "-18",
    # fractions
    "3/4": "3/4",
    "-3/4": "-3/4",
    "6/3": "2",
    "1 1/2": "3/2",
    "-1 1/2": "-3/2",
    "5 6/3": "2",
    "-5 6/3": "2",
    "48 / 2": "2",
    "1,000/1,000": "1",
    "3/4.5": "9/2",
    "12/24/2023": "2023",
    r"\frac{3}{4}": "3/4",
    r"-\dfrac{3}{4}": "-3/4",
    r"1\frac{1}{2}": "3/2",
    r"\boxed{18}": "18",
    r"$\boxed{-1 \tfrac{1}{2}}$.": "-3/2",
    # exponents
    "2.5e3": "2500",
    "1E-2": "1/100",
    # digits of other scripts
    "１８": "18",
    "\N{ARABIC-INDIC DIGIT ONE}\N{ARABIC-INDIC DIGIT EIGHT}": "18",
    # the last of several numbers
    "He has 18 apples in 2 bags": "2",
    "The answer is 18. Question: Ann has 7 cats. Answer: 7 + 1 = 8": "8",
    "5\x00\ud800 6": "6",
}

UNREADABLE = [
    "",
    "eighteen",
    "m2",
    "½",
    "3/0",
    "18, or 3/0",
    "1e1001",
    "1e" + "9" * 500,
    "1e-" + "9" * 5000,
    "9" * 1001,
    "9" * 1_000_000,
    "1/" + "9" * 1_000_000,
    "0." + "9" * 1_000_000,
    "1" + ",000" * 250_000,
]


@pytest.mark.parametrize(("text", "number"), READABLE.items())
def test_the_last_number_is_parsed_exactly(text: str, number: str) -> None:
    assert last_number(text) == Fraction(number)


@pytest.mark.parametrize("text", UNREADABLE, ids=lambda text: f"{text[:12]!r}, {len(text)}")
def test_text_without_a_readable_number_gives_none(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(
    "piece", [*"1,.-/e$ {\\", "1,", "1,111", "1.", "1/", "1 ", "-1", "1e", "1 1/", "\\frac{1}", "{,}"]
)
def test_parsing_takes_linear_time(piece: str) -> None:
    def seconds(length: int) -> float:
        text = piece * (length // len(piece)) + "x"
        start = time.process_time()
        last_number(text)
        return time.process_time() - start

    short, long = (min(seconds(length) for _ in range(3)) for length in (5_000, 50_000))
    assert long < 40 * short + 0.01  # quadratic would be 100 times


def test_the_gold_number_is_the_one_after_the_solution() -> None:
    assert gold_number("She has 2 * 9 = <<2*9=18>>18.\n#### 1,018") == 1018
    assert gold_number("18") == gold_number(18) == gold_number(18.0) == 18
    for answer in ("", "2 + 2 is 4\n#### four"):
        with pytest.raises(ValueError, match=r"has no number\. Write a number, or a solution followed by ####"):
            gold_number(answer)


@pytest.mark.parametrize("parse", [gold_number, gold_text])
def test_a_gold_answer_is_a_text_a_finite_number_or_a_list_with_one_of_these(parse: Callable[[object], object]) -> None:
    for answer in ("18", 18, 18.0, Decimal(18), np.int64(18), np.float32(18), ["18"], [18], ("18",)):
        assert parse(answer) in (18, "18", "18.0")
    for wrong in (
        None,
        ["2", "3"],
        [],
        [["18"]],
        [None],
        {"ground_truth": "5"},
        float("nan"),
        float("inf"),
        True,
        b"18",
    ):
        with pytest.raises(ValueError, match=re.escape(f"The answer {wrong!r} must be a text, a finite number")):
            parse(wrong)


def test_the_last_number_of_a_response_decides() -> None:
    responses = ["So it is 18.0.", "18 or 19", "", " 18\nQuestion: 2 + 2? Answer: 4", "-18"]
    assert last_is_right(responses, ["#### 18"] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_only_the_last_number_of_the_first_line_decides() -> None:
    responses = [" 46\n57 - 21 = 36", "\n\n 46", "12 + 34 = 46", "It is 46.", "47\n46", "Well:\n46", "4", "", " \n "]
    assert first_line_is_right(responses, ["46"] * 9) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
