"""Chains that stop when the feedback has nothing to correct: metrics, groups, updates, resuming and runners."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policies.cory import Cory
from policies.evaluator import last_response_metrics
from policies.learning.estimation import AdvantageEstimator
from policies.learning.rows import frozen_scores
from policies.rllib.token_batch import rows_from_episodes
from policies.rollout.prompt_sampling import PromptRef
from tests.paper import paper_hyperparameters
from tests.policies.conftest import BUNDLED, MakeCory
from tests.policies.test_cory import assert_same_learner, learner_state

FEEDBACK = "tests.policies.sample_rewards:long_enough"
STOPPING: dict[str, Any] = {**BUNDLED, "feedback": FEEDBACK, "stop_when": "solved", "stop_in_training": True}
HIDDEN: dict[str, Any] = {**STOPPING, "observer_prompt": "{query} {reference} {query}"}
"""Feedback that only stops chains, so that the prompts equal those of a chain without feedback."""
PROMPT_REFS = [PromptRef(query) for query in range(12)]


def test_the_metrics_of_the_last_response_are_those_of_the_last_position_that_responded() -> None:
    nan = math.nan
    by_position = [
        {"task_reward": np.array([1.0, 2.0, 3.0]), "kl": np.array([0.1, 0.2, 0.3])},
        {"task_reward": np.array([nan, 4.0, 5.0]), "kl": np.array([nan, 1.0, 1.1])},
        {"task_reward": np.array([nan, nan, 6.0]), "kl": np.array([nan, nan, 2.0])},
    ]
    for metrics, bare_kl in zip(by_position, ([0.15, nan, nan], [nan, 3.0, nan], [nan, nan, 4.0]), strict=True):
        metrics["response_length"] = metrics["task_reward"] * 10
        metrics["bare_kl"] = np.array(bare_kl)
        metrics["combined_reward"] = metrics["task_reward"] - np.where(metrics is by_position[0], 0.1, bare_kl)
    last = last_response_metrics(by_position, 1.0)
    assert {name: values.tolist() for name, values in last.items()} == {
        "task_reward": [1.0, 4.0, 6.0],
        "response_length": [10.0, 40.0, 60.0],
        "in_chain_kl": [0.1, 1.0, 2.0],
        "bare_kl": [0.15, 3.0, 4.0],
        "combined_reward": [0.85, 1.0, 2.0],
    }


def test_metrics_of_stopped_chains_equal_those_of_whole_chains_up_to_the_stop(make_cory: MakeCory) -> None:
    whole_chains = make_cory(**BUNDLED, num_policies=1, eval_queries=12, observer_prompt=HIDDEN["observer_prompt"])
    stopping_chains = make_cory(num_policies=1, eval_queries=12, **HIDDEN)
    _, whole = whole_chains.evaluator.measure(PROMPT_REFS, whole_chains.mapping, "test")
    rollout, metrics = stopping_chains.evaluator.measure(PROMPT_REFS, stopping_chains.mapping, "test")
    stopped = np.array([sample["responses"][0]["feedback"] is None for sample in rollout.samples])
    assert 2 < stopped.sum() < 10
    del whole["pioneer"]["bare_kl"]
    for name, values in whole["pioneer"].items():
        np.testing.assert_allclose(metrics["pioneer"][name], values, atol=1e-5)
    for name, values in whole["observer"].items():
        assert np.isnan(metrics["observer"][name][stopped]).all()
        np.testing.assert_allclose(metrics["observer"][name][~stopped], values[~stopped], atol=1e-5)
    coef = stopping_chains.settings.report_kl_coef
    last = last_response_metrics(list(metrics.values()), coef)
    for name in ("task_reward", "kl", "response_length"):
        expected = np.where(stopped, whole["pioneer"][name], whole["observer"][name])
        np.testing.assert_allclose(last["in_chain_kl" if name == "kl" else name], expected, atol=1e-5)
    np.testing.assert_allclose(last["bare_kl"][~stopped], whole["observer"]["bare_kl"][~stopped], atol=1e-5)
    np.testing.assert_allclose(last["combined_reward"], last["task_reward"] - coef * last["bare_kl"], atol=1e-6)

    figures = stopping_chains.evaluator.evaluate()["last_response"]
    _, metrics = stopping_chains.evaluator.measure(PROMPT_REFS, stopping_chains.mapping, "validation")
    last = last_response_metrics(list(metrics.values()), coef)
    assert figures == pytest.approx({name: float(values.mean()) for name, values in last.items()}, abs=1e-6)


def test_kl_is_in_the_own_prompt_at_every_position_and_bare_kl_exists_where_a_chain_ends(make_cory: MakeCory) -> None:
    two = make_cory(**BUNDLED, num_policies=1, observer_prompt=HIDDEN["observer_prompt"])
    three = make_cory(num_agents=3, num_policies=1, **HIDDEN)
    _, whole = two.evaluator.measure(PROMPT_REFS, two.mapping, "test")
    rollout, metrics = three.evaluator.measure(PROMPT_REFS, three.mapping, "test")
    lengths = np.array([len(sample["responses"]) for sample in rollout.samples])
    assert set(lengths) == {1, 2, 3}
    second = metrics["observer_1"]
    assert np.abs(second["bare_kl"][lengths == 2]).max() > 0.1
    np.testing.assert_allclose(second["bare_kl"][lengths == 2], whole["observer"]["bare_kl"][lengths == 2], atol=1e-4)
    for position, role_metrics in enumerate(metrics.values()):
        assert (np.isnan(role_metrics["kl"]) == (lengths <= position)).all()
        np.testing.assert_allclose(role_metrics["kl"][lengths > position], 0.0, atol=1e-4)  # untrained
        assert (np.isnan(role_metrics["bare_kl"]) == (lengths != position + 1)).all()


def test_groups_contain_only_the_responses_that_exist_and_a_group_of_one_teaches_nothing(make_cory: MakeCory) -> None:
    algorithm = make_cory(num_policies=1, advantage="rloo", num_generations=4, minibatch_size=8, **STOPPING)
    prompt_refs = [PromptRef(query, sample) for query in range(8) for sample in range(4)]
    rollout = algorithm.runners.generate(prompt_refs, update=0, mapping=algorithm.mapping, split="train")
    (rows,) = rows_from_episodes(rollout.episodes).values()
    lengths = [len(sample["responses"]) for sample in rollout.samples]
    assert len(rows.chains) == sum(lengths) < 64 and len(rows.at_position(0)) == 32
    observers = rows.at_position(1)
    assert observers.chains.tolist() == [chain for chain, length in enumerate(lengths) if length == 2]
    queries = torch.tensor([prompt_refs[chain].query for chain in observers.chains])
    for group in observers.groups.unique():
        assert len(queries[observers.groups == group].unique()) == 1
    sizes = (observers.groups.unsqueeze(0) == observers.groups.unsqueeze(1)).sum(1)
    assert {1, 2} <= set(sizes.tolist())
    estimator = AdvantageEstimator(paper_hyperparameters(advantage="rloo", kl_coef=0.0))
    rewards = torch.arange(len(sizes), dtype=torch.float32)
    columns, _ = estimator.estimate(observers.with_scores(frozen_scores(observers)), rewards)
    advantages = columns.advantages[:, 0]
    assert (advantages[sizes == 1] == 0).all() and (advantages[sizes > 1] != 0).any()
    for group in observers.groups[sizes == 2].unique():
        first, second = rewards[observers.groups == group].tolist()
        assert advantages[observers.groups == group].tolist() == [first - second, second - first]


SETTINGS: list[dict[str, Any]] = [
    {"advantage": "rloo", "num_generations": 2, "num_policies": 1, "partner_reward": 0.0, "minibatch_size": 32},
    {"advantage": "gae", "credit": "chain", "exchange_period": 1},
    {"advantage": "gae", "reward_scope": "last", "num_agents": 3},
    {"advantage": "rloo", "credit": "chain", "num_generations": 2, "minibatch_size": 4},
]


@pytest.mark.parametrize("settings", [SETTINGS[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SETTINGS[1:])])
def test_training_with_stopped_chains_resumes_exactly(
    make_cory: MakeCory, tmp_path: Path, settings: dict[str, Any]
) -> None:
    uninterrupted, interrupted = (make_cory(**{**STOPPING, **settings}) for _ in range(2))
    for algorithm in (uninterrupted, interrupted):
        samples = algorithm.train()["cory"]["samples"]
        assert len({len(sample["responses"]) for sample in samples}) > 1
    interrupted.save_to_path(tmp_path / "checkpoint")
    resumed = Cory.from_checkpoint(tmp_path / "checkpoint")
    try:
        expected, report = uninterrupted.train()["cory"], resumed.train()["cory"]
        assert report["samples"] == expected["samples"] and report["tokens"] == expected["tokens"]
        assert_same_learner(learner_state(uninterrupted), learner_state(resumed))
    finally:
        resumed.stop()


@pytest.mark.slow
def test_the_number_of_runners_does_not_change_the_results(make_cory: MakeCory) -> None:
    one, three = (make_cory(num_runners=runners, **STOPPING) for runners in (0, 3))
    for _ in range(2):
        expected, report = one.train()["cory"], three.train()["cory"]
        assert report["samples"] == expected["samples"] and report["tokens"] == expected["tokens"]
        for policy_id, metrics in report["policy"].items():
            assert metrics == pytest.approx(expected["policy"][policy_id], rel=1e-3, abs=1e-5)


def test_a_policy_without_responses_keeps_its_weights_and_trains_after_the_exchange(
    make_cory: MakeCory, tmp_path: Path
) -> None:
    settings = {**STOPPING, "feedback": "tests.policies.sample_rewards:always_solved", "exchange_period": 1}
    algorithm = make_cory(**settings, kl_target=6.0, average_period=None)
    before = {policy_id: dict(algorithm.weights(policy_id)) for policy_id in ("llm_1", "llm_2")}
    report = algorithm.train()["cory"]
    assert all(len(sample["responses"]) == 1 for sample in report["samples"])
    for group, key in (("policy", "llm_2"), ("role", "observer")):
        assert math.isnan(report[group][key]["task_reward"]) and math.isnan(report[group][key]["kl"])
    assert not math.isnan(report["policy"]["llm_1"]["task_reward"])
    assert _equal(before["llm_2"], algorithm.weights("llm_2")) and not _equal(
        before["llm_1"], algorithm.weights("llm_1")
    )
    algorithm.save_to_path(tmp_path / "checkpoint")
    resumed = Cory.from_checkpoint(tmp_path / "checkpoint")
    try:
        report = resumed.train()["cory"]  # llm_2 is the pioneer now
        assert math.isnan(report["policy"]["llm_1"]["kl"]) and not math.isnan(report["policy"]["llm_2"]["kl"])
        assert not _equal(before["llm_2"], resumed.weights("llm_2"))
        assert all(math.isfinite(value) for value in report["last_response"].values())
    finally:
        resumed.stop()


def _equal(weights: Any, others: Any) -> bool:
    return all(np.array_equal(weights[name], others[name]) for name in weights)
