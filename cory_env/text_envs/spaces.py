"""`text_env`: what PettingZoo's own tests need of an environment whose observations and actions are text."""

import string
from collections.abc import Mapping
from typing import Any

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
