"""Answers in responses, to count equal ones in a majority vote."""

from collections.abc import Callable, Hashable

from cory_env.rewards.answer import first_line
from cory_env.rewards.mathematics import BOXED, gold_text
from cory_env.rewards.number import last_number


def answer_reader(reward: str) -> Callable[[str], Hashable | None]:
    """Returns the function that reads the answer in a response as a reward does; None if the response has none.

    Numbers are compared exactly, mathematical answers as the text in their box, programs not at all. With other
    rewards, the answer is the whole response.

    Args:
        reward: The reward function, `module:function` with settings.
    """
    module, _, function = reward.partition("?")[0].partition(":")
    if module == "cory_env.rewards.answer" and function != "whole_is_right":
        return last_number if function == "last_is_right" else _first_line_number
    readers: dict[str, Callable[[str], Hashable | None]] = {
        "cory_env.rewards.mathematics": _boxed_text,
        "cory_env.rewards.code": _no_answer,
    }
    return readers.get(module, _whole_text)


def _first_line_number(response: str) -> Hashable | None:
    return last_number(first_line(response))


def _boxed_text(response: str) -> Hashable | None:
    if BOXED not in response:
        return _whole_text(response)
    try:
        return "".join(gold_text(response).split())
    except ValueError:  # the box is empty or not closed
        return None


def _whole_text(response: str) -> Hashable | None:
    return response.strip() or None


def _no_answer(response: str) -> Hashable | None:
    return None
