"""What a report is about: runs, and arms, which are runs that differ in nothing but their seed."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from cory_env.pickled import shown
from launch.console.configuration import Value
from launch.console.errors import CommandError
from launch.experiments import results
from launch.experiments.results import Cost, FinalFigures, StudyRun, final_figures
from launch.experiments.space import show_value
from launch.experiments.study_runs import NO_MATTER
from launch.run_folder import final, status
from launch.run_folder.layout import CONFIG
from launch.run_folder.records import Figures, SampleLine, Update
from launch.run_folder.run import Run as RunFolder
from launch.run_folder.status import divergence
from launch.run_folder.storage import REPORTED, is_uri
from policies.settings.settings import Settings, deciding

MEAN = "mean"
"""The key under which an evaluation holds the mean of its policies."""
LABEL_LENGTH = 48
"""Letters of an arm's name, about, for which plots have room."""
NO_DIFFERENCE = {"seed", "updates", *deciding("writing")}
"""Settings in which the runs of one arm may differ."""


@dataclass(frozen=True)
class Evaluation:
    """What `cory evaluate` found."""

    name: str
    split: str
    figures: dict[str, dict[str, dict[str, float | None]]]
    """By who answered in which role, each figure's mean and the ends of its interval."""


@dataclass(frozen=True)
class Run:
    """One training: a run's folder, or a result of a study."""

    name: str
    result: StudyRun
    """Of a folder, what a study would have kept of it, as far as the folder says."""
    commands: list[str]
    """What it was made by, the latest last."""
    environment: dict[str, str]
    """What is known of where it ran."""
    unfinished: bool = False
    evaluations: list[Evaluation] = field(default_factory=list)
    last_look: final.Final | None = None
    """Every response after its last update, if its folder keeps them."""

    @property
    def settings(self) -> Settings:
        """Every setting."""
        return self.result.settings

    @property
    def updates(self) -> list[Update]:
        """The lines of its metrics."""
        return self.result.metrics

    @property
    def state(self) -> str:
        """How it stands."""
        if self.unfinished:
            return "unfinished"
        return {"collapsed": "ended by a collapse"}.get(self.result.status, self.result.status)

    @property
    def held_out(self) -> dict[int, dict[str, Figures]]:
        """The held-out evaluations, by update."""
        return {line["update"]: line["evaluation"] for line in self.updates if "evaluation" in line}


@dataclass(frozen=True)
class ArmRuns:
    """Runs whose settings are the same but for the seed."""

    label: str
    runs: list[Run]

    @property
    def settings(self) -> Settings:
        """Of the first run."""
        return self.runs[0].settings

    @property
    def counted(self) -> list[Run]:
        """The runs whose last figures are compared: those that ended, or all as long as none has."""
        return [run for run in self.runs if not run.unfinished and run.result.status != "failed"] or self.runs

    @property
    def results(self) -> list[StudyRun]:
        """What measures are functions of: the results of the runs that count."""
        return [run.result for run in self.counted]


def read(addresses: Sequence[str | Path]) -> list[Run]:
    """Reads runs' folders, or URIs, and studies' folders.

    Raises:
        CommandError: an address is neither's, or a file there is damaged.
        StorageError: storage cannot be read.
    """
    runs = []
    for address, name in zip(addresses, names(addresses), strict=True):
        folder = Path(address)
        if not is_uri(str(address)) and (folder / "results").is_dir() and not RunFolder(folder).exists():
            prefix = f"{name}/" if len(addresses) > 1 else ""
            runs += [_of_study(result, prefix) for result in results.read(folder)]
        else:
            runs.append(read_run(address, name))
    return runs


def _of_study(result: StudyRun, prefix: str) -> Run:
    hardware = {key.replace("_", " "): str(value) for key, value in result.hardware.items()}
    return Run(f"{prefix}{result.arm}/{result.seed}", result, [result.command], {**hardware, **result.versions})


