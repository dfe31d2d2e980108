"""Tasks whose right answers are numbers, in the column `answer`; and GSM8K, which is one of them (paper §4).

GSM8K's prompt is one worked example and the question of grade school; the observer's has the pioneer's answer as a
reference between the question and `Answer:`. With `chat` the same text is the user's message: the example shows a model
that is tuned to instructions how to answer too. The reward is 1 if the last number of the response is the right one.
"""

from cory_env.rewards.number import gold_number
from cory_env.tasks.definition import Form, TaskDefinition
from cory_env.tasks.task import GradedTask, Query

ANSWER = "answer"


class NumberTask(GradedTask):
    """A task whose right answers are numbers."""

    def right_answer(self, query: Query) -> str | None:
        """Returns the right answer, written the same wherever it is the same number."""
        return str(gold_number(query.columns[ANSWER]))


def _checked(query: Query) -> Query:
    gold_number(query.columns[ANSWER])
    return query


FORM = Form("query", (ANSWER,), _checked)

# In our own words, so that nothing of it is in the data.
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
    reference_separator=" Reference: ",  # three agents or more, ours
    reward="cory_env.rewards.answer:last_is_right",
    sources=("hub:openai/gsm8k?config=main&split=train", "hub:openai/gsm8k?config=main&split=test"),
    forms=(Form("question", (ANSWER,), _checked),),
)
