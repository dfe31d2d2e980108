"""Policies with several roles (shared policies)."""

from pathlib import Path

import numpy as np
import pytest

from policies.rllib.token_batch import rows_from_episodes
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import RoleMapping, make_mapping
from tests.policies.conftest import BUNDLED, MakeCory


def test_two_policies_alternate_over_four_roles() -> None:
    mapping = RoleMapping(("pioneer", "observer_1", "observer_2", "observer_3"), ("llm_1", "llm_2"))
    assert list(mapping.as_dict().values()) == ["llm_1", "llm_2", "llm_1", "llm_2"]
    assert list(mapping.rotated().as_dict().values()) == ["llm_2", "llm_1", "llm_2", "llm_1"]
    assert mapping.rotated().rotated() == mapping


def test_one_policy_in_both_roles_learns_from_all_responses_and_never_exchanges(make_cory: MakeCory) -> None:
    algorithm = make_cory(**BUNDLED, num_policies=1, exchange_period=1, minibatch_size=16, num_epochs=1)
    algorithm.train()  # the critic starts at zero, so its explained variance is 0
    report = algorithm.train()["cory"]
    assert report["roles"] == {"pioneer": "llm_1", "observer": "llm_1"}
    assert set(report["policy"]) == {"llm_1"} and (report["exchanged"], report["exchanges"]) == (False, 0)
    (policy,), roles = report["policy"].values(), report["role"].values()
    for name in ("task_reward", "kl", "response_length"):  # both roles have the same number of responses
        assert policy[name] == pytest.approx(np.mean([metrics[name] for metrics in roles]), rel=1e-5)
    pioneer, observer = roles
    assert pioneer["task_reward"] != observer["task_reward"]
    assert pioneer["explained_variance"] != observer["explained_variance"]
    states = algorithm.learners.call_first(lambda learner: list(learner.policies["llm_1"].optimizer.state.values()))
    steps = {float(state["step"]) for state in states}
    assert steps == {2.0}  # in two updates: 8 queries in two roles are one mini-batch of 16


def test_before_training_one_policy_generates_the_same_chains_as_two(make_cory: MakeCory) -> None:
    prompt_refs = [PromptRef(query) for query in range(5)]
    rewards = {}
    for policies in (1, 2):
        algorithm = make_cory(num_policies=policies)
        _, metrics = algorithm.evaluator.measure(prompt_refs, algorithm.mapping, "test")
        assert set(metrics) == {"pioneer", "observer"}
        rewards[policies] = {role: values["task_reward"].tolist() for role, values in metrics.items()}
        # The observer's prompt shifts its distribution from the bare query's, even without training.
        assert np.abs(metrics["observer"]["kl"]).max() < 1e-4 < np.abs(metrics["observer"]["bare_kl"]).max()
        assert np.abs(metrics["pioneer"]["kl"]).max() < 1e-4 and np.isnan(metrics["pioneer"]["bare_kl"]).all()
    assert rewards[1] == rewards[2] and rewards[1]["pioneer"] != rewards[1]["observer"]


def test_the_last_response_is_evaluated_in_every_order_beside_each_policy_alone(make_cory: MakeCory) -> None:
    algorithm = make_cory(exchange_period=None)
    algorithm.train()
    results = algorithm.evaluator.evaluate()
    prompt_refs = [PromptRef(query) for query in range(4)]
    observers = []
    for rotation, policy_id in enumerate(algorithm.settings.policy_ids):
        mapping = make_mapping(algorithm.settings, rotation)
        _, chain = algorithm.evaluator.measure(prompt_refs, mapping, "validation")
        observers.append(chain["observer"])
        _, single = algorithm.evaluator.measure(prompt_refs, RoleMapping(("pioneer",), (policy_id,)), "validation")
        for name, value in results["evaluation"][policy_id].items():
            assert value == pytest.approx(single["pioneer"][name].mean(), abs=1e-6)
    last = results["last_response"]
    assert "kl" not in last
    for name, value in last.items():
        column = "kl" if name == "in_chain_kl" else name
        assert value == pytest.approx(np.mean([metrics[column].mean() for metrics in observers]), abs=1e-6)
    assert last["combined_reward"] == pytest.approx(
        last["task_reward"] - algorithm.settings.report_kl_coef * last["bare_kl"], abs=1e-5
    )
    assert "last_response" not in make_cory(num_agents=1).evaluator.evaluate()


def test_a_group_is_the_responses_to_one_query_in_one_role(make_cory: MakeCory) -> None:
    algorithm = make_cory(
        num_policies=1,
        advantage="rloo",
        num_generations=2,
        queries_per_update=4,
        minibatch_size=16,
        kl_coef=0.0,
        partner_reward=0.0,
    )
    prompt_refs = [PromptRef(query, sample) for query in range(4) for sample in range(2)]
    rollout = algorithm.runners.generate(prompt_refs, mapping=algorithm.mapping)
    (rows,) = rows_from_episodes(rollout.episodes).values()
    scored = rows.with_scores(algorithm.learners.score({"llm_1": rows})["llm_1"])
    estimates, _ = algorithm.estimators["llm_1"].estimate(scored, rows.task_rewards.float())
    for position in (0, 1):
        role_rows = scored.with_estimates(estimates).at_position(position)
        rewards = role_rows.rewards.view(4, 2)  # by query and sample
        first, second = role_rows.groups.view(4, 2).T.tolist()
        assert first == second and len(set(first)) == 4
        advantages = role_rows.advantages[:, 0].view(4, 2)
        np.testing.assert_allclose(advantages, rewards - rewards.flip(1), rtol=1e-5)


def test_chain_credit_trains_and_resumes_exactly(make_cory: MakeCory, tmp_path: Path) -> None:
    settings = {
        "num_policies": 1,
        "credit": "chain",
        "chain_lam": 0.5,
        "minibatch_size": 16,
        "num_epochs": 1,
    }
    algorithm = make_cory(**settings)
    algorithm.train()
    algorithm.save_to_path(str(tmp_path / "saved"))
    expected = algorithm.train()["cory"]
    resumed = make_cory(**settings)
    resumed.restore_from_path(str(tmp_path / "saved"))
    report = resumed.train()["cory"]
    assert report["policy"] == expected["policy"] and report["role"] == expected["role"]
