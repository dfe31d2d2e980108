"""Comparing runs: the settings in which they differ, their held-out metrics, and paired differences with intervals.

Runs that differ only in the seed form one group. Groups are compared over their common seeds if one of them has several
runs, otherwise over the queries that both runs answered. The last answer of a single agent is its only answer.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd
from rich.table import Table

from launch.display.frame import Metrics
from launch.display.plot import Curve, Plot, plot_curves
from launch.display.statistics import column_cis
from launch.display.tables import FINE_PATTERNS, MAIN_METRICS, metric_format, new_table
from launch.run_folder.final import FinalEvaluation, read_final
from launch.run_folder.frame import LAST_RESPONSE, MEAN, metrics_frame
from launch.run_folder.records import EvaluatedResponse, MetricValues, Update, with_shown_kl
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


@dataclass(frozen=True)
class ComparedRun:
    """One run, read once."""

    name: str
    settings: Settings
    updates: list[Update]
    final: FinalEvaluation | None
    """The responses to the test queries after its last update; None if there are none."""

    @classmethod
    def read(cls, run: Run, name: str) -> "ComparedRun":
        """Reads a run."""
        updates, final = run.metrics, read_final(run.final)
        if final is not None and final["update"] != updates[-1]["update"]:
            final = None  # the run continued afterwards
        return cls(name, run.settings, updates, final)

    @property
    def update(self) -> int:
        """The update after which it was evaluated last."""
        return next((line["update"] for line in reversed(self.updates) if self.final or "evaluation" in line), 0)

    @cached_property
    def values(self) -> dict[str, pd.DataFrame]:
        """The last held-out metrics, of the policies each alone and of the chain's last answer.

        A row per test query; without test queries a single row, the last evaluation.
        """
        if self.final is not None:
            policies = [self.final["policy"].get(policy, []) for policy in self.settings.policy_ids]
            groups = {ALONE: policies, LAST_RESPONSE: list(self.final.get("last_response", {}).values())}
            tables = {name: _mean_by_query(group) for name, group in groups.items() if any(group)}
        else:
            lines = [line for line in self.updates if "evaluation" in line]
            figures = {} if not lines else {ALONE: lines[-1]["evaluation"][MEAN]}
            if lines and "last_response" in lines[-1]:
                figures[LAST_RESPONSE] = with_shown_kl(lines[-1]["last_response"])
            tables = {name: _frame([figure]) for name, figure in figures.items()}
        if self.settings.num_agents == 1 and ALONE in tables:
            tables[LAST_RESPONSE] = tables[ALONE]
        return tables


def _frame(rows: Sequence[MetricValues], index: Sequence[int] | None = None) -> pd.DataFrame:
    return pd.DataFrame(rows, index=index, dtype=float).reindex(columns=list(MAIN_METRICS))


def _mean_by_query(groups: Sequence[Sequence[EvaluatedResponse]]) -> pd.DataFrame:
    """Averages the metrics of several policies, or of several orders, over the queries that all of them answered."""
    tables = [
        _frame([with_shown_kl(record["metrics"]) for record in records], [record["query"] for record in records])
        for records in groups
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

    def values(self, name: str, by_seed: bool) -> pd.DataFrame:
        """Returns the metrics of `ALONE` or `LAST_RESPONSE`, with a row per seed or per query of the only run."""
        if not by_seed:
            return self.runs[0].values.get(name, _frame([], []))
        means = {run.settings.seed: run.values[name].mean() for run in self.runs if name in run.values}
        return pd.DataFrame(means, index=list(MAIN_METRICS), dtype=float).T

    @property
    def tokens(self) -> float:
        """The generated tokens of a run, the mean over runs."""
        return sum(line.get("tokens", 0) for run in self.runs for line in run.updates) / len(self.runs)

    @property
    def metrics(self) -> Metrics:
        """The frame of all runs."""
        frames = {run.name: metrics_frame(run.updates) for run in self.runs}
        return Metrics(frames, {run.name: run.settings.seed for run in self.runs})


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


def comparison_plot(groups: Sequence[Group]) -> Plot:
    """Plots the held-out curves of groups: the policies each alone, and the chain's last answer."""
    curves = {group.label: Curve(group.metrics, kinds=("bare", "last")) for group in groups}
    tasks = ", ".join(dict.fromkeys(group.settings.task for group in groups))
    return plot_curves(tasks, curves, [group.settings for group in groups])


def comparison_tables(groups: Sequence[Group]) -> list[Table]:
    """Returns the tables of settings that differ, of held-out metrics, and of differences from the first group."""
    return [_settings_table(groups), _held_out_table(groups), _differences_table(groups)]


def _settings_table(groups: Sequence[Group]) -> Table:
    dumps = [group.settings.model_dump() for group in groups]
    shown = [group.settings.public_dict() for group in groups]
    keys = [
        key
        for key in Settings.model_fields
        if len({repr(dump[key]) for dump in dumps}) > 1
        and (key != "seed" or all(len(group.runs) == 1 for group in groups))
    ]
    if not keys:
        return new_table(["All settings are equal."], [])
    rows = [[key, *(to_cli(values[key]) for values in shown)] for key in keys]
    return new_table(["setting", *(group.label for group in groups)], [], rows)


def _headings() -> list[str]:
    return [metric_format(name).heading for name in MAIN_METRICS]


def _cells(values: pd.DataFrame, by_seed: bool) -> dict[str, str]:
    estimates = column_cis(values.to_numpy(), "student" if by_seed else "bootstrap")
    return {name: estimate.format(FINE_PATTERNS[name]) for name, estimate in zip(MAIN_METRICS, estimates, strict=True)}


def _held_out_table(groups: Sequence[Group]) -> Table:
    table = new_table(["held out", ""], ["update", "tokens", "n", *_headings()])
    for group in groups:
        by_seed = len(group.runs) > 1
        first = [group.label, str(group.runs[0].update), f"{group.tokens:,.0f}"]
        for name in (ALONE, *[LAST_RESPONSE] * (group.settings.num_agents > 1)):
            values = group.values(name, by_seed)
            if len(values):
                cells = _cells(values, by_seed).values()
                table.add_row(first[0], name, *first[1:], _count(len(values), by_seed, group), *cells)
                first = ["", "", ""]
    return table


def _count(count: int, by_seed: bool, *groups: Group) -> str:
    """Describes what an interval is over; a single evaluation has none."""
    if by_seed:
        return f"{count} seed{'s' * (count != 1)}"
    return f"{count} queries" if all(run.final is not None for group in groups for run in group.runs) else ""


def _differences_table(groups: Sequence[Group]) -> Table:
    base = groups[0]
    table = new_table([f"difference from {base.label}", ""], ["n", *_headings()])
    for group in groups[1:]:
        if any(getattr(group.settings, key) != getattr(base.settings, key) for key in TEST_SETTINGS):
            table.add_row(group.label, "other held-out queries or rewards", "", *["-"] * len(MAIN_METRICS))
            continue
        by_seed = len(group.runs) > 1 or len(base.runs) > 1
        for name in (ALONE, LAST_RESPONSE):
            pairs = (group.values(name, by_seed) - base.values(name, by_seed)).dropna(how="all")
            if not len(pairs):
                continue
            cells = _cells(pairs, by_seed)
            if group.settings.report_kl_coef != base.settings.report_kl_coef:
                cells["combined_reward"] = "other KL weight"
            table.add_row(group.label, name, _count(len(pairs), by_seed, base, group), *cells.values())
    return table
