"""Headings and number formats of metrics, and tables for the terminal."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from launch.run_folder.records import MetricValues, Update, with_shown_kl


class MetricFormat(NamedTuple):
    """Heading and number format of a metric."""

    heading: str
    pattern: str


METRIC_FORMATS = {
    "task_reward": MetricFormat("task reward", "{:+.2f}"),
    "kl": MetricFormat("KL", "{:.2f}"),
    "combined_reward": MetricFormat("combined", "{:+.2f}"),
    "response_length": MetricFormat("length", "{:.1f}"),
    "eos_rate": MetricFormat("EOS rate", "{:.2f}"),
}
MAIN_METRICS = ("task_reward", "kl", "combined_reward")  # in every table and plot
FINE_PATTERNS = {**{name: METRIC_FORMATS[name].pattern for name in MAIN_METRICS}, "combined_reward": "{:+.3f}"}
"""Their formats in comparisons of runs, whose combined rewards often differ only in the third digit."""


def metric_format(name: str) -> MetricFormat:
    """Returns the format of a metric; its name is the heading if it has no other, such as pass@4."""
    formats = METRIC_FORMATS | {"chain_tokens": MetricFormat("tokens per query", "{:.1f}")}
    return formats.get(name, MetricFormat(name, "{:.2f}"))


def held_out_pairs(first: Update, last: Update) -> dict[str, tuple[MetricValues, MetricValues]]:
    """Returns the held-out metrics at two evaluations of a run, by policy id, `average of LLMs` and `last answer`."""
    names = list(last["evaluation"])
    rows = {
        "average of LLMs" if name == "mean" else name: (first["evaluation"][name], last["evaluation"][name])
        for name in (names if len(names) > 2 else names[:1])  # the mean equals the only policy's
    }
    if "last_response" in first and "last_response" in last:
        rows["last answer"] = (with_shown_kl(first["last_response"]), with_shown_kl(last["last_response"]))
    return rows


def format_number(value: float | None, pattern: str) -> str:
    """Formats a number; None and NaN become a dash."""
    return "-" if value is None or math.isnan(value) else pattern.format(value)


def format_metric(name: str, value: float | None) -> str:
    """Formats a value of a metric."""
    return format_number(value, metric_format(name).pattern)


def new_table(left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    """Returns a table.

    Args:
        right: Headings of the right-aligned columns after them, for numbers.
    """
    rich_table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in left:
        rich_table.add_column(heading, no_wrap=True)
    for heading in right:
        rich_table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        rich_table.add_row(*row)
    return rich_table


def print_tables(output: TextIO, *tables: Table) -> None:
    """Prints tables without truncation, however narrow the terminal, so that names can be copied."""
    console = Console(file=output, highlight=False, soft_wrap=True, markup=False, emoji=False)
    for index, rich_table in enumerate(tables):
        console.width = max(console.measure(rich_table, options=console.options.update(width=10_000)).maximum, 1)
        console.print(*[""] * (index > 0), rich_table, sep="\n")
