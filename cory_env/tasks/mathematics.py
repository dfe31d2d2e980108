r"""Mathematics: solve a problem and write the answer in \boxed{}.

Data of one's own, or of the hub: MATH (`problem`, and `answer` or a `solution` that ends in \boxed{}), GSM8K
(`question`, `answer`), or `query` and `answer`. Answers are compared by value, as fractions, roots, sets or expressions
(`cory_env.rewards.mathematics`, extra `math`). For numbers in plain text the task gsm8k reads more of them, and faster.
"""

from dataclasses import replace

from cory_env.rewards.mathematics import BOXED, gold_text
from cory_env.rewards.number import answer_text
from cory_env.tasks.definition import Form, TaskDefinition
from cory_env.tasks.numbers import ANSWER
from cory_env.tasks.task import GradedTask, Query

SOLUTION = "solution"
INSTRUCTION = "Reason step by step, and put the final answer in \\boxed{{}}.\n"


class Mathematics(GradedTask):
    """The task."""

    def right_answer(self, query: Query) -> str | None:
        """Returns the right answer, in a box."""
        text = gold_text(query.columns[ANSWER]).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
        return f"{BOXED}{text}}}"


def _answered(query: Query) -> Query:
    """Gives a query the column `answer`, from its solution if it has none.

    Raises:
        ValueError: There is no answer in it.
    """
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
    reference_separator="\n\nAnother one:\n\n",  # three agents or more
    reward="cory_env.rewards.mathematics:same_value",
    data_hint="a file or a data set of the hub with the columns problem (or question, or query) and answer (or a "
    "solution with \\boxed{})",
    forms=tuple(
        Form(query, (answer,), _answered) for query in ("query", "problem", "question") for answer in (ANSWER, SOLUTION)
    ),
    converted=frozenset({ANSWER}),
)
