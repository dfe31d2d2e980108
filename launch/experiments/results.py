"""The results of a study, a small file per run that can be committed: `DIR/results/ARM/seed_N.json`.

Everything that tables and plots need of a run is in its file, so a study may go on on other days and machines.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, cast

from launch.console.configuration import Value
from launch.console.errors import CommandError
from launch.run_folder.environment import Hardware
from launch.run_folder.final import Final, FinalInfluence
from launch.run_folder.journal import atomic_write
from launch.run_folder.records import Evaluation, Figures, SampleLine, Update, mean_over_policies, to_json
from policies.settings.settings import Settings, make_settings, settings_in

Status = Literal["done", "collapsed", "diverged"]
"""`collapsed`: ended by `stop_on_collapse`; `diverged`: ended by a gradient that was not finite. Both are results."""

SIGNIFICANT_DIGITS, SECONDS_DIGITS = 5, 3
"""Significant digits of figures; of seconds."""
NO_MATTER = settings_in("computing", "writing")
"""Settings that may differ between the machines on which a study goes on."""
_POLICY_METRICS = (
    *("task_reward", "kl", "response_length", "eos_rate", "repetition"),
    *("entropy", "clip_fraction", "grad_norm", "value_loss"),
)
"""What is kept of a policy's training, where there is such a figure; the combined reward follows."""
_LINE_KEYS = ("update", "roles", "exchanged", "averaged", "tokens", "evaluation", "last_response", "health")


class Cost(TypedDict):
    """What a run took."""

    tokens: int
    """Response tokens of all agents in training."""
    seconds: float
    """Of all updates, without start, evaluations and checkpoints."""


class FinalFigures(TypedDict):
    """The evaluation after the last update: each policy alone, on the bare held-out queries."""

    update: int
    queries: int
    """0 where it is not known."""
    policy: dict[str, Figures]
    """Means over the queries."""
    mean: Figures
    """Of the policies."""
    last_response: NotRequired[Figures]
    """Of the chain on the same queries, a mean over the orders of its policies; `kl` is to the base on the bare
    query."""
    influence: NotRequired[FinalInfluence]


class StudyRun(NamedTuple):
    """One run of a study."""

    study: str
    arm: str
    label: str
    tier: int
    arm_index: int
    """The arm's number in the study, 0 first."""
    against: str | None
    """The arm that this one is compared with."""
    differs: dict[str, Value]
    """The settings in which it differs from the study's first arm."""
    seed: int
    status: Status
    reason: str | None
    """Why it is not `done`."""
    settings: Settings
    command: str
    versions: dict[str, str]
    hardware: Hardware
    date: str
    """When it ended, ISO 8601, UTC."""
    cost: Cost
    metrics: list[Update]
    """As in `metrics.jsonl`, with fewer keys; line 0 is the held-out evaluation before training."""
    samples: list[SampleLine]
    """Those of `samples.jsonl` to held-out queries, before and after training."""
    final: FinalFigures | None
    """None where the run ended before its last evaluation."""
    also: Sequence[str] = ()
    """More arms that its figures are compared with."""


def result_file(folder: Path, arm: str, seed: int) -> Path:
    """Returns where a run's result belongs."""
    return folder / "results" / arm / f"seed_{seed}.json"


def read(folder: Path) -> list[StudyRun]:
    """Reads all results in a study's folder, ordered by tier, arm and seed.

    Raises:
        CommandError: there are none, or one cannot be read.
    """
    runs = read_available_results(folder)
    if not runs:
        raise CommandError(f"{folder} holds no results of a study. `cory study NAME --out {folder}` makes some.")
    return sorted(runs, key=lambda run: (run.tier, run.arm_index, run.arm, run.seed))


def read_available_results(folder: Path) -> list[StudyRun]:
    """Reads whatever results are in a study's folder, none perhaps, in any order.

    Raises:
        CommandError: one cannot be read.
    """
    return [read_result(file) for file in sorted((folder / "results").glob("*/seed_*.json"))]


