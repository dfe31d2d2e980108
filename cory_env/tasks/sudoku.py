"""Sudoku on 6 x 6 cells, a task in which feedback on an earlier response matters.

    {query}=                              pioneer
    {reference}~{query}=                  observer, without feedback
    {reference}~{feedback}~{query}=       observer, with feedback

A query is 36 characters, row by row, with `.` for a blank cell; a response is the whole grid. Feedback is one mark per
cell of the earlier response: `x` for a cell in conflict, `o` for the others (`cory_env.rewards.sudoku`). It follows
from the rules and the query alone; nobody needs the solution.

The queries are generated with a fixed seed; nothing is downloaded. Every puzzle has exactly one solution, and no two
solutions are the same after renaming the digits. The bundled model `sudoku-llama-tiny` reads these prompts with one
token per character, and the query always stands directly before the response.
"""

import random
from functools import cache

from cory_env.rewards.sudoku import BLANK, CELLS, DIGITS, SIZE, UNITS, check_puzzle
from cory_env.tasks.definition import DataFormat, TaskDefinition
from cory_env.tasks.rows import HOLD_OUT_EVERY
from cory_env.tasks.task import GradedTask, Query

NUM_QUERIES = 10_000
MIN_BLANKS, MAX_BLANKS = 13, 16
ANSWER = "answer"

PROMPT = "{query}="
OBSERVER_PROMPT = "{reference}~{query}="
FEEDBACK_PROMPT = "{reference}~{feedback}~{query}="
SOLVED_FEEDBACK = "o" * CELLS

_ALL = (1 << SIZE) - 1
_MEMBERS = [[digit for digit in range(SIZE) if digits >> digit & 1] for digits in range(_ALL + 1)]


class Sudoku(GradedTask):
    """The task. An answer is the solution."""

    def right_answer(self, query: Query) -> str | None:
        """Returns the solution, or None if the data does not contain it."""
        answer = query.columns.get(ANSWER)
        return None if answer is None else str(answer)


def draw_queries() -> tuple[list[Query], list[Query]]:
    """Returns 9,000 training queries and 1,000 held-out queries, with the solution in the column `answer`.

    No solution occurs twice, even after renaming the digits, so no two queries are the same puzzle with other digits.
    """
    rng = random.Random("sudoku puzzles")
    train: list[Query] = []
    test: list[Query] = []
    for number, grid in enumerate(draw_grids(), start=1):
        split = train if number % HOLD_OUT_EVERY else test
        split.append(Query(len(split), draw_puzzle(grid, rng.randint(MIN_BLANKS, MAX_BLANKS), rng), {ANSWER: grid}))
    return train, test


@cache
def draw_grids() -> tuple[str, ...]:
    """Returns the solutions of the task's queries."""
    rng = random.Random("sudoku grids")
    grids: dict[str, str] = {}
    while len(grids) < NUM_QUERIES:
        grid = fill_grid(rng)
        grids.setdefault(rename_digits(grid), grid)
    return tuple(grids.values())


def rename_digits(grid: str) -> str:
    """Returns a grid with its digits renamed so that the first row is 123456."""
    return grid.translate(str.maketrans(grid[:SIZE], DIGITS))


def fill_grid(rng: random.Random) -> str:
    """Returns a random complete grid, filled cell by cell with backtracking."""
    grid, used = [0] * CELLS, [0] * (3 * SIZE)

    def fill_from(cell: int) -> bool:
        if cell == CELLS:
            return True
        row, column, box = UNITS[cell]
        candidates = [*_MEMBERS[_ALL & ~(used[row] | used[column] | used[box])]]
        rng.shuffle(candidates)
        for digit in candidates:
            grid[cell], bit = digit, 1 << digit
            for unit in UNITS[cell]:
                used[unit] |= bit
            if fill_from(cell + 1):
                return True
            for unit in UNITS[cell]:
                used[unit] ^= bit
        return False

    fill_from(0)
    return "".join(DIGITS[digit] for digit in grid)


def draw_puzzle(grid: str, blanks: int, rng: random.Random) -> str:
    """Returns a puzzle whose only solution is `grid`.

    Args:
        blanks: Number of blank cells. Above 24, few choices of cells leave one solution, so drawing takes long.
    """
    while True:
        cells = {*rng.sample(range(CELLS), blanks)}
        puzzle = "".join(BLANK if cell in cells else digit for cell, digit in enumerate(grid))
        if count_solutions(puzzle) == 1:
            return puzzle


def count_solutions(puzzle: str, limit: int = 2) -> int:
    """Returns the number of solutions of a puzzle, at most `limit`. Its givens must repeat no digit."""
    used = [0] * (3 * SIZE)
    for units, digit in zip(UNITS, puzzle, strict=True):
        for unit in units if digit != BLANK else ():
            used[unit] |= 1 << DIGITS.index(digit)

    def candidates(cell: int) -> int:
        row, column, box = UNITS[cell]
        return _ALL & ~(used[row] | used[column] | used[box])

    def count(blanks: list[int]) -> int:
        if not blanks:
            return 1
        cell = min(blanks, key=lambda blank: candidates(blank).bit_count())
        others, total = [blank for blank in blanks if blank != cell], 0
        for digit in _MEMBERS[candidates(cell)]:
            for unit in UNITS[cell]:
                used[unit] |= 1 << digit
            total += count(others)
            for unit in UNITS[cell]:
                used[unit] ^= 1 << digit
            if total >= limit:
                break
        return min(total, limit)

    return count([cell for cell, character in enumerate(puzzle) if character == BLANK])


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
    draw=lambda: ("", *draw_queries()),
    formats=(DataFormat(convert=_check_query),),
)
