"""The results of a study: one small file per run, `DIR/results/ARM/seed_N.json`, which can be committed.

Each file contains everything that tables and plots need, so a study can continue later or on other machines.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, cast

from launch.console.configuration import Value
from launch.console.errors import CommandError
from launch.run_folder.environment import Hardware
from launch.run_folder.final import FinalEvaluation
from launch.run_folder.records import EvaluatedResponse, MetricValues, SampleLine, Update, mean_over_policies, to_json
from policies.files import atomic_write
from policies.settings.migration.removed import recorded_settings
from policies.settings.settings import Settings, settings_in_categories

Status = Literal["done", "diverged"]
"""`diverged`: stopped by a non-finite gradient, which counts as a result, too."""

SIGNIFICANT_DIGITS = 5
MACHINE_SETTINGS = settings_in_categories("computing", "output") | {"max_logprob_diff"}
"""Settings that may differ between runs of an arm: they do not change the results of a run that ends normally."""
_POLICY_METRICS = (
    *("task_reward", "kl", "response_length", "eos_rate", "repetition", "thought_cut_rate"),
    *("entropy", "clip_fraction", "grad_norm", "value_loss"),
)
"""Training metrics to store per policy, if present."""
_LINE_KEYS = (
    *("update", "roles", "exchanged", "averaged", "tokens", "seconds"),
    *("evaluation", "last_response", "health", "collapsed"),
)


class Cost(TypedDict):
    """Cost of a run."""

    tokens: int
    """Number of response tokens that all agents generated in training."""
    seconds: float
    """Of all updates, without startup, evaluations and checkpoints."""


class FinalFigures(TypedDict):
    """Metrics after the last update: each policy alone, on the bare held-out queries."""

    update: int
    queries: int  # 0 if unknown
    policy: dict[str, MetricValues]
    mean: MetricValues
    last_response: NotRequired[MetricValues]
    """Metrics of the chain's last response to the same queries, averaged over the orders of its policies, with
    `bare_kl` and `in_chain_kl` instead of `kl`. If chains can stop, also `chain_tokens`, the tokens that a chain
    generated per query."""


class StudyRun(NamedTuple):
    """The result of one run of a study."""

    study: str
    arm: str
    label: str
    tier: int
    arm_index: int
    differs: dict[str, Value]  # from the first arm
    seed: int
    status: Status
    reason: str | None  # why the status is not `done`
    settings: Settings
    command: str
    versions: dict[str, str]
    hardware: Hardware
    date: str  # end of the run, ISO 8601, UTC
    cost: Cost
    metrics: list[Update]
    """As in `metrics.jsonl`, with fewer keys; entry 0 is the held-out evaluation before training."""
    samples: list[SampleLine]
    """The lines of `samples.jsonl` for held-out queries, before and after training."""
    final: FinalFigures | None
    """None if the run ended before its last evaluation."""


def result_file(folder: Path, arm: str, seed: int) -> Path:
    """Returns the path of a run's result."""
    return folder / "results" / arm / f"seed_{seed}.json"


def read_results(folder: Path) -> list[StudyRun]:
    """Reads all results in a study's folder, ordered by tier, arm and seed."""
    runs = [read_result(file) for file in (folder / "results").glob("*/seed_*.json")]
    if not runs:
        raise CommandError(f"{folder} contains no study results. Create them with `cory study NAME --out {folder}`.")
    return sorted(runs, key=lambda run: (run.tier, run.arm_index, run.arm, run.seed))


def read_result(file: Path) -> StudyRun:
    """Reads the result of one run.

    Metrics per role, which the file omits if each role has one policy, are added. Unknown keys, which older versions
    wrote, are ignored.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        entries = {key: entries[key] for key in StudyRun._fields if key in entries}
        run = StudyRun(**{**entries, "settings": recorded_settings(entries["settings"])})
        for line in run.metrics:
            if "policy" in line and "role" not in line:
                line["role"] = {role: line["policy"][policy_id] for role, policy_id in line["roles"].items()}
        if result_file(Path(), run.arm, run.seed).parts[-2:] != file.parts[-2:]:
            raise ValueError(f"it belongs to arm {run.arm}, seed {run.seed}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CommandError(
            f"{file} is not a valid study result: {error!r}. Remove it to let `cory study` repeat the run."
        ) from error
    return run


def write_result(file: Path, run: StudyRun) -> None:
    """Writes a result atomically, with one line per update so that diffs are readable.

    Metrics that tables and plots do not need, or that can be derived, are omitted.
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


def _compact_line(update: Update) -> object:
    line = cast(dict[str, Any], update)
    compact = {key: line[key] for key in _LINE_KEYS if key in line}
    one_role_each = len(line.get("roles", {})) == len(line.get("policy", {}))  # role metrics equal policy metrics
    for key in ("policy",) if one_role_each else ("policy", "role"):
        if key in line:
            compact[key] = {
                member: {name: figures[name] for name in _POLICY_METRICS if name in figures}
                for member, figures in line[key].items()
            }
    return round_significant(compact)


def final_figures(final: FinalEvaluation, policy_ids: Sequence[str]) -> FinalFigures:
    """Returns the mean metrics of a run's final evaluation."""
    policy = {policy_id: _means(responses) for policy_id, responses in final["policy"].items()}
    figures = FinalFigures(
        update=final["update"],
        queries=max(map(len, (*final["policy"].values(), *final.get("last_response", {}).values())), default=0),
        policy=policy,
        mean=mean_over_policies([policy.get(policy_id, {}) for policy_id in policy_ids]),
    )
    if "last_response" in final:
        figures["last_response"] = mean_over_policies([_means(group) for group in final["last_response"].values()])
    return cast(FinalFigures, round_significant(figures))


def _means(responses: Sequence[EvaluatedResponse]) -> MetricValues:
    """Returns the mean of each metric over the responses that have it."""
    means: MetricValues = {}
    for name in dict.fromkeys(name for response in responses for name in response["metrics"]):
        values = [value for response in responses if (value := response["metrics"].get(name)) is not None]
        means[name] = sum(values) / len(values) if values else None
    return means


def round_significant(value: object) -> object:
    """Rounds all floats in `value`, recursively, to `SIGNIFICANT_DIGITS`; NaN and infinity become None."""
    value = to_json(value)
    if isinstance(value, dict):
        return {key: round_significant(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [round_significant(entry) for entry in value]
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value