def read_run(address: str | Path, name: str) -> Run:
    """Reads a run's folder.

    Args:
        address: of a run, finished or not; a folder or a URI.
        name: what the report calls it.

    Raises:
        CommandError: there is no run, or a file of it is damaged.
        StorageError: storage cannot be read.
    """
    run = status.read_run(address, REPORTED)
    folder = run.path
    settings, updates = run.settings(), run.updates()
    done = updates[-1]["update"] if updates else 0
    collapsed = settings.stop_on_collapse and any(line.get("collapsed") for line in updates[-1:])
    diverged = divergence(run)
    lines = (folder / CONFIG).read_text(encoding="utf-8").splitlines()
    origins = [shown(line).removeprefix("# ").partition("  # ") for line in lines if line.startswith("# ")]
    commands = [(command, comment) for command, _, comment in origins]
    seconds = sum(line.get("seconds", {}).get("total", 0.0) for line in updates)
    last_look = _last_look(run, updates)
    tokens = sum(int(cast(dict[str, int], line).get("tokens", 0)) for line in updates)
    result = StudyRun(
        study="",
        arm="",
        label="",
        tier=1,
        place=0,
        against=None,
        differs={},
        seed=settings.seed,
        status="diverged" if diverged else "collapsed" if collapsed else "done",
        reason=diverged,
        settings=settings,
        command=commands[-1][0] if commands else "",
        versions={},
        hardware={"cpu": "", "cores": 0, "memory_gib": 0.0, "bf16": False, "gpu": None},
        date="",
        cost=Cost(tokens=tokens, seconds=seconds, wall_seconds=0.0, resumed=False),
        metrics=updates,
        samples=cast(list[SampleLine], run.samples.read()),
        final=None if diverged else _final_figures(settings, updates, last_look),
    )
    return Run(
        name=name,
        result=result,
        commands=[command for command, _ in commands],
        environment={"made with": commands[-1][1]} if commands and commands[-1][1] else {},
        unfinished=not collapsed and diverged is None and done < settings.updates,
        evaluations=[_read_evaluation(file) for file in sorted(folder.glob("evaluation/*/evaluation.json"))],
        last_look=None if diverged else last_look,
    )


def _last_look(run: RunFolder, updates: Sequence[Update]) -> final.Final | None:
    kept = final.read(run.final)
    return kept if kept and updates and kept["update"] == updates[-1]["update"] else None  # else the run went on


def _final_figures(settings: Settings, updates: Sequence[Update], kept: final.Final | None) -> FinalFigures | None:
    """Returns the last look at a run's policies, or else its last held-out evaluation."""
    if kept is not None:
        return final_figures(kept, settings.modules)
    evaluated = [line for line in updates if "evaluation" in line]
    if not evaluated:
        return None
    policy = {name: figures for name, figures in evaluated[-1]["evaluation"].items() if name != MEAN}
    last = evaluated[-1]
    found = FinalFigures(
        update=last["update"],
        queries=0,  # as many as `eval_queries`, or all if there are fewer: that is not written down
        policy=policy,
        mean=last["evaluation"][MEAN],
        responses={},
        texts={},
    )
    if "last_answer" in last:
        found["last_answer"] = last["last_answer"]
    return found


def _read_evaluation(file: Path) -> Evaluation:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        figures = {label: standing["figures"] for label, standing in found["rows"].items()}
        return Evaluation(file.parent.name, found["split"], figures)
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{file} is not what `cory evaluate` wrote there. Evaluate again, or remove it.") from error


def names(addresses: Sequence[str | Path]) -> list[str]:
    """Returns a name per folder or URI, as short as tells them apart: the last parts of its path."""
    parts = [tuple(resolved(address).partition("?")[0].rstrip("/").split("/")) for address in addresses]
    for size in range(1, max(map(len, parts)) + 1):
        found = ["/".join(each[-size:]) for each in parts]
        if len(set(found)) == len(set(parts)):
            break
    return found


def resolved(address: str | Path) -> str:
    """Returns a URI, or the absolute path of a folder."""
    return str(address) if is_uri(str(address)) else Path(address).resolve().as_posix()


