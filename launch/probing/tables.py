"""Tables of a probe for a terminal of 80 columns: a row per figure, a column per temperature."""

from collections.abc import Mapping
from textwrap import wrap

from rich.table import Table

from launch.display.tables import new_table
from launch.probing.advice import Advice, format_percent
from launch.probing.figures import Figure

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


def probe_tables(figures: Mapping[float, Mapping[str, Figure]]) -> list[Table]:
    """Returns the tables: shares of answers, scores of strategies, and tokens of strategies."""
    names = set.intersection(*map(set, figures.values()))  # at some temperature, no two answers may be equal: no vote
    columns = [f"T = {temperature:g}" for temperature in figures]
    tables = []
    for heading, labels in (("% right, 95 % CI", SHARES), ("% solved, 95 % CI", STRATEGIES)):
        tables.append(new_table([heading], columns))
        for name in (name for name in labels if name in names):
            cells = [format_percent(by_name[name].estimate, signed="-" in name) for by_name in figures.values()]
            tables[-1].add_row(labels[name], *cells)
    tables.append(new_table(["tokens per query"], columns))
    for name in (name for name in STRATEGIES if name in names and "-" not in name):
        tables[-1].add_row(STRATEGIES[name], *(f"{by_name[name].tokens:.1f}" for by_name in figures.values()))
    return tables


def text_lines(figures: Mapping[float, Mapping[str, Figure]], advice: Advice) -> list[str]:
    """Returns the lines below the tables: explanations, and the advice."""
    names = next(iter(figures.values()))
    lines = ["*  where the first answer is wrong"]
    if "p2_feedback" in names:
        lines += [
            "** with as many tokens per query as the chain",
            'Best of n, and chains with "stop", end at the first answer that the feedback',
            'function calls "solved".',
        ]
    else:
        lines.append("Best of n is checked by the reward: an upper bound, as users have no reward.")
    return [*lines, "", *wrap(advice.text, WIDTH, break_on_hyphens=False)]


def describe_odd_answers(answers: Mapping[str, int]) -> str:
    """Returns a line about answers that were cut or are empty (`ProbeResult.answers`); empty if there are none."""
    total, cut, empty = answers["all"], answers["cut"], answers["empty"]
    parts = [f"{cut:,} were cut at max_response_tokens"] * (cut > 0) + [f"{empty:,} were empty"] * (empty > 0)
    return f"Of {total:,} answers, {', '.join(parts)}." if parts else ""
