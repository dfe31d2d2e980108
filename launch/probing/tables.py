"""Tables of a probe for a terminal of 80 columns: a row per figure, a column per temperature."""

from collections.abc import Mapping, Sequence
from textwrap import wrap

from rich.table import Table

from launch.display.tables import new_table
from launch.probing.advice import Advice, format_percent
from launch.probing.envs import RETURN, TURNS
from launch.probing.figures import Figure
from launch.probing.team_figures import CONTRIBUTION, REPAIRS, SPOILS, part_names

WIDTH = 80
SHARES = {
    "p1": "first answer (p1)",
    "p1_again": "second sample* (p1')",
    "p2": "second agent* (p2)",
    "p2 - p1_again": "  p2 - p1'",
    "p2_feedback": "  p2 with feedback",
    "p2_feedback - p1_again": "  p2 - p1' with it",
    "kept": "right answers kept",
    "kept_feedback": "  with feedback",
    "wrongly_accepted": 'wrong in "solved"',
    "not_accepted": 'right, not "solved"',
}
"""Row labels of shares and differences, in order; short, so that three temperatures fit in 80 columns."""
STRATEGIES = {
    "one_answer": "one answer",
    "best_of_2": "best of 2",
    "best_of_3": "best of 3",
    "vote_of_3": "vote of 3",
    "chain": "chain",
    "chain_stop": "chain, stop",
    "chain_stop - best_of_n": "  - best of n**",
    "chain_feedback": "feedback chain, stop",
    "chain_feedback - best_of_n": "  - best of n**",
}
"""Row labels of the ways to answer, in order."""


TEAM = {
    "one_answer": "one answer",
    "best_of_n": "best of n**",
    "vote_of_n": "vote of n**",
    "team": "team",
    "team - one_answer": "  - one answer",
    "team - best_of_n": "  - best of n**",
    "team - vote_of_n": "  - vote of n**",
}
"""Row labels of a team's scores and differences, in order."""

EPISODES = {
    "one_answer": "one turn",
    "best_of_n": "starting anew**",
    "team": "whole episode",
    "team - one_answer": "  - one turn",
    "team - best_of_n": "  - starting anew**",
}
"""Row labels of the scores of an environment's episodes."""


def probe_tables(figures: Mapping[float, Mapping[str, Figure]], temperature: float) -> list[Table]:
    """Returns the tables: shares of answers or scores, tokens, and for a team its parts at one temperature."""
    names = set.intersection(*map(set, figures.values()))  # at some temperature, no two answers may be equal: no vote
    columns = [f"T = {value:g}" for value in figures]
    agents = [name.removeprefix(RETURN) for name in names if name.startswith(RETURN)]
    strategies, sections = STRATEGIES, [("% right, 95 % CI", SHARES), ("% solved, 95 % CI", STRATEGIES)]
    if is_team := "team" in names:
        strategies = EPISODES if agents else TEAM
        sections = [("% solved, 95 % CI", strategies)]
    tables = []
    for heading, labels in sections:
        tables.append(new_table([heading], columns))
        for name in (name for name in labels if name in names):
            cells = [format_percent(by_name[name].estimate, signed="-" in name) for by_name in figures.values()]
            tables[-1].add_row(labels[name], *cells)
    tables.append(new_table(["tokens per query"], columns))
    for name in (name for name in strategies if name in names and "-" not in name):
        tables[-1].add_row(strategies[name], *(f"{by_name[name].tokens:.1f}" for by_name in figures.values()))
    if is_team:
        tables.append(_part_table(figures[temperature], temperature))
    if agents:
        tables.append(_agent_table(figures[temperature], temperature))
    return tables


def _agent_table(figures: Mapping[str, Figure], temperature: float) -> Table:
    """Returns a row per agent of an environment: its return, turns and tokens per episode."""
    table = new_table([f"at T = {temperature:g}"], ["return, 95 % CI", "turns", "tokens"])
    for name in (name for name in figures if name.startswith(RETURN)):
        agent, figure = name.removeprefix(RETURN), figures[name]
        turns = figures[f"{TURNS}{agent}"].estimate.mean
        table.add_row(agent, figure.estimate.format("{:.3g}"), f"{turns:.1f}", f"{figure.tokens:.1f}")
    return table


def _part_table(figures: Mapping[str, Figure], temperature: float) -> Table:
    """Returns a row per part of a team: the answers that it changes, its contribution and its tokens."""
    table = new_table([f"at T = {temperature:g}"], ["% repaired", "% spoiled", "contribution", "tokens"])
    for name in part_names(figures):
        repairs, spoils = (figures.get(f"{name}: {figure}") for figure in (REPAIRS, SPOILS))
        contribution = figures[f"{name}: {CONTRIBUTION}"]
        shares = ["-" if figure is None else format_percent(figure.estimate) for figure in (repairs, spoils)]
        table.add_row(name, *shares, format_percent(contribution.estimate, signed=True), f"{contribution.tokens:.1f}")
    return table


def text_lines(
    figures: Mapping[float, Mapping[str, Figure]], advice: Advice, *, has_check: bool, notes: Sequence[str] = ()
) -> list[str]:
    """Returns the lines below the tables: explanations, and the advice.

    Args:
        has_check: Whether there is a feedback function.
        notes: Further sentences (`ProbeResult`).
    """
    names = next(iter(figures.values()))
    is_team = "team" in names
    if any(name.startswith(RETURN) for name in names):
        lines = wrap(
            "** after one turn, until an episode is solved; with as many tokens as whole episodes. Solved: the mean "
            "return of the agents is at least --solved-at.",
            WIDTH,
        )
        lines += [line for note in notes for line in wrap(note, WIDTH)]
        return [*lines, "", *wrap(advice.text, WIDTH, break_on_hyphens=False)]
    subject = "team" if is_team else "chain"
    lines = [] if is_team else ["*  where the first answer is wrong"]
    if is_team or has_check:
        lines.append(f"** with as many tokens per query as the {subject}")
    if has_check:
        chains = "Best of n ends" if is_team else 'Best of n, and chains with "stop", end'
        lines += wrap(f'{chains} at the first answer that the feedback function calls "solved".', WIDTH)
    else:
        lines.append("Best of n is checked by the reward: an upper bound, as users have no reward.")
    if is_team:
        lines += wrap("A role repairs wrong answers of the roles before it, and spoils right ones.", WIDTH)
    return [
        *lines,
        *(line for note in notes for line in wrap(note, WIDTH)),
        "",
        *wrap(advice.text, WIDTH, break_on_hyphens=False),
    ]


def describe_odd_answers(answers: Mapping[str, int]) -> str:
    """Returns a line about answers that were cut or are empty (`ProbeResult.answers`); empty if there are none."""
    total, cut, empty = answers["all"], answers["cut"], answers["empty"]
    parts = [f"{cut:,} were cut at max_response_tokens"] * (cut > 0) + [f"{empty:,} were empty"] * (empty > 0)
    return f"Of {total:,} answers, {', '.join(parts)}." if parts else ""
