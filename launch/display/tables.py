"""How figures are called and written, and the table they stand in."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


class MetricFormat(NamedTuple):
    """How a figure is shown."""

    heading: str
    pattern: str
    """Of its numbers."""


METRIC_FORMATS = {
    "task_reward": MetricFormat("task reward", "{:+.2f}"),
    "kl": MetricFormat("KL", "{:.2f}"),
    "combined_reward": MetricFormat("combined", "{:+.2f}"),
    "response_length": MetricFormat("length", "{:.1f}"),
    "eos_rate": MetricFormat("EOS rate", "{:.2f}"),
    "distinct_1": MetricFormat("distinct-1", "{:.2f}"),
    "distinct_2": MetricFormat("distinct-2", "{:.2f}"),
}
MAIN_METRICS = ("task_reward", "kl", "combined_reward")
"""The figures that are shown everywhere."""
FINE = {**{name: METRIC_FORMATS[name].pattern for name in MAIN_METRICS}, "combined_reward": "{:+.3f}"}
"""Their patterns where runs are compared: combined rewards often differ in the third digit alone."""


def metric_format(name: str) -> MetricFormat:
    """Returns how a figure is shown; one that has no heading, such as pass@4, by its name."""
    return METRIC_FORMATS.get(name, MetricFormat(name, "{:.2f}"))


def format_number(value: float | None, pattern: str) -> str:
    """Returns a number in a format, or a dash for one that is not known."""
    return "-" if value is None or math.isnan(value) else pattern.format(value)


def format_metric(name: str, value: float | None) -> str:
    """Returns a number as that figure's are written."""
    return format_number(value, metric_format(name).pattern)


def table(left: Sequence[str], right: Sequence[str]) -> Table:
    """Returns an empty table.

    Args:
        left: headings of the first columns, of words.
        right: headings of those after them, of numbers.
    """
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in left:
        made.add_column(heading, no_wrap=True)
    for heading in right:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def print_tables(output: TextIO, *tables: Table) -> None:
    """Prints tables in which nothing is cut off, however narrow the terminal: their names are to be copied."""
    console = Console(file=output, highlight=False, soft_wrap=True, markup=False, emoji=False)
    for number, made in enumerate(tables):
        console.width = max(console.measure(made, options=console.options.update(width=10_000)).maximum, 1)
        console.print(*[""] * (number > 0), made, sep="\n")
