"""Episodes of a run's environment, played by its policies in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from cory_env.text_envs.episode import EnvEpisode
from cory_env.text_envs.pool import EnvPool
from cory_env.text_envs.task import seed_query
from launch.console.errors import CommandError
from launch.models.generators import load_generator
from launch.models.trained import PolicySet
from launch.models.trained_chain import MAX_BATCH_SIZE
from launch.run_folder.records import GeneratedResponse, GeneratedSample
from launch.training.preflight import load_task
from policies.rollout.chain_generation import ChainRequest, generate_chains


class TrainedEnv:
    """A run's environment, with policies as its agents, sampled as in training."""

    def __init__(
        self, trained: PolicySet, policy_ids: Sequence[str], temperature: float | None, seed: int | None, backend: str
    ) -> None:
        """Loads the policies.

        Args:
            policy_ids: of the agents, in their order.
            temperature, seed: of sampling; None: the run's.
            backend: `transformers` or `vllm`.
        """
        s = trained.settings
        if len(policy_ids) != s.num_agents:
            raise CommandError(
                f"{len(policy_ids)} policies were chosen, but the environment has {s.num_agents} agents "
                f"({', '.join(s.agents)}). Name one for each with --roles."
            )
        self.settings, self.policy_ids, self.backend = s, policy_ids, backend
        self.temperature = s.temperature if temperature is None else temperature
        self.seed = s.seed if seed is None else seed
        task, tokenizers = load_task(s, trained.task if s.data is None else None)  # a recorded task lacks its rows
        self.chain = s.make_chain(task, tokenizers, [trained.initial_id(policy_id) for policy_id in policy_ids])
        self.queries = {query.columns["seed"]: query for split in task.splits for query in task.queries(split)}
        self.generator = load_generator(trained, tuple(dict.fromkeys(policy_ids)), backend, MAX_BATCH_SIZE[backend])

    def play(self, env_seed: int, samples: int) -> list[GeneratedSample]:
        """Plays the episode of an environment's seed `samples` times.

        Raises:
            RewardError: The environment failed.
            CommandError: No row of the data has the seed.
        """
        assert self.settings.env is not None
        query = self.queries.get(env_seed)
        if query is None and self.settings.data is not None:
            raise CommandError(f"No row of {self.settings.data} has the seed {env_seed}. The first one has 0.")
        query = query or seed_query(env_seed)
        episodes = [EnvEpisode(self.chain, query) for _ in range(samples)]
        requests = [
            ChainRequest(episode, self.policy_ids, self.chain.response_limits, self.temperature, self.seed, sample)
            for sample, episode in enumerate(episodes)
        ]
        with EnvPool(self.settings.env, agents=self.chain.agents, timeout=self.settings.reward_timeout) as pool:
            generate_chains(self.generator, requests, pool)
        return [self._record(episode) for episode in episodes]

    def _record(self, episode: EnvEpisode) -> GeneratedSample:
        responses = [
            {
                "role": agent,
                "policy": self.policy_ids[episode.position(turn)],
                **episode.observation_entry(turn),
                "text": episode.completions[turn],
                **episode.thought_entry(turn),
            }
            for turn, agent in enumerate(episode.agents)
        ]
        return GeneratedSample(
            query=episode.query.text, responses=cast(list[GeneratedResponse], responses), returns=episode.returns()
        )
