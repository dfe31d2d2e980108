"""Tasks whose data holds the right answer: a number, in the column `answer`."""

from collections.abc import Sequence
from dataclasses import dataclass

from cory_env.rewards.number import gold_number
from cory_env.tasks.readers import DataError
from cory_env.tasks.task import Query, Task

ANSWER = "answer"


@dataclass(frozen=True, kw_only=True)
class AnswerTask(Task):
    """A task with a gold answer per query. It is solved at a reward of 1.0, unless the user set another reward."""

    def __post_init__(self) -> None:
        """Finds answers that cannot be compared.

        Raises:
            DataError: An answer holds no number.
            TemplateError: As in `Task`.
        """
        super().__post_init__()
        for query in self.all_queries() if self.solved_at is not None else ():
            try:
                gold_number(query.columns[ANSWER])
            except ValueError as error:
                raise DataError(f"The data of task {self.name}, at {query.text[:60]!r}: {error}") from error

    def observer_prompt(self, query: Query, responses: Sequence[str]) -> str:
        """Returns the later agents' prompt; the space around a response goes, because the template has its own."""
        return super().observer_prompt(query, [response.strip() for response in responses])

    def gold(self, query: Query) -> str | None:
        """Returns the right answer, written the same wherever it is the same number."""
        return None if self.solved_at is None else str(gold_number(query.columns[ANSWER]))
