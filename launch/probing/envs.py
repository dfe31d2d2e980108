"""Samples episodes of an environment, whole ones and their first turns, and computes what further turns are worth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Literal, TypedDict

import numpy as np

from cory_env.rewarding.worker import RewardError
from cory_env.text_envs.episode import EnvEpisode
from cory_env.text_envs.pool import EnvPool
from launch.console.errors import CommandError
from launch.display.statistics import column_cis
from launch.display.terminal import ProgressPrinter
from launch.probing.figures import NO_ANSWER, Figure, SingleAnswers
from launch.probing.plan import ProbePlan
from launch.probing.team_figures import Part, TeamOutcomes
from launch.probing.teams import sample_batches

ROUNDING = 1e-9
"""Returns this far below the lowest one of a solved episode count as it: sums of floats are not exact."""
RETURN, TURNS = "return of ", "turns of "
"""Beginnings of the names of an agent's figures."""


class TurnResponse(TypedDict):
    """A response in `responses.jsonl`, with its number of generated tokens.

    `score` is the mean of the agents' returns after the turn. `ended` is false if the response was cut at
    `max_response_tokens`.
    """

    agent: str
    text: str
    length: int
    score: float
    ended: bool


class SampledEpisode(TypedDict):
    """A line of `responses.jsonl`: an episode, which is whole (`team`) or ends after each agent's first turn.

    `query` is the seed's index in its split, `returns` the sum of each agent's own rewards. `failed`: the environment
    failed, and `on_reward_error` is `skip`.
    """

    kind: Literal["single", "team"]
    temperature: float
    query: int
    sample: int
    responses: list[TurnResponse]
    returns: dict[str, float]
    truncated: bool
    failed: bool


def sample_episodes(plan: ProbePlan, progress: ProgressPrinter) -> Iterator[list[SampledEpisode]]:
    """Yields the episodes of each batch, in order.

    Raises:
        CommandError: The environment failed.
    """
    from launch.probing.local import LocalResponder  # imports torch

    settings = plan.settings
    assert settings.env is not None and plan.team is not None
    progress.stage("Loading the model")
    pool = EnvPool(
        settings.env,
        agents=plan.team.agents,
        num_processes=settings.env_processes,
        timeout=settings.reward_timeout,
        on_error=settings.on_reward_error,
    )
    with pool, closing(LocalResponder(plan)) as responder:
        progress.stage("Sampling episodes")
        progress.start_clock()
        queries = plan.task.queries(plan.split)
        for temperature, kind, prompt_refs in sample_batches(plan):
            chain = plan.plain if kind == "single" else plan.team
            episodes = [EnvEpisode(chain, queries[query]) for query, _ in prompt_refs]
            samples = [sample for _, sample in prompt_refs]
            try:
                responder.generate(episodes, samples, plan.policy_ids, temperature, pool)
            except RewardError as error:
                raise CommandError(str(error)) from error
            yield [
                SampledEpisode(
                    kind=kind,
                    temperature=temperature,
                    query=query,
                    sample=sample,
                    responses=_responses(episode),
                    returns=episode.returns(),
                    truncated=episode.is_truncated,
                    failed=episode.failed,
                )
                for episode, (query, sample) in zip(episodes, prompt_refs, strict=True)
            ]


def _responses(episode: EnvEpisode) -> list[TurnResponse]:
    gains = [math.fsum(state.rewards.values()) / len(episode.chain.agents) for state in episode.states]
    return [
        TurnResponse(
            agent=agent,
            text=episode.completions[turn],
            length=len(episode.responses[turn]),
            score=math.fsum(gains[: turn + 2]),  # the first state is that of the reset
            ended=episode.ended[turn],
        )
        for turn, agent in enumerate(episode.agents)
    ]


