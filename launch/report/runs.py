"""The contents of a report: runs, grouped into arms of runs that differ only in their seed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any, cast

import pandas as pd

from cory_env.pickled import display_name
from launch.console.configuration import Value
from launch.display.frame import MEAN
from launch.display.texts import algorithm_name
from launch.experiments import results
from launch.experiments.measures import Measure, StudyMetrics, final_value
from launch.experiments.results import MACHINE_SETTINGS, Cost, FinalFigures, StudyRun, final_figures
from launch.experiments.space import format_setting_value
from launch.run_folder import final, status
from launch.run_folder.layout import CONFIG
from launch.run_folder.records import SampleLine, Update
from launch.run_folder.run import Run as RunFolder
from launch.run_folder.status import divergence
from launch.run_folder.storage import REPORT_FILES, is_uri
from policies.settings.settings import Settings, settings_in_categories

LABEL_LENGTH = 48
"""Maximum characters of an arm's label in plots; the table of settings shows everything."""
_NO_STUDY_FIELDS: dict[str, Any] = {
    **{"study": "", "arm": "", "label": "", "tier": 1, "arm_index": 0, "against": None, "differs": {}},
    **{"command": "", "versions": {}, "hardware": {}, "date": ""},
}
WITHIN_ARM_SETTINGS = {"seed", "num_updates", *settings_in_categories("output")}
"""Settings that may differ between the runs of one arm."""


@dataclass(frozen=True)
class ReportedRun:
    """One training: a run's folder, or a result of a study."""

    name: str
    result: StudyRun
    """The result as a study records it; for a run's folder, as far as the folder contains it."""
    commands: list[str]
    """The commands that created and resumed it, the latest last."""
    environment: dict[str, str]
    """Known facts about hardware and software."""
    unfinished: bool = False
    final_responses: final.FinalEvaluation | None = None
    """All responses to held-out queries after the last update, if its folder has them."""

    @property
    def settings(self) -> Settings:
        """All settings."""
        return self.result.settings

    @property
    def updates(self) -> list[Update]:
        """The lines of `metrics.jsonl`."""
        return self.result.metrics

    @property
    def state(self) -> str:
        """The state to display."""
        if self.unfinished:
            return "unfinished"
        return {"collapsed": "ended by a collapse"}.get(self.result.status, self.result.status)


@dataclass(frozen=True, eq=False)
class ReportedArm:
    """Runs whose settings differ only in the seed."""

    label: str
    runs: list[ReportedRun]

    @property
    def settings(self) -> Settings:
        """The settings of the first run."""
        return self.runs[0].settings

    @property
    def result(self) -> StudyRun:
        """The result of the first run, with the arm's study and tier."""
        return self.runs[0].result

    @cached_property
    def counted(self) -> list[ReportedRun]:
        """The runs whose final results are compared: the finished ones, or all if none is finished."""
        return [run for run in self.runs if not run.unfinished] or self.runs

    @property
    def results(self) -> list[StudyRun]:
        """The results of the counted runs."""
        return [run.result for run in self.counted]

    @cached_property
    def metrics(self) -> StudyMetrics:
        """The metrics of all runs."""
        return StudyMetrics({run.name: run.result for run in self.runs})

    @cached_property
    def counted_metrics(self) -> StudyMetrics:
        """The metrics of the counted runs."""
        if self.counted == self.runs:
            return self.metrics
        return StudyMetrics({run.name: run.result for run in self.counted})

    def values(self, measure: Measure) -> list[float]:
        """Returns a measure of each counted run; NaN if it has none."""
        return measure(self.counted_metrics).reindex([run.name for run in self.counted]).tolist()

    def by_seed(self, measure: Measure) -> "pd.Series[float]":
        """Returns a measure by seed, of the counted runs that have it."""
        return self.counted_metrics.by_seed(measure)

    def at_end(self, metric: str) -> list[float]:
        """Returns a metric of each counted run after training, the mean of its policies."""
        return self.values(final_value(metric))

    @property
    def is_evaluated(self) -> bool:
        """Whether any run was evaluated after update 0."""
        validation = self.metrics.tables.get("validation")
        return validation is not None and bool((validation.index.get_level_values("update") > 0).any())


def read_runs(addresses: Sequence[str | Path]) -> list[ReportedRun]:
    """Reads runs and studies; duplicates are read once.

    Args:
        addresses: Folders or URIs of runs, and folders of studies.

    Raises:
        CommandError: An address is neither a run nor a study, or a file in it is damaged.
        StorageError: Storage cannot be read.
    """
    addresses = list({resolve_address(address): address for address in reversed(addresses)}.values())[::-1]
    runs = []
    for address, name in zip(addresses, short_run_names(addresses), strict=True):
        folder = Path(address)
        if not is_uri(str(address)) and (folder / "results").is_dir() and not RunFolder(folder).exists():
            prefix = f"{name}/" if len(addresses) > 1 else ""
            runs += [_study_result(result, prefix) for result in results.read_results(folder)]
        else:
            runs.append(read_reported_run(address, name))
    return runs


def _study_result(result: StudyRun, prefix: str) -> ReportedRun:
    hardware = {key.replace("_", " "): str(value) for key, value in result.hardware.items()}
    return ReportedRun(f"{prefix}{result.arm}/{result.seed}", result, [result.command], {**hardware, **result.versions})


