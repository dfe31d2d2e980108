"""Real trainings by each estimator, and resets at role exchanges."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.cory import Cory
from policies.learning.estimation import RewardMoments
from policies.rollout.prompt_sampling import sample_prompts
from tests.policies.conftest import MakeCory
from tests.policies.test_cory import assert_same_learner, flat, learner_state

IN_LOSS = ("grpo", "dr_grpo")


def test_each_query_is_dealt_as_often_as_asked_and_its_samples_are_told_apart() -> None:
    dealt, twice = sample_prompts(0, 0, 3, 4, samples=2), sample_prompts(0, 0, 8, 4, samples=2)
    assert [each.query for each in dealt] == [each.query for each in sample_prompts(0, 0, 3, 4) for _ in range(2)]
    assert [each.sample for each in dealt] == [0, 1] * 3
    assert len(set(twice)) == 16 and {each.sample for each in twice} == {0, 1, 2, 3}  # every query comes twice


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "agents"),
    [("rloo", 2), ("reinforce", 1), ("grpo", 1), ("dr_grpo", 1)],
)
def test_the_task_reward_rises(make_cory: MakeCory, estimator: str, agents: int) -> None:
    kl = {"kl_estimator": "k3"} if estimator in IN_LOSS else {}
    algorithm = make_cory(
        **kl,
        advantage=estimator,
        num_agents=agents,
        reward="tests.policies.sample_rewards:commas",
        queries_per_update=8,
        num_generations=4,
        minibatch_size=16,
        micro_batch_size=16,
        lr=1e-3,
        kl_coef=0.02,
        eval_every=5,
        eval_queries=32,
    )
    before = algorithm.evaluator.held_out()["evaluation"]["mean"]
    for _ in range(5):
        report = algorithm.train()["cory"]
    after = report["evaluation"]["mean"]
    assert after["task_reward"] > before["task_reward"] + 0.2
    assert len({sample["query"] for sample in report["samples"]}) == len(report["samples"]) == 4
    assert "value_loss" not in report["policy"]["llm_1"] and report["logprob_diff_max"] < 1e-3


def adam_of(algorithm: Cory) -> list[str]:
    return [name for name in flat(learner_state(algorithm)["optimizer"]) if "exp_avg" in name]


def test_a_reset_at_an_exchange_empties_all_but_the_weights_and_lasts_through_a_checkpoint(
    make_cory: MakeCory, tmp_path: Path
) -> None:
    controlled = {"kl_control": "adaptive", "reward_scaling": "normalize", "exchange_period": 2}
    algorithm = make_cory(**controlled, reset_on_exchange=True)
    algorithm.train()
    estimations = algorithm.estimators.values()
    assert adam_of(algorithm) and all(estimation.kl_coef != 0.3 for estimation in estimations)
    assert all(estimation.reward_moments.count > 7 for estimation in estimations)
    weights = algorithm.weights("llm_1")
    assert algorithm.train()["cory"]["exchanged"]
    assert adam_of(algorithm) == [] and {estimation.kl_coef for estimation in estimations} == {0.3}
    assert [estimation.reward_moments for estimation in estimations] == [RewardMoments()] * 2
    assert any((algorithm.weights("llm_1")[name] != array).any() for name, array in weights.items())
    algorithm.save_to_path(tmp_path / "checkpoint")
    resumed = Cory.from_checkpoint(tmp_path / "checkpoint")
    try:
        for each in (algorithm, resumed):
            each.train()
        assert adam_of(resumed)
        assert_same_learner(learner_state(algorithm), learner_state(resumed))
        resumed.restore_from_path(str(tmp_path / "checkpoint"))  # into one that has moments
        assert adam_of(resumed) == []
    finally:
        resumed.stop()
