"""Comparing runs: the settings in which they differ, their held-out metrics, and paired differences with intervals.

Runs that differ only in the seed form one group. Groups are compared over their common seeds if one of them has several
runs, otherwise over the queries that both runs answered. The last answer of a single agent is its only answer.
"""

from collections import Counter
from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table

from launch.display.frame import Metrics
from launch.display.plot import Curve, draw_curves
from launch.display.statistics import column_cis
from launch.display.tables import FINE_PATTERNS, MAIN_METRICS, metric_format, new_table
from launch.run_folder.final import read_final
from launch.run_folder.frame import LAST_RESPONSE, MEAN, metrics_frame
from launch.run_folder.records import EvaluatedResponse, MetricValues, with_shown_kl
from launch.run_folder.run import Run
from policies.settings.settings import Settings, settings_in_categories
from policies.settings.yaml12 import to_cli

WITHIN_GROUP_SETTINGS = {"seed", "num_updates", *settings_in_categories("output")}
"""Settings that may differ between the runs of one group."""
TEST_SETTINGS = (
    *("task", "data", "eval_data", "reward", "validation", "eval_queries"),
    *("max_query_tokens", "min_query_tokens"),
)
"""Settings that must be equal for the same held-out queries and rewards."""
ALONE = "each alone"
"""How the mean over the policies that each answer the bare query is named in tables."""


class ComparedRun:
    """One run, read once.

    Its `values` are the last held-out metrics, of the policies each alone and of the chain's last answer: a row per
    test query; without test queries a single row, the last evaluation.
    """

    def __init__(self, run: Run, name: str) -> None:
        self.name, self.settings, self.updates = name, run.settings, run.metrics
        self.update = 0
        self.values: dict[str, pd.DataFrame] = {}
        final = read_final(run.final)
        self.is_tested = final is not None and final["update"] == self.updates[-1]["update"]  # else it has continued
        if final is not None and self.is_tested:
            self.update = final["update"]
            policies = [final["policy"].get(policy, []) for policy in self.settings.policy_ids]
            groups = {ALONE: policies, LAST_RESPONSE: list(final.get("last_response", {}).values())}
            self.values = {source: _mean_by_query(group) for source, group in groups.items() if any(group)}
        elif lines := [line for line in self.updates if "evaluation" in line]:
            self.update = lines[-1]["update"]
            self.values[ALONE] = _frame([lines[-1]["evaluation"][MEAN]])
            if "last_response" in lines[-1]:
                self.values[LAST_RESPONSE] = _frame([lines[-1]["last_response"]])
        if self.settings.num_agents == 1 and ALONE in self.values:
            self.values[LAST_RESPONSE] = self.values[ALONE]


def _frame(rows: Sequence[MetricValues], index: Sequence[int] | None = None) -> pd.DataFrame:
    return pd.DataFrame([with_shown_kl(row) for row in rows], index=index, dtype=float).reindex(
        columns=list(MAIN_METRICS)
    )


def _mean_by_query(groups: Sequence[Sequence[EvaluatedResponse]]) -> pd.DataFrame:
    """Averages the metrics of several policies, or of several orders, over the queries that all of them answered."""
    tables = [
        _frame([record["metrics"] for record in group], [record["query"] for record in group]) for group in groups
    ]
    common = pd.concat(tables, axis=1, join="inner").index
    return pd.concat([table.loc[common] for table in tables]).groupby(level=0).mean()


class Group:
    """Runs that differ only in the seed."""

    def __init__(self, runs: Sequence[ComparedRun]) -> None:
        self.runs = sorted(runs, key=lambda run: run.settings.seed)
        self.settings = self.runs[0].settings
        more = f" and {len(runs) - 1} more seeds" if len(runs) > 2 else " and 1 more seed" * (len(runs) - 1)
        self.label = self.runs[0].name + more
        self.tokens = sum(line.get("tokens", 0) for run in runs for line in run.updates) / len(runs)

    def values(self, source: str, by_seed: bool) -> pd.DataFrame:
        """Returns the metrics of `ALONE` or `LAST_RESPONSE`, with a row per seed or per query of the only run."""
        if not by_seed:
            return self.runs[0].values.get(source, _frame([], []))
        means = {run.settings.seed: run.values[source].mean() for run in self.runs if source in run.values}
        return pd.DataFrame(means, index=list(MAIN_METRICS), dtype=float).T


