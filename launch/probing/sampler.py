"""Samples first answers, and second answers with and without feedback to the same first answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NotRequired, TypedDict

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import give_feedback, reward_episodes
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks.task import Query
from policies.rollout.chain_generation import ChainRequest, generate_chains

if TYPE_CHECKING:
    from policies.generation.generator import Generator


class Answer(TypedDict):
    """An answer in `responses.jsonl`."""

    text: str
    length: int
    """Generated tokens."""
    task_reward: float | None
    """None if the reward function failed and `on_reward_error` is `skip`."""


class ProbedSample(TypedDict):
    """A first answer to a query, and second answers to it, in `responses.jsonl`."""

    query: int
    """The query's index in its split."""
    sample: int
    first: Answer
    second: NotRequired[Answer]
    """Without feedback. Missing, like the rest, if the feedback function failed and `on_reward_error` is `skip`."""
    feedback: NotRequired[str | None]
    """On the first answer; None: "solved". Missing if there is no feedback function."""
    second_feedback: NotRequired[Answer]
    """With feedback. Missing if there is no feedback function."""


class Sampler:
    """Samples the chain of two agents, whose second agent answers with and without feedback.

    The second agent answers also if the feedback on the first answer is None, so that one sees whether it keeps right
    answers. Sampling seeds are those of evaluations with the same `seed`.
    """

    def __init__(
        self,
        generator: Generator,
        worker: RewardWorker,
        policy_ids: Sequence[str],
        plain: Chain,
        with_feedback: Chain | None,
        seed: int,
    ) -> None:
        """Creates the sampler.

        Args:
            worker: The reward, and the feedback function if there is one.
            plain: The chain of two without feedback.
            with_feedback: The chain of two whose second agent sees the feedback; it must not stop. None: there is no
                feedback function.
        """
        self._generator = generator
        self._worker = worker
        self._policy_ids = policy_ids
        self._plain = plain
        self._with_feedback = with_feedback
        self._seed = seed

    def sample(self, prompt_refs: Sequence[tuple[Query, int]], temperature: float) -> list[ProbedSample]:
        """Samples a batch.

        Returns:
            A record per query and sample, in order.
        """
        samples = [sample for _, sample in prompt_refs]
        plain = [ChainEpisode(self._plain, query) for query, _ in prompt_refs]
        self._respond(plain, samples, temperature)
        rewards = reward_episodes(self._worker, plain)
        with_feedback: list[ChainEpisode] = []
        if self._with_feedback is not None:
            with_feedback = [_replay_first(self._with_feedback, episode) for episode in plain]
            give_feedback(self._worker, with_feedback)
            self._respond(with_feedback, samples, temperature)
        feedback_rewards = reward_episodes(self._worker, with_feedback, first=1)
        records = []
        for index, (episode, sample) in enumerate(zip(plain, samples, strict=True)):
            record = ProbedSample(query=episode.query.id, sample=sample, first=_answer(episode, 0, rewards[index][0]))
            if not with_feedback:
                record["second"] = _answer(episode, 1, rewards[index][1])
            elif not (other := with_feedback[index]).failed:
                record["second"] = _answer(episode, 1, rewards[index][1])
                record["feedback"] = other.feedback_entry(0).get("feedback", "")  # none on a thought that was cut off
                record["second_feedback"] = _answer(other, 1, feedback_rewards[index][0])
            records.append(record)
        return records

    def _respond(self, episodes: Sequence[ChainEpisode], samples: Sequence[int], temperature: float) -> None:
        """Generates the remaining responses of episodes, except of those whose feedback failed."""
        generate_chains(
            self._generator,
            [
                ChainRequest(episode, self._policy_ids, episode.chain.response_limits, temperature, self._seed, sample)
                for episode, sample in zip(episodes, samples, strict=True)
            ],
        )


def _replay_first(chain: Chain, episode: ChainEpisode) -> ChainEpisode:
    """Returns an episode of another chain with the same first response."""
    copy = ChainEpisode(chain, episode.query)
    copy.respond({"tokens": episode.responses[0], "length": len(episode.responses[0])})
    return copy


def _answer(episode: ChainEpisode, position: int, reward: float | None) -> Answer:
    return Answer(text=episode.completions[position], length=len(episode.responses[position]), task_reward=reward)


def answer_numbers(texts: Sequence[str], extract: Callable[[str], object]) -> list[int]:
    """Numbers the answers to one query: equal answers get the same number, and those without one -1.

    Args:
        extract: Returns the answer in a response, which must be hashable; None if there is none.
    """
    answers = [extract(text) for text in texts]
    numbers = {answer: number for number, answer in enumerate(dict.fromkeys(a for a in answers if a is not None))}
    return [-1 if answer is None else numbers[answer] for answer in answers]
