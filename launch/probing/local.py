"""The policies of a probe in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode, Episode
from cory_env.tasks import Query
from launch.models.generators import load_generator, start_generator
from launch.probing.plan import ProbePlan
from launch.probing.responder import Continue
from policies.rollout.chain_generation import ChainRequest, EpisodeContinuation, FeedbackTogether, generate_chains


class LocalResponder:
    """Generates the responses of episodes with an engine in this process; see `Responder`."""

    def __init__(self, plan: ProbePlan) -> None:
        """Loads the policies."""
        settings, distinct = plan.settings, plan.distinct_policy_ids
        if plan.policies is None:
            models = {policy_id: settings.model_paths[policy_id] for policy_id in distinct}
            self._generator = start_generator(settings, models, settings.backend, plan.batch_size)
        else:
            policies = replace(plan.policies, settings=settings)
            self._generator = load_generator(policies, distinct, settings.backend, plan.batch_size)
        self._seed = settings.seed

    def make_episode(self, chain: Chain, query: Query) -> ChainEpisode:
        """See `Responder`."""
        return ChainEpisode(chain, query)

    def replay_first(self, chain: Chain, episode: ChainEpisode) -> ChainEpisode:
        """See `Responder`."""
        copy = ChainEpisode(chain, episode.query)
        copy.respond({"tokens": episode.responses[0], "length": len(episode.responses[0])})
        return copy

    def respond(
        self,
        episodes: Sequence[ChainEpisode],
        samples: Sequence[int],
        policy_ids: Sequence[str],
        temperature: float,
        continue_episodes: Continue | None = None,
    ) -> None:
        """See `Responder`. Sampling seeds are those of evaluations with the same `seed`."""
        continuation = None if continue_episodes is None else FeedbackTogether(continue_episodes)
        self.generate(episodes, samples, policy_ids, temperature, continuation)

    def generate(
        self,
        episodes: Sequence[Episode],
        samples: Sequence[int],
        policy_ids: Sequence[str],
        temperature: float,
        continuation: EpisodeContinuation | None,
    ) -> None:
        """Generates the responses of any episodes; see `respond` and `generate_chains`."""
        requests = [
            ChainRequest(episode, policy_ids, episode.chain.response_limits, temperature, self._seed, sample)
            for episode, sample in zip(episodes, samples, strict=True)
        ]
        generate_chains(self._generator, requests, continuation)

    def close(self) -> None:
        """Frees the engine."""
        self._generator.close()