def group_runs(runs: Sequence[ComparedRun]) -> list[Group]:
    """Groups runs that differ only in the seed, in the order of their first runs."""
    groups: dict[tuple[str, int], list[ComparedRun]] = {}
    repetitions: Counter[str] = Counter()
    for run in runs:
        settings = repr(run.settings.model_dump(exclude=WITHIN_GROUP_SETTINGS))
        with_seed = f"{settings} {run.settings.seed}"
        groups.setdefault((settings, repetitions[with_seed]), []).append(run)  # a seed occurs once in a group
        repetitions[with_seed] += 1
    return [Group(members) for members in groups.values()]


def draw_comparison(groups: Sequence[Group]) -> Figure:
    """Draws the held-out curves of groups: the policies each alone, and the chain's last answer."""
    curves = {
        group.label: Curve(
            Metrics({run.name: metrics_frame(run.updates) for run in group.runs}), kinds=("bare", "last")
        )
        for group in groups
    }
    tasks = ", ".join(dict.fromkeys(group.settings.task for group in groups))
    return draw_curves(tasks, curves, [group.settings for group in groups], {})


def comparison_tables(groups: Sequence[Group]) -> list[Table]:
    """Returns the tables of settings that differ, of held-out metrics, and of differences from the first group."""
    return [_settings_table(groups), _held_out_table(groups), _differences_table(groups)]


def _settings_table(groups: Sequence[Group]) -> Table:
    dumps = [group.settings.model_dump() for group in groups]
    shown = [group.settings.public_dict() for group in groups]
    keys = [key for key in Settings.model_fields if len({repr(dump[key]) for dump in dumps}) > 1]
    if any(len(group.runs) > 1 for group in groups):
        keys = [key for key in keys if key != "seed"]
    if not keys:
        return new_table(["All settings are equal."], [])
    rows = [[key, *(to_cli(values[key]) for values in shown)] for key in keys]
    return new_table(["setting", *(group.label for group in groups)], [], rows)


def _new_metrics_table(left: Sequence[str], right: Sequence[str]) -> Table:
    return new_table(left, [*right, *(metric_format(name).heading for name in MAIN_METRICS)])


def _cells(values: pd.DataFrame, by_seed: bool) -> list[str]:
    estimates = column_cis(values.to_numpy(), "student" if by_seed else "bootstrap")
    return [estimate.format(FINE_PATTERNS[name]) for name, estimate in zip(MAIN_METRICS, estimates, strict=True)]


def _held_out_table(groups: Sequence[Group]) -> Table:
    table = _new_metrics_table(["held out", ""], ["update", "tokens", "n"])
    for group in groups:
        by_seed = len(group.runs) > 1
        first = [group.label, str(group.runs[0].update), f"{group.tokens:,.0f}"]
        for source in (ALONE, *[LAST_RESPONSE] * (group.settings.num_agents > 1)):
            values = group.values(source, by_seed)
            if len(values):
                count = _count(len(values), by_seed, group)
                table.add_row(first[0], source, *first[1:], count, *_cells(values, by_seed))
                first = ["", "", ""]
    return table


def _count(count: int, by_seed: bool, *groups: Group) -> str:
    """Describes what an interval is over; a single evaluation has none."""
    if by_seed:
        return f"{count} seed{'s' * (count != 1)}"
    return f"{count} queries" if all(run.is_tested for group in groups for run in group.runs) else ""


def _differences_table(groups: Sequence[Group]) -> Table:
    base = groups[0]
    table = _new_metrics_table([f"difference from {base.label}", ""], ["n"])
    for group in groups[1:]:
        if any(getattr(group.settings, key) != getattr(base.settings, key) for key in TEST_SETTINGS):
            table.add_row(group.label, "other held-out queries or rewards", "", *["-"] * len(MAIN_METRICS))
            continue
        by_seed = len(group.runs) > 1 or len(base.runs) > 1
        for source in (ALONE, LAST_RESPONSE):
            pairs = (group.values(source, by_seed) - base.values(source, by_seed)).dropna(how="all")
            if not len(pairs):
                continue
            cells = _cells(pairs, by_seed)
            if group.settings.report_kl_coef != base.settings.report_kl_coef:
                cells[MAIN_METRICS.index("combined_reward")] = "other KL weight"
            table.add_row(group.label, source, _count(len(pairs), by_seed, base, group), *cells)
    return table
