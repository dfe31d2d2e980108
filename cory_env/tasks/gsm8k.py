"""GSM8K: solve a word problem of grade school (paper §4).

The pioneer's prompt is one worked example and the question; the observer's has the pioneer's answer as a reference
between the question and `Answer:`. With `chat` the same text is the user's message: the example shows a model that is
tuned to instructions how to answer too. The reward is 1 if the last number of the response is the right one, else 0.
"""

from cory_env.tasks.answers import ANSWER, AnswerTask
from cory_env.tasks.rows import Source, read_queries, read_splits
from cory_env.tasks.task import Task
from cory_env.tasks.template import placeholders

HUB = "hub:openai/gsm8k?config=main&split="
QUERY = "question"
REWARD = "cory_env.rewards.answer:last_is_right"

# In our own words, so that nothing of it is in the data.
EXAMPLE = (
    "Question: A ferry has room for 24 cars and makes 5 crossings a day. Each car pays $8. On Sunday one crossing was "
    "cancelled, and the others were full. How many dollars did the cars pay on Sunday? "
    "Answer: The ferry made 5 - 1 = 4 crossings. It carried 4 * 24 = 96 cars. They paid 96 * 8 = 768 dollars. "
    "The answer is 768. "
)
PROMPT = EXAMPLE + "Question: {query} Answer:"
OBSERVER_PROMPT = EXAMPLE + "Question: {query} Reference: {reference} Answer:"
REFERENCE_SEPARATOR = " Reference: "  # three agents or more, ours


def make(
    *,
    data: Source | None = None,
    eval_data: Source | None = None,
    reward: str | None = None,
    prompt: str | None = None,
    observer_prompt: str | None = None,
) -> Task:
    """Builds the task; see `cory_env.tasks.make_task` for the settings and errors.

    The data has the columns `question` and `answer`, the latter a number or a solution with the number after `####`.
    With a reward of one's own there are no gold answers, and an `observer_prompt` of one's own puts several earlier
    responses on a line each.
    """
    required = placeholders(prompt or PROMPT) | placeholders(observer_prompt or OBSERVER_PROMPT) - {"reference"}
    required |= set() if reward else {ANSWER}
    if data is not None:
        train, test = read_splits(data, eval_data, required, QUERY)
    else:
        train = read_queries(HUB + "train", required, QUERY)
        test = read_queries(eval_data or HUB + "test", required, QUERY)
    return AnswerTask(
        name="gsm8k",
        train=train,
        test=test,
        reward=reward or REWARD,
        prompt_template=prompt or PROMPT,
        observer_template=observer_prompt or OBSERVER_PROMPT,
        reference_separator="\n" if observer_prompt else REFERENCE_SEPARATOR,
        solved_at=None if reward else 1.0,
    )
