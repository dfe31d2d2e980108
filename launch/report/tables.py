"""The tables of a report: metrics of arms, differences between arms, runs, warnings and environments."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from launch.display.frame import LAST_RESPONSE, MEAN
from launch.display.statistics import Difference, Estimate, column_cis, mean_ci
from launch.display.tables import (
    BARE_KL,
    MAIN_METRICS,
    format_metric,
    format_number,
    held_out_pairs,
    metric_format,
    with_shown_kl,
)
from launch.experiments.measures import (
    Measure,
    count_collapsed,
    final_average_policy_value,
    final_influence,
    final_last_response_value,
    final_value,
    mean_curve_height,
    paired_difference,
    run_collapse_signs,
)
from launch.report.runs import ReportedArm, ReportedRun
from launch.run_folder.records import EvaluatedResponse, HealthWarning, argmax_update

COMBINED_PATTERN = metric_format("combined_reward").pattern


class TableCell(NamedTuple):
    """A table cell: a value, and details in small print."""

    text: str
    small: str = ""


def mean_cell(values: Iterable[float], pattern: str, runs: int | None = None) -> TableCell:
    """Formats a mean over seeds with its interval, and the number of values if it differs from `runs`."""
    mean, low, high, n = mean_ci(values)
    if not n:
        return TableCell("-")
    small = [_format_interval(low, high, pattern), "" if runs in (None, n) else f"{n} of {runs}"]
    return TableCell(pattern.format(mean), ", ".join(part for part in small if part))


def _format_interval(low: float | None, high: float | None, pattern: str) -> str:
    return (
        "" if low is None and high is None else f"{format_number(low, pattern)}\u00a0… {format_number(high, pattern)}"
    )


def arm_rows(arms: Sequence[ReportedArm]) -> list[dict[str, Any]]:
    """Returns the final metrics of each arm."""
    return [_arm_row(arm) for arm in arms]


def _arm_row(arm: ReportedArm) -> dict[str, Any]:
    count = len(arm.counted)

    def cell_of(measure: Measure, pattern: str) -> TableCell:
        return mean_cell(arm.values(measure), pattern, count)

    last = [cell_of(measure, metric_format(key).pattern) for key, measure in _last_answer_measures(arm).items()]
    average = [cell_of(final_average_policy_value(key), metric_format(key).pattern) for key in MAIN_METRICS]
    return {
        "label": arm.label,
        "runs": str(len(arm.runs)) if arm.counted == arm.runs else f"{count} of {len(arm.runs)}",
        "figures": [cell_of(final_value(key), metric_format(key).pattern) for key in MAIN_METRICS],
        "last": last if any(figure.text != "-" for figure in last) else [],
        "average": average if any(figure.text != "-" for figure in average) else [],
        "collapsed": count_collapsed(arm.results),
        "more": [
            cell_of(mean_curve_height, COMBINED_PATTERN),
            cell_of(final_influence, "{:.0%}"),
            mean_cell([result.cost["tokens"] / 1e3 for result in arm.results], "{:.0f}"),
            mean_cell([result.cost["seconds"] / 60 for result in arm.results], "{:.1f}"),
        ],
    }


def _last_answer_measures(arm: ReportedArm) -> dict[str, Measure]:
    """Returns the measures of an arm's last answers by metric; earlier versions named their KL `kl`."""
    measures = {key: final_last_response_value(key) for key in MAIN_METRICS}
    bare_kl = final_last_response_value(BARE_KL)
    return measures if all(map(math.isnan, arm.values(bare_kl))) else {**measures, "kl": bare_kl}


def before_and_after(runs: Sequence[ReportedRun]) -> dict[str, Any] | None:
    """Returns the held-out metrics of a single run before and after training; None for several runs.

    Returns:
        The two updates, and by policy id, `mean` and `last answer` a text per metric.
    """
    evaluations = [line for line in runs[0].updates if "evaluation" in line]
    if len(runs) > 1 or len(evaluations) < 2:
        return None
    first, last = evaluations[0], evaluations[-1]
    rows = {
        name: [f"{format_metric(key, old.get(key))} → {format_metric(key, new.get(key))}" for key in MAIN_METRICS]
        for name, (old, new) in held_out_pairs(first, last).items()
    }
    return {"first": first["update"], "last": last["update"], "rows": rows}


def difference_rows(arms: Sequence[ReportedArm]) -> list[dict[str, Any]]:
    """Returns the paired differences of each arm to its baselines: those its study defines, or else the first arm."""
    rows = []
    by_name = {(arm.result.study, arm.result.arm): arm for arm in arms if arm.result.study}
    for arm in arms:
        result = arm.result
        others = [by_name.get((result.study, name)) for name in (result.against or "", *result.also)]
        for other in others if result.study else arms[:1]:
            if other is None or other is arm:
                continue
            differences = [
                paired_difference(arm.by_seed(final_value(key)), other.by_seed(final_value(key)))
                for key in MAIN_METRICS
            ]
            if any(differences):
                rows.append(
                    {
                        "label": arm.label,
                        "against": other.label,
                        "seeds": max(len(difference.seeds) for difference in differences if difference),
                        "figures": [_difference_cell(difference) for difference in differences],
                    }
                )
    return rows


