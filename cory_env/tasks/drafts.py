"""Drafts: sums of three two-digit numbers, a task in which an earlier response matters.

    48+61+35=            pioneer
    48+61+35~109+035=    observer, after the pioneer wrote 109+035

The reward is 1 if the whole response is the sum (144), else 0. A response may also be the working: the sum of the first
two numbers and the third number, in three digits each. Its reward is 0, but an agent that sees it only needs to add two
numbers. So the pioneer's response can be right (the sum) or useful to the observer (the working), and the pioneer can
learn the latter only if it shares the observer's reward.

The bundled model `drafts-llama-tiny` reads these prompts with one token per character. Its training data contained
right and wrong drafts; its card describes the effect.
"""

from pathlib import Path

from cory_env.tasks.definition import TaskDefinition
from cory_env.tasks.numbers import NUMBER_FORMAT, NumberTask

QUERIES = Path(__file__).parents[1] / "assets" / "drafts-queries"
PROMPT = "{query}="
OBSERVER_PROMPT = "{query}~{reference}="

DRAFTS = TaskDefinition(
    kind=NumberTask,
    prompt=PROMPT,
    observer_prompt=OBSERVER_PROMPT,
    reference_separator="~",  # for three or more agents
    keep_separator=True,
    reward="cory_env.rewards.answer:whole_is_right",
    sources=(QUERIES / "train.csv", QUERIES / "test.csv"),
    formats=(NUMBER_FORMAT,),
)
