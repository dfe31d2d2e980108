"""Roles in training: solver, critic and reviser, with two LLMs."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.learning.credit import assign_credit
from policies.learning.estimation import AdvantageEstimator
from policies.learning.rows import frozen_scores, left_padded, make_rows
from policies.rllib.token_batch import rows_from_episodes
from policies.rollout.prompt_sampling import PromptRef
from tests.paper import paper_credit, paper_hyperparameters
from tests.policies.conftest import MakeCory
from tests.policies.rollout.test_chain_generation import OneByOneGenerator
from tests.policies.rollout.test_chain_runner import make_runner, sample_chains

TEAM: dict[str, Any] = {
    "task": "drafts",
    "model": "drafts-llama-tiny",
    "max_prompt_tokens": 48,
    "reward": "tests.policies.sample_rewards:letters",
    "roles": [
        {"name": "solver", "count": 2, "policy": "llm_1"},
        {
            "name": "critic",
            "prompt": "{query}~{solver.response}=",
            "produces_response": False,
            "max_response_tokens": 3,
            "policy": "llm_2",
        },
        {
            "name": "reviser",
            "prompt": "{query}~{solver.response}~{critic.response}=",
            "repeat": 2,
            "policy": "llm_1",
        },
    ],
    "feedback": "tests.cory_env.sample_rewards:too_short",
    "stop_when": "solved",
    "exchange_period": None,
    "advantage": "rloo",
    "num_generations": 2,
    "partner_reward": 0.5,
}
AGENTS = ["solver_1", "solver_2", "critic", "reviser_1", "reviser_2"]
POLICY_IDS = ("llm_1", "llm_2")
PROMPT_REFS = [PromptRef(query % 4, query // 4) for query in range(8)]


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    excluded = ("seconds", "tokens_per_second")
    return {name: value for name, value in report.items() if name not in excluded}


def weights_of(algorithm: Any) -> dict[str, np.ndarray]:
    return {
        f"{policy_id}/{name}": array
        for policy_id in algorithm.settings.policy_ids
        for name, array in algorithm.weights(policy_id).items()
    }


def test_a_team_trains_reports_by_role_and_resumes_exactly(make_cory: MakeCory, tmp_path: Any) -> None:
    algorithm = make_cory(**TEAM)
    before = weights_of(algorithm)
    first = algorithm.train()["cory"]
    assert list(first["role"]) == AGENTS and list(first["roles"].values()) == [f"llm_{k}" for k in (1, 1, 2, 1, 1)]
    assert math.isnan(first["role"]["critic"]["task_reward"]) and first["role"]["critic"]["response_length"] <= 3
    assert math.isnan(first["policy"]["llm_2"]["task_reward"]) and abs(first["policy"]["llm_2"]["kl"]) < 1e-5
    own = [first["role"][name]["task_reward"] for name in AGENTS if name != "critic"]
    assert first["policy"]["llm_1"]["task_reward"] == pytest.approx(np.mean(own))
    algorithm.save_to_path(str(tmp_path / "checkpoint"))
    second = algorithm.train()["cory"]
    assert "evaluation" in second and math.isnan(second["evaluation"]["llm_2"]["task_reward"])
    assert second["evaluation"]["llm_2"].keys() == second["evaluation"]["llm_1"].keys()
    assert not math.isnan(second["last_response"]["task_reward"])
    assert second["evaluation"]["mean"]["task_reward"] == second["evaluation"]["llm_1"]["task_reward"]
    after = weights_of(algorithm)
    assert all(
        any((before[name] != after[name]).any() for name in after if name.startswith(policy_id))
        for policy_id in POLICY_IDS
    )

    resumed = make_cory(**TEAM)
    resumed.restore_from_path(str(tmp_path / "checkpoint"))
    again = resumed.train()["cory"]
    np.testing.assert_equal(without_times(again), without_times(second))
    np.testing.assert_equal(weights_of(resumed), after)


def frozen_team(policy: str = "drafts-llama-tiny", **others: Any) -> dict[str, Any]:
    """The team with a frozen critic."""
    solver, critic, reviser = TEAM["roles"]
    return {**TEAM, "roles": [solver, critic | {"policy": policy}, reviser], **others}


@pytest.mark.parametrize(
    "others",
    [{"credit": "chain", "partner_reward": 1.0, "weights": "lora"}, pytest.param({}, marks=pytest.mark.slow)],
)
def test_a_frozen_model_responds_and_is_not_trained(make_cory: MakeCory, tmp_path: Any, others: dict[str, Any]) -> None:
    settings = frozen_team(**others)
    algorithm = make_cory(**settings)
    generator = algorithm.env_runner_group.local_env_runner.generator
    before = {name: parameter.clone() for name, parameter in generator.models["frozen_1"].named_parameters()}
    first = algorithm.train()["cory"]
    assert list(first["roles"].values()) == ["llm_1", "llm_1", "frozen_1", "llm_1", "llm_1"]
    assert list(first["policy"]) == ["llm_1"] and list(first["role"]) == AGENTS
    critic = first["role"]["critic"]
    assert 0 < critic["response_length"] <= 3 and critic["kl"] == 0.0 and math.isnan(critic["task_reward"])
    algorithm.save_to_path(str(tmp_path / "checkpoint"))
    second = algorithm.train()["cory"]
    assert not math.isnan(second["last_response"]["combined_reward"]) and list(second["evaluation"]) == [
        "llm_1",
        "mean",
    ]
    after = dict(generator.models["frozen_1"].named_parameters())
    assert before.keys() == after.keys() and all((before[name] == after[name]).all() for name in after)
    assert not any("lora" in name for name in after)

    resumed = make_cory(**settings)
    resumed.restore_from_path(str(tmp_path / "checkpoint"))
    np.testing.assert_equal(without_times(resumed.train()["cory"]), without_times(second))


def test_a_reviser_learns_from_a_frozen_solver_s_drafts(make_cory: MakeCory) -> None:
    solver, _, reviser = TEAM["roles"]
    roles = [solver | {"policy": "drafts-llama-tiny"}, reviser | {"prompt": "{query}~{solver.response}=", "repeat": 1}]
    algorithm = make_cory(**{**TEAM, "roles": roles, "select_by": "chain"})
    report = algorithm.train()["cory"]
    assert list(report["roles"].values()) == ["frozen_1", "frozen_1", "llm_1"]
    assert not math.isnan(report["role"]["solver_1"]["task_reward"])
    evaluated = algorithm.evaluator.evaluate()
    assert not math.isnan(evaluated["last_response"]["combined_reward"])
    assert math.isnan(evaluated["evaluation"]["mean"]["task_reward"])


@pytest.mark.parametrize("others", [{}, {"dynamic_sampling": 1}, {"advantage": "gae", "num_generations": 1}])
def test_an_update_in_which_only_frozen_models_responded_changes_no_weights(
    make_cory: MakeCory, tmp_path: Any, others: dict[str, Any]
) -> None:
    solver, _, reviser = TEAM["roles"]
    roles = [solver | {"policy": "drafts-llama-tiny", "count": 1}, reviser | {"prompt": None, "repeat": 1}]
    solved = {"feedback": "tests.policies.sample_rewards:always_solved", "stop_in_training": True}
    settings = {**TEAM, **solved, "roles": roles, "select_by": "chain", **others}
    algorithm = make_cory(**settings)
    before = weights_of(algorithm)
    first = algorithm.train()["cory"]
    assert first["update"] == 1 and {len(sample["responses"]) for sample in first["samples"]} == {1}
    assert math.isnan(first["logprob_diff_mean"]) and math.isnan(first["logprob_diff_max"])
    assert set(map(math.isnan, first["policy"]["llm_1"].values())) == {True}
    assert not math.isnan(first["role"]["solver"]["task_reward"])
    np.testing.assert_equal(weights_of(algorithm), before)
    algorithm.save_to_path(str(tmp_path / "checkpoint"))
    second = algorithm.train()["cory"]
    assert second["last_response"]["bare_kl"] == 0.0 and math.isnan(second["evaluation"]["mean"]["kl"])
    resumed = make_cory(**settings)
    resumed.restore_from_path(str(tmp_path / "checkpoint"))
    np.testing.assert_equal(without_times(resumed.train()["cory"]), without_times(second))


def test_the_reward_of_a_frozen_model_is_credited_to_earlier_agents() -> None:
    trained = make_rows([[1]] * 2, [[2]] * 2, [[-1.0]] * 2, [1.0, 2.0], [True] * 2)
    frozen = make_rows([[1]] * 2, [[2]] * 2, [[-1.0]] * 2, [10.0, 20.0], [True] * 2, positions=[1, 1])
    rows = {name: part.with_scores(frozen_scores(part)) for name, part in (("llm_1", trained), ("frozen_1", frozen))}
    estimators = {"llm_1": AdvantageEstimator(paper_hyperparameters(advantage="rloo"))}
    credited = assign_credit(rows, paper_credit("chain", chain_gamma=0.5), estimators)
    assert credited["llm_1"].tolist() == [6.0, 12.0] and credited["frozen_1"].tolist() == [10.0, 20.0]


def test_roles_are_exchanged_between_llms(make_cory: MakeCory) -> None:
    algorithm = make_cory(**{**TEAM, "exchange_period": 1})
    reports = [algorithm.train()["cory"] for _ in range(2)]
    assert [list(report["roles"].values()) for report in reports] == [
        ["llm_1", "llm_1", "llm_2", "llm_1", "llm_1"],
        ["llm_2", "llm_2", "llm_1", "llm_2", "llm_2"],
    ]
    assert not math.isnan(reports[1]["evaluation"]["llm_2"]["task_reward"])


def test_stopping_in_training_shortens_chains_and_masks_positions(make_cory: MakeCory) -> None:
    feedback = "tests.policies.sample_rewards:done_after_three"
    algorithm = make_cory(**{**TEAM, "feedback": feedback, "stop_in_training": True})
    report = algorithm.train()["cory"]
    lengths = {len(sample["responses"]) for sample in report["samples"]}
    stopped = [sample["responses"][-1] for sample in report["samples"] if len(sample["responses"]) < 5]
    assert min(lengths) < 5 and all(response.get("feedback", "none") is None for response in stopped)


@pytest.mark.slow
def test_two_runners_generate_what_one_does(make_cory: MakeCory) -> None:
    one, two = (make_cory(**{**TEAM, "num_runners": count}) for count in (0, 2))
    reports = [algorithm.train()["cory"] for algorithm in (one, two)]
    np.testing.assert_equal(reports[1]["samples"], reports[0]["samples"])  # NaN equals NaN there
    for name in AGENTS:
        np.testing.assert_allclose(
            [reports[0]["role"][name][key] for key in ("task_reward", "kl", "response_length")],
            [reports[1]["role"][name][key] for key in ("task_reward", "kl", "response_length")],
            atol=1e-6,
        )


def test_drafts_are_requested_at_once_and_any_finishing_order_gives_the_same_chains(ray_session: None) -> None:
    runner: Any = make_runner(**TEAM)
    expected = sample_chains(runner, PROMPT_REFS)
    generator = runner.generator
    for seed in (0, 1):
        runner.generator = OneByOneGenerator(generator, random.Random(seed).randrange)
        rollout = sample_chains(runner, PROMPT_REFS)
        positions = [key % 5 for key in runner.generator.order if key // 5 == 0]
        assert sorted(positions) == [0, 1, 2, 3, 4] and positions[2:] == [2, 3, 4]
        np.testing.assert_equal(rollout.samples, expected.samples)
    runner.generator = OneByOneGenerator(generator, lambda waiting: waiting - 1)  # the last request first
    np.testing.assert_equal(sample_chains(runner, PROMPT_REFS).samples, expected.samples)
    assert runner.generator.order[:2] == [36, 35]  # the second draft of the last chain, then its first
    rows = rows_from_episodes(expected.episodes)
    assert {policy_id: len(columns.mask) for policy_id, columns in rows.items()} == {"llm_1": 32, "llm_2": 8}
    texts = [[response["text"] for response in sample["responses"][:2]] for sample in expected.samples]
    assert any(first != second for first, second in texts)  # drafts have different seeds
    runner.stop()


PLANNER = {"name": "planner", "prompt": "{query} plan", "produces_response": False}


@pytest.mark.parametrize(
    ("roles", "alone"),
    [
        ([{"name": "first", "prompt": "{query}~="}, {"name": "second", "prompt": "{query}~="}], "{query}~="),
        ([{"name": "drafter", "prompt": "{query}~=", "count": 2}], "{query}~="),
        ([{"name": "first", "prompt": "{query}~{reference}="}, {"name": "second"}], None),
        ([PLANNER, {"name": "solver", "prompt": "{query}~="}], "{query}~="),
        ([PLANNER, {"name": "solver", "prompt": "{query}~{planner.response}="}, {"name": "reviser"}], None),
    ],
)
def test_the_bare_query_of_a_last_answer_is_the_prompt_of_the_first_role_that_answers(
    make_cory: MakeCory, roles: list[dict[str, Any]], alone: str | None
) -> None:
    changes = {"roles": roles, "feedback": None, "stop_when": None, "num_policies": 1, "select_by": "chain"}
    algorithm = make_cory(**{**TEAM, **changes, "eval_kl_coef": 0.1})
    rollout, metrics = algorithm.evaluator.measure(PROMPT_REFS, algorithm.mapping, "test")
    last = algorithm.settings.agents[-1]
    (rows,) = rows_from_episodes(rollout.episodes).values()
    rows = rows.at_position(len(algorithm.settings.agents) - 1)
    task, tokenizer = algorithm.task, algorithm.settings.make_tokenizers()["llm_1"]
    template = task.prompt_template if alone is None else alone
    prompts = tokenizer([template.format(query=task.test[ref.query].text) for ref in rollout.prompt_refs])["input_ids"]
    tokens, mask = left_padded(prompts)
    bare = replace(rows, prompts=tokens, prompt_mask=mask)
    own, alone_scores = (algorithm.learners.score({"llm_1": part})["llm_1"] for part in (rows, bare))
    expected = ((own.logprobs - alone_scores.columns()["reference_logprobs"]) * rows.mask).sum(1)
    np.testing.assert_allclose(metrics[last]["bare_kl"], expected, atol=1e-4)
    own_prompts = [row[mask.bool()].tolist() for row, mask in zip(rows.prompts, rows.prompt_mask, strict=True)]
    is_asked_alike = own_prompts == prompts
    assert (np.abs(expected).max() < 1e-4) == is_asked_alike  # untrained
