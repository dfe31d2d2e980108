"""Puts a report together: its tables, its plots, and the page that holds them."""

import time
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from cory_env.pickled import display_name
from launch.console.configuration import as_yaml
from launch.display.plot import Plot
from launch.display.tables import format_metric
from launch.display.texts import algorithm_name, visible
from launch.experiments.space import show_value
from launch.report import plots, tables
from launch.report.runs import ReportedArm, ReportedRun, differing_settings, group_arms
from launch.run_folder.manifest import own_version


def render_page(runs: Sequence[ReportedRun]) -> tuple[str, list[Plot]]:
    """Makes the report of runs, at least one of which has metrics.

    Returns:
        The HTML page, and the plots in it.
    """
    arms = group_arms(runs)
    ordered = [run for arm in arms for run in arm.runs]
    evaluated = [arm for arm in arms if "validation" in arm.metrics.tables]
    overview = plots.pareto_plots(evaluated)
    if len(arms) > 1:
        overview += [*(plots.ablation_plots(evaluated) if evaluated else []), *plots.comparison_plots(arms)]
    curves = [(arm, plots.arm_curves(arm, f"curves-{number}")) for number, arm in enumerate(arms, start=1)]
    health = plots.health_plots(arms)
    environment = Environment(
        loader=PackageLoader("launch.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(visible=visible, reward=lambda value: format_metric("task_reward", value))
    html = environment.get_template("report.html").render(
        title=_title(arms),
        subtitle=_subtitle(runs),
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        version=own_version(),
        caveats=_caveats(arms),
        arms=tables.arm_rows(arms),
        differences=tables.difference_rows(arms),
        runs=tables.run_rows(arms),
        overview=overview,
        curves=curves,
        health=health,
        warnings=[(run.name, warnings) for run in ordered if (warnings := tables.warning_rows(run))],
        samples=[run for run in ordered if run.result.samples],
        differing=[(key, [_distinct_values(arm, key) for arm in arms]) for key in differing_settings(ordered)],
        settings=[(arm.label, display_name(as_yaml(arm.settings))) for arm in arms],
        environments=tables.environment_rows(ordered),
        commands=[(run.name, run.commands) for run in ordered],
    )
    return html, [*overview, *(plot for _, group in curves for plot in group), *health]


def _distinct_values(arm: ReportedArm, key: str) -> str:
    """Returns the values of a setting in an arm's runs."""
    return ", ".join(dict.fromkeys(show_value(getattr(run.settings, key)) for run in arm.runs))


def _title(arms: Sequence[ReportedArm]) -> str:
    studies = list(dict.fromkeys(run.result.study for arm in arms for run in arm.runs if run.result.study))
    if studies:
        return f"Study {', '.join(studies)}"
    return algorithm_name(arms[0].settings) if len(arms) == 1 else f"{len(arms)} arms"


def _subtitle(runs: Sequence[ReportedRun]) -> str:
    tasks = ", ".join(dict.fromkeys(run.settings.task for run in runs))
    models = ", ".join(dict.fromkeys(run.settings.model_names for run in runs))
    return f"Task {tasks} · model {models} · {len(runs)} run{'s' * (len(runs) > 1)}"


def _caveats(arms: Sequence[ReportedArm]) -> list[str]:
    """Returns what a reader should know before comparing."""
    caveats = []
    runs = [run for arm in arms for run in arm.runs]
    counted = [run for arm in arms for run in arm.counted]
    if names := [run.name for run in counted if run.unfinished]:
        caveats.append(f"Not finished, so their figures are those so far: {', '.join(names)}.")
    if names := [run.name for run in runs if run.unfinished and run not in counted]:
        caveats.append(f"Not finished, so in the curves alone: {', '.join(names)}.")
    coefs = sorted({arm.settings.report_kl_coef for arm in arms})
    if len(coefs) > 1:
        caveats.append(
            f"Combined rewards weigh the KL differently here (η = {', '.join(f'{coef:g}' for coef in coefs)}), so they "
            "do not compare: set eval_kl_coef to the same in all runs. Task reward and KL do compare."
        )
    if len({(arm.settings.task, arm.settings.data, arm.settings.reward_spec) for arm in arms}) > 1:
        caveats.append("The runs are of different tasks, data or rewards: their figures do not compare.")
    return caveats
