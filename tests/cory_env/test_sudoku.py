"""The task sudoku: its puzzles, splits, prompts, rewards and feedback."""

import json
import random
from pathlib import Path

import pytest

from cory_env.rewarding.worker import RewardWorker
from cory_env.rewards.sudoku import CELLS, UNITS, conflicts, find_conflicts, solved
from cory_env.tasks import DataError, Query, make_task
from cory_env.tasks.sudoku import SOLVED_FEEDBACK, Sudoku
from tests.cory_env.sample_tasks import tokenizer, validate

GRID = "123456456123231564564231312645645312"
PUZZLE = "1.345645612323156456423.312645645312"


def flat(*rows: str) -> str:
    """Joins the six rows of a grid."""
    return "".join(rows)


def brute_force_solutions(puzzle: str) -> list[str]:
    """Finds all solutions cells in order, all six digits, whole units compared."""
    cell = puzzle.find(".")
    if cell < 0:
        return [puzzle]
    peers = {
        puzzle[other]
        for other in range(CELLS)
        if other // 6 == cell // 6
        or other % 6 == cell % 6
        or (other // 12, other % 6 // 3) == (cell // 12, cell % 6 // 3)
    }
    return [
        solution
        for digit in "123456"
        if digit not in peers
        for solution in brute_force_solutions(puzzle[:cell] + digit + puzzle[cell + 1 :])
    ]


def test_units_are_six_rows_six_columns_and_six_boxes_of_two_rows_and_three_columns() -> None:
    members = [[cell for cell in range(CELLS) if unit in UNITS[cell]] for unit in range(18)]
    assert all(len(cells) == 6 for cells in members)
    assert members[1] == [6, 7, 8, 9, 10, 11] and members[6] == [0, 6, 12, 18, 24, 30]
    assert members[12] == [0, 1, 2, 6, 7, 8] and members[17] == [27, 28, 29, 33, 34, 35]


def test_every_puzzle_has_exactly_one_solution_and_it_is_the_answer() -> None:
    task = make_task("sudoku")
    for query in (*task.train[:150], *task.test[:150]):
        answer = str(query.columns["answer"])
        assert brute_force_solutions(query.text) == [answer]
        assert all(cell in (".", digit) for cell, digit in zip(query.text, answer, strict=True))
        assert 13 <= query.text.count(".") <= 16


def test_all_answers_are_solved_and_splits_share_no_grid_even_with_other_digits() -> None:
    task = make_task("sudoku", validation=200)
    sizes = {split: len(task.queries(split)) for split in task.splits}
    assert sizes == {"train": 9000, "validation": 200, "test": 800}
    queries = list(task.all_queries())
    answers = [str(query.columns["answer"]) for query in queries]
    assert solved([query.text for query in queries], answers) == [1.0] * len(queries)
    # The same after renaming the digits of the first row to 123456.
    assert len({answer.translate(str.maketrans(answer[:6], "123456")) for answer in answers}) == len(queries)
    assert task.checksum == 2177163957  # runs on these queries, in this order, can be resumed
    assert all(query.id == index for index, query in enumerate(task.train))


def test_cells_in_conflict_are_marked() -> None:
    # Cell 1 of row 1 is 5: row 1 has a second 5 (column 5), column 2 and the box have one in row 2.
    wrong = flat("153456", "456123", "231564", "564231", "312645", "645312")
    assert find_conflicts(PUZZLE, wrong) == flat("oxooxo", "oxoooo", "oooooo", "oooooo", "oooooo", "oooooo")
    # The last cell of row 4 is 6: row 4 has 6 in column 2, column 6 in row 1, the box has 6 in row 3, column 5.
    wrong = flat("123456", "456123", "231564", "564236", "312645", "645312")
    assert find_conflicts(PUZZLE, wrong) == flat("ooooox", "oooooo", "ooooxo", "oxooox", "oooooo", "oooooo")


def test_a_changed_given_is_marked_even_if_the_grid_breaks_no_rule() -> None:
    renamed = GRID.translate(str.maketrans("12", "21"))  # a valid grid of another puzzle
    marks = find_conflicts(PUZZLE, renamed)
    assert {cell for cell in range(CELLS) if marks[cell] == "x"} == {
        cell for cell in range(CELLS) if PUZZLE[cell] in "12"
    }
    assert solved([PUZZLE], [renamed]) == [0.0] and conflicts([PUZZLE], [renamed]) == [marks]


@pytest.mark.parametrize(
    "completion", ["", GRID[:-1], GRID + "1", GRID[:-1] + "7", GRID[:-1] + ".", GRID[:-1] + "２", "The grid: " + GRID]
)
def test_every_cell_of_a_malformed_grid_is_marked(completion: str) -> None:
    assert conflicts([PUZZLE], [completion]) == ["x" * CELLS]
    assert solved([PUZZLE], [completion]) == [0.0]


def test_only_the_solution_is_solved_and_white_space_does_not_matter() -> None:
    lines = "\n".join(" ".join(GRID[row : row + 6]) for row in range(0, CELLS, 6))
    wrong = GRID[:1] + "5" + GRID[2:]
    completions = [GRID, lines, wrong]
    assert solved([PUZZLE] * 3, completions) == [1.0, 1.0, 0.0]
    assert conflicts([PUZZLE] * 3, completions)[:2] == [None, None]


def test_feedback_is_none_exactly_for_the_answer() -> None:
    rng, queries = random.Random(0), make_task("sudoku").test[:200]
    for query in queries:
        answer = str(query.columns["answer"])
        cell = rng.choice([cell for cell in range(CELLS) if query.text[cell] == "."])
        others = [answer[:cell] + digit + answer[cell + 1 :] for digit in "123456" if digit != answer[cell]]
        assert conflicts([query.text] * 6, [answer, *others])[0] is None
        assert all(mark is not None for mark in conflicts([query.text] * 5, others))


def test_a_query_that_is_no_puzzle_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"The query '12\.' is not a 6x6 Sudoku. Write 36 characters"):
        solved(["12."], [GRID])


