"""Samples first answers, and second answers with and without feedback to the same first answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NotRequired, TypedDict

from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import give_feedback, reward_episodes
from cory_env.rewarding.worker import RewardWorker
from launch.display.terminal import ProgressPrinter
from launch.probing.endpoint import EndpointResponder
from launch.probing.plan import ProbePlan
from launch.probing.responder import Responder


class Answer(TypedDict):
    """An answer in `responses.jsonl`, with its number of generated tokens.

    The task reward is None if the reward function failed and `on_reward_error` is `skip`. `ended` is false if the
    answer was cut at `max_response_tokens`.
    """

    text: str
    length: int
    task_reward: float | None
    ended: bool


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
    answers.
    """
    with open_responder(plan, progress) as (responder, worker):
        for temperature, prompt_refs in plan.batches():
            yield _sample_batch(plan, responder, worker, temperature, prompt_refs)


@contextlib.contextmanager
def open_responder(plan: ProbePlan, progress: ProgressPrinter) -> Iterator[tuple[Responder, RewardWorker]]:
    """Loads the policies, or connects with the API, and starts the rewards."""
    worker = RewardWorker(
        plan.task.reward,
        feedback=plan.task.feedback,
        timeout=plan.settings.reward_timeout,
        on_error=plan.settings.on_reward_error,
    )
    with worker:
        worker.prepare()  # while the engines start
        responder: Responder
        if plan.endpoint is not None:
            responder = EndpointResponder(plan.endpoint, plan.settings)
        else:
            from launch.probing.local import LocalResponder  # imports torch

            progress.stage("Loading the model")
            responder = LocalResponder(plan)
        with contextlib.closing(responder):
            progress.stage("Sampling answers")
            progress.start_clock()
            yield responder, worker


def _sample_batch(
    plan: ProbePlan,
    responder: Responder,
    worker: RewardWorker,
    temperature: float,
    prompt_refs: Sequence[tuple[int, int]],
) -> list[ProbedSample]:
    queries, samples = plan.task.queries(plan.split), [sample for _, sample in prompt_refs]
    plain = [responder.make_episode(plan.plain, queries[query]) for query, _ in prompt_refs]
    responder.respond(plain, samples, plan.policy_ids, temperature)
    rewards = reward_episodes(worker, plain)
    with_feedback: list[ChainEpisode] = []
    if plan.with_feedback is not None:
        with_feedback = [responder.replay_first(plan.with_feedback, episode) for episode in plain]
        give_feedback(worker, with_feedback)
        responder.respond(with_feedback, samples, plan.policy_ids, temperature)  # none of those whose feedback failed
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


def _answer(episode: ChainEpisode, position: int, reward: float | None) -> Answer:
    return Answer(
        text=episode.completions[position],
        length=len(episode.responses[position]),
        task_reward=reward,
        ended=episode.ended[position],
    )
