"""The table of many trainings, in which searches and studies end: a row per point, over its seeds."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from launch.display.statistics import mean_ci
from launch.display.tables import FINE, MAIN_METRICS, metric_format, table

if TYPE_CHECKING:
    import pandas as pd


def points_table(keys: Sequence[str], points: "Iterable[tuple[Sequence[str], pd.DataFrame]]") -> Table:
    """Returns a row per point: the mean of each figure over its whole runs, ± half its 95 % interval.

    Args:
        keys: headings of the columns that tell points apart.
        points: what stands in these columns, and the point's runs: a row each, with `whole`, the figures of `MAIN`,
            `seconds`, and a `remark` or nothing.
    """
    made = table(keys, ["seeds", *(metric_format(key).heading for key in MAIN_METRICS), "minutes"])
    made.add_column("")
    for cells, runs in points:
        whole = runs[runs["whole"]]
        made.add_row(
            *cells,
            f"{len(whole)}" if len(whole) == len(runs) else f"{len(whole)} of {len(runs)}",
            *(_mean(whole[key].astype(float), FINE[key]) for key in MAIN_METRICS),
            f"{runs['seconds'].mean() / 60:.1f}",
            ", ".join(filter(None, runs["remark"])),
        )
    return made


def _mean(values: "pd.Series[float]", pattern: str) -> str:
    mean, low, _, n = mean_ci(values)
    if not n:
        return "-"
    half = "" if low is None else f" ± {pattern.replace('+', '').format(mean - low)}"
    return pattern.format(mean) + half + ("" if n == len(values) else f", {n} of {len(values)}")
