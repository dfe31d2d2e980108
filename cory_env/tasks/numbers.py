"""Tasks whose right answers are numbers in the column `answer`, such as GSM8K (paper §4).

GSM8K's prompt is one worked example and the question; the observer's prompt has the pioneer's response as a reference
between the question and `Answer:`. With `chat`, the same text is the user message: the example shows instruction-tuned
models the format too. The reward is 1 if the last number of the response is right.
"""

from cory_env.rewards.number import gold_number
from cory_env.tasks.definition import DataFormat, TaskDefinition
from cory_env.tasks.task import GradedTask, Query

ANSWER = "answer"


class NumberTask(GradedTask):
    """A task whose right answers are numbers."""

    def right_answer(self, query: Query) -> str | None:
        """Returns the right answer in a canonical notation: equal numbers give equal text."""
        return str(gold_number(query.columns[ANSWER]))


def _check_answer(query: Query) -> Query:
    gold_number(query.columns[ANSWER])
    return query


NUMBER_FORMAT = DataFormat("query", (ANSWER,), _check_answer)

# Written for this project, so that it does not occur in the data.
EXAMPLE = (
    "Question: A ferry has room for 24 cars and makes 5 crossings a day. Each car pays $8. On Sunday one crossing was "
    "cancelled, and the others were full. How many dollars did the cars pay on Sunday? "
    "Answer: The ferry made 5 - 1 = 4 crossings. It carried 4 * 24 = 96 cars. They paid 96 * 8 = 768 dollars. "
    "The answer is 768. "
)
GSM8K = TaskDefinition(
    kind=NumberTask,
    prompt=EXAMPLE + "Question: {query} Answer:",
    observer_prompt=EXAMPLE + "Question: {query} Reference: {reference} Answer:",
    reference_separator=" Reference: ",  # for three or more agents; not in the paper
    reward="cory_env.rewards.answer:last_is_right",
    sources=("hub:openai/gsm8k?config=main&split=train", "hub:openai/gsm8k?config=main&split=test"),
    formats=(DataFormat("question", (ANSWER,), _check_answer),),
)
