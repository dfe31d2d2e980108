"""Puts a report together: its tables, its plots, and the page that holds them."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from jinja2 import Environment, PackageLoader, StrictUndefined

from cory_env.pickled import shown
from launch.console.configuration import as_yaml
from launch.console.errors import CommandError
from launch.display.curves import method
from launch.display.plot import Plot
from launch.experiments.space import show_value
from launch.report import ends, plots, tables
from launch.report.runs import Arm, Run, arms_of, differing
from launch.report.samples import moments_of
from launch.run_folder.manifest import own_version
from policies.health import CHANCE, LEAST_EOS


@dataclass(frozen=True)
class Page:
    """A report that is not yet written."""

    html: str
    plots: list[Plot]

    def named(self, patterns: Sequence[str]) -> list[Plot]:
        """Returns the plots with these names, in which `*` stands for anything.

        Raises:
            CommandError: there is none for one of them.
        """
        for pattern in patterns:
            if not any(fnmatchcase(plot.name, pattern) for plot in self.plots):
                kinds = dict.fromkeys(re.sub(r"^curves-\d+", "curves-*", plot.name) for plot in self.plots)
                raise CommandError(f"There is no plot `{pattern}`. Name some of: {', '.join(kinds)}.")
        return [plot for plot in self.plots if any(fnmatchcase(plot.name, pattern) for pattern in patterns)]


def page(runs: Sequence[Run], claims: Sequence[tables.JudgedClaim] = ()) -> Page:
    """Makes the report of runs, at least one of which has metrics, and of claims that were judged by them."""
    arms = arms_of(runs)
    evaluated = [arm for arm in arms if "validation" in arm.metrics.tables]
    overview: list[Plot] = []
    if evaluated:
        overview += ends.pareto(evaluated)
    if len(arms) > 1 and evaluated:
        overview += ends.side_by_side(arms)
    over_training = [*plots.comparisons(arms), *plots.costs(arms)] if len(arms) > 1 else []
    sensitivity = plots.sweeps(evaluated)
    curves = [(arm, plots.curves_of(arm, f"curves-{number}")) for number, arm in enumerate(arms, start=1)]
    health = plots.health(arms)
    environment = Environment(
        loader=PackageLoader("launch.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    ordered = [run for arm in arms for run in arm.runs]
    html = environment.get_template("report.html").render(
        title=_title(arms),
        subtitle=_subtitle(runs),
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        version=own_version(),
        caveats=_caveats(arms),
        rule=_rule(arms),
        queries=_queries(arms),
        arms=tables.arm_rows(arms),
        differences=tables.difference_rows(arms),
        claims=claims,
        runs=tables.run_rows(arms),
        overview=overview,
        over_training=over_training,
        sensitivity=sensitivity,
        curves=curves,
        health=health,
        warnings=[(run.name, found) for run in ordered if (found := tables.warnings(run))],
        evaluations=[(run.name, each, tables.evaluation_table(each)) for run in ordered for each in run.evaluations],
        samples=[(run, moments) for run in ordered if (moments := moments_of(run))],
        differing=[(key, [_distinct(arm, key) for arm in arms]) for key in differing(ordered)],
        settings=[(arm.label, shown(as_yaml(arm.settings))) for arm in arms],
        environments=tables.environments(ordered),
        commands=[(run.name, run.commands) for run in ordered],
    )
    return Page(
        html, [*overview, *over_training, *sensitivity, *(plot for _, some in curves for plot in some), *health]
    )


def _distinct(arm: Arm, key: str) -> str:
    """Returns the values of a setting in an arm's runs."""
    return ", ".join(dict.fromkeys(show_value(getattr(run.settings, key)) for run in arm.runs))


def _title(arms: Sequence[Arm]) -> str:
    studies = list(dict.fromkeys(run.result.study for arm in arms for run in arm.runs if run.result.study))
    if studies:
        return f"Study {', '.join(studies)}"
    methods = list(dict.fromkeys(method(arm.settings) for arm in arms))
    return " and ".join(methods) if len(methods) == len(arms) <= 2 else f"{len(arms)} arms"


