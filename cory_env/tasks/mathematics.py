r"""Mathematics: solve a problem and write the answer in \boxed{}.

Data of one's own, or of the hub: MATH (`problem`, and `answer` or a `solution` that ends in \boxed{}), GSM8K
(`question`, `answer`), or `query` and `answer`. Answers are compared by value, as fractions, roots, sets or expressions
(`cory_env.rewards.mathematics`, extra `math`). For numbers in plain text the task gsm8k reads more of them, and faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cory_env.rewards.gold import answer_text
from cory_env.rewards.mathematics import BOXED, gold_text
from cory_env.tasks.answers import ANSWER
from cory_env.tasks.readers import DataError
from cory_env.tasks.rows import QUERY, Source, columns_of, read_queries, read_splits
from cory_env.tasks.task import Query, Task
from cory_env.tasks.template import placeholders

REWARD = "cory_env.rewards.mathematics:same_value"
SOLUTION = "solution"
QUERIES = (QUERY, "problem", "question")

PROMPT = "{query}\n\nReason step by step, and put the final answer in \\boxed{{}}.\n"
OBSERVER_PROMPT = (
    "{query}\n\nA solution that may be wrong:\n\n{reference}\n\n"
    "Reason step by step, and put the final answer in \\boxed{{}}.\n"
)
REFERENCE_SEPARATOR = "\n\nAnother one:\n\n"  # three agents or more


@dataclass(frozen=True, kw_only=True)
class Mathematics(Task):
    """The task. It is solved at a reward of 1.0, unless the user set another reward."""

    def observer_prompt(self, query: Query, responses: Sequence[str]) -> str:
        """Returns the later agents' prompt; the space around a response goes, because the template has its own."""
        return super().observer_prompt(query, [response.strip() for response in responses])

    def gold(self, query: Query) -> str | None:
        """Returns the right answer, in a box."""
        if self.solved_at is None:
            return None
        text = gold_text(query.columns[ANSWER]).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
        return f"{BOXED}{text}}}"


def make(
    *,
    data: Source | None = None,
    eval_data: Source | None = None,
    reward: str | None = None,
    prompt: str | None = None,
    observer_prompt: str | None = None,
) -> Task:
    """Builds the task; see `cory_env.tasks.make_task` for the settings and errors.

    With a reward of one's own the data needs no answers, and there are no gold answers.
    """
    if data is None:
        raise ValueError(
            "The task math needs data: set data to a file or a data set of the hub with the columns problem (or "
            "question, or query) and answer (or a solution with \\boxed{})."
        )
    columns = (placeholders(prompt or PROMPT) | placeholders(observer_prompt or OBSERVER_PROMPT)) - {"reference"}

    def form(source: Source) -> tuple[set[str], str]:
        has = columns_of(source)
        column = next((name for name in QUERIES if name in has), QUERY)
        answer = SOLUTION if ANSWER not in has and SOLUTION in has else ANSWER
        return set(columns - {ANSWER}) | (set() if reward else {answer}), column

    if eval_data is None:
        train, test = read_splits(data, None, *form(data))
    else:
        train, test = read_queries(data, *form(data)), read_queries(eval_data, *form(eval_data))
    if reward is None:
        train, test = [_answered(query) for query in train], [_answered(query) for query in test]
    return Mathematics(
        name="math",
        train=train,
        test=test,
        reward=reward or REWARD,
        prompt_template=prompt or PROMPT,
        observer_template=observer_prompt or OBSERVER_PROMPT,
        reference_separator="\n" if observer_prompt else REFERENCE_SEPARATOR,
        solved_at=None if reward else 1.0,
    )


def _answered(query: Query) -> Query:
    """Gives a query the column `answer`, from its solution where it has none.

    Raises:
        DataError: There is no answer in it.
    """
    answer = query.columns.get(ANSWER)
    try:
        if answer is None:
            answer = answer_text(query.columns[SOLUTION])
            if BOXED not in answer:
                raise ValueError("the solution has no answer in \\boxed{}. Write one, or add a column answer.")
        gold_text(answer)
    except ValueError as error:
        raise DataError(f"The data of task math, at {query.text[:60]!r}: {error}") from error
    return replace(query, columns={**query.columns, ANSWER: answer})
