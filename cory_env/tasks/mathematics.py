r"""Mathematics: solve a problem and write the answer in \boxed{}.

User data or hub data sets may have the columns of MATH (`problem`, and `answer` or a `solution` that ends in \boxed{}),
those of GSM8K (`question`, `answer`), or `query` and `answer`. Answers are compared by value: fractions, roots, sets or
expressions (`cory_env.rewards.mathematics`, extra `math`). For numbers in plain text, the task gsm8k recognizes more
notations and is faster.
"""

from dataclasses import replace

from cory_env.rewards.mathematics import BOXED, gold_text
from cory_env.rewards.number import answer_text
from cory_env.tasks.definition import DataFormat, TaskDefinition
from cory_env.tasks.numbers import ANSWER
from cory_env.tasks.task import GradedTask, Query

SOLUTION = "solution"
INSTRUCTION = "Reason step by step, and put the final answer in \\boxed{{}}.\n"


class Mathematics(GradedTask):
    """The task."""

    def right_answer(self, query: Query) -> str | None:
        r"""Returns the right answer in \boxed{}."""
        text = gold_text(query.columns[ANSWER]).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
        return f"{BOXED}{text}}}"


def _add_answer(query: Query) -> Query:
    """Adds the column `answer`, taken from the solution, if the query has none."""
    answer = query.columns.get(ANSWER)
    if answer is None:
        answer = answer_text(query.columns[SOLUTION])
        if BOXED not in answer:
            raise ValueError("the solution has no answer in \\boxed{}. Write one, or add a column answer.")
    gold_text(answer)
    return replace(query, columns={**query.columns, ANSWER: answer})


MATHEMATICS = TaskDefinition(
    kind=Mathematics,
    prompt="{query}\n\n" + INSTRUCTION,
    observer_prompt="{query}\n\nA solution that may be wrong:\n\n{reference}\n\n" + INSTRUCTION,
    reference_separator="\n\nAnother one:\n\n",  # for three or more agents
    reward="cory_env.rewards.mathematics:same_value",
    data_hint="a file or a hub data set with the columns problem (or question, or query) and answer (or a solution "
    "with \\boxed{})",
    formats=tuple(
        DataFormat(query, (answer,), _add_answer)
        for query in ("query", "problem", "question")
        for answer in (ANSWER, SOLUTION)
    ),
    added_columns=frozenset({ANSWER}),
)
