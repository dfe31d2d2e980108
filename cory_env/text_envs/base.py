"""For authors of environments: `TurnBasedEnv`, a base class, and `text_env`, the spaces of PettingZoo's own tests."""

import string
from collections.abc import Mapping
from typing import Any, ClassVar

from gymnasium import spaces
from pettingzoo import AECEnv
from pettingzoo.utils.wrappers import BaseWrapper

MAX_CHARACTERS = 100_000


class _Text(spaces.Text):
    """Any text; samples are short and printable."""

    def __init__(self) -> None:
        super().__init__(MAX_CHARACTERS, min_length=0, charset=string.printable)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Returns a random text of up to 20 characters."""
        length = int(self.np_random.integers(20)) if mask is None else mask[0]
        return super().sample(mask=(length, None), probability=probability)

    def contains(self, x: Any) -> bool:
        """Returns whether `x` is a text."""
        return isinstance(x, str)


class text_env(BaseWrapper[str, dict[str, str], str | None]):
    """An AEC environment with the spaces of text, for PettingZoo's `api_test` and other tools that need them.

        from pettingzoo.test import api_test
        api_test(text_env(my_games.negotiation()))

    Observations become `{"text": …}`; those that are messages become their contents, line by line. Training uses the
    environment as it is.
    """

    def __init__(self, env: AECEnv[str, Any, Any]) -> None:
        """Wraps an environment."""
        super().__init__(env)
        self._observation_spaces = {agent: spaces.Dict(text=_Text()) for agent in env.possible_agents}
        self._action_spaces = {agent: _Text() for agent in env.possible_agents}

    def observation_space(self, agent: str) -> spaces.Dict:
        """Returns the agent's observation space, the same object each time."""
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Text:
        """Returns the agent's action space, the same object each time."""
        return self._action_spaces[agent]

    def observe(self, agent: str) -> dict[str, str]:
        """Returns the agent's observation as text."""
        observation: Any = self.env.observe(agent)
        if isinstance(observation, Mapping):
            observation = observation.get("messages", observation.get("text"))
        if isinstance(observation, list | tuple):
            observation = "\n".join(message["content"] for message in observation)
        return {"text": observation}


class TurnBasedEnv(AECEnv[str, Any, str | None]):
    """A PettingZoo environment whose agents act in turn.

    A subclass defines `start`, `observe` (returns a text, or messages) and `act`.

    Attributes:
        is_over: Whether the episode has ended; set by `act`.
        row: The row of data that the episode is about, set before `start`; None without data.
        agent_selection: The agent whose turn it is; when `act` is called, already the next one in order, which it may
            change.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "turn_based_env", "is_parallelizable": False}

    def __init__(self, *agents: str) -> None:
        """Names the agents, in the order of their turns."""
        super().__init__()
        self.possible_agents = [*agents]
        self.agents: list[str] = []

    def start(self, seed: int) -> None:
        """Starts the episode of a seed."""
        raise NotImplementedError

    def act(self, agent: str, text: str) -> Mapping[str, float]:
        """Takes an agent's response; returns the rewards that agents get for it, by agent; the others get 0."""
        raise NotImplementedError

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Starts an episode; without a seed that of seed 0."""
        self.agents = list(self.possible_agents)
        self.agent_selection = self.agents[0]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.is_over = False
        self.row = (options or {}).get("row")
        self.start(seed or 0)

    def step(self, action: str | None) -> None:
        """Takes the response of `agent_selection`."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert action is not None
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        following = self.possible_agents.index(agent) + 1
        self.agent_selection = self.possible_agents[following % len(self.possible_agents)]
        self.rewards |= self.act(agent, action)
        self._accumulate_rewards()
        self.terminations = dict.fromkeys(self.agents, self.is_over)