def _subtitle(runs: Sequence[Run]) -> str:
    tasks = ", ".join(dict.fromkeys(run.settings.task for run in runs))
    models = ", ".join(dict.fromkeys(run.settings.started_from for run in runs))
    return f"Task {tasks} · model {models} · {len(runs)} run{'s' * (len(runs) > 1)}"


def _queries(arms: Sequence[Arm]) -> str:
    """Returns on how many queries the last evaluations are, if on as many in all runs."""
    counts = {last["queries"] for arm in arms for run in arm.counted if (last := run.result.final) is not None}
    return f" ({counts.pop()})" if len(counts) == 1 and 0 not in counts else ""


def _no_influence(arm: Arm) -> bool:
    """Returns whether the influence was measured, and its interval holds 0 in every run."""
    lows = [last["influence"]["low"] for run in arm.counted if (last := run.result.final) and "influence" in last]
    return bool(lows) and all(low is None or low <= 0 for low in lows)


def _rule(arms: Sequence[Arm]) -> str:
    """Returns by what a run counts as collapsed (`study.measures.collapse`)."""

    def limit(key: str, form: str) -> str:
        values = sorted({getattr(arm.settings, key) for arm in arms})
        return f"{' or '.join(form.format(value) for value in values)} ({key})"

    return (
        "A run has collapsed if its gradient was not finite, or any of its policies shows one of three signs then: "
        f"more than {limit('max_repetition', '{:.0%}')} of its token pairs stand earlier in the same response; its "
        f"end-of-sequence rate is less than {limit('min_eos_share', '{:.0%}')} of that before training, if that was "
        f"{LEAST_EOS:.0%} or more, and higher by {CHANCE:g} of its standard errors; its KL "
        f"is more than {limit('max_token_kl', '{:g}')} nats per token."
    )


def _caveats(arms: Sequence[Arm]) -> list[str]:
    """Returns what a reader should know before comparing."""
    found = []
    runs = [run for arm in arms for run in arm.runs]
    counted = [run for arm in arms for run in arm.counted]
    if names := [run.name for run in counted if run.unfinished]:
        found.append(f"Not finished, so their figures are those so far: {', '.join(names)}.")
    if names := [run.name for run in runs if run.unfinished and run not in counted]:
        found.append(f"Not finished, so in the curves alone: {', '.join(names)}.")
    coefs = sorted({arm.settings.report_kl_coef for arm in arms})
    if len(coefs) > 1:
        found.append(
            f"Combined rewards weigh the KL differently here (η = {', '.join(f'{coef:g}' for coef in coefs)}), so they "
            "do not compare: set eval_kl_coef to the same in all runs. Task reward and KL do compare."
        )
    if len({(arm.settings.task, arm.settings.data, arm.settings.whole_reward) for arm in arms}) > 1:
        found.append("The runs are of different tasks, data or rewards: their figures do not compare.")
    if names := [arm.label for arm in arms if len({run.settings.updates for run in arm.counted}) > 1]:
        found.append(f"Trained for different numbers of updates, and compared all the same: {', '.join(names)}.")
    if names := [arm.label for arm in arms if len({run.settings.seed for run in arm.runs}) < len(arm.runs)]:
        found.append(f"Runs with the same seed count as one each, which they are not: {', '.join(names)}.")
    found += [
        f"Agents of {arm.label} are paid for each other's rewards, but in the end what the pioneer writes explains "
        "nothing of the next agent's reward that would show (influence, below). Unless its responses to a query have "
        "all become alike, such a payment can only add noise."
        for arm in arms
        if arm.settings.pays_for_others and _no_influence(arm)
    ]
    if any(sum(value == value for value in arm.at_end("combined_reward")) == 2 for arm in arms):
        found.append("Two seeds say little: the 95 % interval of their mean is 13 standard errors to either side.")
    return found
