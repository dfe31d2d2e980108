"""What to train, in one sentence derived from the intervals of a probe."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from launch.display.statistics import Estimate
from launch.probing.figures import Figure
from launch.probing.team_figures import CONTRIBUTION, part_names

MAX_MORE_QUERIES = 100
"""A number of required queries is given if it is at most this many times the number of queries."""

Choice = Literal[
    "chain with feedback", "chain without feedback", "team", "several turns", "single agent", "one turn", "nothing"
]

CHAINS: tuple[tuple[Choice, str, str], ...] = (
    ("chain with feedback", "p2_feedback", "chain_feedback"),
    ("chain without feedback", "p2", "chain_stop"),
)
"""Chains that stop at "solved": the choice, and the names of its repairs and its score."""


class Advice(NamedTuple):
    """What to train by the figures at a temperature.

    Attributes:
        choice: `nothing`: the intervals do not decide. `team`, or `single agent`: of a probe with roles too. `several
            turns`, or `one turn`: of an environment.
    """

    temperature: float
    choice: Choice
    text: str


def best_temperature(figures: Mapping[float, Mapping[str, Figure]], name: str) -> float:
    """Returns the temperature at which the single agent is best by a figure; the lowest of equal ones.

    A chain or a team has to be better than the single agent at its best.
    """
    return min(figures, key=lambda temperature: (-figures[temperature][name].estimate.mean, temperature))


def advise(figures: Mapping[float, Mapping[str, Figure]]) -> Advice:
    """Says what to train, from the figures of `compute_figures` at the best temperature.

    With a check, it is the one with the highest best-of-2, otherwise with the highest share of right first answers.
    """
    has_check = all("p2_feedback" in by_name for by_name in figures.values())
    temperature = best_temperature(figures, "best_of_2" if has_check else "one_answer")
    estimates = {name: figure.estimate for name, figure in figures[temperature].items()}
    decide = _decide_with_feedback if "p2_feedback" in estimates else _decide_without_feedback
    choice, text = decide(estimates)
    if math.isnan(estimates["p1_again"].mean):
        choice, text = "nothing", "Nothing to repair: all first answers are right"
    return Advice(temperature, choice, f"{text} (temperature {temperature:g}).")


def _decide_with_feedback(estimates: Mapping[str, Estimate]) -> tuple[Choice, str]:
    """Compares repairs with a second sample, and each chain that stops with best-of-n at equal tokens."""
    again = _share(estimates["p1_again"])
    open_text = ""
    for choice, p2, chain in CHAINS:
        repairs, equal_tokens = estimates[f"{p2} - p1_again"], estimates[f"{chain} - best_of_n"]
        differences = (
            f"it repairs {_share(estimates[p2])} of wrong first answers, where a second sample is right in "
            f"{again} (difference {_points(repairs)}), and scores {_points(equal_tokens)} against best-of-n with as "
            "many tokens"
        )
        if _is_above(repairs) and _is_above(equal_tokens):
            return choice, f"Train a {choice}: {differences}"
        if not (_is_below(repairs) or _is_below(equal_tokens) or open_text):
            undecided = equal_tokens if _is_above(repairs) else repairs
            open_text = (
                f"Nothing can be said at {_queries(estimates['one_answer'])} about a {choice}: {differences}"
                f"{_required(undecided)}"
            )
    if open_text:
        return "nothing", open_text
    choice, p2, chain = CHAINS[0]
    return "single agent", (
        f"Train a single agent and use best-of-n: where the first answer is wrong, a second sample is right in {again}"
        f", a second agent with feedback in {_share(estimates[p2])}, and the chain scores "
        f"{_points(estimates[f'{chain} - best_of_n'])} against best-of-n with as many tokens"
    )


def _decide_without_feedback(estimates: Mapping[str, Estimate]) -> tuple[Choice, str]:
    """Compares the second agent's answer with the first one and with a vote: without a check, nothing else can."""
    scores = f"{_share(estimates['chain'])} of second answers are right, {_share(estimates['p1'])} of first ones"
    rivals = {"chain - one_answer": "one answer", "chain - vote_of_3": "a vote of three"}
    return _compare(estimates, "chain without feedback", scores, rivals)