def read_reported_run(address: str | Path, name: str) -> ReportedRun:
    """Reads a run.

    Args:
        address: The folder or URI of a run, finished or not.
        name: The run's name in the report.

    Raises:
        CommandError: There is no run, or one of its files is damaged.
        StorageError: Storage cannot be read.
    """
    run = status.read_run(address, REPORT_FILES)
    folder = run.path
    settings, updates = run.settings(), run.updates()
    done = updates[-1]["update"] if updates else 0
    collapsed = settings.stop_on_collapse and any(line.get("collapsed") for line in updates[-1:])
    diverged = divergence(run)
    lines = (folder / CONFIG).read_text(encoding="utf-8").splitlines()
    origins = [display_name(line).removeprefix("# ").partition("  # ") for line in lines if line.startswith("# ")]
    machine = origins[-1][2] if origins else ""
    responses = None if diverged else _final_responses(run, updates)
    seconds = [line.get("seconds", {}) for line in updates]
    result = StudyRun(
        **_NO_STUDY_FIELDS,
        seed=settings.seed,
        status="diverged" if diverged else "collapsed" if collapsed else "done",
        reason=diverged,
        settings=settings,
        cost=Cost(
            tokens=sum(line.get("tokens", 0) for line in updates),
            seconds=sum(times.get("total", 0.0) - times.get("evaluate", 0.0) for times in seconds),
        ),
        metrics=updates,
        samples=cast(list[SampleLine], run.samples.read()),
        final=None if diverged else _final_figures(settings, updates, responses),
    )
    return ReportedRun(
        name=name,
        result=result,
        commands=[command for command, _, _ in origins],
        environment={"software and hardware": machine} if machine else {},
        unfinished=not collapsed and diverged is None and done < settings.num_updates,
        final_responses=responses,
    )


def _final_responses(run: RunFolder, updates: Sequence[Update]) -> final.FinalEvaluation | None:
    responses = final.read_final(run.final)
    if responses is None or not updates or responses["update"] != updates[-1]["update"]:
        return None  # the run continued afterwards
    return responses


def _final_figures(
    settings: Settings, updates: Sequence[Update], responses: final.FinalEvaluation | None
) -> FinalFigures | None:
    """Returns the metrics of a run's final responses or, without them, of its last held-out evaluation."""
    if responses is not None:
        return final_figures(responses, settings.policy_ids)
    for line in reversed(updates):
        if "evaluation" in line:
            policy = dict(line["evaluation"])
            figures = FinalFigures(
                update=line["update"],
                queries=0,  # unknown: `eval_queries`, or all if there are fewer
                mean=policy.pop(MEAN),
                policy=policy,
            )
            if "last_response" in line:
                figures["last_response"] = line["last_response"]
            return figures
    return None


def short_run_names(addresses: Sequence[str | Path]) -> list[str]:
    """Returns a name per folder or URI: the last parts of its path, as few as make the names distinct."""
    parts = [tuple(resolve_address(address).partition("?")[0].rstrip("/").split("/")) for address in addresses]
    for size in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-size:]) for path in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def resolve_address(address: str | Path) -> str:
    """Returns a URI, or the absolute path of a folder."""
    return str(address) if is_uri(str(address)) else Path(address).resolve().as_posix()


def differing_settings(runs: Sequence[ReportedRun]) -> list[str]:
    """Returns the names of the settings in which runs differ."""
    dumps = [run.settings.model_dump() for run in runs]
    return [key for key in Settings.model_fields if len({repr(settings[key]) for settings in dumps}) > 1]


def differing_values(runs: Sequence[ReportedRun]) -> dict[str, list[Value]]:
    """Returns each setting in which runs differ, with the value of each run."""
    all_settings = [run.settings.public_dict() for run in runs]
    return {key: [settings[key] for settings in all_settings] for key in differing_settings(runs)}


def group_arms(runs: Sequence[ReportedRun]) -> list[ReportedArm]:
    """Groups runs into arms: first those of studies, then those of other runs, labelled by their differences.

    Runs of the same study arm that come from different folders and differ in their settings become separate arms.
    """
    studies: dict[tuple[str, str, str], list[ReportedRun]] = {}
    for run in runs:
        if run.result.study:
            settings = run.settings.model_dump(exclude={"seed", *MACHINE_SETTINGS})
            studies.setdefault((run.result.study, run.result.arm, repr(settings)), []).append(run)
    several_studies = len({study for study, *_ in studies}) > 1
    arms = [
        ReportedArm(f"{study}: {group[0].result.label}" if several_studies else group[0].result.label, group)
        for (study, *_), group in studies.items()
    ]
    arms += _group_folder_runs([run for run in runs if not run.result.study])
    labels: set[str] = set()
    for index, arm in enumerate(arms):  # plots identify arms by their labels
        if arm.label in labels:
            arms[index] = ReportedArm(f"{arm.label} ({arm.runs[0].name})", arm.runs)
        labels.add(arms[index].label)
    return arms


def _group_folder_runs(runs: Sequence[ReportedRun]) -> list[ReportedArm]:
    """Groups runs that differ only in their seed; an arm is labelled by its settings that few other arms share."""
    keys = [key for key in differing_settings(runs) if key not in WITHIN_ARM_SETTINGS]
    groups: dict[tuple[str, ...], list[ReportedRun]] = {}
    for run in runs:
        groups.setdefault(tuple(repr(getattr(run.settings, key)) for key in keys), []).append(run)
    common_values = [Counter(values).most_common(1)[0][0] for values in zip(*groups, strict=True)]
    arms = []
    for values, group in groups.items():
        differences = [
            f"{key}={format_setting_value(getattr(group[0].settings, key))}"
            for key, value, common_value in zip(keys, values, common_values, strict=True)
            if key != "num_agents" and (value != common_value or len(keys) == 1)
        ]
        names = [algorithm_name(group[0].settings)] if "num_agents" in keys or not differences else []
        label = shorten(", ".join([*names, *differences]), LABEL_LENGTH, placeholder=" …")
        arms.append(ReportedArm(label, sorted(group, key=lambda run: run.settings.seed)))
    return arms
