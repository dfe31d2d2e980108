"""Tests of health checks: runs that show each sign, and a healthy run without warnings."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM

from cory_env.tokenizer import load_tokenizer
from policies.health import Health, collapse_signs, effect_size
from policies.settings.settings import make_settings
from tests.policies.conftest import MakeCory

RECORDINGS = Path(__file__).parent / "recordings"
REWARDS = "tests.policies.sample_rewards"


def signs(report: dict[str, Any]) -> set[tuple[str, str]]:
    return {(warning["signature"], warning["subject"]) for warning in report["health"]}


def replay(name: str, **settings: Any) -> tuple[Health, list[list[dict[str, Any]]]]:
    """Returns the warnings of each update of a recorded run."""
    health = Health(make_settings(settings))
    lines = (RECORDINGS / f"{name}.jsonl").read_text().splitlines()
    return health, [health.observe({**json.loads(line), "update": n}) for n, line in enumerate(lines, 1)]


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


def test_a_warning_starts_after_health_patience_is_logged_once_and_ends_with_its_sign(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = Health(make_settings({"health_patience": 2, "max_token_kl": 1.0}))
    healthy: dict[str, float] = {
        "task_reward": 1.0,
        "task_reward_std": 1.0,
        "kl": 1.0,
        "response_length": 10.0,
        "eos_rate": 0.5,
        "repetition": 0.0,
    }
    active = []
    for update, kl in enumerate((20.0, 20.0, 20.0, 1.0, 20.0), 1):
        report = {"update": update, "policy": {"llm_1": {**healthy, "kl": kl}}, "role": {"pioneer": healthy}}
        warnings = health.observe(report)
        active.append([(warning["signature"], warning["updates"]) for warning in warnings])
    assert active == [[], [("kl", 2)], [("kl", 3)], [], []]
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [2]


def test_a_policy_that_stops_ending_its_responses_ends_the_run_as_collapsed(
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
        stop_on_collapse=True,
        health_patience=2,
        max_token_kl=100.0,
    )
    with caplog.at_level(logging.WARNING, logger="policies"):
        for _ in range(12):
            result = algorithm.train()
            if result["done"]:
                break
    assert result["done"] and result["cory"]["collapsed"]
    assert {sign for sign, _ in signs(result["cory"])} == {"eos"}
    assert "rarely ends its responses" in caplog.text


@pytest.mark.parametrize(("winner", "dragged_down"), [("pioneer", True), ("observer", False)])
def test_a_role_with_far_higher_rewards_and_an_observer_that_is_dragged_down(
    make_cory: MakeCory, winner: str, dragged_down: bool
) -> None:
    report = make_cory(reward=f"{REWARDS}:only?winner={winner}", health_patience=1).train()["cory"]
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
    assert bool(list(collapse_signs(settings, "llm_1", figures, first, responses=128))) == has_sign
    assert not list(collapse_signs(settings, "llm_1", figures, first, responses=8))


@pytest.mark.parametrize(
    ("overlong", "eos_rate", "has_sign"), [("mask", 0.0, True), ("mask", 0.01, False), ("keep", 0.0, False)]
)
def test_an_llm_whose_responses_are_all_masked_learns_nothing(overlong: str, eos_rate: float, has_sign: bool) -> None:
    metrics = {"repetition": 0.0, "eos_rate": eos_rate, "kl": 0.0, "response_length": 12.0}
    health = Health(make_settings({"num_agents": 1, "health_patience": 1, "overlong": overlong}))
    warnings = health.observe({"update": 1, "policy": {"llm_1": metrics}, "role": {"agent": metrics}})
    assert signs({"health": warnings}) == ({("all_masked", "llm_1")} if has_sign else set())
    assert not has_sign or warnings[0]["text"].startswith("llm_1 learns nothing: all its responses were cut")


def test_an_observer_without_knowledge_transfer_is_not_dragged_down() -> None:
    better = {"task_reward": 1.0, "task_reward_std": 0.5}
    report = {"update": 1, "policy": {}, "role": {"pioneer": better, "observer": {**better, "task_reward": 0.0}}}
    for knowledge_transfer, expected in ((True, {("dragged_down", "observer")}), (False, set())):
        settings = make_settings({"health_patience": 1, "knowledge_transfer": knowledge_transfer, "max_role_gap": 9.0})
        assert signs({"health": Health(settings).observe(report)}) == expected


def test_effect_size_is_infinite_without_variance_and_0_without_difference() -> None:
    constant = {"task_reward": 1.0, "task_reward_std": 0.0}
    assert effect_size(constant, constant) == 0.0
    assert effect_size(constant, {**constant, "task_reward": 2.0}) == float("-inf")