def advise_team(figures: Mapping[float, Mapping[str, Figure]], *, has_check: bool) -> Advice:
    """Says what to train, from the figures of `compute_team_figures` at the best temperature.

    Args:
        has_check: Whether a check picks among the answers of a single agent; otherwise a vote does.
    """
    temperature = best_temperature(figures, "best_of_n" if has_check else "one_answer")
    estimates = {name: figure.estimate for name, figure in figures[temperature].items()}
    right = _share(estimates["team"])
    scores = f"{right} of the team's answers are right, {_share(estimates['one_answer'])} of single ones"
    rivals = {"team - one_answer": "one answer", "team - vote_of_n": "a vote with as many tokens"}
    if has_check:
        rivals = {"team - best_of_n": "best-of-n with as many tokens"}
    choice, text = _compare(estimates, "team", scores, rivals)
    text = f"{text} (temperature {temperature:g})."
    for name in part_names(figures[temperature]):
        contribution = estimates[f"{name}: {CONTRIBUTION}"]
        if _is_below(contribution):
            text += f" Change or remove {name}: it spoils more than it repairs ({_points(contribution)})."
    return Advice(temperature, choice, text)


def advise_turns(figures: Mapping[float, Mapping[str, Figure]]) -> Advice:
    """Says how many turns to train with, from the figures of an environment's episodes at the best temperature."""
    temperature = best_temperature(figures, "best_of_n")
    estimates = {name: figure.estimate for name, figure in figures[temperature].items()}
    scores = f"{_share(estimates['team'])} of episodes are solved, {_share(estimates['one_answer'])} in one turn"
    rivals = {"team - best_of_n": "starting anew after one turn, with as many tokens"}
    choice, text = _compare(estimates, "several turns", scores, rivals)
    if len(part_names(figures[temperature])) == 1:
        choice, text = "nothing", f"No agent had a second turn: {scores}"
    return Advice(temperature, choice, f"{text} (temperature {temperature:g}).")


SUBJECTS: dict[Choice, tuple[str, str, Choice, str]] = {
    "chain without feedback": (
        "the chain scores",
        "Train a chain without feedback",
        "single agent",
        "Train a single agent",
    ),
    "team": ("the team scores", "Train the team", "single agent", "Train a single agent"),
    "several turns": ("further turns score", "Train with several turns", "one turn", "Train with max_turns=1"),
}
"""By the choice if a comparison is won: its subject and its advice; and the choice and advice if it is lost."""


def _compare(
    estimates: Mapping[str, Estimate], winner: Choice, scores: str, rivals: Mapping[str, str]
) -> tuple[Choice, str]:
    """Chooses a way to train if it is better than all rivals, by the names of their differences, that were measured."""
    subject, win, loser, loss = SUBJECTS[winner]
    differences = {
        f"{scores}; {subject} {_points(estimates[name])} against {rival}": estimates[name]
        for name, rival in rivals.items()
        if name in estimates
    }
    for text, difference in differences.items():
        if _is_below(difference):
            return loser, f"{loss}: {text}"
    for text, difference in differences.items():
        if not _is_above(difference):
            return "nothing", f"Nothing can be said at {_queries(difference)}: {text}{_required(difference)}"
    return winner, f"{win}: {scores if winner == 'chain without feedback' else next(iter(differences))}"


def format_percent(estimate: Estimate, *, signed: bool = False) -> str:
    """Formats a share or a difference in percent with its interval: `54 [49, 59]`; with a decimal if all are below 10.

    A dash if there are no cases.
    """
    mean, low, high, count = estimate
    percent = Estimate(mean * 100, None if low is None else low * 100, None if high is None else high * 100, count)
    is_small = all(abs(bound) < 9.95 for bound in percent[:3] if bound is not None and not math.isnan(bound))
    return percent.format(f"{{:{'+' if signed else ''}.{1 if is_small else 0}f}}")


def _share(estimate: Estimate) -> str:
    """Returns `54 % [49, 59]`."""
    return format_percent(estimate).replace(" [", " % [") + " %" * (estimate.low is None)


def _points(estimate: Estimate) -> str:
    """Returns `+5 points [+2, +8]`."""
    return format_percent(estimate, signed=True).replace(" [", " points [")


def _is_above(estimate: Estimate) -> bool:
    return estimate.low is not None and estimate.low > 0


def _is_below(estimate: Estimate) -> bool:
    return estimate.high is not None and estimate.high < 0


def _queries(estimate: Estimate) -> str:
    return f"{estimate.n} quer{'y' if estimate.n == 1 else 'ies'}"


def _required(estimate: Estimate) -> str:
    """Returns how many queries would decide if the difference stayed as it is; nothing if that is hopeless."""
    mean, low, high, count = estimate
    if low is None or high is None or not mean:
        return ""
    half_width = mean - low if mean > 0 else high - mean
    factor = (half_width / mean) ** 2
    if not 1 < factor <= MAX_MORE_QUERIES:
        return ""
    required = count * factor
    step = 10 ** max(int(math.log10(required)) - 1, 0)
    return f"; if it stays so, {math.ceil(required / step) * step:,} queries would decide"