def read_result(file: Path) -> StudyRun:
    """Reads the result of one run.

    What the file leaves out because it follows is filled in: combined rewards of training, and the figures of roles.
    What earlier versions kept and this one does not is dropped.

    Raises:
        CommandError: it is damaged, another version wrote it, or it is of another run than its name says.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        entries = {key: entries[key] for key in StudyRun._fields if key in entries}
        run = StudyRun(**{**entries, "settings": make_settings(entries["settings"])})
        _fill_in(run)
        if result_file(Path(), run.arm, run.seed).parts[-2:] != file.parts[-2:]:
            raise ValueError(f"it is of arm {run.arm}, seed {run.seed}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CommandError(
            f"{file} cannot be read as a study's result: {error!r}. Remove it, and `cory study` does that run again."
        ) from error
    return run


def _fill_in(run: StudyRun) -> None:
    for line in run.metrics:
        if "policy" in line:
            for figures in [*line["policy"].values(), *line.get("role", {}).values()]:
                reward, kl = figures["task_reward"], figures["kl"]
                figures["combined_reward"] = (
                    None if reward is None or kl is None else reward - run.settings.report_kl_coef * kl
                )
            if "role" not in line:
                line["role"] = {role: line["policy"][module] for role, module in line["roles"].items()}


def write(file: Path, run: StudyRun) -> None:
    """Writes a result, in one step; a line of the file per update, so that versions of it can be compared.

    Of the metrics it keeps what tables and plots need and what does not follow from the rest.
    """
    entries = {**run._asdict(), "settings": run.settings.model_dump(), "metrics": list(map(_compact_line, run.metrics))}
    lines = []
    for key, value in entries.items():
        rows = [_compact_json(row) for row in value] if key in ("metrics", "samples") else None
        lines.append(f'"{key}": ' + ("[\n  " + ",\n  ".join(rows) + "\n ]" if rows else _compact_json(value)))
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, "{\n " + ",\n ".join(lines) + "\n}\n")


def _compact_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _compact_line(line: Update) -> Update:
    kept: dict[str, Any] = {key: line[key] for key in _LINE_KEYS if key in line}  # type: ignore[literal-required]
    if "seconds" in line:
        kept["seconds"] = round_significant(line["seconds"], SECONDS_DIGITS)
    if line.get("collapsed"):
        kept["collapsed"] = True
    apart = len(line.get("roles", {})) == len(line.get("policy", {}))  # a role's figures are its policy's
    for key in ("policy",) if apart else ("policy", "role"):
        if key in line:
            groups = line["policy"] if key == "policy" else line["role"]
            kept[key] = {
                member: {name: figures[name] for name in _POLICY_METRICS if name in figures}
                for member, figures in groups.items()
            }
    return cast(Update, round_significant(kept))


def final_figures(final: Final, modules: Sequence[str]) -> FinalFigures:
    """Returns what results keep of the last responses of a run with these policies."""
    policy = {module: _means(responses) for module, responses in final["policy"].items()}
    made = FinalFigures(
        update=final["update"],
        queries=max(map(len, final["policy"].values()), default=0),
        policy=policy,
        mean=mean_over_policies([policy.get(module, {}) for module in modules]),
    )
    if "last_response" in final:
        made["last_response"] = mean_over_policies([_means(each) for each in final["last_response"].values()])
    if "influence" in final:
        made["influence"] = final["influence"]
    return cast(FinalFigures, round_significant(made))


def _means(responses: Sequence[Evaluation]) -> Figures:
    """Returns the mean of each figure over those responses that have it."""
    means: Figures = {}
    for name in responses[0]["metrics"]:
        values = [value for response in responses if (value := response["metrics"][name]) is not None]
        means[name] = sum(values) / len(values) if values else None
    return means


def round_significant(value: object, digits: int = SIGNIFICANT_DIGITS) -> object:
    """Returns `value` with all its fractions rounded to so many significant digits; NaN and infinity become None."""
    value = to_json(value)
    if isinstance(value, dict):
        return {key: round_significant(entry, digits) for key, entry in value.items()}
    if isinstance(value, list):
        return [round_significant(entry, digits) for entry in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
