"""Batches whose rewards all fail (`on_reward_error=skip`), such as during an outage of a judge, are skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policies.rollout.prompt_sampling import sample_prompts
from tests.policies.conftest import MakeCory

NUM_QUERIES, BATCH_SIZE = 12, 4


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Settings with which all rewards of the second batch fail, and one reward of the third."""
    no_reward = {prompt_ref.query for prompt_ref in sample_prompts(0, 1, BATCH_SIZE, NUM_QUERIES)} | {
        sample_prompts(0, 2, BATCH_SIZE, NUM_QUERIES)[0].query
    }
    rows = [{"query": f"The film number {i} is", "broken": i in no_reward} for i in range(NUM_QUERIES)]
    data = tmp_path / "queries.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = {"reward": "tests.policies.sample_rewards:nan_if_broken", "on_reward_error": "skip"}
    sizes = {
        "queries_per_update": BATCH_SIZE,
        "minibatch_size": BATCH_SIZE,
        "num_updates": 3,
        "eval_every": 100,
        "exchange_period": 1,
        "num_epochs": 1,
    }
    return {"data": str(data), "eval_data": str(data), "lr_schedule": "linear", **reward, **sizes}


def sampled_queries(report: dict[str, Any]) -> set[str]:
    return {sample["query"] for sample in report["samples"]}


def batch_queries(batch: int) -> list[str]:
    return [
        f"The film number {prompt_ref.query} is" for prompt_ref in sample_prompts(0, batch, BATCH_SIZE, NUM_QUERIES)
    ]


@pytest.mark.parametrize("prefetch", [{}, pytest.param({"num_runners": 1, "max_lag": 1}, marks=pytest.mark.slow)])
def test_a_batch_without_rewards_is_skipped_and_does_not_count_as_an_update(
    make_cory: MakeCory, settings: dict[str, Any], prefetch: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = make_cory(**settings, **prefetch)
    first, second, third = (algorithm.train()["cory"] for _ in range(3))
    assert [report["skipped_batches"] for report in (first, second, third)] == [0, 1, 0]
    assert (first["dropped_chains"], second["dropped_chains"]) == (0, BATCH_SIZE + 1)
    assert (
        sampled_queries(first) == set(batch_queries(0))
        and sampled_queries(second) == set(batch_queries(2)[1:])
        and sampled_queries(third) <= set(batch_queries(3))
    )
    assert [report["update"] for report in (first, second, third)] == [1, 2, 3]
    assert [report["roles"]["pioneer"] for report in (first, second, third)] == ["llm_1", "llm_2", "llm_1"]
    assert (algorithm.updates, algorithm.exchanges) == (3, 3)
    assert "Update 2: the reward failed on every query. Skipping the batch." in caplog.messages


def test_a_run_with_a_skipped_batch_resumes_exactly(
    make_cory: MakeCory, settings: dict[str, Any], tmp_path: Path
) -> None:
    algorithm = make_cory(**settings)
    for _ in range(2):
        algorithm.train()
    algorithm.save_to_path(str(tmp_path / "saved"))
    resumed = make_cory(**settings)
    resumed.restore_from_path(str(tmp_path / "saved"))
    expected, report = (cory.train()["cory"] for cory in (algorithm, resumed))
    assert report["policy"] == expected["policy"] and report["samples"] == expected["samples"]
    assert sampled_queries(expected) <= set(batch_queries(3))
