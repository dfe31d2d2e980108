"""Rewards and feedback for 6x6 Sudoku: the digits 1 to 6 once in each row, each column and each box of 2 x 3 cells.

A grid is 36 characters, row by row; white space between them is ignored. Nothing here uses the solution: a complete
grid that keeps the givens and repeats no digit is right, because a puzzle has one solution.
"""

from collections.abc import Sequence

SIZE, BOX_ROWS, BOX_COLUMNS = 6, 2, 3
CELLS = SIZE * SIZE
DIGITS, BLANK = "123456", "."
IN_CONFLICT, NO_CONFLICT = "x", "o"


def _units() -> list[tuple[int, int, int]]:
    """Returns each cell's row, column and box as three numbers from 0 to 17, different for different units."""
    units = []
    for cell in range(CELLS):
        row, column = divmod(cell, SIZE)
        box = row // BOX_ROWS * BOX_ROWS + column // BOX_COLUMNS
        units.append((row, SIZE + column, 2 * SIZE + box))
    return units


UNITS = _units()


def solved(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Rewards 1.0 for the solution and 0.0 for anything else."""
    marks = [find_conflicts(*pair) for pair in zip(prompts, completions, strict=True)]
    return [float(IN_CONFLICT not in text) for text in marks]


def conflicts(prompts: Sequence[str], completions: Sequence[str]) -> list[str | None]:
    """Feedback: 36 marks, `x` for cells in conflict and `o` for the others; None if the grid is solved."""
    marks = [find_conflicts(*pair) for pair in zip(prompts, completions, strict=True)]
    return [text if IN_CONFLICT in text else None for text in marks]


def find_conflicts(puzzle: str, completion: str) -> str:
    """Marks the cells of a grid that break a rule.

    Args:
        puzzle: 36 characters: the givens, and `.` for blank cells.
        completion: A response. It is malformed unless it has exactly 36 digits from 1 to 6 (and white space).

    Returns:
        36 marks: `x` for a cell whose digit is also in its row, column or box, and for a given that was changed; `o`
        for the others. All are `x` if the completion is malformed.

    Raises:
        ValueError: `puzzle` is not a puzzle.
    """
    check_puzzle(puzzle)
    grid = "".join(completion.split())
    if len(grid) != CELLS or not {*grid} <= {*DIGITS}:
        return IN_CONFLICT * CELLS
    counts: dict[tuple[int, str], int] = {}
    for units, digit in zip(UNITS, grid, strict=True):
        for unit in units:
            counts[unit, digit] = counts.get((unit, digit), 0) + 1
    wrong = [
        puzzle[cell] not in (BLANK, digit) or any(counts[unit, digit] > 1 for unit in UNITS[cell])
        for cell, digit in enumerate(grid)
    ]
    return "".join(IN_CONFLICT if is_wrong else NO_CONFLICT for is_wrong in wrong)


def check_puzzle(puzzle: str) -> None:
    """Checks the form of a puzzle.

    Raises:
        ValueError: It does not consist of 36 digits and blank cells.
    """
    if len(puzzle) != CELLS or not {*puzzle} <= {*DIGITS, BLANK}:
        raise ValueError(
            f"The query {puzzle!r:.80} is not a 6x6 Sudoku. Write 36 characters, row by row: the digits 1 to 6, and "
            f"{BLANK!r} for blank cells."
        )
