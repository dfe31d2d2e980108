"""Batches whose rewards all fail (`on_reward_error=skip`), as while a judge is out: skipped, and counted apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policies.rollout.prompt_sampling import sample_prompts
from tests.policies.conftest import MakeCory

QUERIES, SIZE = 12, 4


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Of runs whose second batch has no reward, and the third one lacks one of a query."""
    no_reward = {dealt.query for dealt in sample_prompts(0, 1, SIZE, QUERIES)} | {
        sample_prompts(0, 2, SIZE, QUERIES)[0].query
    }
    rows = [{"query": f"The film number {i} is", "broken": i in no_reward} for i in range(QUERIES)]
    data = tmp_path / "queries.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = {"reward": "tests.policies.sample_rewards:unless_broken", "on_reward_error": "skip"}
    sizes = {
        "queries_per_update": SIZE,
        "minibatch_size": SIZE,
        "num_updates": 3,
        "eval_every": 100,
        "exchange_period": 1,
        "num_epochs": 1,
    }
    return {"data": str(data), "eval_data": str(data), "lr_schedule": "linear", **reward, **sizes}


def queries(report: dict[str, Any]) -> set[str]:
    return {sample["query"] for sample in report["samples"]}


def dealt(batch: int) -> list[str]:
    return [f"The film number {each.query} is" for each in sample_prompts(0, batch, SIZE, QUERIES)]


@pytest.mark.parametrize("ahead", [{}, pytest.param({"num_runners": 1, "max_lag": 1}, marks=pytest.mark.slow)])
def test_a_batch_without_rewards_is_skipped_and_counted_and_only_updates_count_as_such(
    make_cory: MakeCory, settings: dict[str, Any], ahead: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = make_cory(**settings, **ahead)
    first, second, third = (algorithm.train()["cory"] for _ in range(3))
    assert [report["skipped_batches"] for report in (first, second, third)] == [0, 1, 0]
    assert (first["dropped_chains"], second["dropped_chains"]) == (0, SIZE + 1)
    assert queries(first) == set(dealt(0)) and queries(second) == set(dealt(2)[1:]) and queries(third) <= set(dealt(3))
    assert [report["update"] for report in (first, second, third)] == [1, 2, 3]
    assert [report["roles"]["pioneer"] for report in (first, second, third)] == ["llm_1", "llm_2", "llm_1"]
    assert (algorithm.updates, algorithm.exchanges) == (3, 3)
    assert "Update 2: the reward failed on every query. The batch is skipped." in caplog.messages


def test_a_run_with_a_skipped_batch_goes_on_as_if_it_had_not_stopped(
    make_cory: MakeCory, settings: dict[str, Any], tmp_path: Path
) -> None:
    algorithm = make_cory(**settings)
    for _ in range(2):
        algorithm.train()
    algorithm.save_to_path(str(tmp_path / "saved"))
    resumed = make_cory(**settings)
    resumed.restore_from_path(str(tmp_path / "saved"))
    on, again = (each.train()["cory"] for each in (algorithm, resumed))
    assert again["policy"] == on["policy"] and again["samples"] == on["samples"] and queries(on) <= set(dealt(3))
