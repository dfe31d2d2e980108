"""Samples a team of roles: whole episodes, and single answers of its first answering role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NotRequired, TypedDict

import numpy as np

from cory_env.chain_settings import Position
from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import RewardedResponse, compute_awaited, give_feedback, reward_responses
from cory_env.rewarding.worker import RewardWorker
from cory_env.text_envs.task import EnvTask
from launch.console.errors import CommandError
from launch.display.terminal import ProgressPrinter
from launch.probing.chains import answering_position
from launch.probing.figures import SingleAnswers
from launch.probing.outcomes import number_answers
from launch.probing.plan import ProbePlan
from launch.probing.responder import Responder
from launch.probing.sampler import open_responder
from launch.probing.team_figures import Part, TeamOutcomes

Kind = Literal["single", "team"]
MAX_SINGLE_TURNS = 8
"""Turns of an environment for which there are enough single answers."""


class RoleResponse(TypedDict):
    """A response in `responses.jsonl`, with its number of generated tokens.

    `task_reward` is None if the response is no answer to the query, or the reward function failed and
    `on_reward_error` is `skip`. `feedback`, None for "solved", is missing without any. `ended` is false if the response
    was cut at `max_response_tokens`.
    """

    agent: str
    text: str
    length: int
    task_reward: float | None
    ended: bool
    feedback: NotRequired[str | None]


class SampledTeam(TypedDict):
    """A line of `responses.jsonl`: an episode of the team, or a single answer.

    `query` is the query's index in its split. `failed`: the reward or feedback function failed on it.
    """

    kind: Kind
    temperature: float
    query: int
    sample: int
    responses: list[RoleResponse]
    failed: bool


def num_singles(plan: ProbePlan) -> int:
    """Returns the number of single answers per query: more than the team has turns, so that best-of-n is not short."""
    assert plan.team is not None
    task = plan.team.task
    turns = min(task.max_turns, MAX_SINGLE_TURNS) if isinstance(task, EnvTask) else len(plan.team.positions)
    return max(plan.samples, turns + 1)


def sample_batches(plan: ProbePlan) -> list[tuple[float, Kind, list[tuple[int, int]]]]:
    """Returns all batches in order: a temperature, what is sampled, and pairs of query index and sample index."""
    counts: tuple[tuple[Kind, int], ...] = (("single", num_singles(plan)), ("team", plan.samples))
    return [
        (temperature, kind, chunk)
        for temperature in plan.temperatures
        for kind, count in counts
        for chunk in plan.chunks(count)
    ]


def sample_teams(plan: ProbePlan, progress: ProgressPrinter) -> Iterator[list[SampledTeam]]:
    """Yields the samples of each batch, in order."""
    with open_responder(plan, progress) as (responder, worker):
        for temperature, kind, prompt_refs in sample_batches(plan):
            yield _sample_batch(plan, responder, worker, temperature, kind, prompt_refs)


def _sample_batch(
    plan: ProbePlan,
    responder: Responder,
    worker: RewardWorker,
    temperature: float,
    kind: Kind,
    prompt_refs: Sequence[tuple[int, int]],
) -> list[SampledTeam]:
    assert plan.team is not None
    chain, policy_ids = plan.team, plan.policy_ids
    if kind == "single":
        chain, policy_ids = plan.plain, policy_ids[answering_position(plan.team) :][:1]
    queries = plan.task.queries(plan.split)
    episodes = [responder.make_episode(chain, queries[query]) for query, _ in prompt_refs]
    awaited = partial(compute_awaited, worker) if plan.task.feedback is not None else None
    responder.respond(episodes, [sample for _, sample in prompt_refs], policy_ids, temperature, awaited)
    if plan.task.feedback is not None:  # also on last answers: it is the check of single ones
        give_feedback(worker, [episode for episode in episodes if not episode.failed])
    rewards = _reward_answers(worker, episodes)
    return [
        SampledTeam(
            kind=kind,
            temperature=temperature,
            query=query,
            sample=sample,
            responses=_responses(episode, rewards[index]),
            failed=episode.failed or None in rewards[index].values(),
        )
        for index, (episode, (query, sample)) in enumerate(zip(episodes, prompt_refs, strict=True))
    ]


def _reward_answers(worker: RewardWorker, episodes: Sequence[ChainEpisode]) -> list[dict[int, float | None]]:
    """Returns by episode and position the task's reward of each answer to the query, whatever its role's reward is."""
    keys = [
        (index, position)
        for index, episode in enumerate(episodes)
        for position in range(len(episode.responses))
        if episode.chain.positions[position].role.produces_response
    ]
    answers = [
        RewardedResponse(
            episodes[index].query,
            episodes[index].chain.agents[position],
            episodes[index].completions[position],
            episodes[index].shown_tokens(position),
        )
        for index, position in keys
    ]
    rewards: list[dict[int, float | None]] = [{} for _ in episodes]
    for (index, position), reward in zip(keys, reward_responses(worker, answers), strict=True):
        rewards[index][position] = reward
    return rewards


def _responses(episode: ChainEpisode, rewards: dict[int, float | None]) -> list[RoleResponse]:
    responses = []
    for position, agent in enumerate(episode.agents):
        response = RoleResponse(
            agent=agent,
            text=episode.completions[position],
            length=len(episode.responses[position]),
            task_reward=rewards.get(position),
            ended=episode.ended[position],
        )
        entry = episode.feedback_entry(position)
        if "feedback" in entry:
            response["feedback"] = entry["feedback"]
        responses.append(response)
    return responses


def collect_teams(
    samples: Sequence[SampledTeam],
    positions: Sequence[Position],
    solved_at: float,
    read_answer: Callable[[str], object],
    *,
    has_check: bool,
) -> TeamOutcomes:
    """Converts the samples of one temperature to arrays, without the queries on which a function failed.

    Args:
        positions: Of the team.
        solved_at: Task reward from which an answer is right.
        read_answer: See `collect_outcomes`.
        has_check: Whether there is a feedback function, whose None accepts a single answer.
    """
    dropped = {sample["query"] for sample in samples if sample["failed"]}
    rows: dict[Kind, dict[int, list[SampledTeam]]] = {"single": {}, "team": {}}
    for sample in samples:
        if sample["query"] not in dropped:
            rows[sample["kind"]].setdefault(sample["query"], []).append(sample)
    if len(rows["team"]) < 2:
        raise CommandError("The reward or feedback function failed on all queries. Fix the function.")
    answers = [[sample["responses"][0] for sample in row] for row in rows["single"].values()]
    accepted = [[answer.get("feedback", "") is None for answer in row] for row in answers]
    single = SingleAnswers(
        np.array([[(answer["task_reward"] or 0.0) >= solved_at for answer in row] for row in answers]),
        np.array([[float(answer["length"]) for answer in row] for row in answers]),
        np.array([number_answers([read_answer(answer["text"]) for answer in row]) for row in answers]),
        np.array(accepted) if has_check else None,
    )
    episodes = [
        [_read_parts(sample["responses"], positions, solved_at) for sample in row] for row in rows["team"].values()
    ]
    parts = []
    for name in dict.fromkeys(position.role.name for position in positions):
        columns = np.array(
            [[parts_by_name[name] for parts_by_name in row] for row in episodes]
        )  # [queries, samples, 4]
        writes = any(position.role.produces_response for position in positions if position.role.name == name)
        before, after, acted, tokens = np.moveaxis(columns, 2, 0)
        parts.append(Part(name, before, after, acted, tokens, writes))
    return TeamOutcomes(single, tuple(parts))


def _read_parts(
    responses: Sequence[RoleResponse], positions: Sequence[Position], solved_at: float
) -> dict[str, tuple[float, float, float, float]]:
    """Returns by role whether the team's answer was right before and after its turn, whether it had one, and tokens.

    Drafts count as their mean, unless the episode ends with them.
    """
    parts, current = {}, 0.0
    for name in dict.fromkeys(position.role.name for position in positions):
        indices = [k for k, position in enumerate(positions[: len(responses)]) if position.role.name == name]
        before, role = current, next(position.role for position in positions if position.role.name == name)
        if indices and role.produces_response:
            right = [float((responses[k]["task_reward"] or 0.0) >= solved_at) for k in indices]
            is_last = indices[-1] == len(responses) - 1
            current = float(np.mean(right)) if role.count > 1 and not is_last else right[-1]
        tokens = float(sum(responses[k]["length"] for k in indices))
        parts[name] = (before, current, float(bool(indices)), tokens)
    return parts
