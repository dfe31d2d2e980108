"""The results table of searches and studies: one row per point, aggregated over seeds."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from launch.display.statistics import mean_ci
from launch.display.tables import FINE_PATTERNS, MAIN_METRICS, metric_format, new_table

if TYPE_CHECKING:
    import pandas as pd


def points_table(keys: Sequence[str], points: "Iterable[tuple[Sequence[str], pd.DataFrame]]") -> Table:
    """Returns a table with one row per point: the mean of each metric over complete runs, ± half its 95 % interval.

    Args:
        points: the cells of these columns, and a frame of the point's runs with the columns `complete`, each of
            `MAIN_METRICS`, `seconds` and `remark` (may be empty).
    """
    results_table = new_table(keys, ["seeds", *(metric_format(key).heading for key in MAIN_METRICS), "minutes"])
    results_table.add_column("")
    for cells, runs in points:
        complete = runs[runs["complete"]]
        results_table.add_row(
            *cells,
            f"{len(complete)}" if len(complete) == len(runs) else f"{len(complete)} of {len(runs)}",
            *(_format_mean(complete[key].astype(float), FINE_PATTERNS[key]) for key in MAIN_METRICS),
            f"{runs['seconds'].mean() / 60:.1f}",
            ", ".join(filter(None, runs["remark"])),
        )
    return results_table


def _format_mean(values: "pd.Series[float]", pattern: str) -> str:
    mean, low, _, n = mean_ci(values)
    if not n:
        return "-"
    half = "" if low is None else f" ± {pattern.replace('+', '').format(mean - low)}"
    return pattern.format(mean) + half + ("" if n == len(values) else f", {n} of {len(values)}")
