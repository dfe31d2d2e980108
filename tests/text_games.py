"""Environments with text for tests: sound ones, and one per way to break the contract."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from cory_env.text_envs.base import TurnBasedEnv
from tests.policies.sample_rewards import letters


class TextGame(TurnBasedEnv):
    """Agents act in turn, `rounds` times each; every action is rewarded by its length modulo 3."""

    metadata: ClassVar[dict[str, Any]] = {"name": "text_game_v0"}

    def __init__(self, rounds: str = "2", agents: str = "first,second") -> None:
        super().__init__(*agents.split(","))
        self.rounds = int(rounds)

    def start(self, seed: int) -> None:
        self.seed = seed
        self.actions: list[str] = []

    def observe(self, agent: str) -> Any:
        return f"seed {self.seed}, {len(self.actions)} actions.\n"

    def act(self, agent: str, text: str) -> dict[str, Any]:
        self.actions.append(text)
        self.is_over = len(self.actions) == self.rounds * len(self.possible_agents)
        return self.reward(agent, text)

    def reward(self, agent: str, action: str) -> dict[str, Any]:
        return {agent: float(len(action) % 3)}


class Duel(TextGame):
    """Whoever writes the longer text in a round wins 1 from the other one."""

    def reward(self, agent: str, action: str) -> dict[str, Any]:
        if agent != self.possible_agents[-1]:
            return {}
        difference = len(self.actions[-2]) - len(action)
        first = float(difference > 0) - float(difference < 0)
        return {self.possible_agents[0]: first, agent: -first}


class Problem(TextGame):
    """Each row of data is a problem with its answer, and the agent has two turns to find it."""

    def __init__(self) -> None:
        super().__init__("2", "solver")

    def observe(self, agent: str) -> str:
        assert self.row is not None
        return f"{self.row['query']}?"

    def reward(self, agent: str, action: str) -> dict[str, Any]:
        assert self.row is not None
        return {agent: float(self.row["answer"] in action)}


class Twice(TextGame):
    """The first agent acts twice in a row, then the second one once."""

    def act(self, agent: str, text: str) -> dict[str, Any]:
        if len(self.actions) % 3 == 0:
            self.agent_selection = "first"
        rewards = super().act(agent, text)
        self.is_over = len(self.actions) == 6
        return rewards


class Broken(TextGame):
    """Breaks the contract in one `way`, at the second action of an odd seed (or once, if `once` names a file)."""

    def __init__(self, way: str, once: str = "") -> None:
        super().__init__()
        self.way, self.once = way, once

    def _is_due(self) -> bool:
        if len(self.actions) != 2 or self.seed % 2 == 0:
            return False
        if self.once:
            if Path(self.once).exists():
                return False
            Path(self.once).touch()
        return True

    def observe(self, agent: str) -> Any:
        if self._is_due() and self.way in ("number", "half", "assistant", "long"):
            broken: dict[str, Any] = {
                "number": 3,
                "half": "\ud83d",
                "assistant": [{"role": "assistant", "content": "Me."}],
                "long": "very " * 1000,
            }
            return broken[self.way]
        return super().observe(agent)

    def reward(self, agent: str, action: str) -> dict[str, Any]:
        if not self._is_due():
            return super().reward(agent, action)
        if self.way == "raise":
            raise RuntimeError("out of cards")
        if self.way == "hang":
            time.sleep(1000)
        if self.way == "exit":
            os._exit(3)
        if self.way == "kill_runner":
            os.kill(os.getppid(), signal.SIGKILL)
        if self.way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return {agent: float("nan") if self.way == "nan" else 1.0}

    def step(self, action: str | None) -> None:
        super().step(action)
        if self.way == "text" and self._is_due():
            self.rewards["first"] = cast(Any, "much")
        if self.way == "tools" and self._is_due():
            self.infos[self.agent_selection] = {"tools": ["dig"]}
        if self.way == "dead" and self._is_due():
            self.terminations[self.agent_selection] = True
            self._was_dead_step = lambda action: None
        if self.way == "stranger" and self._is_due():
            self.agents = [*self.agents, "stranger"]
            self.terminations["stranger"] = self.truncations["stranger"] = False
            self.agent_selection = "stranger"


class Moody(TextGame):
    """Its observations differ when it is reset again, as those of an environment with a clock do."""

    def observe(self, agent: str) -> str:
        return f"{super().observe(agent)} It is {time.time_ns()}.\n"


class Endless(TextGame):
    """Never ends."""

    def __init__(self) -> None:
        super().__init__(rounds="1000000")


def no_environment() -> Sequence[str]:
    """Returns something else."""
    return ["first"]


class Question(TextGame):
    """One agent answers once; the reward is that of `letters`."""

    def __init__(self) -> None:
        super().__init__(rounds="1", agents="pioneer")

    def observe(self, agent: str) -> str:
        return question(self.seed)

    def reward(self, agent: str, action: str) -> dict[str, Any]:
        return {agent: letters([action])[0]}


def question(seed: int) -> str:
    """The question of a seed; every fourth is the same."""
    return f"What is {seed % 4} times {seed}?"


class Unseeded(TextGame):
    """Has an agent that is not among its agents."""

    def start(self, seed: int) -> None:
        super().start(seed)
        self.agents = ["first"]
