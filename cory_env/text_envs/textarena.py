"""Games of TextArena (extra `textarena`) as environments.

    env: textarena:KuhnPoker-v0
    env: textarena:Snake-v0?num_players=4     a game for two or more: as few as it takes, unless this is set
    env: textarena:Wordle-v0-train            suffixes choose TextArena's wrappers, as in TextArena

The agents are player_0, player_1, and so on; their rewards are the game's, at its end.
"""

import contextlib
import difflib
import io
from collections.abc import Iterator
from typing import Any, ClassVar

from pettingzoo import AECEnv

from cory_env.rewards.prepared import import_extra
from cory_env.text_envs.own_random import OwnRandom

MAX_PLAYERS = 15


class textarena_game(AECEnv[str, Any, str | None]):
    """A game. Its random choices depend on the seed alone, although TextArena draws from Python's global generators."""

    metadata: ClassVar[dict[str, Any]] = {"name": "textarena_v0", "is_parallelizable": False}

    def __init__(self, id: str, num_players: str | None = None) -> None:
        """Makes the game.

        Args:
            id: Its name in TextArena.
            num_players: Number of players; None: the smallest that the game takes.

        Raises:
            ModuleNotFoundError: TextArena is not installed.
            ValueError: There is no such game, or it does not take so many players.
        """
        super().__init__()
        self._id, self._library = id, import_extra("textarena", "textarena")
        registry = self._library.envs.registration.ENV_REGISTRY
        if id not in registry:
            close = difflib.get_close_matches(id, registry, n=3)
            raise ValueError(f"TextArena has no game {id!r}." + (f" Similar: {', '.join(close)}." if close else ""))
        errors: list[Exception] = []
        for count in range(1, MAX_PLAYERS + 1) if num_players is None else [int(num_players)]:
            self.possible_agents = [f"player_{k}" for k in range(count)]
            try:
                self.reset(seed=0)
                break
            except Exception as error:
                errors.append(error)
        else:  # assertions are about the number of players
            cause = next((error for error in errors if not isinstance(error, AssertionError)), errors[-1])
            reason = " ".join(str(cause).replace("*", "").split())[:300] or type(cause).__name__
            raise ValueError(f"TextArena's game {id} does not start: {reason}") from cause
        self.agents: list[str] = []

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Starts the game of a seed."""
        self.agents = [*self.possible_agents]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self._seen: dict[str, str] = {}
        self._random = OwnRandom(seed or 0)
        with self._own_random():
            self._game = self._library.make(env_id=self._id)  # wrappers would keep the last game's observations
            self._game.reset(num_players=len(self.agents), seed=seed or 0)
            self._observe_next()

    def observe(self, agent: str) -> Any:
        """Returns what is new for the agent since its last turn; all of it, if the game's wrapper rewrites it."""
        return self._observation if agent == self.agent_selection else ""

    def step(self, action: str | None) -> None:
        """Takes the action of `agent_selection`."""
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        with self._own_random():
            is_over, _ = self._game.step(action=action)
            if is_over:
                rewards, _ = self._game.close()
                self.rewards |= {self.possible_agents[k]: float(reward) for k, reward in (rewards or {}).items()}
            else:
                self._observe_next()
        self._accumulate_rewards()
        self.terminations = dict.fromkeys(self.agents, bool(is_over))

    def _observe_next(self) -> None:
        player_id, observation = self._game.get_observation()
        agent = self.agent_selection = self.possible_agents[player_id]
        if not isinstance(observation, str):  # without a wrapper it is a list of new messages
            names = self._game.state.role_mapping
            self._observation: Any = "\n".join(
                f"[{names.get(sender, sender)}] {text}" for sender, text, _ in observation
            )
            return
        before = self._seen.get(agent)
        self._seen[agent] = observation
        if before is None or observation.startswith(before):
            self._observation = observation.removeprefix(before or "").strip("\n") or "It is your turn."
        else:
            self._observation = {"messages": [{"role": "user", "content": observation}]}

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """Gives the global generators this game's state, and drops what the game prints."""
        with self._random.active(), contextlib.redirect_stdout(io.StringIO()):
            yield