def test_puzzles_of_ones_own_need_no_answer_and_their_form_is_checked(tmp_path: Path) -> None:
    data = tmp_path / "puzzles.jsonl"
    rows = [json.dumps({"query": PUZZLE}), json.dumps({"query": GRID.replace("6", ".")})]
    data.write_text("\n".join(rows))
    task = make_task("sudoku", data=str(data))
    assert [query.text for query in task.all_queries()] == [PUZZLE, GRID.replace("6", ".")]
    assert isinstance(task, Sudoku) and task.gold(task.train[0]) is None
    data.write_text("\n".join([*rows, json.dumps({"query": GRID.replace("6", "0")})]))
    with pytest.raises(DataError, match=r"Invalid data of task sudoku, query '12345045.*Write 36 characters"):
        make_task("sudoku", data=str(data))


def test_the_query_stands_directly_before_the_response() -> None:
    task, query = make_task("sudoku"), Query(0, PUZZLE, {"answer": GRID})
    assert task.prompt(query) == f"{PUZZLE}="
    assert task.observer_prompt(query, [GRID + "\n"]) == f"{GRID}~{PUZZLE}="
    assert task.observer_prompt(query, ["1", "2"]) == f"1~2~{PUZZLE}="
    assert task.solved_at == 1.0 and len(SOLVED_FEEDBACK) == CELLS


def test_with_feedback_the_observer_sees_marks_and_the_chain_stops_at_the_solution() -> None:
    task, wrong = make_task("sudoku", feedback="task"), GRID[:1] + "5" + GRID[2:]
    query = Query(0, PUZZLE, {"answer": GRID})
    marks = find_conflicts(PUZZLE, wrong)
    assert task.observer_prompt(query, [wrong], marks) == f"{wrong}~{marks}~{PUZZLE}="
    assert task.shows_feedback and task.solved_feedback == SOLVED_FEEDBACK
    with RewardWorker(task.reward, feedback=task.feedback) as worker:
        assert worker.rewards([PUZZLE] * 2, [GRID, wrong], {"answer": [GRID] * 2}) == [1.0, 0.0]
        assert worker.feedback([PUZZLE] * 2, [GRID, wrong], {"answer": [GRID] * 2}) == [None, marks]


@pytest.mark.slow
def test_the_task_is_valid() -> None:
    for feedback in (None, "task"):
        task = make_task("sudoku", feedback=feedback)
        report = validate(task, tokenizer(), max_prompt_tokens=None, max_response_tokens=37)
        assert report.ok and not report.warnings
