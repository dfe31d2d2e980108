"""Study results with given metrics, for tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.console.configuration import read_preset
from launch.experiments.results import Cost, FinalFigures, Status, StudyRun, result_file, write_result
from tests.paper import make_settings

HARDWARE: Any = {"cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "gpu": None}
START = {"task_reward": 0.0, "kl": 0.0, "combined_reward": 0.0, "response_length": 12.0, "eos_rate": 0.2}


def policy_metrics(task_reward: float, kl: float, **others: float) -> dict[str, float | None]:
    """Returns the metrics of a policy; η is 0.1."""
    defaults = {"response_length": 10.0, "eos_rate": 0.2, "repetition": 0.0, **others}
    return {"task_reward": task_reward, "kl": kl, "combined_reward": task_reward - 0.1 * kl, **defaults}


def study_run(
    arm: str,
    seed: int,
    *policies: dict[str, float | None],
    curve: Sequence[float] = (0.0, 1.0, 1.0),
    training: Sequence[float] = (),
    status: Status = "done",
    arm_index: int = 0,
    study: str = "imdb",
    **differs: Any,
) -> StudyRun:
    """Returns the result of a run.

    Args:
        arm: name of the arm.
        seed: of the run.
        policies: final metrics of each policy.
        curve: held-out combined and task reward of all policies, every 5 updates.
        training: task reward of all policies in each update.
        status: of the run.
        arm_index: of the arm.
        study: name of the study.
        differs: settings that differ from the preset imdb-tiny-paper.
    """
    updates = 5 * (len(curve) - 1)
    settings = make_settings(
        {**read_preset("imdb-tiny-paper"), "seed": seed, "num_updates": updates, "num_agents": len(policies), **differs}
    )
    policy_ids = settings.policy_ids
    metrics: list[Any] = [
        {
            "update": 1 + index,
            "roles": dict(zip(settings.agents, policy_ids, strict=True)),
            "policy": {policy_id: {"task_reward": value, "kl": 0.0} for policy_id in policy_ids},
        }
        for index, value in enumerate(training)
    ]
    for index, value in enumerate(curve):
        held_out = {**START, "repetition": 0.0, "task_reward": value, "combined_reward": value}
        metrics.append({"update": 5 * index, "evaluation": dict.fromkeys((*policy_ids, "mean"), held_out)})
    by_policy = dict(zip(policy_ids, policies, strict=True))
    mean = {name: sum(p[name] or 0.0 for p in policies) / len(policies) for name in policies[0]}
    final = FinalFigures(update=updates, queries=500, policy=by_policy, mean=dict(mean))
    return StudyRun(
        study=study,
        arm=arm,
        label=arm,
        tier=1,
        arm_index=arm_index,
        differs={**differs, **({} if len(policies) == 2 else {"num_agents": len(policies)})},
        seed=seed,
        status=status,
        reason=None,
        settings=settings,
        command="cory train",
        versions={},
        hardware=HARDWARE,
        date="2026-01-01T00:00:00+00:00",
        cost=Cost(tokens=100, seconds=10.0),
        metrics=metrics,
        samples=[],
        final=None if status in ("diverged", "failed") else final,
    )


def write_runs(folder: Path, *runs: StudyRun) -> None:
    for run in runs:
        write_result(result_file(folder, run.arm, run.seed), run)
