"""Averaging policies' weights during training, and evaluating the average."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policies.cory import Cory
from policies.generation.installed import vllm_installed
from policies.learning.metrics import RESPONSE_METRICS
from policies.models.weights import checksum
from policies.rollout.episodes import Rollout
from policies.rollout.prompt_sampling import PromptRef
from tests.policies.conftest import MakeCory
from tests.policies.test_cory import assert_same_learner, learner_state


@pytest.fixture(params=["full", "lora"])
def make_either(make_cory: MakeCory, request: pytest.FixtureRequest) -> MakeCory:
    """Builds algorithms with full weights or adapters."""
    return partial(make_cory, weights=request.param)


def max_weight_difference(algorithm: Cory) -> float:
    """The largest difference between the two policies' weights, including value heads."""
    one, two = (policy.values() for policy in learner_state(algorithm)["rl_module"].values())
    return max(float(np.abs(a - b).max()) for a, b in zip(one, two, strict=True))


def test_averaging_makes_policies_equal_in_learner_and_engine_and_keeps_adams_moments(
    make_either: MakeCory,
) -> None:
    algorithm = make_either(average_period=2, exchange_period=3)
    averaged, distances = [], []
    for _ in range(3):
        averaged.append(algorithm.train()["cory"]["averaged"])
        distances.append(max_weight_difference(algorithm))
    assert averaged == [False, True, False]
    assert [distance == 0.0 for distance in distances] == averaged
    engine_parameters = algorithm.env_runner_group.local_env_runner.generator.trainable
    for policy_id in ("llm_1", "llm_2"):
        loaded = {name: parameter.numpy() for name, parameter in engine_parameters[policy_id].items()}
        assert checksum(loaded) == checksum(algorithm.weights(policy_id))
    one, two = algorithm.learners.call_first(
        lambda learner: [
            [state["exp_avg"] for state in policy.optimizer.state.values()] for policy in learner.policies.values()
        ]
    )
    assert one and all(not torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_average_tau_moves_policies_by_that_share_of_the_distance(make_cory: MakeCory) -> None:
    unaveraged, averaged = make_cory(), make_cory(average_period=1, average_tau=0.25)
    for algorithm in (unaveraged, averaged):
        algorithm.train()
    assert max_weight_difference(averaged) == pytest.approx(0.75 * max_weight_difference(unaveraged), rel=1e-3)


@pytest.mark.slow  # `test_cory` has the case without averaging
def test_resuming_is_exact_with_averaging(make_cory: MakeCory, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"average_period": 3, "average_tau": 0.5, "num_policies": 2, "num_agents": 4}
    settings |= {"queries_per_update": 4}
    uninterrupted, interrupted = make_cory(**settings), make_cory(**settings)
    for _ in range(2):
        uninterrupted.train()
        interrupted.train()
    interrupted.save_to_path(tmp_path / "checkpoint")
    resumed = Cory.from_checkpoint(tmp_path / "checkpoint")
    try:
        reports = [(uninterrupted.train()["cory"], resumed.train()["cory"]) for _ in range(2)]
        assert [report["averaged"] for _, report in reports] == [True, False]
        assert [report["samples"] for _, report in reports] == [expected["samples"] for expected, _ in reports]
        assert_same_learner(learner_state(uninterrupted), learner_state(resumed))
    finally:
        resumed.stop()


def test_policies_with_equal_weights_are_evaluated_once(make_cory: MakeCory) -> None:
    algorithm = make_cory(average_period=2, lr=1e-3, eval_every=9)
    evaluator, pioneers = algorithm.evaluator, []
    generate = algorithm.runners.generate

    def record(prompt_refs: Sequence[PromptRef], **arguments: Any) -> Rollout:
        pioneers.append(arguments["mapping"]("pioneer"))
        return generate(prompt_refs, **arguments)

    algorithm.runners.generate = record  # type: ignore[method-assign]
    for expected in (["llm_1"], ["llm_1", "llm_2"], ["llm_1"]):  # at the start, after update 1, and after averaging
        if pioneers:
            algorithm.train()
        pioneers.clear()
        evaluation = evaluator.evaluate()["evaluation"]
        assert pioneers == expected
        orders = {mapping("pioneer"): mapping for mapping in evaluator.orders()}
        for policy_id in ("llm_1", "llm_2"):
            prompt_refs = [PromptRef(query) for query in range(algorithm.settings.eval_queries)]
            _, metrics = evaluator.measure(prompt_refs, orders[policy_id], "validation")
            assert evaluation[policy_id] == {name: metrics["pioneer"][name].mean() for name in RESPONSE_METRICS}


@pytest.mark.parametrize("weights", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_evaluating_the_average_restores_the_first_policys_weights(make_cory: MakeCory, weights: str) -> None:
    algorithm = make_cory(weights=weights, eval_average=True, lr=1e-3, eval_every=9)
    start = algorithm.evaluator.evaluate()["evaluation"]
    assert start["llm_mean"] == start["llm_1"] == start["llm_2"]  # nothing is trained yet
    for _ in range(2):
        report = algorithm.train()["cory"]
    assert report["averaged"] is False
    before, first = learner_state(algorithm), algorithm.weights("llm_1")
    evaluation = algorithm.evaluator.evaluate()["evaluation"]
    assert list(evaluation) == ["llm_1", "llm_2", "llm_mean", "mean"]
    assert evaluation["mean"]["kl"] == pytest.approx((evaluation["llm_1"]["kl"] + evaluation["llm_2"]["kl"]) / 2)
    assert_same_learner(before, learner_state(algorithm))
    engine_parameters = algorithm.env_runner_group.local_env_runner.generator.trainable["llm_1"]
    assert checksum({name: parameter.numpy() for name, parameter in engine_parameters.items()}) == checksum(first)
    assert algorithm.evaluator.evaluate()["evaluation"] == evaluation
    algorithm.learners.average(1.0)
    algorithm.runners.sync_weights(algorithm.updates)
    assert algorithm.evaluator.evaluate()["evaluation"]["llm_2"] == evaluation["llm_mean"] != evaluation["llm_2"]


def test_a_failed_evaluation_of_the_average_restores_all_weights(make_cory: MakeCory) -> None:
    algorithm = make_cory(eval_average=True, lr=1e-3)
    algorithm.train()
    before = learner_state(algorithm)
    with pytest.raises(RuntimeError, match="stopped"), algorithm.evaluator.average():
        assert checksum(algorithm.weights("llm_1")) != checksum(algorithm.weights("llm_2"))
        assert max_weight_difference(algorithm) > 0
        raise RuntimeError("stopped")
    assert_same_learner(before, learner_state(algorithm))
    engine_parameters = algorithm.env_runner_group.local_env_runner.generator.trainable["llm_1"]
    loaded = {name: parameter.numpy() for name, parameter in engine_parameters.items()}
    assert checksum(loaded) == checksum(algorithm.weights("llm_1"))


@pytest.mark.slow
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
@pytest.mark.timeout(300)
def test_vllm_evaluates_the_average_and_then_uses_the_policys_own_weights(make_either: MakeCory) -> None:
    algorithm = make_either(eval_average=True, backend="vllm", num_runners=1, lr=1e-3)
    for _ in range(2):
        report = algorithm.train()["cory"]
    evaluation = report["evaluation"]
    assert report["logprob_diff_max"] < 1e-3
    assert algorithm.evaluator.evaluate()["evaluation"] == evaluation and evaluation["llm_mean"] != evaluation["llm_1"]
    assert algorithm.train()["cory"]["logprob_diff_max"] < 1e-3
