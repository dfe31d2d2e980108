"""Measures against numbers computed by hand."""

import math

from launch.experiments.measures import (
    Measure,
    final_value,
    metrics_of,
    paired_difference,
    run_collapse_signs,
)
from launch.experiments.results import StudyRun
from tests.launch.results_of_studies import policy_metrics, study_run

ONE, TWO = policy_metrics(1.0, 4.0), policy_metrics(2.0, 8.0)


def value(measure: Measure, run: StudyRun) -> float:
    """Returns a measure of one run; NaN if it is missing."""
    return metrics_of([run]).by_seed(measure).get(run.seed, math.nan)


def test_the_value_of_a_run_is_the_mean_over_its_policies() -> None:
    run = study_run("cory", 0, ONE, TWO)
    assert value(final_value("task_reward"), run) == 1.5
    assert math.isnan(value(final_value("kl"), study_run("cory", 0, ONE, TWO, status="diverged")))


def test_runs_are_compared_with_those_of_the_same_seed() -> None:
    cory = [
        study_run("cory", seed, policy_metrics(1.0 + seed, 0.0), policy_metrics(3.0 + seed, 0.0)) for seed in (0, 1, 3)
    ]
    ppo = [study_run("ppo", seed, policy_metrics(float(seed), 0.0)) for seed in (3, 1, 2)]
    first, second, disjoint = (metrics_of(runs).by_seed(final_value("task_reward")) for runs in (cory, ppo, ppo[2:]))
    difference = paired_difference(first, second)
    assert difference is not None
    assert difference.seeds == (1, 3) and difference.values == (2.0, 2.0)
    assert paired_difference(first, disjoint) is None


def test_collapse_of_any_policy_is_detected_by_the_health_limits() -> None:
    assert run_collapse_signs(study_run("cory", 0, ONE, TWO)) == []
    repeating = study_run("cory", 0, ONE, policy_metrics(2.0, 8.0, repetition=0.21))
    assert [(sign.signature, sign.subject) for sign in run_collapse_signs(repeating)] == [("repetition", "llm_2")]
    high_kl = study_run("ppo", 0, policy_metrics(2.0, 20.1))  # 2.01 nats per token, with 10 tokens
    no_eos = study_run("ppo", 1, policy_metrics(2.0, 8.0, eos_rate=0.09))  # 0.2 before training
    assert [sign.signature for run in (high_kl, no_eos) for sign in run_collapse_signs(run)] == ["kl", "eos"]
    diverged = study_run("ppo", 2, ONE, status="diverged")
    healthy = study_run("ppo", 4, policy_metrics(2.0, 19.9, eos_rate=0.11, repetition=0.2))
    assert [bool(run_collapse_signs(run)) for run in (diverged, healthy)] == [True, False]


def test_old_results_without_repetition_show_no_signs_of_collapse() -> None:
    old = study_run("cory", 0, ONE, policy_metrics(2.0, 20.1))
    assert old.final and run_collapse_signs(old)
    for evaluation in (old.final["policy"], *(line["evaluation"] for line in old.metrics if "evaluation" in line)):
        for metrics in evaluation.values():
            metrics.pop("repetition", None)
    assert run_collapse_signs(old) == []
