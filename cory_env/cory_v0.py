"""The environment `cory_v0`: a chain of agents as a PettingZoo AEC environment; one step is one whole response.

    from cory_env import cory_v0

    env = cory_v0.env(task="imdb", num_agents=2, render_mode="human")
    env.reset(seed=1)
    for agent in env.agent_iter():
        observation, reward, termination, truncation, info = env.last()
        env.step(None if termination else env.action_space(agent).sample())
    env.close()

- Agents: the roles, `pioneer` and `observer`; with three or more `pioneer`, `observer_1`, `observer_2`, …
- Observation: the prompt, `Dict(tokens: int32 [max_prompt_tokens] padded on the right, length)`; before the turn,
  length 0.
- Action: a response, `Dict(tokens: MultiDiscrete([vocab] * max_response_tokens), length)`; tokens after `length` or
  after an end token are ignored.
- Reward: r_i + α · Σ_{j≠i} r_j (paper §2), for all agents at the last step; 0 before.
- Info: `query` (its index), `truncated_prompt`; after the last step also `task_reward` (r_i) and `completion`,
  `reasoning` if it has a thought (`thinking`), and `feedback` if another agent could see it.
- End: after the last agent's response, or with `stop_when="solved"` after a response without anything to correct. The
  agents that were not asked terminate too, with reward 0 and without `task_reward`.

The environment checks the order of calls itself and raises `ValueError`s that name the agent, so it needs no wrapper.
"""

import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv
from pettingzoo.utils.env import AECIterable

from cory_env.chain import Chain
from cory_env.chain_settings import ChainSettings
from cory_env.episode import Action, ChainEpisode, Observation
from cory_env.rewarding.episodes import compute_awaited, reward_episodes
from cory_env.rewarding.worker import REWARD_TIMEOUT, RewardWorker
from cory_env.tasks import Query, Split, Task, make_task
from cory_env.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDER_MODES = ("ansi", "human")


