"""Reward and feedback for answers without tags, because SmolLM2-135M hardly ever writes those of the task."""

import re
from collections.abc import Sequence

from cory_env.rewards import reasoning_gym
from cory_env.rewards.answer import first_line
from cory_env.rewards.prepared import prepare_with
from cory_env.rewards.reasoning_gym import ANSWER_FORMAT, start_verifier

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
VERDICT = re.compile(r"\b(yes|no|true|false)\b", re.IGNORECASE)


def read_answer(completion: str, right: object) -> str:
    """Returns the answer in the first line of a response, which may be a sentence.

    Args:
        right: The right answer, which tells what to look for: if it is a number, the last number; if it is yes, no,
            true or false, the first of these words; otherwise the whole line without quotation marks and full stop.
    """
    line, answer = first_line(completion), str(right)
    if NUMBER.fullmatch(answer) and (numbers := NUMBER.findall(line)):
        return str(numbers[-1])
    if VERDICT.fullmatch(answer) and (verdict := VERDICT.search(line)):
        return verdict[0].capitalize()
    return line.removesuffix(".").strip("\"'`")


@prepare_with(start_verifier)
def score(
    completions: Sequence[str],
    prompts: Sequence[object],
    metadata: Sequence[dict[str, object]],
    dataset: Sequence[str],
    answer: Sequence[object] = (),  # a default, as some data sets have none
) -> list[float]:
    """Scores answers by `read_answer`; see `cory_env.rewards.reasoning_gym.score`."""
    return reasoning_gym.score(_tag_answers(completions, answer), prompts, metadata, dataset, answer)


def feedback(
    completions: Sequence[str],
    prompts: Sequence[object],
    metadata: Sequence[dict[str, object]],
    dataset: Sequence[str],
    answer: Sequence[object] = (),  # a default, as some data sets have none
) -> list[str | None]:
    """Says whether answers by `read_answer` are wrong or partly right; None for right ones."""
    return reasoning_gym.feedback(_tag_answers(completions, answer), prompts, metadata, dataset, answer)


def _tag_answers(completions: Sequence[str], answers: Sequence[object]) -> list[str]:
    pairs = zip(completions, answers, strict=True)
    return [ANSWER_FORMAT.format(read_answer(completion, right)) for completion, right in pairs]
