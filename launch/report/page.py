"""Renders a report: its tables and plots, and the HTML page that contains them."""

import time
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from cory_env.pickled import display_name
from launch.console.configuration import settings_to_yaml
from launch.display.plot import Plot
from launch.display.tables import format_metric
from launch.display.texts import algorithm_name, feedback_text, replace_control_chars
from launch.experiments.space import format_setting_value
from launch.report import plots, tables
from launch.report.runs import ReportedArm, ReportedRun, differing_settings, group_arms
from launch.run_folder.manifest import own_version


def render_page(runs: Sequence[ReportedRun]) -> tuple[str, list[Plot]]:
    """Renders the report of runs, at least one of which has metrics.

    Returns:
        The HTML page and its plots.
    """
    arms = group_arms(runs)
    runs_by_arm = [run for arm in arms for run in arm.runs]
    evaluated_arms = [arm for arm in arms if "validation" in arm.metrics.tables]
    overview = plots.pareto_plots(evaluated_arms)
    if len(arms) > 1:
        overview += [*(plots.ablation_plots(evaluated_arms) if evaluated_arms else []), *plots.comparison_plots(arms)]
    curves = [(arm, plots.arm_curves(arm, f"curves-{number}")) for number, arm in enumerate(arms, start=1)]
    health = plots.health_plots(arms)
    environment = Environment(
        loader=PackageLoader("launch.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(
        visible=replace_control_chars,
        reward=lambda value: format_metric("task_reward", value),
        feedback=feedback_text,
    )
    html = environment.get_template("report.html").render(
        title=_title(arms),
        subtitle=_subtitle(runs),
        created=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        version=own_version(),
        caveats=_caveats(arms),
        arms=tables.arm_rows(arms),
        before_and_after=tables.before_and_after(runs),
        differences=tables.difference_rows(arms),
        runs=tables.run_rows(arms),
        overview=overview,
        curves=curves,
        health=health,
        warnings=[(run.name, warnings) for run in runs_by_arm if (warnings := tables.warning_rows(run))],
        samples=[run for run in runs_by_arm if run.result.samples],
        differing=[(key, [_distinct_values(arm, key) for arm in arms]) for key in differing_settings(runs_by_arm)],
        settings=[(arm.label, display_name(settings_to_yaml(arm.settings))) for arm in arms],
        environments=tables.environment_rows(runs_by_arm),
        commands=[(run.name, run.commands) for run in runs_by_arm],
    )
    return html, [*overview, *(plot for _, group in curves for plot in group), *health]


def _distinct_values(arm: ReportedArm, key: str) -> str:
    """Returns the distinct values of a setting in an arm's runs."""
    return ", ".join(dict.fromkeys(format_setting_value(getattr(run.settings, key)) for run in arm.runs))


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
    """Returns warnings about arms that are not comparable or not finished."""
    caveats = []
    runs = [run for arm in arms for run in arm.runs]
    counted = [run for arm in arms for run in arm.counted]
    if names := [run.name for run in counted if run.unfinished]:
        caveats.append(f"Not finished, so results are preliminary: {', '.join(names)}.")
    if names := [run.name for run in runs if run.unfinished and run not in counted]:
        caveats.append(f"Not finished, so shown only in the curves: {', '.join(names)}.")
    coefs = sorted({arm.settings.report_kl_coef for arm in arms})
    if len(coefs) > 1:
        caveats.append(
            f"The combined rewards use different KL weights (η = {', '.join(f'{coef:g}' for coef in coefs)}) and are "
            "not comparable. Set the same eval_kl_coef in all runs. Task reward and KL are comparable."
        )
    if len({(arm.settings.task, arm.settings.data, arm.settings.reward_spec) for arm in arms}) > 1:
        caveats.append("The runs differ in task, data or reward, so their results are not comparable.")
    return caveats
