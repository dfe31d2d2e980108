"""One LLM in several roles."""

from pathlib import Path

import numpy as np
import pytest

from policies.learning.rows import at_position
from policies.rllib.token_batch import rows_of
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import RoleMapping
from tests.policies.conftest import MakeCory


def test_two_policies_alternate_over_four_roles() -> None:
    mapping = RoleMapping(("pioneer", "observer_1", "observer_2", "observer_3"), ("llm_1", "llm_2"))
    assert list(mapping.as_dict().values()) == ["llm_1", "llm_2", "llm_1", "llm_2"]
    assert list(mapping.rotated().as_dict().values()) == ["llm_2", "llm_1", "llm_2", "llm_1"]
    assert mapping.rotated().rotated() == mapping


def test_one_policy_in_both_roles_learns_from_all_responses_and_never_exchanges(make_cory: MakeCory) -> None:
    algorithm = make_cory(num_policies=1, exchange_period=1, minibatch_size=16, num_epochs=1)
    algorithm.train()  # the critic starts at zero, which explains nothing
    report = algorithm.train()["cory"]
    assert report["roles"] == {"pioneer": "llm_1", "observer": "llm_1"}
    assert set(report["policy"]) == {"llm_1"} and (report["exchanged"], report["exchanges"]) == (False, 0)
    (whole,), roles = report["policy"].values(), report["role"].values()
    for name in ("task_reward", "kl", "response_length"):  # as many responses in either role
        assert whole[name] == pytest.approx(np.mean([figures[name] for figures in roles]), rel=1e-5)
    pioneer, observer = roles
    assert pioneer["task_reward"] != observer["task_reward"]
    assert pioneer["explained_variance"] != observer["explained_variance"]
    states = algorithm.learners.ask(lambda learner: list(learner.policies["llm_1"].optimizer.state.values()))
    steps = {float(state["step"]) for state in states}
    assert steps == {2.0}  # in two updates: 8 queries in two roles are one mini-batch of 16


def test_before_training_one_policy_generates_the_same_chains_as_two(make_cory: MakeCory) -> None:
    prompt_refs = [PromptRef(query) for query in range(5)]
    rewards = {}
    for policies in (1, 2):
        algorithm = make_cory(num_policies=policies)
        _, figures = algorithm.evaluator.measure(prompt_refs, algorithm.mapping, "test")
        assert set(figures) == {"pioneer", "observer"}
        rewards[policies] = {role: found["task_reward"].tolist() for role, found in figures.items()}
        # The observer's prompt moved the base itself, which someone who asks the bare query is told, and it is not.
        assert np.abs(figures["observer"]["in_chain_kl"]).max() < 1e-4 < np.abs(figures["observer"]["kl"]).max()
        assert np.abs(figures["pioneer"]["kl"]).max() < 1e-4 and "in_chain_kl" not in figures["pioneer"]
    assert rewards[1] == rewards[2] and rewards[1]["pioneer"] != rewards[1]["observer"]


def test_the_last_response_is_evaluated_in_every_order_beside_each_policy_alone(make_cory: MakeCory) -> None:
    algorithm = make_cory(exchange_period=None)
    algorithm.train()
    found = algorithm.evaluator.held_out()
    prompt_refs = [PromptRef(query) for query in range(4)]
    last = []
    for turn, module in enumerate(algorithm.settings.policy_ids):
        mapping = RoleMapping(algorithm.settings.roles, algorithm.settings.policy_ids, turn)
        _, chain = algorithm.evaluator.measure(prompt_refs, mapping, "validation")
        last.append(chain["observer"])
        _, alone = algorithm.evaluator.measure(prompt_refs, RoleMapping(("pioneer",), (module,)), "validation")
        for name, figure in found["evaluation"][module].items():
            assert figure == pytest.approx(alone["pioneer"][name].mean(), abs=1e-6)
    for name, figure in found["last_response"].items():
        assert figure == pytest.approx(np.mean([each[name].mean() for each in last]), abs=1e-6)
    assert found["last_response"]["combined_reward"] == pytest.approx(
        found["last_response"]["task_reward"] - algorithm.settings.report_kl_coef * found["last_response"]["kl"],
        abs=1e-5,
    )
    assert "last_response" not in make_cory(num_agents=1).evaluator.held_out()


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
    (rows,) = rows_of(rollout.episodes).values()
    rows |= algorithm.learners.score({"llm_1": rows})["llm_1"]
    rows["rewards"] = rows["task_rewards"].float()
    columns, _ = algorithm.estimators["llm_1"].estimate(rows)
    rows |= columns
    for position in (0, 1):
        part = at_position(rows, position)
        rewards = part["rewards"].view(4, 2)  # by query, in the order dealt
        first, second = part["groups"].view(4, 2).T.tolist()
        assert first == second and len(set(first)) == 4
        found = part["advantages"][:, 0].view(4, 2)
        np.testing.assert_allclose(found, rewards - rewards.flip(1), rtol=1e-5)


