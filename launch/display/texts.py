"""Texts for the terminal and reports: the name of a run's algorithm, and a query with the chain's responses."""

import re
from textwrap import shorten

from rich.text import Text

from launch.display.tables import format_metric
from launch.run_folder.records import Sample, ScoredResponse
from policies.settings.settings import Settings

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # not tab and line feed; surrogates too

MAX_FEEDBACK, MAX_THOUGHT = 100, 100
"""Maximum number of characters of feedback, and of a thought, in samples."""
NOTHING_TO_CORRECT = "(nothing to correct)"
"""Stands for feedback that is None."""


def algorithm_name(settings: Settings) -> str:
    """Returns the name of a run's algorithm, such as `CORY of 3`."""
    if settings.num_agents == 1:
        return f"{settings.algorithm}{f' by {len(settings.policy_ids)} LLMs' * (len(settings.policy_ids) > 1)}"
    agents = "" if settings.num_agents == 2 else f" of {settings.num_agents}"
    if len(settings.policy_ids) != settings.num_agents:
        agents += f" by {len(settings.policy_ids)} LLM{'s' * (len(settings.policy_ids) > 1)}"
    learner = "" if settings.algorithm == "PPO" else f" with {settings.algorithm}"
    return f"CORY{agents}{learner}"


def chain_text(sample: Sample, indent: int) -> Text:
    """Returns a query and its responses, a line each, with their thoughts and the feedback between them."""
    margin, widths = " " * indent, _column_widths(sample)
    text = Text(margin).append(one_line(sample["query"]), style="italic")
    for response in sample["responses"]:
        text.append("\n").append_text(_response_text(response, margin, widths))
    return text


def _column_widths(*samples: Sample) -> tuple[int, int]:
    """Returns the widths of the columns of roles and of policies."""
    responses = [response for sample in samples for response in sample["responses"]]
    roles, policies = ({response[name] for response in responses} for name in ("role", "policy"))
    return max([10, *map(len, roles)]), max(map(len, policies), default=0)


def _response_text(response: ScoredResponse, margin: str, widths: tuple[int, int]) -> Text:
    """Returns a response as one line: role, policy, task reward, text; then its thought and the feedback on it."""
    role, policy = f"{response['role']:<{widths[0]}}", f"{response['policy']:<{widths[1]}}"
    reward = format_metric("task_reward", response["task_reward"])
    text = Text().append(f"{margin}{role} {policy} {reward:>6}  ", style="dim")
    text.append(one_line(response["text"]) or "(empty)")
    return text.append_text(_extra_lines(response, " " * len(margin), widths[0]))


def feedback_text(feedback: str | None) -> str:
    """Returns feedback as one short line; None means that nothing is to be corrected."""
    return NOTHING_TO_CORRECT if feedback is None else shorten(feedback, MAX_FEEDBACK, placeholder=" …") or "(empty)"


def _extra_lines(response: ScoredResponse, margin: str, width: int) -> Text:
    """Returns a line each, beginning with a line break, for a response's thought and the feedback on it."""
    lines = {}
    if "reasoning" in response:
        lines["thought"] = shorten(response["reasoning"], MAX_THOUGHT, placeholder=" …") or "(empty)"
    if "feedback" in response:
        lines["feedback"] = feedback_text(response["feedback"])
    return Text("".join(f"\n{margin}{label:<{width}} {line}" for label, line in lines.items()), style="dim")


def one_line(text: str) -> str:
    """Replaces line breaks and repeated spaces by single spaces."""
    return " ".join(text.split())


def replace_control_chars(text: str) -> str:
    """Replaces control characters, which a terminal would execute, and surrogates, which no file can store."""
    return _CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text)
