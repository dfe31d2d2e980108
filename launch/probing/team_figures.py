"""What a team is worth against one of its agents with as many tokens, and each part's contribution to it.

A part is a role of a chain, or a turn of an environment's agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from launch.display.statistics import Floats
from launch.probing.figures import (
    Figure,
    Ratio,
    SingleAnswers,
    Strategy,
    best_of,
    best_of_tokens,
    ratio_cis,
    vote_of_tokens,
)

REPAIRS, SPOILS, CONTRIBUTION = "repairs", "spoils", "after - before"
"""Names of a part's figures, after its own name and a colon."""


class Part(NamedTuple):
    """A part's turns in all episodes: arrays `[queries, samples]`.

    Attributes:
        before, after: Whether the team's answer was right before and after them; a share for drafts. Before the first
            answer it is not.
        acted: Whether there was a turn.
        tokens: The part's tokens.
        answers: Whether the part writes answers; otherwise it acts only through the next part.
    """

    name: str
    before: Floats
    after: Floats
    acted: Floats
    tokens: Floats
    answers: bool = True


class TeamOutcomes(NamedTuple):
    """Single answers, and the parts of the team's episodes in their order."""

    single: SingleAnswers
    parts: tuple[Part, ...]

    @property
    def right(self) -> Floats:
        """`[queries, samples]`, whether the team's final answer is right."""
        return self.parts[-1].after

    @property
    def tokens(self) -> Floats:
        """`[queries, samples]`, the tokens of all parts."""
        return np.sum([part.tokens for part in self.parts], axis=0)


def compute_team_figures(outcomes: TeamOutcomes, seed: int = 0) -> dict[str, Figure]:
    """Computes all figures at one temperature.

    Args:
        outcomes: Of at least two queries.

    Returns:
        By name: scores with their tokens (`one_answer`, `team`; with as many tokens as the team `best_of_n`, and if
        answers can be compared `vote_of_n`), their differences to the team (`team - one_answer`, ...), and per part the
        shares of wrong answers that it repairs and of right ones that it spoils, among the episodes in which it had a
        turn, and its contribution: the share of right answers after its turns less that before them
        (`NAME: after - before`), with its tokens per episode. Shares without any case are NaN.
    """
    single, team = outcomes.single, Strategy(outcomes.right.mean(1), outcomes.tokens.mean(1))
    tokens = float(team.tokens.mean())
    by_name = {
        "one_answer": Strategy(single.right.mean(1), single.length.mean(1)),
        "best_of_n": best_of_tokens(single, tokens),
        "team": team,
    }
    if (votes := vote_of_tokens(single, tokens)) is not None:
        by_name["vote_of_n"] = votes
    samples = outcomes.right.shape[1]

    def mean(values: Floats) -> Ratio:
        return Ratio(values * samples, np.full(len(values), float(samples)))

    ratios = {name: mean(strategy.score) for name, strategy in by_name.items()}
    ratios |= {
        f"team - {name}": mean(team.score - strategy.score) for name, strategy in by_name.items() if name != "team"
    }
    costs = {name: float(strategy.tokens.mean()) for name, strategy in by_name.items()}
    first = next(part.name for part in outcomes.parts if part.answers)
    for part in outcomes.parts:
        contribution = f"{part.name}: {CONTRIBUTION}"
        costs[contribution] = float(part.tokens.mean())
        if part.answers:
            if part.name != first:
                repairs, spoils = _changes(part)
                ratios |= {f"{part.name}: {REPAIRS}": repairs, f"{part.name}: {SPOILS}": spoils}
            ratios[contribution] = mean((part.after - part.before).mean(1))
        else:
            ratios[contribution] = Ratio(np.zeros(len(outcomes.right)), np.zeros(len(outcomes.right)))  # no case
    return {name: Figure(estimate, costs.get(name)) for name, estimate in ratio_cis(ratios, seed).items()}


def _changes(part: Part) -> tuple[Ratio, Ratio]:
    """Returns the shares of wrong answers that become right, and of right ones that become wrong."""
    wrong, right = (1 - part.before) * part.acted, part.before * part.acted
    return (
        Ratio((wrong * part.after).sum(1), wrong.sum(1)),
        Ratio((right * (1 - part.after)).sum(1), right.sum(1)),
    )


def lacks_samples(outcomes: TeamOutcomes) -> bool:
    """Whether a single agent with as many tokens as the team would have more samples than there are.

    With a check it stops at an accepted sample, so it lacks none if each query has one.
    """
    single, samples = outcomes.single, outcomes.single.right.shape[1]
    tokens = single.length.sum(1)
    if single.accepted is not None:
        if single.accepted.any(1).all():
            return False
        tokens = best_of(single, samples).tokens
    return float(tokens.mean()) < float(outcomes.tokens.mean())


def part_names(figures: Mapping[str, Figure]) -> list[str]:
    """Returns the names of the parts in order."""
    suffix = f": {CONTRIBUTION}"
    return [name.removesuffix(suffix) for name in figures if name.endswith(suffix)]
