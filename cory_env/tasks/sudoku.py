"""Sudoku on 6 x 6 cells, a task in which feedback on an earlier response matters.

    {query}=                              pioneer
    {reference}~{query}=                  observer, without feedback
    {reference}~{feedback}~{query}=       observer, with feedback

A query is 36 characters, row by row, with `.` for a blank cell; a response is the whole grid. Feedback is one mark per
cell of the earlier response: `x` for a cell in conflict, `o` for the others (`cory_env.rewards.sudoku`). It follows
from the rules and the query alone; nobody needs the solution.

The bundled puzzles have exactly one solution each, and no two solutions are the same after renaming the digits. The
bundled model `sudoku-llama-tiny` reads these prompts with one token per character, and the query always stands directly
before the response.
"""

from pathlib import Path

from cory_env.rewards.sudoku import CELLS, check_puzzle
from cory_env.tasks.definition import DataFormat, TaskDefinition
from cory_env.tasks.task import GradedTask, Query

PUZZLES = Path(__file__).parents[1] / "assets" / "sudoku-puzzles"
ANSWER = "answer"

PROMPT = "{query}="
OBSERVER_PROMPT = "{reference}~{query}="
FEEDBACK_PROMPT = "{reference}~{feedback}~{query}="
SOLVED_FEEDBACK = "o" * CELLS


class Sudoku(GradedTask):
    """The task. An answer is the solution."""

    def right_answer(self, query: Query) -> str | None:
        """Returns the solution, or None if the data does not contain it."""
        answer = query.columns.get(ANSWER)
        return None if answer is None else str(answer)


def _check_query(query: Query) -> Query:
    check_puzzle(query.text)
    return query


SUDOKU = TaskDefinition(
    kind=Sudoku,
    prompt=PROMPT,
    observer_prompt=OBSERVER_PROMPT,
    reference_separator="~",  # for three or more agents
    keep_separator=True,
    reward="cory_env.rewards.sudoku:solved",
    feedback="cory_env.rewards.sudoku:conflicts",
    feedback_prompt=FEEDBACK_PROMPT,
    solved_feedback=SOLVED_FEEDBACK,
    sources=(PUZZLES / "train.csv", PUZZLES / "test.csv"),
    formats=(DataFormat(convert=_check_query),),
)
