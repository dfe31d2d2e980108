"""Training with each advantage estimator, and resets at role exchanges."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.cory import Cory
from policies.learning.estimation import RewardMoments
from policies.rollout.prompt_sampling import sample_prompts
from tests.policies.conftest import MakeCory
from tests.policies.test_cory import assert_same_learner, flatten, learner_state

IN_LOSS = ("grpo", "dr_grpo")


def test_each_query_has_num_generations_samples_with_different_numbers() -> None:
    once, twice = sample_prompts(0, 0, 3, 4, samples=2), sample_prompts(0, 0, 8, 4, samples=2)
    assert [ref.query for ref in once] == [ref.query for ref in sample_prompts(0, 0, 3, 4) for _ in range(2)]
    assert [ref.sample for ref in once] == [0, 1] * 3
    assert len(set(twice)) == 16 and {ref.sample for ref in twice} == {0, 1, 2, 3}  # two epochs: every query twice


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
    before = algorithm.evaluator.evaluate()["evaluation"]["mean"]
    for _ in range(5):
        report = algorithm.train()["cory"]
    after = report["evaluation"]["mean"]
    assert after["task_reward"] > before["task_reward"] + 0.2
    assert len({sample["query"] for sample in report["samples"]}) == len(report["samples"]) == 4
    assert "value_loss" not in report["policy"]["llm_1"] and report["logprob_diff_max"] < 1e-3


def adam_moments(algorithm: Cory) -> list[str]:
    return [name for name in flatten(learner_state(algorithm)["optimizer"]) if "exp_avg" in name]


def test_reset_on_exchange_resets_optimizers_and_estimators_and_survives_a_checkpoint(
    make_cory: MakeCory, tmp_path: Path
) -> None:
    settings = {"kl_target": 6.0, "reward_scaling": "normalize", "exchange_period": 2}
    algorithm = make_cory(**settings, reset_on_exchange=True)
    algorithm.train()
    estimators = algorithm.estimators.values()
    assert adam_moments(algorithm) and all(estimator.kl_coef != 0.3 for estimator in estimators)
    assert all(estimator.reward_moments.count > 7 for estimator in estimators)
    weights = algorithm.weights("llm_1")
    assert algorithm.train()["cory"]["exchanged"]
    assert adam_moments(algorithm) == [] and {estimator.kl_coef for estimator in estimators} == {0.3}
    assert [estimator.reward_moments for estimator in estimators] == [RewardMoments()] * 2
    assert any((algorithm.weights("llm_1")[name] != array).any() for name, array in weights.items())
    algorithm.save_to_path(tmp_path / "checkpoint")
    resumed = Cory.from_checkpoint(tmp_path / "checkpoint")
    try:
        for cory in (algorithm, resumed):
            cory.train()
        assert adam_moments(resumed)
        assert_same_learner(learner_state(algorithm), learner_state(resumed))
        resumed.restore_from_path(str(tmp_path / "checkpoint"))  # into an algorithm that has moments
        assert adam_moments(resumed) == []
    finally:
        resumed.stop()
