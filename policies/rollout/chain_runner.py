"""Plays chains: continuous batching over positions, batched reward calls, RLlib episodes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.utils.framework import get_device

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import reward_episodes, reward_so_far
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks.task import Split
from policies.generation.cuda import check_cuda
from policies.generation.generator import (
    GenerationError,
    Generator,
    LoadedWeights,
    Request,
    Response,
    Sampling,
    sampling_seed,
)
from policies.models.weights import Weights
from policies.rllib.stateless_runner import StatelessRunner
from policies.rollout.chain_scheduler import ChainScheduler, ChainState
from policies.rollout.engines import make_generator
from policies.rollout.episodes import Rollout, as_rllib_episode
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import RoleMapping
from policies.settings.settings import Settings

T = TypeVar("T")


class ChainRunner(StatelessRunner):
    """An RLlib EnvRunner for chains. Its episodes equal those of stepping `cory_v0` alone with the same tokens.

    Which queries it plays, in which roles and with which weights comes with every call. With vLLM it builds no torch
    copy of the model.
    """

    generator: Generator

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        """Builds task, reward process and generation backend.

        Args:
            config: a `CoryConfig`.
            **kwargs: RLlib's: `worker_index` and others.
        """
        super().__init__(config=config, **kwargs)
        self.settings: Settings = self.config.settings
        self._versions: dict[str, int] = {}
        self._reward_seconds = 0.0
        self.make_env()
        self.make_module()

    def make_env(self) -> None:
        """Loads the task and the tokenizers."""
        s = self.settings
        self.task, self.tokenizers = s.make_task(), s.make_tokenizers()
        self._chains: dict[tuple[int, ...], Chain] = {}
        self.env = self.chain(tuple(RoleMapping(s.roles, s.policy_ids).as_dict().values()))
        self.rewards = RewardWorker(self.task.reward, timeout=s.reward_timeout, on_error=s.on_reward_error)
        self.rewards.prepare()  # while the engines start

    def task_checksum(self) -> int:
        """The checksum of the queries that this runner has read."""
        return self.task.checksum

    def chain(self, policy_ids: tuple[str, ...]) -> Chain:
        """The chain in which these LLMs answer; for policies with the same tokenizers it is one and the same."""
        kind = tuple(id(self.tokenizers[policy_id]) for policy_id in policy_ids)
        if kind not in self._chains:
            self._chains[kind] = self.settings.make_chain(self.task, self.tokenizers, policy_ids)
        return self._chains[kind]

    def make_module(self) -> None:
        """Starts the generation backend, on the device that Ray gave this runner.

        Raises:
            DeviceError, EngineStartError: as of `make_generator`.
        """
        if self.settings.gpus_per_runner:
            check_cuda("gpus_per_runner", self.settings.gpus_per_runner)
        device = get_device(self.config, self.config.num_gpus_per_env_runner)
        self.generator = make_generator(self.settings, device, in_driver=not self.worker_index)

    def sample(
        self,
        *,
        prompt_refs: Sequence[PromptRef] = (),
        stream: int = 0,
        mapping: RoleMapping | None = None,
        version: int = 0,
        split: Split = "train",
        siblings: int = 1,
        **kwargs: Any,
    ) -> Rollout:
        """Plays queries through the chain, each at its own pace (`Game`).

        Args:
            prompt_refs: the queries; each is answered by the pioneer once.
            stream: what the sampling seeds, and with `min_response_tokens` the longest response, are drawn from: the
            update's
                number.
            mapping: who plays which role, all of them or the pioneer's alone.
            version: version of the weights that must be loaded.
            split: `train` or `test`.
            siblings: chains that go on from each response of the pioneer.

        Raises:
            GenerationError: the engine failed, or other weights are loaded than asked for.
            RewardError: the reward failed and `on_reward_error` is `stop`.
        """
        assert mapping is not None
        policy_ids = tuple(mapping.as_dict().values())
        for policy_id in policy_ids:
            if self._versions.get(policy_id) != version:
                raise GenerationError(f"{policy_id} is at version {self._versions.get(policy_id)}, not {version}.")
        chain = self.chain(policy_ids)
        queries = chain.task.queries(split)
        limit = self.settings.response_limit(stream) if split == "train" else chain.max_response_tokens
        started, self._reward_seconds = time.perf_counter(), 0.0

        def ask(place: int, playing: ChainState) -> Request:
            prompt_ref, episode, responses = playing
            position = len(responses)
            sample = prompt_ref.sample * siblings + prompt_ref.sibling if position else prompt_ref.sample
            seed = sampling_seed(self.settings.seed, stream, prompt_ref.query, position, sample)
            sampling = Sampling(self.settings.temperature, limit, [seed], chain.at[position].stop_token_ids)
            return Request(place, mapping(chain.roles[position]), episode.prompt_ids(), sampling)

        dealt = [(prompt_ref, ChainEpisode(chain, queries[prompt_ref.query])) for prompt_ref in prompt_refs]
        game = ChainScheduler(dealt, siblings, ask, partial(self._reward, reward_so_far))
        self.generator.run_requests(game.start(), game.follow)
        chains = game.chains
        rewards = self._reward(reward_episodes, [playing.episode for playing in chains])
        seconds = time.perf_counter() - started
        episodes = [
            as_rllib_episode(*playing, cast(list[float], of_chain), mapping)
            for playing, of_chain in zip(chains, rewards, strict=True)
            if None not in of_chain
        ]
        self.env_steps += len(episodes) * len(chain.roles)
        counters = {
            "version": version,
            "tokens": game.tokens,
            "truncated_prompts": sum(sum(playing.episode.truncated) for playing in chains),
            "dropped_chains": len(chains) - len(episodes),
            "rollout_seconds": seconds - self._reward_seconds,
            "reward_seconds": self._reward_seconds,
        }
        return Rollout(episodes, counters)

    def _reward(
        self, score: Callable[[RewardWorker, Sequence[ChainEpisode]], T], episodes: Sequence[ChainEpisode]
    ) -> T:
        """Asks for rewards, and counts the seconds that takes."""
        started = time.perf_counter()
        rewards = score(self.rewards, episodes)
        self._reward_seconds += time.perf_counter() - started
        return rewards

    def probe(self, policy_id: str, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Response]:
        """Responses to raw prompts: what the self-test compares with the learner."""
        ends = self.chain((policy_id,)).stop_token_ids
        sampling = Sampling(self.settings.temperature, self.settings.max_response_tokens, seeds, ends)
        return self.generator.generate(prompts, policy_id, sampling)

    def load_weights(self, *, policy_id: str, weights: Weights, version: int) -> LoadedWeights:
        """Hands new weights of an LLM to the backend.

        Args:
            policy_id: the LLM.
            weights: fp32 arrays by Hugging Face names.
            version: their version.

        Returns:
            What the engine holds now.

        Raises:
            GenerationError: the engine failed, and was started anew.
        """
        loaded = self.generator.load(policy_id, weights, version)
        self._versions[policy_id] = version
        return loaded

    def transfer(self, *, step: str, policy_id: str, argument: Any, version: int) -> LoadedWeights | None:
        """A step in which a learner sends weights past the driver; see `VLLMGenerator.transfer`."""
        self._versions.pop(policy_id, None)  # in the middle of it the engine holds neither old nor new weights
        loaded: LoadedWeights | None = self.generator.transfer(step, policy_id, argument, version)  # type: ignore[attr-defined]
        if loaded is not None:
            self._versions[policy_id] = version
        return loaded

    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """What RLlib asks: observation and action space of every LLM, and of the environment as a whole."""
        observation, action = self.env.observation_space(), self.env.action_space()
        whole = (dict.fromkeys(self.env.roles, observation), dict.fromkeys(self.env.roles, action))
        chains = {name: self.chain((name,)) for name in self.settings.policy_ids}
        spaces = {name: (chain.observation_space(), chain.action_space()) for name, chain in chains.items()}
        return {INPUT_ENV_SPACES: whole, INPUT_ENV_SINGLE_SPACES: whole, **spaces}

    def stop(self) -> None:
        """Ends the engines and the reward process."""
        self.generator.close()
        self.rewards.close()