class raw_env(AECEnv[str, Observation, Action | None]):
    """A query answered by a chain of agents, one after another."""

    metadata: ClassVar = {"name": "cory_v0", "render_modes": list(RENDER_MODES), "is_parallelizable": False}

    def __init__(
        self,
        task: str | Task = "imdb",
        num_agents: int | None = None,
        *,
        split: Split = "train",
        tokenizer: "str | os.PathLike[str] | PreTrainedTokenizerBase | None" = None,
        reward_timeout: float = REWARD_TIMEOUT,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        """Makes the environment. The reward process starts when the first response is rewarded.

        Args:
            task: A task's name or a `Task`.
            num_agents: Number of agents; 1 is the single-agent baseline, 2 is CORY. None: 2, or all of `roles`.
            split: The queries to use, `train`, `validation` or `test`.
            tokenizer: A folder, a hub id or a tokenizer object; None means the bundled one.
            reward_timeout: Seconds that one call of the reward may take.
            render_mode: `ansi`: `render()` returns the chain as text. `human`: `render()` prints it, and so does the
                end of each episode.
            **settings: Fields of `cory_env.chain.ChainSettings` and, if `task` is a name, of
                `cory_env.tasks.TaskSettings`.

        Raises:
            ValueError: A setting is out of range, or the task cannot be made.
        """
        super().__init__()
        tokenizer = load_tokenizer(tokenizer)
        chain_settings = {
            field.name: settings.pop(field.name) for field in fields(ChainSettings) if field.name in settings
        }
        if isinstance(task, str):
            task = make_task(task, tokenizer=tokenizer, **settings)
        elif task_settings := [name for name, value in settings.items() if value is not None]:
            raise ValueError(
                f"{', '.join(task_settings)} require a task's name, but task is a Task. Leave them out, or pass them "
                "to make_task."
            )
        if render_mode is not None and render_mode not in RENDER_MODES:
            raise ValueError(f"render_mode is {render_mode!r}, but must be one of {', '.join(RENDER_MODES)}, or None.")
        self.render_mode = render_mode
        self.queries = task.queries(split)
        self.chain = Chain(task, tokenizer, num_agents=num_agents, **chain_settings)
        self.possible_agents = list(self.chain.agents)
        self.agents: list[str] = []
        self.observation_spaces = {agent: self.chain.observation_space() for agent in self.chain.agents}
        self.action_spaces = {agent: self.chain.action_space() for agent in self.chain.agents}
        self._worker = RewardWorker(
            task.reward, feedback=task.feedback, role_rewards=self.chain.role_rewards, timeout=reward_timeout
        )
        self._random = np.random.default_rng()
        self._episode: ChainEpisode | None = None
        self._task_rewards: list[float] = []

    def observation_space(self, agent: str) -> spaces.Dict:
        """Returns the agent's observation space, the same object each time."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Dict:
        """Returns the agent's action space, the same object each time."""
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, object] | None = None) -> None:
        """Starts an episode.

        Args:
            seed: Seeds the choice of this and all following queries; None continues with the current generator.
            options: `{"query": i}` selects query i of the split; by default a random one. Other keys are ignored.

        Raises:
            ValueError: The query does not exist.
            QueryTooLongError: The query does not fit `max_prompt_tokens`.
        """
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._episode = ChainEpisode(self.chain, self._select_query(options or {}))
        self._task_rewards = []
        self.agents = list(self.chain.agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, object]] = {agent: {"query": self._episode.query.id} for agent in self.agents}
        self._skip_agent_selection: str | None = None
        self._take_turn(self._episode, self.agents[0])

    def _select_query(self, options: dict[str, object]) -> Query:
        if "query" not in options:
            return self.queries[int(self._random.integers(len(self.queries)))]
        index = options["query"]
        if not isinstance(index, (int, np.integer)) or not 0 <= index < len(self.queries):
            raise ValueError(f"reset() got query {index!r}, but expects an integer from 0 to {len(self.queries) - 1}.")
        return self.queries[int(index)]

    def _take_turn(self, episode: ChainEpisode, agent: str) -> None:
        self.agent_selection = agent
        self.infos[agent]["truncated_prompt"] = episode.prompt().is_truncated

    def _require_episode(self, call: str) -> ChainEpisode:
        if self._episode is None:
            raise ValueError(f"{call}() requires an episode. Call reset() first.")
        return self._episode

    def last(self, observe: bool = True) -> tuple[Any, float, bool, bool, dict[str, object]]:
        """Returns observation, reward, termination, truncation and info of the agent whose turn it is.

        Raises:
            ValueError: `reset` was not called.
        """
        self._require_episode("last")
        return super().last(observe)

    def agent_iter(self, max_iter: int = 2**63) -> AECIterable[str, Observation, Action | None]:
        """Iterates over the agents whose turn it is until the episode ends.

        Raises:
            ValueError: `reset` was not called.
        """
        self._require_episode("agent_iter")
        return super().agent_iter(max_iter)

    def observe(self, agent: str) -> Observation:
        """Returns the agent's observation: its prompt, or an empty one (length 0) before its turn.

        Raises:
            ValueError: The agent is unknown, or `reset` was not called.
        """
        return self._require_episode("observe").observation(agent)

    def step(self, action: Action | None) -> None:
        """Takes the response of `agent_selection`. After the last response, all agents get their rewards.

        Raises:
            ValueError: `reset` was not called, the episode is over, or the action is invalid.
            RewardError: The reward function failed.
        """
        episode = self._require_episode("step")
        if not self.agents:
            raise ValueError("step() was called after the episode's end. Call reset() to start another.")
        agent = self.agent_selection
        if self.terminations[agent]:
            if action is not None:
                raise ValueError(f"{agent} has finished, so its action must be None, not {action!r}.")
            self._was_dead_step(None)
            return
        if action is None:
            raise ValueError(f"It is the turn of {agent}, so its action must be a response, not None.")
        episode.respond(action)
        self._clear_rewards()
        self._cumulative_rewards[agent] = 0.0
        compute_awaited(self._worker, [episode])
        if episode.agent is not None:
            self._take_turn(episode, episode.agent)
        else:
            self._finish(episode)

    def _finish(self, episode: ChainEpisode) -> None:
        """Computes the rewards and ends the episode for all agents."""
        (rewards,) = reward_episodes(self._worker, [episode])
        # No reward is None, because this worker stops on errors.
        self._task_rewards = [reward for reward in rewards if reward is not None]
        self.rewards |= episode.collective_rewards(self._task_rewards)
        self.terminations = dict.fromkeys(self.agents, True)
        for position, agent in enumerate(episode.agents):
            self.infos[agent]["task_reward"] = self._task_rewards[position]
            self.infos[agent]["completion"] = episode.completions[position]
            self.infos[agent] |= {**episode.thought_entry(position), **episode.feedback_entry(position)}
        self._accumulate_rewards()
        self.agent_selection = self.agents[0]
        if self.render_mode == "human":
            self.render()

    def render(self) -> str | None:
        """Returns (`ansi`) or prints (`human`) the chain so far: the query, each response and its task reward.

        Raises:
            ValueError: The environment has no render mode, or `reset` was not called.
        """
        episode = self._require_episode("render")
        if self.render_mode is None:
            raise ValueError("render() requires a render mode. Set render_mode to 'ansi' or 'human'.")
        lines = [f"query {episode.query.id}: {episode.query.text}"]
        for position in range(len(episode.responses)):
            reward = f" [task reward {self._task_rewards[position]:.3f}]" if self._task_rewards else ""
            text = episode.full_text(position)
            lines.append(f"{self.chain.agents[position]}{reward}:{text}")
        text = "\n".join(lines)
        if self.render_mode == "ansi":
            return text
        print(text)
        return None

    def close(self) -> None:
        """Ends the reward process."""
        self._worker.close()


env = raw_env  # PettingZoo's name for the environment with its wrappers; this one needs none
