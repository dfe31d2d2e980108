"""Sudoku as an environment: one agent fills in a grid, sees which cells break a rule, and tries again.

    env: cory_env.text_envs.sudoku:repair?turns=4

The puzzles are those of the task `sudoku`. Seeds of training choose from its training puzzles, held-out seeds from its
test puzzles.
"""

import csv
from functools import cache
from typing import Any, ClassVar

from cory_env.rewards.sudoku import CELLS, IN_CONFLICT, SIZE, find_conflicts
from cory_env.tasks.sudoku import FEEDBACK_PROMPT, PROMPT, PUZZLES
from cory_env.text_envs.base import TurnBasedEnv
from cory_env.text_envs.task import FIRST_TEST_SEED

INSTRUCTION = (
    "Fill in this 6x6 Sudoku: the digits 1 to 6 once in each row, each column and each box of 2 rows and 3 columns.\n"
    "{grid}\nWrite the whole grid, six lines of six digits, and nothing else."
)
MARKS = "These cells, marked x, break a rule:\n{grid}\nWrite the whole corrected grid."


class repair(TurnBasedEnv):
    """A puzzle and up to `turns` attempts. The reward is 1 for the solution, which ends the episode, else 0."""

    metadata: ClassVar[dict[str, Any]] = {"name": "sudoku_repair_v0", "is_parallelizable": False}

    def __init__(self, turns: str = "2", prompts: str = "words") -> None:
        """Makes the environment.

        Args:
            turns: Maximum number of attempts.
            prompts: `words`, for models that follow instructions; or `marks`, for the bundled `sudoku-llama-tiny`: the
                prompts of the task `sudoku`, which show the last attempt and its marks, and no earlier ones.

        Raises:
            ValueError: `turns` is no number above 0, or `prompts` is neither of the two.
        """
        super().__init__("solver")
        if prompts not in ("words", "marks") or int(turns) < 1:
            raise ValueError(f"turns={turns} must be at least 1, and prompts={prompts} must be words or marks.")
        self.turns, self.prompts = int(turns), prompts

    def start(self, seed: int) -> None:
        """Starts with the puzzle of a seed."""
        is_test = seed >= FIRST_TEST_SEED
        puzzles = _puzzles("test" if is_test else "train")
        self.puzzle = puzzles[(seed - FIRST_TEST_SEED if is_test else seed) % len(puzzles)]
        self.attempts: list[str] = []

    def observe(self, agent: str) -> Any:
        """Returns the puzzle, or the marks of the last attempt."""
        marks = find_conflicts(self.puzzle, self.attempts[-1]) if self.attempts else None
        if self.prompts == "words":
            return INSTRUCTION.format(grid=_lines(self.puzzle)) if marks is None else MARKS.format(grid=_lines(marks))
        text = PROMPT.format(query=self.puzzle)
        if marks is not None:
            text = FEEDBACK_PROMPT.format(reference=self.attempts[-1].strip(), feedback=marks, query=self.puzzle)
        return {"messages": [{"role": "user", "content": text}]}

    def act(self, agent: str, text: str) -> dict[str, float]:
        """Takes an attempt."""
        self.attempts.append(text)
        is_solved = IN_CONFLICT not in find_conflicts(self.puzzle, text)
        self.is_over = is_solved or len(self.attempts) == self.turns
        return {agent: float(is_solved)}


def _lines(cells: str) -> str:
    return "\n".join(cells[start : start + SIZE] for start in range(0, CELLS, SIZE))


@cache
def _puzzles(split: str) -> list[str]:
    with open(PUZZLES / f"{split}.csv", encoding="utf-8", newline="") as file:
        return [row["query"] for row in csv.DictReader(file)]
