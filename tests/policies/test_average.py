"""LLMs that move to their mean while they train."""

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
    """Builds algorithms with weights of either kind."""
    return partial(make_cory, weights=request.param)


def apart(algorithm: Cory) -> float:
    """The largest difference between weights of the two LLMs, value heads among them."""
    one, two = (policy.values() for policy in learner_state(algorithm)["rl_module"].values())
    return max(float(np.abs(a - b).max()) for a, b in zip(one, two, strict=True))


def test_llms_are_equal_after_every_second_update_in_learner_and_engine_and_keep_their_moments(
    make_either: MakeCory,
) -> None:
    algorithm = make_either(average_period=2, exchange_period=3)
    averaged, distances = [], []
    for _ in range(4):
        averaged.append(algorithm.train()["cory"]["averaged"])
        distances.append(apart(algorithm))
    assert averaged == [False, True, False, True]
    assert [distance == 0.0 for distance in distances] == averaged
    held = algorithm.env_runner_group.local_env_runner.generator.own
    for name in ("llm_1", "llm_2"):
        present = algorithm.weights(name)
        assert checksum({key: parameter.numpy() for key, parameter in held[name].items()}) == checksum(present)
    one, two = algorithm.learners.ask(
        lambda learner: [
            [state["exp_avg"] for state in policy.optimizer.state.values()] for policy in learner.policies.values()
        ]
    )
    assert one and all(not torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_share_of_the_way_leaves_the_rest_of_the_distance(make_cory: MakeCory) -> None:
    whole, part = make_cory(), make_cory(average_period=1, average_tau=0.25)
    for algorithm in (whole, part):
        algorithm.train()
    assert apart(part) == pytest.approx(0.75 * apart(whole), rel=1e-3)


@pytest.mark.slow  # `test_cory` has it without averaging, which follows from the update counter
def test_k_updates_a_checkpoint_and_k_updates_equal_2k_updates_with_averaging(
    make_cory: MakeCory, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"average_period": 3, "average_tau": 0.5, "num_policies": 2, "num_agents": 4}
    settings |= {"queries_per_update": 4}
    straight, halfway = make_cory(**settings), make_cory(**settings)
    for _ in range(2):
        straight.train()
        halfway.train()
    halfway.save_to_path(tmp_path / "checkpoint")
    resumed = Cory.from_checkpoint(tmp_path / "checkpoint")
    try:
        reports = [(straight.train()["cory"], resumed.train()["cory"]) for _ in range(2)]
        assert [found["averaged"] for _, found in reports] == [True, False]
        assert [found["samples"] for _, found in reports] == [expected["samples"] for expected, _ in reports]
        assert_same_learner(learner_state(straight), learner_state(resumed))
    finally:
        resumed.stop()


def test_llms_with_the_same_weights_are_evaluated_once_and_others_each_for_itself(make_cory: MakeCory) -> None:
    algorithm = make_cory(average_period=2, lr=1e-3, eval_every=9)
    evaluator, played = algorithm.evaluator, []
    play = algorithm.runners.generate

    def noted(prompt_refs: Sequence[PromptRef], **arguments: Any) -> Rollout:
        played.append(arguments["mapping"]("pioneer"))
        return play(prompt_refs, **arguments)

    algorithm.runners.generate = noted  # type: ignore[method-assign]
    for expected in (["llm_1"], ["llm_1", "llm_2"], ["llm_1"]):  # the start, after update 1, and once averaged
        played.clear()
        found = evaluator.held_out()["evaluation"]
        assert played == expected
        for name in ("llm_1", "llm_2"):
            prompt_refs = [PromptRef(query) for query in range(algorithm.settings.eval_queries)]
            _, figures = evaluator.measure(prompt_refs, evaluator.with_pioneer(name), "validation")
            assert found[name] == {key: figures["pioneer"][key].mean() for key in RESPONSE_METRICS}
        algorithm.train()


def test_the_mean_is_evaluated_in_the_place_of_one_llm_that_gets_its_own_weights_back(make_either: MakeCory) -> None:
    algorithm = make_either(eval_average=True, lr=1e-3, eval_every=9)
    start = algorithm.evaluator.held_out()["evaluation"]
    assert start["llm_mean"] == start["llm_1"] == start["llm_2"]  # nothing is trained yet
    for _ in range(2):
        report = algorithm.train()["cory"]
    assert report["averaged"] is False
    before, own = learner_state(algorithm), algorithm.weights("llm_1")
    found = algorithm.evaluator.held_out()["evaluation"]
    assert list(found) == ["llm_1", "llm_2", "llm_mean", "mean"]
    assert found["mean"]["kl"] == pytest.approx((found["llm_1"]["kl"] + found["llm_2"]["kl"]) / 2)
    assert_same_learner(before, learner_state(algorithm))
    held = algorithm.env_runner_group.local_env_runner.generator.own["llm_1"]
    assert checksum({key: parameter.numpy() for key, parameter in held.items()}) == checksum(own)
    assert algorithm.evaluator.held_out()["evaluation"] == found
    algorithm.learners.average(1.0)
    algorithm.runners.send(algorithm.updates)
    assert algorithm.evaluator.held_out()["evaluation"]["llm_2"] == found["llm_mean"] != found["llm_2"]


def test_a_failing_evaluation_of_the_mean_leaves_every_llm_its_own_weights(make_cory: MakeCory) -> None:
    algorithm = make_cory(eval_average=True, lr=1e-3)
    algorithm.train()
    before = learner_state(algorithm)
    with pytest.raises(RuntimeError, match="stopped"), algorithm.evaluator.average():
        assert checksum(algorithm.weights("llm_1")) != checksum(algorithm.weights("llm_2"))
        assert apart(algorithm) > 0
        raise RuntimeError("stopped")
    assert_same_learner(before, learner_state(algorithm))
    held = algorithm.env_runner_group.local_env_runner.generator.own["llm_1"]
    assert checksum({key: parameter.numpy() for key, parameter in held.items()}) == checksum(algorithm.weights("llm_1"))


@pytest.mark.slow
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
@pytest.mark.timeout(300)
def test_vllm_answers_as_the_mean_and_then_as_the_llm_itself(make_either: MakeCory) -> None:
    algorithm = make_either(eval_average=True, backend="vllm", num_runners=1, lr=1e-3)
    for _ in range(2):
        found = algorithm.train()["cory"]
    before = found["evaluation"]
    assert found["logprob_diff_max"] < 1e-3
    assert algorithm.evaluator.held_out()["evaluation"] == before and before["llm_mean"] != before["llm_1"]
    assert algorithm.train()["cory"]["logprob_diff_max"] < 1e-3
