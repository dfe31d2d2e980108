"""Sudoku as an environment: one agent fills in a grid, sees which cells break a rule, and tries again.

    env: cory_env.text_envs.sudoku:repair?turns=4

The puzzles are those of the task `sudoku`. Seeds of training choose from its training puzzles, held-out seeds from its
test puzzles.
"""

import csv
from functools import cache
from typing import Any, ClassVar

from pettingzoo import AECEnv

from cory_env.rewards.sudoku import CELLS, IN_CONFLICT, SIZE, find_conflicts
from cory_env.tasks.sudoku import FEEDBACK_PROMPT, PROMPT, PUZZLES
from cory_env.text_envs.task import FIRST_TEST_SEED

AGENT = "solver"

INSTRUCTION = (
    "Fill in this 6x6 Sudoku: the digits 1 to 6 once in each row, each column and each box of 2 rows and 3 columns.\n"
    "{grid}\nWrite the whole grid, six lines of six digits, and nothing else."
)
MARKS = "These cells, marked x, break a rule:\n{grid}\nWrite the whole corrected grid."


class repair(AECEnv[str, Any, str | None]):
    """A puzzle and up to `turns` attempts. The reward is 1 for the solution, which ends the episode, else 0."""

    metadata: ClassVar = {"name": "sudoku_repair_v0", "is_parallelizable": False}

    def __init__(self, turns: str = "2", prompts: str = "words") -> None:
        """Makes the environment.

        Args:
            turns: Maximum number of attempts.
            prompts: `words`, for models that follow instructions; or `marks`, for the bundled `sudoku-llama-tiny`: the
                prompts of the task `sudoku`, which show the last attempt and its marks, and no earlier ones.

        Raises:
            ValueError: `turns` is no number above 0, or `prompts` is neither of the two.
        """
        super().__init__()
        if prompts not in ("words", "marks") or int(turns) < 1:
            raise ValueError(f"turns={turns} must be at least 1, and prompts={prompts} must be words or marks.")
        self.turns, self.prompts = int(turns), prompts
        self.possible_agents = [AGENT]
        self.agents: list[str] = []

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Starts with the puzzle of a seed."""
        seed = seed or 0
        puzzles = _puzzles("test" if seed >= FIRST_TEST_SEED else "train")
        self.puzzle = puzzles[(seed - FIRST_TEST_SEED if seed >= FIRST_TEST_SEED else seed) % len(puzzles)]
        self.attempts: list[str] = []
        self.agents = [AGENT]
        self.agent_selection = AGENT
        self.rewards, self._cumulative_rewards = {AGENT: 0.0}, {AGENT: 0.0}
        self.terminations, self.truncations = {AGENT: False}, {AGENT: False}
        self.infos = {AGENT: dict[str, Any]()}

    def observe(self, agent: str) -> Any:
        """Returns the puzzle, or the marks of the last attempt."""
        marks = find_conflicts(self.puzzle, self.attempts[-1]) if self.attempts else None
        if self.prompts == "words":
            if marks is None:
                return INSTRUCTION.format(grid=_lines(self.puzzle))
            return MARKS.format(grid=_lines(marks))
        text = PROMPT.format(query=self.puzzle)
        if marks is not None:
            text = FEEDBACK_PROMPT.format(reference=self.attempts[-1].strip(), feedback=marks, query=self.puzzle)
        return {"messages": [{"role": "user", "content": text}]}

    def step(self, action: str | None) -> None:
        """Takes an attempt."""
        if self.terminations[AGENT]:
            self._was_dead_step(action)
            return
        assert action is not None
        self.attempts.append(action)
        is_solved = IN_CONFLICT not in find_conflicts(self.puzzle, action)
        self.rewards[AGENT] = float(is_solved)
        self._cumulative_rewards[AGENT] = float(is_solved)
        self.terminations[AGENT] = is_solved or len(self.attempts) == self.turns


def _lines(cells: str) -> str:
    return "\n".join(cells[start : start + SIZE] for start in range(0, CELLS, SIZE))


@cache
def _puzzles(split: str) -> list[str]:
    with open(PUZZLES / f"{split}.csv", encoding="utf-8", newline="") as file:
        return [row["query"] for row in csv.DictReader(file)]