def test_siblings_fork_from_one_response_of_the_pioneer_and_form_a_group(make_cory: MakeCory) -> None:
    algorithm = make_cory(
        num_policies=1,
        advantage="rloo",
        num_generations=2,
        num_siblings=3,
        queries_per_update=2,
        minibatch_size=16,
        kl_coef=0.0,
    )
    assert algorithm.settings.responses == 16  # of each query 2 of the pioneer, and 3 of the observer to each of these
    prompt_refs = [PromptRef(q, n) for q in range(2) for n in range(2)]
    rollout = algorithm.runners.generate(prompt_refs, mapping=algorithm.mapping, num_siblings=3)
    (rows,) = rows_of(rollout.episodes).values()
    assert rollout.counters["tokens"] == rows["mask"].sum()
    pioneers, observers = (at_position(rows, position) for position in (0, 1))
    assert pioneers["chains"].tolist() == pioneers["forks"].tolist() == [0, 3, 6, 9]
    assert observers["forks"].tolist() == [0] * 3 + [3] * 3 + [6] * 3 + [9] * 3
    prompts = observers["prompts"].view(4, 3, -1)
    assert (prompts == prompts[:, :1]).all() and not (prompts[0, 0] == prompts[1, 0]).all()
    answers = observers["responses"].view(4, 3, -1).tolist()
    assert all(one != other for first, *others in answers for one in [first] for other in others)
    rows |= algorithm.learners.score({"llm_1": rows})["llm_1"]
    rows["rewards"] = rows["task_rewards"].float()
    columns, _ = algorithm.estimators["llm_1"].estimate(rows)
    rows |= columns
    for position, shape in ((0, (2, 2)), (1, (4, 3))):
        part = at_position(rows, position)
        rewards = part["rewards"].view(shape)
        others = (rewards.sum(1, keepdim=True) - rewards) / (shape[1] - 1)
        np.testing.assert_allclose(part["advantages"][:, 0].view(shape), rewards - others, rtol=1e-4, atol=1e-5)


def test_two_policies_take_the_same_number_of_steps_with_siblings(make_cory: MakeCory, tmp_path: Path) -> None:
    settings = {
        "num_siblings": 2,
        "num_generations": 2,
        "group_baseline": 0.5,
        "queries_per_update": 2,
        "minibatch_size": 3,
        "num_epochs": 1,
        "exchange_period": 1,
        "credit": "chain",
    }
    algorithm = make_cory(**settings)
    assert algorithm.settings.responses == 6  # 4 as the pioneer, 8 as the observer
    for turn in range(2):
        report = algorithm.train()["cory"]
        assert len(report["samples"]) == 2  # of each query its first chain
        states = algorithm.learners.ask(
            lambda learner: [list(each.optimizer.state.values()) for each in learner.policies.values()]
        )
        assert [float(state[0]["step"]) for state in states] == [2.0 * (turn + 1)] * 2


def test_chain_credit_trains_and_resumes_exactly(make_cory: MakeCory, tmp_path: Path) -> None:
    settings = {
        "num_policies": 1,
        "credit": "chain",
        "chain_lam": 0.5,
        "critic_inputs": "chain",
        "minibatch_size": 16,
        "num_epochs": 1,
    }
    algorithm = make_cory(**settings)
    algorithm.train()
    (critic,) = algorithm.learners.ask(lambda learner: [each.model.value_head for each in learner.policies.values()])
    assert critic.of_earlier.shape == (2, 1) and critic.of_role.abs().min() > 0 and critic.of_earlier[1].abs() > 0
    algorithm.save_to_path(str(tmp_path / "saved"))
    ahead = algorithm.train()["cory"]
    resumed = make_cory(**settings)
    resumed.restore_from_path(str(tmp_path / "saved"))
    again = resumed.train()["cory"]
    assert again["policy"] == ahead["policy"] and again["role"] == ahead["role"]
