"""Texts for the terminal: a query with the responses of its chain."""

import re
from textwrap import shorten

from rich.text import Text

from launch.display.tables import format_metric
from launch.run_folder.records import Sample

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # not tab and line feed; surrogates too
MAX_EXTRA = 100  # characters of a thought, of feedback or of an observation, in samples
NOTHING_TO_CORRECT = "(nothing to correct)"  # stands for feedback that is None


def chain_text(sample: Sample, indent: int) -> Text:
    """Returns a query and its responses, a line each: role, policy, task reward, text; then thought and feedback.

    In an environment, the line before each response is what the agent was shown.
    """
    margin, responses = " " * indent, sample["responses"]
    role_width = max([10, *(len(response["role"]) for response in responses)])
    policy_width = max((len(response["policy"]) for response in responses), default=0)
    text = Text(margin).append(_one_line(sample["query"]), style="italic")
    for response in responses:
        role, policy = f"{response['role']:<{role_width}}", f"{response['policy']:<{policy_width}}"
        reward = format_metric("task_reward", response["task_reward"])
        if "observation" in response:
            shown = shorten(response["observation"], MAX_EXTRA, placeholder=" …") or "(empty)"
            text.append(f"\n{margin}{'':<{role_width}} {shown}", style="dim")
        text.append(f"\n{margin}{role} {policy} {reward:>6}  ", style="dim")
        text.append(_one_line(response["text"]) or "(empty)")
        extras = {"thought": response["reasoning"]} if "reasoning" in response else {}
        if "feedback" in response:
            feedback = response["feedback"]
            extras["feedback"] = NOTHING_TO_CORRECT if feedback is None else feedback
        for label, extra in extras.items():
            shortened = shorten(extra, MAX_EXTRA, placeholder=" …") or "(empty)"
            text.append(f"\n{margin}{label:<{role_width}} {shortened}", style="dim")
    return text


def _one_line(text: str) -> str:
    return " ".join(text.split())


def replace_control_chars(text: str) -> str:
    """Replaces control characters, which a terminal would execute, and surrogates, which no file can store."""
    return _CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text)