def _difference_cell(difference: Difference | None) -> TableCell:
    if difference is None:
        return TableCell("-")
    estimate, p, effect = difference.estimate, difference.p, difference.effect
    small = [_format_interval(estimate.low, estimate.high, "{:+.2f}")]
    small += [f"p\u00a0{p:.2g}"] if p is not None else []
    small += [f"g\u00a0{effect:+z.1f}"] if effect is not None else []
    return TableCell(f"{estimate.mean:+.2f}", ", ".join(part for part in small if part))


def final_estimates(run: ReportedRun) -> dict[str, dict[str, Estimate]]:
    """Returns a run's final held-out metrics, of each policy, their mean, and the chain's last response.

    Returns:
        By policy id, `mean` or `last answer`: estimates by metric. Intervals are over queries, and missing if the run
        has no single responses.
    """
    policies = run.settings.policy_ids
    estimates: dict[str, dict[str, Estimate]] = {}
    if run.final_responses is not None:
        responses_by_name = {policy: [responses] for policy, responses in run.final_responses["policy"].items()}
        if all(policy in responses_by_name for policy in policies):
            responses_by_name[MEAN] = [run.final_responses["policy"][policy] for policy in policies]
        responses_by_name[LAST_RESPONSE] = list(run.final_responses.get("last_response", {}).values())
        estimates = {name: _mean_over_queries(responses) for name, responses in responses_by_name.items() if responses}
    elif run.result.final is not None:
        final = run.result.final
        figures = {MEAN: final["mean"], **final["policy"]}
        figures |= {LAST_RESPONSE: with_shown_kl(final["last_response"])} if "last_response" in final else {}
        estimates = {
            name: {metric: _without_interval(values.get(metric)) for metric in MAIN_METRICS}
            for name, values in figures.items()
        }
    if len(policies) == 1:
        estimates.pop(MEAN, None)  # equal to the only policy's
    rank = {MEAN: 0, LAST_RESPONSE: 2}
    return dict(sorted(estimates.items(), key=lambda item: rank.get(item[0], 1)))


def _without_interval(value: float | None) -> Estimate:
    return Estimate(math.nan if value is None else value, None, None, 0)


def _mean_over_queries(groups: Sequence[Sequence[EvaluatedResponse]]) -> dict[str, Estimate]:
    """Averages several groups of responses over the queries that all groups answered, with intervals."""
    tables = [
        pd.DataFrame(
            [with_shown_kl(response["metrics"]) for response in responses],
            index=[response["query"] for response in responses],
            dtype=float,
        )
        for responses in groups
    ]
    joined = pd.concat([table[list(MAIN_METRICS)] for table in tables], axis=1, join="inner", keys=range(len(tables)))
    values = np.mean([joined[index].to_numpy() for index in range(len(tables))], axis=0)
    return dict(zip(MAIN_METRICS, column_cis(values, "bootstrap"), strict=True))


def run_rows(arms: Sequence[ReportedArm]) -> list[dict[str, Any]]:
    """Returns the row of each run."""
    return [_run_row(run, arm) for arm in arms for run in arm.runs]


def _run_row(run: ReportedRun, arm: ReportedArm) -> dict[str, Any]:
    done = run.updates[-1]["update"] if run.updates else 0
    times = [
        line["seconds"]["total"] - line["seconds"].get("evaluate", 0.0) for line in run.updates if "seconds" in line
    ]
    at_best = argmax_update(
        {line["update"]: line["evaluation"][MEAN]["combined_reward"] for line in run.updates if "evaluation" in line}
    )
    final = run.result.final
    return {
        "name": run.name,
        "arm": arm.label,
        "seed": run.settings.seed,
        "updates": f"{done} of {run.settings.num_updates}",
        "state": run.state,
        "reason": run.result.reason or "",
        "signs": [sign.text for sign in run_collapse_signs(run.result)],
        "combined": format_metric("combined_reward", None if final is None else final["mean"].get("combined_reward")),
        "best": "-" if at_best is None else f"{format_metric('combined_reward', at_best[1])} (update {at_best[0]})",
        "seconds": mean_cell(times, "{:.1f}").text,
    }


def warning_rows(run: ReportedRun) -> list[dict[str, Any]]:
    """Returns each distinct warning of a run, with its first and last update."""
    occurrences: dict[tuple[str, str], list[tuple[int, HealthWarning]]] = {}
    for line in run.updates:
        for warning in line.get("health", []):
            occurrences.setdefault((warning["signature"], warning["subject"]), []).append((line["update"], warning))
    return [
        {
            "signature": signature,
            "subject": subject,
            "first": warnings[0][0],
            "last": warnings[-1][0],
            "text": warnings[-1][1]["text"],
        }
        for (signature, subject), warnings in occurrences.items()
    ]


def environment_rows(runs: Sequence[ReportedRun]) -> list[tuple[str, Mapping[str, str]]]:
    """Returns the distinct environments, each with the names of its runs; "" if all runs share one."""
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        groups.setdefault(repr(run.environment), []).append(run)
    names = [", ".join(run.name for run in group) for group in groups.values()] if len(groups) > 1 else [""]
    return [(name, group[0].environment) for name, group in zip(names, groups.values(), strict=True)]