def collect_episodes(samples: Sequence[SampledEpisode], solved_at: float) -> TeamOutcomes:
    """Converts the episodes of one temperature to arrays, without seeds on which the environment failed.

    Single answers are episodes that end where an agent would have its second turn; the environment itself accepts those
    that are solved. Parts are the first turns of all agents, their second ones, and so on; an agent that begins later
    is in the part in which it begins.

    Args:
        solved_at: The mean of the agents' returns from which an episode is solved.
    """
    rows = {kind: _by_query(samples, kind) for kind in ("single", "team")}
    if len(rows["team"]) < 2:
        raise CommandError("The environment failed on all seeds. Correct it.")
    solved_at -= ROUNDING
    right = np.array([[_score(sample) >= solved_at for sample in row] for row in rows["single"]])
    lengths = [
        [float(sum(response["length"] for response in sample["responses"])) for sample in row] for row in rows["single"]
    ]
    single = SingleAnswers(right, np.array(lengths), np.full(right.shape, NO_ANSWER), right)
    episodes = [[_read_turns(sample, solved_at) for sample in row] for row in rows["team"]]
    num_turns = max(len(turns) for row in episodes for turns in row)
    parts = []
    for turn in range(num_turns):
        # An episode that has ended stays as it is.
        columns = np.array(
            [
                [turns[turn] if turn < len(turns) else (turns[-1][1], turns[-1][1], 0.0, 0.0) for turns in row]
                for row in episodes
            ]  # [queries, samples, 4]
        )
        before, after, acted, tokens = np.moveaxis(columns, 2, 0)
        parts.append(Part(f"turn {turn + 1}", before, after, acted, tokens))
    return TeamOutcomes(single, tuple(parts))


def _by_query(samples: Sequence[SampledEpisode], kind: str) -> list[list[SampledEpisode]]:
    failed = {sample["query"] for sample in samples if sample["failed"]}
    rows: dict[int, list[SampledEpisode]] = {}
    for sample in samples:
        if sample["kind"] == kind and sample["query"] not in failed:
            rows.setdefault(sample["query"], []).append(sample)
    return [*rows.values()]


def _score(sample: SampledEpisode) -> float:
    return math.fsum(sample["returns"].values()) / len(sample["returns"])


def _read_turns(sample: SampledEpisode, solved_at: float) -> list[tuple[float, float, float, float]]:
    """Returns for the agents' first turns, second turns, ...: solved before and after, 1, and tokens."""
    counts: dict[str, int] = {}
    turns: list[tuple[float, float, float, float]] = []
    for response in sample["responses"]:
        counts[response["agent"]] = number = counts.get(response["agent"], 0) + 1
        solved = float(response["score"] >= solved_at)
        if number > len(turns):
            turns.append((turns[-1][1] if turns else 0.0, solved, 1.0, 0.0))
        before, _, acted, tokens = turns[-1]
        turns[-1] = (before, solved, acted, tokens + response["length"])
    return turns or [(0.0, float(_score(sample) >= solved_at), 0.0, 0.0)]  # its reset ended it


def agents_without_turns(samples: Sequence[SampledEpisode]) -> list[str]:
    """Returns the agents that act in whole episodes only, as those do whose turn comes after several of another one."""
    acting: dict[str, set[str]] = {"single": set(), "team": set()}
    for sample in samples:
        acting[sample["kind"]] |= {response["agent"] for response in sample["responses"]}
    return sorted(acting["team"] - acting["single"])


def compute_agent_figures(samples: Sequence[SampledEpisode], seed: int) -> dict[str, Figure]:
    """Returns each agent's mean return and number of turns in whole episodes at one temperature, with its tokens."""
    rows = _by_query(samples, "team")
    figures: dict[str, Figure] = {}
    for agent in rows[0][0]["returns"]:
        chosen = [[[r for r in sample["responses"] if r["agent"] == agent] for sample in row] for row in rows]
        columns = [
            [np.mean([sample["returns"][agent] for sample in row]) for row in rows],
            [np.mean([len(responses) for responses in row]) for row in chosen],
        ]
        tokens = float(np.mean([[sum(r["length"] for r in responses) for responses in row] for row in chosen]))
        returns, turns = column_cis(np.array(columns).T, "bootstrap", seed)
        figures |= {f"{RETURN}{agent}": Figure(returns, tokens), f"{TURNS}{agent}": Figure(turns, tokens)}
    return figures
