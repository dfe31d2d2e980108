"""`ChainRunner`: an RLlib EnvRunner that generates chains with continuous batching and batched reward calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.utils.framework import get_device

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import compute_awaited, reward_episodes
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks.task import Split
from cory_env.text_envs.episode import EnvEpisode
from cory_env.text_envs.pool import EnvPool
from policies.generation.cuda import check_cuda
from policies.generation.generator import GenerationError, Generator, LoadedWeights, Response, Sampling
from policies.models.weights import Weights
from policies.rllib.stateless_runner import StatelessRunner
from policies.rollout.chain_generation import ChainRequest, FeedbackTogether, generate_chains
from policies.rollout.engines import make_generator
from policies.rollout.episodes import Rollout, to_rllib_episode
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import RoleMapping, make_mapping
from policies.settings.settings import Settings

T = TypeVar("T")

_PROBE_TOKENS = 64
"""Longest response of the weight-sync check. With perturbed weights, responses rarely end by themselves, and a check
with 512 tokens takes minutes on a CPU."""


class ChainRunner(StatelessRunner):
    """An RLlib EnvRunner for chains. Its episodes equal those of stepping `cory_v0` with the same tokens.

    Every call of `sample` names the queries, the role mapping and the weight version to use. With vLLM the runner holds
    no torch copy of the model.
    """

    generator: Generator

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        """Builds task, reward process and generation backend from a `CoryConfig`."""
        super().__init__(config=config, **kwargs)
        self.settings: Settings = self.config.settings
        self._versions: dict[str, int] = {}  # of the loaded weights, by policy id
        self._reward_seconds = 0.0
        self.make_env()
        self.make_module()

    def make_env(self) -> None:
        """Loads the task and the tokenizers."""
        s = self.settings
        self.task, self.tokenizers = s.make_task(), s.make_tokenizers()
        self._chains: dict[tuple[object, ...], Chain] = {}
        self.env = self.chain(tuple(make_mapping(s).as_dict().values()))
        self.user_code: RewardWorker | EnvPool
        if s.env is not None:
            self.user_code = EnvPool(
                s.env,
                agents=s.agents,
                num_processes=s.env_processes,
                timeout=s.reward_timeout,
                on_error=s.on_reward_error,
            )
        else:
            self.user_code = RewardWorker(
                self.task.reward,
                feedback=self.task.feedback,
                role_rewards=self.env.role_rewards,
                timeout=s.reward_timeout,
                on_error=s.on_reward_error,
            )
        self.user_code.prepare()  # in the background, while the engines start

    def task_checksum(self) -> int:
        """Returns the checksum of the queries that this runner loaded."""
        return self.task.checksum

    def chain(self, policy_ids: tuple[str, ...], *, training: bool = False) -> Chain:
        """Returns the chain for these policies, by position. Chains with the same tokenizers are one cached object."""
        key = (training, *(id(self.tokenizers[policy_id]) for policy_id in policy_ids))
        if key not in self._chains:
            self._chains[key] = self.settings.make_chain(self.task, self.tokenizers, policy_ids, training=training)
        return self._chains[key]

    def make_module(self) -> None:
        """Starts the generation backend on the device that Ray assigned to this runner.

        On a GPU that the driver's runner shares with a learner, the engines run in processes of their own.
        """
        s = self.settings
        if s.gpus_per_runner:
            check_cuda("gpus_per_runner", s.gpus_per_runner)
        device = get_device(self.config, self.config.num_gpus_per_env_runner)
        self.generator = make_generator(
            s,
            s.model_paths,
            s.backend,
            device,
            min(s.chains, 256),
            seed=s.seed,
            gpu_share=s.gpus_per_runner,
            in_process=self.worker_index > 0 or device.type == "cpu",
            timeout=s.generation_timeout,
            weight_transfer=s.weight_transfer,
        )

    def sample(
        self,
        *,
        prompt_refs: Sequence[PromptRef] = (),
        update: int = 0,
        mapping: RoleMapping | None = None,
        version: int = 0,
        split: Split = "train",
        **kwargs: Any,
    ) -> Rollout:
        """Generates chains for queries, and computes their rewards.

        Args:
            prompt_refs: the queries. The pioneer generates one response to each.
            update: number of the update, from 0. Sampling seeds depend on it, as does the random response limit with
                `min_response_tokens`.
            mapping: which policy has which role: all roles, or the pioneer alone.

        Returns:
            One episode per chain whose rewards could be computed, in the order of the queries.
        """
        assert mapping is not None
        policy_ids = tuple(mapping.as_dict().values())
        for policy_id in policy_ids:
            if policy_id not in self.settings.frozen_models and self._versions.get(policy_id) != version:
                raise GenerationError(f"{policy_id} is at version {self._versions.get(policy_id)}, not {version}.")
        chain = self.chain(policy_ids, training=split == "train")
        queries = chain.task.queries(split)
        s = self.settings
        max_tokens = s.response_limit(update) if split == "train" else chain.max_response_tokens
        limits = [min(max_tokens, limit) for limit in chain.response_limits]
        start, self._reward_seconds = time.perf_counter(), 0.0
        make_episode = ChainEpisode if s.env is None else EnvEpisode
        chains: list[Any] = [make_episode(chain, queries[ref.query]) for ref in prompt_refs]
        requests = [
            ChainRequest(episode, policy_ids, limits, s.temperature, s.seed, ref.sample, update)
            for episode, ref in zip(chains, prompt_refs, strict=True)
        ]
        responses, rewards = self._generate(requests, chains)
        seconds = time.perf_counter() - start
        episodes = [
            to_rllib_episode(ref, chain_episode, chain_responses, cast(list[float], chain_rewards), mapping)
            for ref, chain_episode, chain_responses, chain_rewards in zip(
                prompt_refs, chains, responses, rewards, strict=True
            )
            if None not in chain_rewards
        ]
        self.env_steps += sum(map(len, responses))
        counters = {
            "version": version,
            "tokens": sum(len(response.tokens) for chain_responses in responses for response in chain_responses),
            "truncated_prompts": sum(prompt.is_truncated for episode in chains for prompt in episode.prompts),
            "dropped_chains": len(chains) - len(episodes),
            "rollout_seconds": seconds - self._reward_seconds,
            "reward_seconds": self._reward_seconds,
        }
        if s.env is not None:
            counters["truncated_episodes"] = sum(episode.is_truncated for episode in chains)
        return Rollout(episodes, counters)

    def _generate(
        self, requests: Sequence[ChainRequest], episodes: Sequence[Any]
    ) -> tuple[list[list[Response]], list[list[float | None]]]:
        """Generates the responses of episodes; returns them, and their task rewards by turn, None if one failed."""
        if isinstance(self.user_code, RewardWorker):
            compute_feedback = partial(self._timed, compute_awaited, self.user_code)
            responses = generate_chains(self.generator, requests, FeedbackTogether(compute_feedback))
            return responses, self._timed(reward_episodes, self.user_code, episodes)
        pool = self.user_code
        seconds = pool.seconds
        try:
            responses = generate_chains(self.generator, requests, pool)
        except BaseException:
            pool.discard()
            raise
        self._reward_seconds += pool.seconds - seconds
        return responses, [
            [None] if episode.failed else [own for own, _ in episode.turn_rewards()] for episode in episodes
        ]

    def _timed(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a user's code, and adds the time to `_reward_seconds`."""
        start = time.perf_counter()
        result = function(*arguments)
        self._reward_seconds += time.perf_counter() - start
        return result

    def probe(self, policy_id: str, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Response]:
        """Generates responses to raw prompts, for the weight-sync check."""
        stop_token_ids = self.chain((policy_id,)).encoders[0].stop_token_ids
        length = min(self.settings.max_response_tokens, _PROBE_TOKENS)
        sampling = Sampling(self.settings.temperature, length, seeds, stop_token_ids)
        return self.generator.generate(prompts, policy_id, sampling)

    def load_weights(self, *, policy_id: str, weights: Weights, version: int) -> LoadedWeights:
        """Loads new weights of a policy into the generation backend; see `Generator.load`."""
        loaded = self.generator.load(policy_id, weights, version)
        self._versions[policy_id] = version
        return loaded

    def transfer(self, *, step: str, policy_id: str, argument: Any, version: int) -> LoadedWeights | None:
        """Runs one step of a weight transfer from a learner, bypassing the driver; see `VLLMGenerator.transfer`."""
        self._versions.pop(policy_id, None)  # during the transfer the engine holds neither the old nor the new weights
        loaded: LoadedWeights | None = self.generator.transfer(step, policy_id, argument, version)  # type: ignore[attr-defined]
        if loaded is not None:
            self._versions[policy_id] = version
        return loaded

    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Returns observation and action space of every policy, and of the environment; overrides RLlib's."""
        observation, action = self.env.observation_space(), self.env.action_space()
        env_spaces = (dict.fromkeys(self.env.agents, observation), dict.fromkeys(self.env.agents, action))
        chains = {policy_id: self.chain((policy_id,)) for policy_id in self.settings.policy_ids}
        spaces = {policy_id: (chain.observation_space(), chain.action_space()) for policy_id, chain in chains.items()}
        return {INPUT_ENV_SPACES: env_spaces, INPUT_ENV_SINGLE_SPACES: env_spaces, **spaces}

    def stop(self) -> None:
        """Stops the engines and the reward process."""
        self.generator.close()
        self.user_code.close()
