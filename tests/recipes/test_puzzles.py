"""The generator of the task's Sudoku puzzles."""

import random
from pathlib import Path

import pytest

from cory_env.rewards.sudoku import CELLS
from cory_env.tasks.sudoku import PUZZLES
from recipes.puzzles import count_solutions, draw_grids, draw_puzzle, fill_grid, rename_digits, write_puzzles
from tests.cory_env.test_sudoku import GRID, PUZZLE, brute_force_solutions


def test_grids_are_not_variants_of_a_few() -> None:
    # Which rows hold a digit's places: unchanged if digits are renamed, so few base grids give few of these.
    grids = [rename_digits(fill_grid(random.Random(seed))) for seed in range(500)]
    assert len({*grids}) > 480  # of 39,168 grids whose first row is 123456
    assert len({grid[6:12] for grid in grids}) == 36  # all second rows that are possible


def test_solutions_are_counted_up_to_the_limit() -> None:
    assert count_solutions(GRID) == count_solutions(PUZZLE) == 1
    # The digits 1 and 4 can change places in rows 1 and 2 if neither column nor box tells them apart.
    two = ".23.56.56.23231564564231312645645312"
    assert len(brute_force_solutions(two)) == count_solutions(two) == count_solutions(two, limit=9) == 2
    assert count_solutions("." * CELLS, limit=5) == 5
    assert count_solutions("12345......6" + "." * 24) == 0  # the corner must be 6, but its box has one already


def test_drawn_puzzles_have_the_number_of_blanks() -> None:
    puzzle = draw_puzzle(GRID, 20, random.Random(3))
    assert puzzle.count(".") == 20 and brute_force_solutions(puzzle) == [GRID]


def test_the_first_grids_are_the_bundled_answers() -> None:
    bundled = (PUZZLES / "train.csv").read_text("utf-8").splitlines()[1:10]
    assert draw_grids(9) == [line.partition(",")[2] for line in bundled]


@pytest.mark.slow
def test_the_bundled_puzzles_can_be_written_again(tmp_path: Path) -> None:
    write_puzzles(tmp_path)
    for name in ("train.csv", "test.csv"):
        assert (tmp_path / name).read_bytes() == (PUZZLES / name).read_bytes()
