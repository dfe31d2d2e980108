"""Measures how well LLMs answer, alone and as chains of two, on the same queries with the same random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self, TypedDict

import numpy as np
from numpy.typing import NDArray

from benchmarks.team.design import SAMPLES, TEMPERATURE
from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import give_feedback, reward_episodes
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks.sudoku import OBSERVER_PROMPT
from cory_env.tasks.task import Split
from launch.models.generators import start_generator
from launch.models.trained import PolicySet
from launch.probing.figures import Outcomes, SecondAnswers, best_of
from launch.training.preflight import load_task
from policies.generation.generator import Generator
from policies.rollout.chain_generation import ChainRequest, FeedbackTogether, generate_chains
from policies.settings.settings import Settings

BATCH_SIZE = 256
"""Responses that are generated at once."""


class Policy(NamedTuple):
    """An LLM: a trained policy, or the initial model of a run."""

    trained: PolicySet | None
    policy_id: str
    model: str
    """Path of the initial model."""


class Way(TypedDict):
    """A way to answer queries."""

    score: float
    """Share of right answers."""
    tokens: float
    """Generated tokens per query."""
    prompt_tokens: float
    """Tokens of all prompts of a query."""


class Answers(NamedTuple):
    """First answers of a policy: arrays `[queries, SAMPLES]`."""

    episodes: list[ChainEpisode]
    right: NDArray[np.bool_]
    accepted: NDArray[np.bool_]
    length: NDArray[np.float64]


class Measurement:
    """Lets policies answer the same queries; the first answers of each are generated once."""

    def __init__(
        self, settings: Settings, policies: Mapping[str, Policy], split: Split, queries: int, worker: RewardWorker
    ) -> None:
        """Loads the policies.

        Args:
            settings: Of a chain of two with feedback.
            policies: By name.
            worker: Of the task, with its feedback.
        """
        self.settings, self.worker = settings, worker
        task, tokenizers = load_task(settings)
        single = settings.model_copy(update={"stop_when": None})
        blind = settings.model_copy(update={"observer_prompt": OBSERVER_PROMPT})
        self.alone = single.make_chain(task, tokenizers, ["llm_1"])
        self.chains = {
            "chain": settings.make_chain(task, tokenizers, ["llm_1"] * 2),
            "blind": blind.make_chain(load_task(blind)[0], tokenizers, ["llm_1"] * 2),
        }
        self.refs = [(query, k) for query in task.queries(split)[:queries] for k in range(SAMPLES)]
        self.generator = load_policies(settings, policies)
        self._first: dict[str, Answers] = {}

    def first(self, name: str) -> Answers:
        """Returns a policy's first answers."""
        if name not in self._first:
            episodes = [ChainEpisode(self.alone, query) for query, _ in self.refs]
            self._respond(episodes, (name,))
            right = self._reshape([rewards[0] for rewards in reward_episodes(self.worker, episodes)]) >= 1
            chained = [self._replay("chain", episode) for episode in episodes]
            give_feedback(self.worker, chained)
            accepted = self._reshape([episode.agent is None for episode in chained]) == 1
            length = self._reshape([len(episode.responses[0]) for episode in episodes])
            self._first[name] = Answers(episodes, right, accepted, length)
        return self._first[name]

    def best_of(self, name: str, n: int) -> Way:
        """Returns a policy's best-of-n by the check."""
        answers = self.first(name)
        seconds = SecondAnswers(answers.right, answers.length)  # not used
        strategy = best_of(
            Outcomes(answers.right, answers.length, np.zeros_like(answers.right), seconds, answers.accepted), n
        )
        tokens = float(strategy.tokens.mean())
        prompt = len(answers.episodes[0].prompts[0].tokens)
        return Way(
            score=float(strategy.score.mean()), tokens=tokens, prompt_tokens=prompt * tokens / answers.length.mean()
        )

    def independent(self, name: str, other: str) -> Way:
        """Returns the way in which another policy answers the bare query if the check rejects the first answer.

        Every first answer is combined with the other policy's further samples, not with the one of equal random
        numbers, so that two policies with equal weights score like best-of-2 of one.
        """
        first, second = self.first(name), self.first(other)
        rejected, prompt = ~first.accepted, len(first.episodes[0].prompts[0].tokens)

        def mean_of_others(values: NDArray[Any]) -> NDArray[np.float64]:
            others: NDArray[np.float64] = (values.sum(1, keepdims=True) - values) / (SAMPLES - 1)
            return others

        right = np.where(rejected, mean_of_others(second.right), first.right)
        tokens = first.length + rejected * mean_of_others(second.length)
        return Way(
            score=float(right.mean()), tokens=float(tokens.mean()), prompt_tokens=float(prompt * (1 + rejected.mean()))
        )

    def chain(self, name: str, other: str, kind: str = "chain") -> Way:
        """Returns the chain of two policies, which ends if the check accepts the first answer.

        Args:
            kind: `chain`, with feedback, or `blind`: the second policy sees the first answer without feedback.
        """
        episodes = [self._replay(kind, episode) for episode in self.first(name).episodes]
        self._respond(episodes, (name, other))
        right = np.array([rewards[-1] for rewards in reward_episodes(self.worker, episodes)], np.float64) >= 1
        return Way(
            score=float(right.mean()),
            tokens=float(np.mean([sum(map(len, episode.responses)) for episode in episodes])),
            prompt_tokens=float(np.mean([sum(len(p.tokens) for p in e.prompts[: len(e.responses)]) for e in episodes])),
        )

    def __enter__(self) -> Self:
        """Starts the worker."""
        self.worker.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Releases the policies and the worker."""
        self.generator.close()
        self.worker.__exit__(*exception)

    def _replay(self, kind: str, episode: ChainEpisode) -> ChainEpisode:
        copy = ChainEpisode(self.chains[kind], episode.query)
        copy.respond({"tokens": episode.responses[0], "length": len(episode.responses[0])})
        return copy

    def _respond(self, episodes: Sequence[ChainEpisode], names: tuple[str, ...]) -> None:
        """Generates the missing responses."""
        for start in range(0, len(episodes), BATCH_SIZE):
            requests = [
                ChainRequest(
                    episode,
                    names,
                    episode.chain.response_limits,
                    TEMPERATURE,
                    self.settings.seed,
                    self.refs[start + k][1],
                )
                for k, episode in enumerate(episodes[start : start + BATCH_SIZE])
            ]
            generate_chains(self.generator, requests, FeedbackTogether(partial(give_feedback, self.worker)))

    def _reshape(self, values: Sequence[float | None]) -> NDArray[np.float64]:
        return np.array(values, np.float64).reshape(-1, SAMPLES)


def load_policies(settings: Settings, policies: Mapping[str, Policy]) -> Generator:
    """Loads policies into a generator, by name."""
    generator = start_generator(settings, {name: policy.model for name, policy in policies.items()}, "transformers", 1)
    for name, policy in policies.items():
        if policy.trained is not None:
            generator.load(name, policy.trained.checked_weights(policy.policy_id), policy.trained.update)
    return generator
