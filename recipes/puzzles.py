"""`sudoku-puzzles`: the queries of the task sudoku, 6x6 puzzles with one solution each.

`python -m recipes.puzzles` writes them again: 9,000 training queries and 1,000 held-out ones. No solution occurs twice,
even after renaming the digits, so no two queries are the same puzzle with other digits.
"""

import csv
import random
from pathlib import Path

from cory_env.rewards.sudoku import BLANK, CELLS, DIGITS, SIZE, UNITS
from cory_env.tasks.rows import HOLD_OUT_EVERY
from cory_env.tasks.sudoku import ANSWER, PUZZLES

NUM_QUERIES = 10_000
MIN_BLANKS, MAX_BLANKS = 13, 16

_ALL = (1 << SIZE) - 1
_MEMBERS = [[digit for digit in range(SIZE) if digits >> digit & 1] for digits in range(_ALL + 1)]


def write_puzzles(folder: Path) -> None:
    """Writes `train.csv` and `test.csv`."""
    rng = random.Random("sudoku puzzles")
    splits: dict[str, list[tuple[str, str]]] = {"train.csv": [("query", ANSWER)], "test.csv": [("query", ANSWER)]}
    for number, grid in enumerate(draw_grids(NUM_QUERIES), start=1):
        name = "train.csv" if number % HOLD_OUT_EVERY else "test.csv"
        splits[name].append((draw_puzzle(grid, rng.randint(MIN_BLANKS, MAX_BLANKS), rng), grid))
    for name, rows in splits.items():
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def draw_grids(count: int) -> list[str]:
    """Returns the solutions of the task's first queries."""
    rng = random.Random("sudoku grids")
    grids: dict[str, str] = {}
    while len(grids) < count:
        grid = fill_grid(rng)
        grids.setdefault(rename_digits(grid), grid)
    return list(grids.values())


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


if __name__ == "__main__":
    write_puzzles(PUZZLES)
