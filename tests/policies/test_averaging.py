"""LLMs that move to their mean while they train."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policies.cory import Cory
from policies.models.weights import checksum
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
    whole, part = make_cory(), make_cory(average_period=1, average_share=0.25)
    for algorithm in (whole, part):
        algorithm.train()
    assert apart(part) == pytest.approx(0.75 * apart(whole), rel=1e-3)


def test_k_updates_a_checkpoint_and_k_updates_equal_2k_updates_with_averaging(
    make_cory: MakeCory, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"average_period": 3, "average_share": 0.5, "num_policies": 2, "num_agents": 4}
    settings |= {"queries": 4}
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