def differing(runs: Sequence[Run]) -> list[str]:
    """Returns the settings in which runs differ."""
    dumps = [run.settings.model_dump() for run in runs]
    return [key for key in Settings.model_fields if len({repr(each[key]) for each in dumps}) > 1]


def arms_of(runs: Sequence[Run]) -> list[ArmRuns]:
    """Returns the arms of studies, then those of other runs, each named by what sets it apart.

    Raises:
        CommandError: runs of one arm of a study, from several folders, cannot be compared.
    """
    studies: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.result.study:
            studies.setdefault((run.result.study, run.result.arm), []).append(run)
    for some in studies.values():
        _refuse_mixed(some)
    several = len({study for study, _ in studies}) > 1
    arms = [
        ArmRuns(f"{study}: {some[0].result.label}" if several else some[0].result.label, some)
        for (study, _), some in studies.items()
    ]
    arms += _arms_of_folders([run for run in runs if not run.result.study])
    labels: set[str] = set()
    for number, arm in enumerate(arms):  # plots know arms by their labels
        if arm.label in labels:
            arms[number] = ArmRuns(f"{arm.label} ({arm.runs[0].name})", arm.runs)
        labels.add(arms[number].label)
    return arms


def _refuse_mixed(arm: Sequence[Run]) -> None:
    """Checks that an arm's runs, which may be of several folders, differ in their seeds and in nothing that matters."""
    seeds: dict[int, Run] = {}
    for run in arm:
        other = seeds.setdefault(run.result.seed, run)
        if other is not run:
            raise CommandError(f"{other.name} and {run.name} are of one arm and seed. Name one of their studies alone.")
        changed = [key for key in differing([arm[0], run]) if key not in {"seed", *NO_MATTER}]
        if changed:
            raise CommandError(
                f"{arm[0].name} and {run.name} are of one arm, but differ in {', '.join(changed)}. Name one of their "
                "studies alone."
            )


def _arms_of_folders(runs: Sequence[Run]) -> list[ArmRuns]:
    """Groups runs that differ in nothing but their seed."""
    keys = [key for key in differing(runs) if key not in NO_DIFFERENCE]
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(repr(getattr(run.settings, key)) for key in keys), []).append(run)
    usual = {key: Counter(group[number] for group in groups).most_common(1)[0][0] for number, key in enumerate(keys)}
    others = [key for key in keys if key != "num_agents"]
    arms = []
    for some in groups.values():
        settings = some[0].settings
        apart = {key: getattr(settings, key) for key in others}
        if len(others) > 1:
            apart = {key: value for key, value in apart.items() if repr(value) != usual[key]}
        label = [method(settings)] if "num_agents" in keys or not apart else []
        label += [f"{key}={_short(value)}" for key, value in apart.items()]
        arms.append(ArmRuns(_joined(label), sorted(some, key=lambda run: run.settings.seed)))
    return arms


def method(settings: Settings) -> str:
    """Returns what a run's algorithm is called."""
    if settings.num_agents == 1:
        return f"{settings.algorithm}{f' by {len(settings.modules)} LLMs' * (len(settings.modules) > 1)}"
    agents = "" if settings.num_agents == 2 else f" of {settings.num_agents}"
    if len(settings.modules) != settings.num_agents:
        agents += f" by {len(settings.modules)} LLM{'s' * (len(settings.modules) > 1)}"
    learner = "" if settings.algorithm == "PPO" else f" with {settings.algorithm}"
    return f"CORY{agents}{learner}"


def _joined(parts: Sequence[str]) -> str:
    """Joins what sets an arm apart, as far as plots have room for it; the table of settings has all."""
    kept = next((n for n in range(len(parts), 1, -1) if len(", ".join(parts[:n])) <= LABEL_LENGTH), 1)
    return ", ".join([*parts[:kept], *([f"{len(parts) - kept} more"] if kept < len(parts) else [])])


def _short(value: Value) -> str:
    text = show_value(value)
    return text if len(text) <= 30 else f"{text[:29]}…"
