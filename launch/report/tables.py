"""The tables of a report: measures of each arm, differences between arms, claims, runs, evaluations and settings."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
from typing_extensions import TypedDict

from launch.console.errors import CommandError
from launch.display.tables import MAIN, show, shown, written
from launch.evaluation.intervals import over_seeds
from launch.experiments.measures import (
    Difference,
    area,
    at_end,
    best,
    collapse,
    collapses,
    critic_loss,
    influence,
    last_answer,
    of_average,
    paired,
    variance,
)
from launch.experiments.space import show_value
from launch.report.runs import ArmRuns, Evaluation, Run, differing
from launch.report.series import ends_of, of_arm
from launch.run_folder.records import HealthWarning

COMBINED = shown("combined_reward").pattern


class Cell(NamedTuple):
    """A figure, and in small letters what belongs to it."""

    text: str
    small: str = ""


def cell(values: Sequence[float | None], form: str, runs: int | None = None) -> Cell:
    """Returns a mean over seeds with its interval, and of how many it is where that is not all `runs`."""
    found = over_seeds(values)
    if found is None:
        return Cell("-")
    small = [_interval(found.low, found.high, form), "" if runs in (None, found.n) else f"{found.n} of {runs}"]
    return Cell(form.format(found.mean), ", ".join(part for part in small if part))


def _interval(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None and high is None else f"{show(low, form)}\u00a0… {show(high, form)}"


def arm_rows(arms: Sequence[ArmRuns]) -> list[dict[str, Any]]:
    """Returns the figures of each arm at the end."""
    rows = []
    for arm in arms:
        collapsed = collapses(arm.results)
        of_mean = [of_arm(arm, of_average(key)) for key in MAIN]
        averaged = any(not math.isnan(value) for values in of_mean for value in values)
        spread, count = variance(arm.results, "combined_reward"), len(arm.counted)
        rows.append(
            {
                "label": arm.label,
                "runs": str(len(arm.runs)) if arm.counted == arm.runs else f"{len(arm.counted)} of {len(arm.runs)}",
                "figures": [cell(ends_of(arm, key), shown(key).pattern, count) for key in MAIN],
                "average": [cell(values, shown(key).pattern, count) for key, values in zip(MAIN, of_mean, strict=True)]
                if averaged
                else [],
                "collapsed": collapsed,
                "more": [
                    cell(of_arm(arm, area()), COMBINED, count),
                    cell(of_arm(arm, best("combined_reward")), COMBINED, count),
                    cell(of_arm(arm, last_answer("combined_reward")), COMBINED, count),
                    cell(of_arm(arm, influence), "{:.0%}", count),
                    Cell("-" if spread is None else f"{spread:.2g}"),
                    cell(of_arm(arm, critic_loss), "{:.2f}", count),
                    cell([result.cost["tokens"] / 1e3 for result in arm.results], "{:.0f}"),
                    cell([result.cost["seconds"] / 60 for result in arm.results], "{:.1f}"),
                ],
            }
        )
    return rows


def difference_rows(arms: Sequence[ArmRuns]) -> list[dict[str, Any]]:
    """Returns each arm less those it is compared with, seed by seed; a study says which, else it is the first."""
    rows = []
    by_name = {(arm.runs[0].result.study, arm.runs[0].result.arm): arm for arm in arms if arm.runs[0].result.study}
    for arm in arms:
        result = arm.runs[0].result
        others = [by_name.get((result.study, name)) for name in (result.against or "", *result.also)]
        for other in others if result.study else arms[:1]:
            if other is None or other is arm:
                continue
            found = [paired(arm.results, other.results, at_end(key)) for key in MAIN]
            if any(found):
                rows.append(
                    {
                        "label": arm.label,
                        "against": other.label,
                        "seeds": max(len(each.seeds) for each in found if each),
                        "figures": [_difference(each) for each in found],
                    }
                )
    return rows


def _difference(found: Difference | None) -> Cell:
    if found is None:
        return Cell("-")
    small = [_interval(found.estimate.low, found.estimate.high, "{:+.2f}")]
    small += [f"p\u00a0{found.p:.2g}"] if found.p is not None else []
    small += [f"g\u00a0{found.effect:+z.1f}"] if found.effect is not None else []
    return Cell(f"{found.estimate.mean:+.2f}", ", ".join(part for part in small if part))


class JudgedClaim(TypedDict):
    """What is claimed of a method, and what a study found."""

    text: str
    source: str
    rule: str
    """By which it is judged."""
    found: str
    """The figure, or nothing."""
    small: str
    """What belongs to it in small letters."""
    verdict: str


def read_claims(file: Path) -> list[JudgedClaim]:
    """Reads the claims that `benchmarks.reproduction` judged, or anyone else.

    Raises:
        CommandError: the file cannot be read, or is not a list of such claims.
    """
    try:
        return pydantic.TypeAdapter(list[JudgedClaim]).validate_json(file.read_bytes())
    except (OSError, pydantic.ValidationError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, pydantic.ValidationError) else error.strerror
        raise CommandError(
            f"The claims in {file} cannot be read: {first}. `python -m benchmarks.reproduction STUDY --out {file}` "
            "writes them."
        ) from error


def run_rows(arms: Sequence[ArmRuns]) -> list[dict[str, Any]]:
    """Returns what is known of each run."""
    return [_run_row(run, arm) for arm in arms for run in arm.runs]


def _run_row(run: Run, arm: ArmRuns) -> dict[str, Any]:
    lines = [line for line in run.updates if "policy" in line]
    done = run.updates[-1]["update"] if run.updates else 0
    known = {
        update: value
        for update, figures in run.held_out.items()
        if (value := figures["mean"]["combined_reward"]) is not None
    }
    at = max(known, key=lambda update: known[update]) if known else None
    times = [line["seconds"]["total"] - line["seconds"].get("evaluate", 0.0) for line in lines if "seconds" in line]
    return {
        "name": run.name,
        "arm": arm.label,
        "seed": run.settings.seed,
        "updates": f"{done} of {run.settings.updates}",
        "state": run.state,
        "reason": run.result.reason or "",
        "signs": [sign.text for sign in collapse(run.result)],
        "combined": written("combined_reward", at_end("combined_reward")(run.result)),
        "best": "-" if at is None else f"{written('combined_reward', known[at])} (update {at})",
        "seconds": cell(times, "{:.1f}").text,
    }


def warnings(run: Run) -> list[dict[str, Any]]:
    """Returns each warning of a run once, with the updates at which it stood."""
    found: dict[tuple[str, str], list[tuple[int, HealthWarning]]] = {}
    for line in run.updates:
        for warning in line.get("health", []):
            found.setdefault((warning["signature"], warning["of"]), []).append((line["update"], warning))
    return [
        {"signature": signature, "of": of, "first": stood[0][0], "last": stood[-1][0], "text": stood[-1][1]["text"]}
        for (signature, of), stood in found.items()
    ]


def evaluation_table(evaluation: Evaluation) -> dict[str, Any]:
    """Returns the headings and rows of what `cory evaluate` found."""
    names = list(next(iter(evaluation.figures.values()), {}))
    rows = {
        label: [
            Cell(written(name, found["mean"]), _interval(found["low"], found["high"], shown(name).pattern))
            for name, found in figures.items()
        ]
        for label, figures in evaluation.figures.items()
    }
    return {"headings": [shown(name).heading for name in names], "rows": rows}


def settings_that_differ(arms: Sequence[ArmRuns]) -> list[tuple[str, list[str]]]:
    """Returns each setting in which runs differ, with its values in every arm."""
    keys = differing([run for arm in arms for run in arm.runs])
    return [
        (key, [", ".join(dict.fromkeys(show_value(getattr(run.settings, key)) for run in arm.runs)) for arm in arms])
        for key in keys
    ]


def environments(runs: Sequence[Run]) -> list[tuple[str, dict[str, str]]]:
    """Returns what is known of where runs ran, each with the runs that it holds for."""
    groups: list[tuple[list[str], dict[str, str]]] = []
    for run in runs:
        same = next((names for names, found in groups if found == run.environment), None)
        if same is None:
            groups.append(([run.name], run.environment))
        else:
            same.append(run.name)
    if len(groups) == 1:
        return [("", groups[0][1])]
    return [(", ".join(names), found) for names, found in groups]
