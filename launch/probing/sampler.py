"""Samples first answers, and second answers with and without feedback to the same first answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NotRequired, TypedDict

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import give_feedback, reward_episodes
from cory_env.rewarding.worker import RewardWorker
from launch.display.terminal import ProgressPrinter
from launch.models.generators import load_generator, start_generator
from launch.probing.plan import ProbePlan
from policies.rollout.chain_generation import ChainRequest, generate_chains

if TYPE_CHECKING:
    from policies.generation.generator import Generator


class Answer(TypedDict):
    """An answer in `responses.jsonl`, with its number of generated tokens.

    The task reward is None if the reward function failed and `on_reward_error` is `skip`.
    """

    text: str
    length: int
    task_reward: float | None


class ProbedSample(TypedDict):
    """A line of `responses.jsonl`: a first answer to a query, and second answers to it without and with feedback.

    `query` is the query's index in its split. `feedback` is None for "solved"; it and `second_feedback` are missing
    without a feedback function. If that failed and `on_reward_error` is `skip`, `second` is missing, too.
    """

    temperature: float
    query: int
    sample: int
    first: Answer
    second: NotRequired[Answer]
    feedback: NotRequired[str | None]
    second_feedback: NotRequired[Answer]


def sample_answers(plan: ProbePlan, progress: ProgressPrinter) -> Iterator[list[ProbedSample]]:
    """Yields the samples of each batch of the plan, in order.

    The second agent answers also if the feedback on the first answer is None, so that one sees whether it keeps right
    answers. Sampling seeds are those of evaluations with the same `seed`.
    """
    settings = plan.settings
    worker = RewardWorker(
        plan.task.reward,
        feedback=plan.task.feedback,
        timeout=settings.reward_timeout,
        on_error=settings.on_reward_error,
    )
    with worker:
        worker.prepare()  # while the engines start
        progress.stage("Loading the model")
        distinct = tuple(dict.fromkeys(plan.policy_ids))
        if plan.policies is None:
            models = {policy_id: settings.model_paths[policy_id] for policy_id in distinct}
            generator = start_generator(settings, models, settings.backend, plan.batch_size)
        else:
            policies = replace(plan.policies, settings=settings)
            generator = load_generator(policies, distinct, settings.backend, plan.batch_size)
        with contextlib.closing(generator):
            progress.stage("Sampling answers")
            progress.start_clock()
            for temperature, prompt_refs in plan.batches():
                yield _sample_batch(plan, generator, worker, temperature, prompt_refs)


def _sample_batch(
    plan: ProbePlan,
    generator: Generator,
    worker: RewardWorker,
    temperature: float,
    prompt_refs: Sequence[tuple[int, int]],
) -> list[ProbedSample]:
    def respond(episodes: Sequence[ChainEpisode]) -> None:
        requests = [
            ChainRequest(
                episode, plan.policy_ids, episode.chain.response_limits, temperature, plan.settings.seed, sample
            )
            for episode, (_, sample) in zip(episodes, prompt_refs, strict=True)
        ]
        generate_chains(generator, requests)  # none of those whose feedback failed

    queries = plan.task.queries(plan.split)
    plain = [ChainEpisode(plan.plain, queries[query]) for query, _ in prompt_refs]
    respond(plain)
    rewards = reward_episodes(worker, plain)
    with_feedback: list[ChainEpisode] = []
    if plan.with_feedback is not None:
        with_feedback = [_replay_first(plan.with_feedback, episode) for episode in plain]
        give_feedback(worker, with_feedback)
        respond(with_feedback)
    feedback_rewards = reward_episodes(worker, with_feedback, first=1)
    records = []
    for index, (episode, (query, sample)) in enumerate(zip(plain, prompt_refs, strict=True)):
        first = _answer(episode, 0, rewards[index][0])
        record = ProbedSample(temperature=temperature, query=query, sample=sample, first=first)
        if not with_feedback:
            record["second"] = _answer(episode, 1, rewards[index][1])
        elif not (other := with_feedback[index]).failed:
            record["second"] = _answer(episode, 1, rewards[index][1])
            record["feedback"] = other.feedback_entry(0).get("feedback", "")  # none on a thought that was cut off
            record["second_feedback"] = _answer(other, 1, feedback_rewards[index][0])
        records.append(record)
    return records


def _replay_first(chain: Chain, episode: ChainEpisode) -> ChainEpisode:
    """Returns an episode of another chain with the same first response."""
    copy = ChainEpisode(chain, episode.query)
    copy.respond({"tokens": episode.responses[0], "length": len(episode.responses[0])})
    return copy


def _answer(episode: ChainEpisode, position: int, reward: float | None) -> Answer:
    return Answer(text=episode.completions[position], length=len(episode.responses[position]), task_reward=reward)
