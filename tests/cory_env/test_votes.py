"""Which answers are counted as equal in a vote."""

from fractions import Fraction

import pytest

from cory_env.rewards.votes import answer_reader


@pytest.mark.parametrize(
    ("reward", "response", "answer"),
    [
        ("cory_env.rewards.answer:last_is_right", "First 3, then 4.0\nso 18", 18),
        ("cory_env.rewards.answer:last_is_right", "None.", None),
        ("cory_env.rewards.answer:first_line_is_right", " 12 + 34 = 46\n 7", 46),
        ("cory_env.rewards.answer:whole_is_right", " 109+035", "109+035"),
        ("cory_env.rewards.mathematics:same_value", r"so \boxed{ \frac{1} {2} }.", r"\frac{1}{2}"),
        ("cory_env.rewards.mathematics:same_value", r"so \boxed{", None),
        ("cory_env.rewards.mathematics:same_value", "x = 3 ", "x = 3"),
        ("cory_env.rewards.code:share_passed?seconds=5", "def f(): pass", None),
        ("mine:score", "  good ", "good"),
        ("mine:score", "  ", None),
    ],
)
def test_answers_are_read_as_the_reward_reads_them(reward: str, response: str, answer: object) -> None:
    value = answer_reader(reward)(response)
    assert value == (Fraction(answer) if isinstance(answer, int) else answer)
