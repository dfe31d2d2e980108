"""Tests of health checks: runs that show each sign, and a healthy run without warnings."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM

from cory_env.tokenizer import load_tokenizer
from policies.health import Health, collapse_signs, effect_size
from tests.paper import make_settings
from tests.policies.conftest import BUNDLED, MakeCory

RECORDINGS = Path(__file__).parent / "recordings"
REWARDS = "tests.policies.sample_rewards"
METRICS = {"task_reward": 0.0, "kl": 0.0, "response_length": 6.0, "eos_rate": 0.3, "repetition": 0.0}
ROLES = {role: {"task_reward": 1.0, "task_reward_std": 0.0} for role in ("pioneer", "observer")}


def signs(report: dict[str, Any]) -> set[tuple[str, str]]:
    return {(warning["signature"], warning["subject"]) for warning in report["health"]}


def replay(name: str, **settings: Any) -> tuple[Health, list[list[dict[str, Any]]]]:
    """Returns the warnings of each update of a recorded run."""
    health = Health(make_settings(settings))
    lines = (RECORDINGS / f"{name}.jsonl").read_text().splitlines()
    responses = dict.fromkeys(health.settings.policy_ids, health.settings.responses)
    return health, [health.observe({**json.loads(line), "update": n}, responses) for n, line in enumerate(lines, 1)]


def test_a_healthy_run_has_no_warnings() -> None:
    _, warnings = replay("imdb-tiny")
    assert len(warnings) == 45
    assert not any(warnings)


def test_a_run_without_a_kl_penalty_collapses_with_warnings() -> None:
    _, warnings = replay("imdb-tiny-collapse")
    first = {
        signature: next(n for n, active in enumerate(warnings, 1) if signature in {w["signature"] for w in active})
        for signature in ("kl", "repetition")
    }
    assert first["kl"] < len(warnings) and first["repetition"] <= len(warnings)
    assert {warning["subject"] for warning in warnings[-1]} >= {"llm_1", "llm_2"}


def observe_thrice(health: Health, report: dict[str, Any], responses: dict[str, int]) -> list[dict[str, Any]]:
    """Returns the warnings after three updates with this report."""
    for _ in range(2):
        health.observe(report, responses)
    return health.observe(report, responses)


def test_a_warning_starts_after_three_updates_is_logged_once_and_ends_with_its_sign(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = Health(make_settings({}))
    healthy: dict[str, float] = {
        "task_reward": 1.0,
        "task_reward_std": 1.0,
        "kl": 1.0,
        "response_length": 10.0,
        "eos_rate": 0.5,
        "repetition": 0.0,
    }
    active = []
    for update, kl in enumerate((28.0, 28.0, 28.0, 28.0, 19.0, 28.0), 1):
        report = {"update": update, "policy": {"llm_1": {**healthy, "kl": kl}}, "role": {"pioneer": healthy}}
        warnings = health.observe(report, {"llm_1": 8})
        active.append([(warning["signature"], warning["updates"]) for warning in warnings])
    assert active == [[], [], [("kl", 3)], [("kl", 4)], [], []]
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [3]


def test_a_policy_that_stops_ending_its_responses_has_collapsed(
    make_cory: MakeCory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = PhiForCausalLM(  # its head has a bias, set so that a response ends with probability 1/3 at each token
        PhiConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    with torch.no_grad():
        model.lm_head.bias[tokenizer.eos_token_id] = torch.tensor(len(tokenizer) / 2.0).log()
    model.save_pretrained(tmp_path)
    algorithm = make_cory(
        model=str(tmp_path),
        reward=f"{REWARDS}:longer",
        kl_coef=0.0,
        lr=3e-2,
        queries_per_update=32,
        minibatch_size=32,
        micro_batch_size=32,
        eval_every=100,
        num_updates=12,
    )
    with caplog.at_level(logging.WARNING, logger="policies"):
        for _ in range(12):
            result = algorithm.train()
            if result["cory"]["collapsed"]:
                break
    assert result["cory"]["collapsed"]
    assert {sign for sign, _ in signs(result["cory"])} == {"eos"}
    assert "rarely ends its responses" in caplog.text


@pytest.mark.parametrize(("winner", "dragged_down"), [("pioneer", True), ("observer", False)])
def test_a_role_with_far_higher_rewards_and_an_observer_that_is_dragged_down(
    make_cory: MakeCory, winner: str, dragged_down: bool
) -> None:
    algorithm = make_cory(**BUNDLED, reward=f"{REWARDS}:only?winner={winner}", exchange_period=None)
    report = [algorithm.train()["cory"] for _ in range(3)][-1]
    expected = {("one_sided", "observer")} | ({("dragged_down", "observer")} if dragged_down else set())
    assert signs(report) == expected
    assert any(f"The {winner} has far higher rewards" in warning["text"] for warning in report["health"])
    assert not report["collapsed"]


@pytest.mark.parametrize(("first", "current", "has_sign"), [(0.06, 0.0, False), (0.2, 0.08, True), (0.04, 0.0, False)])
def test_an_end_of_sequence_rate_may_fall_within_three_standard_errors(
    first: float, current: float, has_sign: bool
) -> None:
    """With a true rate of 2 %, 6 % of 128 responses can end by chance: three standard errors are 0.063."""
    settings = make_settings({})
    figures = {"repetition": 0.0, "eos_rate": current, "kl": 0.0, "response_length": 12.0}
    start = {"eos_rate": first, "repetition": 0.0}
    assert bool(list(collapse_signs(settings, "llm_1", figures, start, responses=128))) == has_sign
    assert not list(collapse_signs(settings, "llm_1", figures, start, responses=8))


@pytest.mark.parametrize(
    ("overlong", "eos_rate", "has_sign"), [("mask", 0.0, True), ("mask", 0.01, False), ("keep", 0.0, False)]
)
def test_an_llm_whose_responses_are_all_masked_learns_nothing(overlong: str, eos_rate: float, has_sign: bool) -> None:
    metrics = {"repetition": 0.0, "eos_rate": eos_rate, "kl": 0.0, "response_length": 12.0}
    health = Health(make_settings({"num_agents": 1, "overlong": overlong}))
    metrics |= {"task_reward": 0.0, "task_reward_std": 1.0, "grad_norm": 0.0 if has_sign else 1.0}
    report = {"update": 1, "policy": {"llm_1": metrics}, "role": {"pioneer": metrics}}
    warnings = observe_thrice(health, report, {"llm_1": 8})
    assert signs({"health": warnings}) == ({("no_signal", "llm_1")} if has_sign else set())
    assert not has_sign or "all its responses were cut at max_response_tokens" in warnings[0]["text"]


def test_an_observer_without_knowledge_transfer_is_not_dragged_down() -> None:
    better = {"task_reward": 1.0, "task_reward_std": 0.6}
    report = {"update": 1, "policy": {}, "role": {"pioneer": better, "observer": {**better, "task_reward": 0.0}}}
    for knowledge_transfer, expected in ((True, {("dragged_down", "observer")}), (False, set())):
        settings = make_settings({"knowledge_transfer": knowledge_transfer})
        assert signs({"health": observe_thrice(Health(settings), report, {})}) == expected


@pytest.mark.parametrize("stop_in_training", [False, True])
@pytest.mark.parametrize("roles", [False, True])
def test_roles_are_not_compared_if_later_ones_answer_only_what_was_not_solved(
    stop_in_training: bool, roles: bool
) -> None:
    names = ["drafter_1", "drafter_2", "reviser_1", "reviser_2"] if roles else ["pioneer", "observer"]
    chain: dict[str, Any] = {"num_policies": 1, "queries_per_update": 64, "minibatch_size": 64}
    if roles:
        chain["roles"] = [{"name": "drafter", "count": 2}, {"name": "reviser", "repeat": 2}]
    settings = make_settings(
        {
            **chain,
            "feedback": f"{REWARDS}:long_enough",
            "stop_when": "solved",
            "stop_in_training": stop_in_training,
        }
    )
    better = {"task_reward": 1.0, "task_reward_std": 0.4}
    by_role = dict.fromkeys(names[:-1], better) | {names[-1]: {**better, "task_reward": 0.0}}
    warnings = observe_thrice(Health(settings), {"update": 1, "policy": {}, "role": by_role}, {})
    expected = set() if stop_in_training else {("dragged_down", names[-1]), ("one_sided", names[-1])}
    assert signs({"health": warnings}) == expected


@pytest.mark.parametrize("settings", [{"credit": "chain", "reward_scope": "last"}, {"num_policies": 1}])
def test_roles_are_compared_if_both_are_rewarded_and_with_advice_for_two_llms_only(settings: dict[str, Any]) -> None:
    roles = {
        "pioneer": {"task_reward": 0.0, "task_reward_std": 0.1},
        "observer": {"task_reward": 1.0, "task_reward_std": 0.1},
    }
    warnings = observe_thrice(Health(make_settings(settings)), {"update": 1, "policy": {}, "role": roles}, {})
    texts = [warning["text"] for warning in warnings]
    assert len(texts) == ("num_policies" in settings) and not any("both LLMs" in text for text in texts)


def test_the_end_of_sequence_rate_of_the_few_chains_that_reached_a_role_may_be_0_by_chance() -> None:
    varied = {role: {"task_reward": 1.0, "task_reward_std": 1.0} for role in ROLES}
    active = {}
    for count in (128, 3):
        health = Health(make_settings({"num_policies": 1}))
        for eos_rate in (0.3, 0.0):
            report = {"update": 1, "policy": {"llm_1": {**METRICS, "eos_rate": eos_rate}}, "role": varied}
            active[count] = signs({"health": observe_thrice(health, report, {"llm_1": count})})
    assert active == {128: {("eos", "llm_1")}, 3: set()}


GROUPS: dict[str, Any] = {"advantage": "rloo", "num_generations": 2, "queries_per_update": 4, "kl_coef": 0.0}


@pytest.mark.parametrize(
    "settings",
    [{}, {"credit": "chain"}, GROUPS, {**GROUPS, "num_policies": 1}],
)
def test_an_llm_whose_rewards_are_all_equal_learns_nothing(
    make_cory: MakeCory, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = make_cory(reward=f"{REWARDS}:constant", eval_every=100, **settings)
    reports = [algorithm.train()["cory"] for _ in range(2)]
    for report in reports:  # from the first update on
        assert signs(report) == {("no_signal", policy_id) for policy_id in algorithm.settings.policy_ids}
    equal = "Update 1: llm_1 learns nothing from its rewards: all the responses of a role got the same reward (pioneer"
    assert caplog.text.count("llm_1 learns nothing") == 1 and equal in caplog.text


def test_equal_rewards_are_a_warning_at_once_in_the_first_update_only_if_no_responses_differ() -> None:
    updates = {}
    for name, first, std in (("all", 1, 0.0), ("within groups", 1, 0.5), ("all, later", 2, 0.0)):
        health = Health(make_settings({**GROUPS, "minibatch_size": 8}))
        metrics = {**METRICS, "task_reward_std": std, "frac_zero_std": 1.0, "grad_norm": 0.0}
        reports = [
            {"update": update, "policy": {"llm_1": metrics}, "role": {"pioneer": metrics}}
            for update in range(first, first + 4)
        ]
        active = [health.observe(report, {"llm_1": 8}) for report in reports]
        updates[name] = [warning["updates"] for warnings in active for warning in warnings]
    assert updates == {"all": [1, 2, 3, 4], "within groups": [3, 4], "all, later": [3, 4]}


def test_equal_rewards_of_conversations_come_with_how_to_read_their_completions() -> None:
    metrics = {**METRICS, "task_reward_std": 0.0, "frac_zero_std": 1.0}
    report = {"update": 1, "policy": {"llm_1": metrics}, "role": {"pioneer": metrics}}
    for has_conversations in (True, False):
        health = Health(make_settings({"num_agents": 1}), has_conversations=has_conversations)
        (warning,) = health.observe(report, {"llm_1": 8})
        assert ('completion[0]["content"]' in warning["text"]) == has_conversations


def replay_kl(kls: Sequence[float], **settings: Any) -> list[list[tuple[str, int]]]:
    """Returns the warnings of each update of a run with these KLs per response of 10 tokens."""
    health = Health(make_settings(settings))
    active = []
    for update, kl in enumerate(kls, 1):
        metrics = {**METRICS, "task_reward_std": 1.0, "response_length": 10.0, "kl": kl}
        report = {"update": update, "policy": {"llm_1": metrics}, "role": {"pioneer": metrics}}
        warnings = health.observe(report, {"llm_1": 8})
        active.append([(warning["signature"], warning["updates"]) for warning in warnings])
    return active


@pytest.mark.parametrize(
    ("kls", "settings", "updates"),
    [
        ((0.0, 18.5, 18.6, 18.0), {}, [2]),  # below the limit, and far from the initial policy at once
        ((0.0, 9.0, 18.0, 19.9), {}, []),  # the same KL, in steps
        ((0.0, 18.5, 3.0, 18.5), {}, [2, 4]),
        ((18.0, 18.0), {}, []),  # of a run that starts from another run's policies
        ((math.nan, math.nan), {"kl_coef": 0.0}, []),
        ((0.0, math.nan, 18.5), {}, [3]),  # an update without responses of the policy
    ],
)
def test_a_kl_that_jumps_in_one_update_is_a_warning_at_once(
    kls: Sequence[float], settings: dict[str, Any], updates: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    active = replay_kl(kls, **settings)
    assert [update for update, warnings in enumerate(active, 1) if ("kl_jump", 1) in warnings] == updates
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == updates


def test_the_warning_about_a_jump_of_the_kl_says_what_to_change_and_survives_a_restart() -> None:
    metrics = {**METRICS, "response_length": 10.0, "frac_zero_std": 0.0, "grad_norm": 1.0}
    for weights, has_adapters in (("full", False), ("lora", True)):
        settings = make_settings({"weights": weights})
        first, second = Health(settings), Health(settings)
        first.observe({"update": 1, "policy": {"llm_1": metrics}, "role": ROLES}, {"llm_1": 8})
        second.state = first.state
        report = {"update": 2, "policy": {"llm_1": {**metrics, "kl": 18.5}}, "role": ROLES}
        (warning,) = second.observe(report, {"llm_1": 8})
        assert "KL 0.00 -> 1.85 nats per token (it may rise by 1)" in warning["text"]
        assert "Reduce lr, increase kl_coef" in warning["text"] and ("lora" in warning["text"]) != has_adapters
        second.state = {"first_eos_rate": {}, "held": {}}  # of a checkpoint of an earlier version
        assert second.observe(report, {"llm_1": 8}) == []


LIMITED: dict[str, Any] = {"task": "arithmetic", "max_response_tokens": 12}


@pytest.mark.parametrize(
    ("settings", "eos_rate", "has_sign"),
    [
        (LIMITED, 0.05, True),
        (LIMITED, 0.06, False),
        (LIMITED, math.nan, False),  # a role that no chain reached
        ({**LIMITED, "max_response_tokens": 1}, 0.0, False),  # a single token is meant to be cut
        ({**LIMITED, "min_response_tokens": 4}, 0.0, False),  # the limit changes
        ({**LIMITED, "task": "imdb"}, 0.0, False),  # film reviews are continued, and need no end
    ],
)
def test_responses_that_nearly_all_end_at_the_length_limit_are_a_warning_at_once(
    settings: dict[str, Any], eos_rate: float, has_sign: bool, caplog: pytest.LogCaptureFixture
) -> None:
    health = Health(make_settings(settings))
    start = {"evaluation": {"llm_1": {"eos_rate": 1.0}, "llm_2": {"eos_rate": eos_rate}}}
    cut = signs({"health": health.observe_start(start)})
    assert cut == ({("length_limit", "pioneer")} if has_sign else set())
    roles = {"pioneer": {**ROLES["pioneer"], "task_reward_std": 1.0, "eos_rate": eos_rate}}
    for update in (1, 2):
        active = health.observe({"update": update, "policy": {}, "role": roles}, {})
        assert signs({"health": active}) == cut
        assert [warning["updates"] for warning in active] == [update] * has_sign
    assert len(caplog.records) == has_sign  # once, before training
    assert (
        "Update 0: 95% of the pioneer's responses are cut at the length limit, max_response_tokens=12." in caplog.text
    ) == has_sign


def test_the_length_limit_is_that_of_the_role_and_of_the_chain_s_last_answers() -> None:
    roles = [{"name": "solver"}, {"name": "critic", "max_response_tokens": 5}]
    health = Health(make_settings({**LIMITED, "roles": roles}))
    start = {"evaluation": {"llm_1": {"eos_rate": 0.9}}, "last_response": {"eos_rate": 0.0}}
    (warning,) = health.observe_start(start)
    assert warning["subject"] == "critic" and "max_response_tokens=5." in warning["text"]


def test_a_gradient_of_0_is_a_sign() -> None:
    roles = [{"name": "solver"}, {"name": "critic"}]
    metrics = {**METRICS, "frac_zero_std": 0.5, "grad_norm": 0.0}
    settings = make_settings({"roles": roles})
    report = {
        "update": 1,
        "policy": {"llm_1": metrics, "llm_2": {**metrics, "grad_norm": 0.1}},
        "role": dict.fromkeys(("solver", "critic"), ROLES["pioneer"]),
        "roles": {"solver": "llm_1", "critic": "llm_2"},
    }
    warnings = observe_thrice(Health(settings), report, {"llm_1": 8, "llm_2": 8})
    assert signs({"health": warnings}) == {("no_signal", "llm_1")}
    assert warnings[0]["text"].startswith("llm_1 learns nothing from its rewards: its gradient is 0.")


@pytest.mark.parametrize(
    ("changes", "constant", "has_sign"),
    [
        ({}, True, True),
        ({}, False, False),  # the rewards of one role differ, and each LLM gets a share of them
        ({"overlong": "penalty", "overlong_buffer": 2}, True, False),
        ({"stop_when": "solved", "stop_in_training": True, "feedback": f"{REWARDS}:long_enough"}, True, False),
    ],
)
def test_without_groups_equal_rewards_are_a_sign_if_credit_and_penalties_cannot_make_them_differ(
    changes: dict[str, Any], constant: bool, has_sign: bool
) -> None:
    settings = make_settings({"advantage": "gae", **changes})
    roles = {**ROLES, "observer": ROLES["observer"] if constant else {**ROLES["observer"], "task_reward_std": 0.1}}
    report = {"update": 1, "policy": {"llm_1": {**METRICS, "grad_norm": 1.0}}, "role": roles}
    active = signs({"health": observe_thrice(Health(settings), report, {"llm_1": 8})})
    assert active == ({("no_signal", "llm_1")} if has_sign else set())
    report["policy"] = {"llm_1": dict.fromkeys(METRICS, math.nan)}  # without responses
    assert signs({"health": observe_thrice(Health(settings), report, {})}) == set()


def test_effect_size_is_infinite_without_variance_and_0_without_difference() -> None:
    constant = {"task_reward": 1.0, "task_reward_std": 0.0}
    assert effect_size(constant, constant) == 0.0
    assert effect_size(constant, {**constant, "task_reward": 2.0}) == float("-inf")


@pytest.mark.parametrize(
    ("first", "current", "has_sign"),
    [(0.0, 0.19, False), (0.0, 0.21, True), (0.45, 0.6, False), (0.85, 0.95, True), (0.95, 0.97, True)],
)
def test_texts_that_repeat_by_nature_may_do_so(first: float, current: float, has_sign: bool) -> None:
    """A grid of six digits repeats pairs; `first` is the share of repeated pairs in the first update."""
    health = Health(make_settings({"num_agents": 1}))
    healthy = {**METRICS, "task_reward_std": 1.0}
    reports = [
        {"update": 1, "policy": {"llm_1": {**healthy, "repetition": first}}, "role": {"pioneer": healthy}},
        {"update": 2, "policy": {"llm_1": {**healthy, "repetition": current}}, "role": {"pioneer": healthy}},
    ]
    assert health.observe(reports[0], {"llm_1": 8}) == []
    assert signs({"health": observe_thrice(health, reports[1], {"llm_1": 8})}) == (
        {("repetition", "llm_1")} if has_sign else set()
    )
