"""Texts for the terminal: a query with the responses of its chain."""

import re
from textwrap import shorten

from rich.text import Text

from launch.display.tables import format_metric
from launch.run_folder.records import Sample

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # not tab and line feed; surrogates too
MAX_EXTRA = 100  # characters of a thought or of feedback, in samples
NOTHING_TO_CORRECT = "(nothing to correct)"  # stands for feedback that is None


def chain_text(sample: Sample, indent: int) -> Text:
    """Returns a query and its responses, a line each, with their thoughts and the feedback between them."""
    text = Text(" " * indent).append(_one_line(sample["query"]), style="italic")
    return text.append_text(_responses_text(sample, [" " * indent], _column_widths(sample)))


def before_and_after_text(earlier: Sample, earlier_label: str, later: Sample, later_label: str) -> Text:
    """Returns a query and the chain's responses to it from two updates."""
    width, widths = max(len(earlier_label), len(later_label)) + 3, _column_widths(earlier, later)
    text = Text(f"  {_one_line(earlier['query'])}", style="italic")
    for sample, label in ((earlier, earlier_label), (later, later_label)):
        text.append_text(_responses_text(sample, [f"    {label:<{width}}", " " * (4 + width)], widths))
    return text


def _column_widths(*samples: Sample) -> tuple[int, int]:
    responses = [response for sample in samples for response in sample["responses"]]
    roles, policies = ({response[name] for response in responses} for name in ("role", "policy"))
    return max([10, *map(len, roles)]), max(map(len, policies), default=0)


def _responses_text(sample: Sample, margins: list[str], widths: tuple[int, int]) -> Text:
    """Returns a line for each response: role, policy, task reward, text; then its thought and the feedback on it.

    Args:
        margins: The left margins of the first line and of all others.
    """
    text = Text()
    for index, response in enumerate(sample["responses"]):
        role, policy = f"{response['role']:<{widths[0]}}", f"{response['policy']:<{widths[1]}}"
        reward = format_metric("task_reward", response["task_reward"])
        text.append(f"\n{margins[min(index, len(margins) - 1)]}{role} {policy} {reward:>6}  ", style="dim")
        text.append(_one_line(response["text"]) or "(empty)")
        extras = {"thought": response["reasoning"]} if "reasoning" in response else {}
        if "feedback" in response:
            feedback = response["feedback"]
            extras["feedback"] = NOTHING_TO_CORRECT if feedback is None else feedback
        for label, extra in extras.items():
            shortened = shorten(extra, MAX_EXTRA, placeholder=" …") or "(empty)"
            text.append(f"\n{margins[-1]}{label:<{widths[0]}} {shortened}", style="dim")
    return text


def _one_line(text: str) -> str:
    return " ".join(text.split())


def replace_control_chars(text: str) -> str:
    """Replaces control characters, which a terminal would execute, and surrogates, which no file can store."""
    return _CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text)
