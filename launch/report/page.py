"""Puts a report together: its tables, its plots, and the page that holds them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from launch.configuration import as_yaml
from launch.curves import PANELS
from launch.manifest import own_version
from launch.records import Warning
from launch.report import plots
from launch.report.drawing import Plot
from launch.report.runs import UNFINISHED, Arm, Run, arms_of, differing, method
from launch.report.samples import moments_of
from launch.report.series import estimate, final
from launch.results import FIGURES, Estimate
from launch.rows import show
from launch.search_space import show_value

FORMS = {key: form for key, (_, form) in FIGURES.items()}


@dataclass(frozen=True)
class Page:
    """A report that is not yet written."""

    html: str
    plots: list[Plot]


def page(runs: Sequence[Run]) -> Page:
    """Makes the report of runs, at least one of which has metrics."""
    arms = arms_of(runs)
    several = len(arms) > 1
    evaluated = [arm for arm in arms if any(run.held_out for run in arm.runs)]
    overview: list[Plot] = []
    if several:
        overview += plots.comparisons(arms)
    if evaluated:
        overview.append(plots.pareto(evaluated))
    if several and evaluated:
        overview.append(plots.side_by_side(arms))
    sensitivity = plots.sweeps(evaluated)
    curves = [(arm, plots.curves_of(arm, f"curves-{place}")) for place, arm in enumerate(arms, start=1)]
    health = plots.health(arms)
    every = [*overview, *sensitivity, *(plot for _, some in curves for plot in some), *health]
    environment = Environment(
        loader=PackageLoader("launch.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    html = environment.get_template("report.html").render(
        title=_title(arms),
        subtitle=_subtitle(runs),
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        version=own_version(),
        caveats=_caveats(arms),
        arms=[_arm_row(arm) for arm in arms],
        runs=[_run_row(run, arm) for arm in arms for run in arm.runs],
        overview=overview,
        sensitivity=sensitivity,
        curves=curves,
        health=health,
        warnings=[(run.name, _warnings(run)) for run in runs if _warnings(run)],
        evaluations=[(run.name, each, _evaluation_rows(each.rows)) for run in runs for each in run.evaluations],
        samples=[(run, moments_of(run)) for arm in arms for run in arm.runs if run.samples],
        differing=_differing(runs),
        settings=[(run.name, as_yaml(run.settings)) for run in runs],
        environments=[(run.name, run.environment) for run in runs],
    )
    return Page(html, every)


def _title(arms: Sequence[Arm]) -> str:
    if len(arms) > 2:
        return f"{len(arms)} arms"
    methods = list(dict.fromkeys(method(arm.settings) for arm in arms))
    return " and ".join(methods) if len(methods) == len(arms) else f"{len(arms)} arms"


def _subtitle(runs: Sequence[Run]) -> str:
    tasks = ", ".join(dict.fromkeys(run.settings.task for run in runs))
    models = ", ".join(dict.fromkeys(run.settings.model for run in runs))
    return f"Task {tasks} · model {models} · {len(runs)} run{'s' * (len(runs) > 1)}"


def _caveats(arms: Sequence[Arm]) -> list[str]:
    """Returns what a reader should know before comparing."""
    found = []
    if names := [run.name for arm in arms for run in arm.counted if run.state == UNFINISHED]:
        found.append(f"Not finished, so their figures are those so far: {', '.join(names)}.")
    if names := [run.name for arm in arms for run in arm.runs if run not in arm.counted]:
        found.append(f"Not finished, so in the curves alone: {', '.join(names)}.")
    coefs = sorted({arm.settings.report_kl_coef for arm in arms})
    if len(coefs) > 1:
        found.append(
            f"Combined rewards weigh the KL differently here (η = {', '.join(f'{coef:g}' for coef in coefs)}), so they "
            "do not compare: set eval_kl_coef to the same in all runs. Task reward and KL do compare."
        )
    if len({(arm.settings.task, arm.settings.data, arm.settings.reward) for arm in arms}) > 1:
        found.append("The runs are of different tasks, data or rewards: their figures do not compare.")
    if any(len(arm.runs) == 2 for arm in arms):
        found.append("Two seeds give wide intervals, and little certainty; three or more are better.")
    return found


def _arm_row(arm: Arm) -> dict[str, Any]:
    return {
        "label": arm.label,
        "runs": str(len(arm.runs)) if arm.counted == arm.runs else f"{len(arm.counted)} of {len(arm.runs)}",
        "updates": sorted({run.done for run in arm.runs}),
        "collapsed": sum(any(line.get("collapsed") for line in run.updates) for run in arm.runs),
        "figures": [cell(estimate(final(arm, key)), FORMS[key]) for key, *_ in PANELS],
    }


def _run_row(run: Run, arm: Arm) -> dict[str, Any]:
    lines = [line for line in run.updates if "policy" in line]
    seconds = [line["seconds"]["total"] for line in lines if "seconds" in line]
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    best = {
        update: figures["mean"]["combined_reward"]
        for update, figures in run.held_out.items()
        if figures["mean"]["combined_reward"] is not None
    }
    at = max(best, key=lambda update: best[update] or 0.0) if best else None
    return {
        "name": run.name,
        "arm": arm.label,
        "seed": run.settings.seed,
        "updates": f"{run.done} of {run.settings.updates}",
        "state": run.state,
        "combined": show(run.final.get("combined_reward"), FORMS["combined_reward"]),
        "best": "-" if at is None else f"{show(best[at], FORMS['combined_reward'])} (update {at})",
        "seconds": show(estimate(seconds)["mean"], "{:.1f}"),
        "speed": show(estimate(speeds)["mean"], "{:.0f}"),
    }


def cell(found: Estimate, form: str) -> tuple[str, str]:
    """Returns a mean and its interval, as they stand in a table."""
    interval = "" if found["low"] is None else f"{show(found['low'], form)} to {show(found['high'], form)}"
    return show(found["mean"], form), interval


def _warnings(run: Run) -> list[dict[str, Any]]:
    """Returns each warning of a run once, with the updates at which it stood."""
    found: dict[tuple[str, str], list[tuple[int, Warning]]] = {}
    for line in run.updates:
        for warning in line.get("health", []):
            found.setdefault((warning["signature"], warning["of"]), []).append((line["update"], warning))
    return [
        {"signature": signature, "of": of, "first": stood[0][0], "last": stood[-1][0], "text": stood[-1][1]["text"]}
        for (signature, of), stood in found.items()
    ]


def _evaluation_rows(rows: Any) -> dict[str, Any]:
    names = list(next(iter(rows.values()))["figures"]) if rows else []
    return {
        "headings": [FIGURES[name][0] if name in FIGURES else name for name in names],
        "rows": [
            (label, [cell(row["figures"][name], FORMS.get(name, "{:.2f}")) for name in names])
            for label, row in rows.items()
        ],
    }


def _differing(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    return [(key, [show_value(getattr(run.settings, key)) for run in runs]) for key in differing(runs)]
