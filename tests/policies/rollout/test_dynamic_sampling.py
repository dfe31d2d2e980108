"""Dynamic sampling: which queries are replaced, by which, and what that changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.cory import Cory
from policies.rollout.chain_runner import ChainRunner
from policies.rollout.episodes import Rollout
from policies.rollout.prompt_sampling import PromptRef, query_at, sample_prompts, sample_replacements
from policies.rollout.role_mapping import make_mapping
from policies.rollout.scheduler import RolloutScheduler
from tests.policies.conftest import BUNDLED, MakeCory
from tests.policies.rollout.test_chain_runner import make_runner

DYNAMIC: dict[str, Any] = {
    **BUNDLED,
    "advantage": "rloo",
    "num_generations": 2,
    "queries_per_update": 8,
    "minibatch_size": 8,
    "reward": "tests.policies.sample_rewards:parity",
    "kl_coef": 0.0,
    "eval_every": 100,
}


class LocalRunner:
    """In the place of `Runners`: generates with one runner in this process, without Ray."""

    def __init__(self, runner: ChainRunner) -> None:
        self.runner = runner

    def generate(self, prompt_refs: list[PromptRef], **arguments: Any) -> Rollout:
        return self.runner.sample(prompt_refs=prompt_refs, version=0, **arguments)


def generate(updates: int = 1, **settings: Any) -> tuple[list[Rollout], RolloutScheduler]:
    """Generates the rollouts of the first updates, with the initial weights."""
    runner = make_runner(**{**DYNAMIC, **settings})
    local: Any = LocalRunner(runner)
    scheduler = RolloutScheduler(runner.settings, local, len(runner.task.train))
    mapping = make_mapping(runner.settings)
    rollouts = [scheduler.generate(update, mapping) for update in range(updates)]
    runner.stop()
    return rollouts, scheduler


def test_replacements_are_the_next_queries_that_the_update_does_not_contain() -> None:
    sequence = [query_at(5, index, 4) for index in range(12)]
    assert [prompt_ref.query for prompt_ref in sample_prompts(5, 1, 2, 4)] == sequence[2:4]
    assert [prompt_ref.query for prompt_ref in sample_prompts(5, 1, 2, 4, used=3)] == sequence[5:7]
    queries, used = sample_replacements(5, 4, 1, 4, set(sequence[2:4]))
    expected = next(query for query in sequence[4:] if query not in sequence[2:4])
    assert (queries, sequence[4 + used - 1]) == ([expected], expected)
    queries, used = sample_replacements(5, 4, 3, 4, set(sequence[2:4]))
    assert set(queries) == set(range(4)) - set(sequence[2:4]) and sequence[4 + used - 1] == queries[-1]
    assert sample_replacements(5, 4, 3, 4, set(range(4))) == ([], 0)


def rewards_by_query(rollout: Rollout) -> dict[int, dict[int, list[float]]]:
    """Query → the pioneer's response → the summed task rewards of the chains that continue it."""
    rewards: dict[int, dict[int, list[float]]] = {}
    for prompt_ref, sample in zip(rollout.prompt_refs, rollout.samples, strict=True):
        by_sample = rewards.setdefault(prompt_ref.query, {})
        by_sample.setdefault(prompt_ref.sample, []).append(sum(r["task_reward"] for r in sample["responses"]))
    return rewards


def has_signal(rewards: dict[int, list[float]]) -> bool:
    """Whether any group of a query has different rewards: the observers' after one response, or the pioneers'."""
    means = [sum(values) / len(values) for values in rewards.values()]
    return len(set(means)) > 1 or any(len(set(values)) > 1 for values in rewards.values())


def test_only_queries_without_a_signal_in_any_role_are_replaced() -> None:
    (before,), _ = generate()
    (after,), scheduler = generate(dynamic_sampling=1)
    has_signals = {query: has_signal(rewards) for query, rewards in rewards_by_query(before).items()}
    replaced = [query for query, signal in has_signals.items() if not signal]
    assert 0 < len(replaced) < 8
    new = iter(query_at(0, index, scheduler.num_queries) for index in range(8, 8 + len(replaced)))
    expected = [query if signal else next(new) for query, signal in has_signals.items()]
    refs = [PromptRef(query, sample) for query in expected for sample in range(2)]
    assert after.prompt_refs == refs
    texts = dict(zip(before.prompt_refs, before.samples, strict=True))
    for ref, sample in zip(after.prompt_refs, after.samples, strict=True):
        if ref.query in has_signals:
            assert sample == texts[ref]
    assert after.counters["replaced_queries"] == len(replaced) == scheduler.used_queries
    assert before.counters["replaced_queries"] == before.counters["discarded_tokens"] == 0
    lengths = {
        ref: [len(agent.actions[0]["tokens"]) for agent in episode.agent_episodes.values()]
        for ref, episode in zip(before.prompt_refs, before.episodes, strict=True)
    }
    discarded = sum(sum(tokens) for ref, tokens in lengths.items() if ref.query in replaced)
    assert after.counters["discarded_tokens"] == discarded > 0
    replacement = Rollout([e for e, r in zip(after.episodes, refs, strict=True) if r.query not in has_signals], {})
    generated = sum(
        sum(len(agent.actions[0]["tokens"]) for agent in episode.agent_episodes.values())
        for episode in replacement.episodes
    )
    assert after.counters["tokens"] == before.counters["tokens"] + generated


def test_a_reward_of_weight_0_keeps_no_query() -> None:
    (expected,), _ = generate(dynamic_sampling=1)
    rewards = [DYNAMIC["reward"], "tests.policies.sample_rewards:letters"]
    gdpo: dict[str, Any] = {"advantage": "gdpo", "reward": rewards, "reward_weights": [1.0, 0.0]}
    (rollout,), _ = generate(dynamic_sampling=1, **gdpo)
    assert rollout.prompt_refs == expected.prompt_refs and rollout.counters["replaced_queries"] > 0
    (counted,), _ = generate(dynamic_sampling=1, **{**gdpo, "reward_weights": [1.0, 1.0]})
    assert counted.counters["replaced_queries"] < rollout.counters["replaced_queries"]


def test_rounds_continue_until_no_query_is_left_and_the_next_update_starts_after_them() -> None:
    (first, second), scheduler = generate(updates=2, dynamic_sampling=50)
    for rollout in (first, second):
        assert all(map(has_signal, rewards_by_query(rollout).values())) and len(rollout.episodes) == 16
    used = int(first.counters["replaced_queries"])
    assert scheduler.used_queries == used + second.counters["replaced_queries"]
    unique = [query_at(0, index, scheduler.num_queries) for index in range(8 + used, 16 + used)]
    common = {prompt_ref.query for prompt_ref in second.prompt_refs} & set(unique)
    assert common and not common & {prompt_ref.query for prompt_ref in first.prompt_refs}


def test_queries_stay_if_the_data_has_no_others(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"query": "This film, number {number},"}}\n' for number in range(8)))
    reward = "tests.policies.sample_rewards:constant"
    settings: dict[str, Any] = {"reward": reward, "data": str(data), "eval_data": str(data)}
    (rollout,), scheduler = generate(dynamic_sampling=3, **settings)
    assert scheduler.num_queries == 8 and scheduler.used_queries == 0 and len(rollout.episodes) == 16
    assert rollout.counters["replaced_queries"] == rollout.counters["discarded_tokens"] == 0


def test_a_new_query_whose_reward_fails_replaces_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [
        f'{{"query": "This film, number {number},", "broken": {"true" if number == 9 else "false"}}}'
        for number in range(10)
    ]
    data.write_text("\n".join(rows))
    reward = {"reward": "tests.policies.sample_rewards:constant_if_not_broken", "on_reward_error": "skip"}
    settings: dict[str, Any] = {**reward, "data": str(data), "eval_data": str(data), "dynamic_sampling": 1}
    for seed in range(20):  # the broken query is one of the two that the update does not contain at first
        if 9 in {query_at(seed, index, 10) for index in range(8, 10)}:
            break
    (rollout,), scheduler = generate(seed=seed, **settings)
    assert scheduler.used_queries == 2 and rollout.counters["replaced_queries"] == 1
    assert len(rollout.episodes) == 16 and rollout.counters["dropped_chains"] == 2
    assert 9 not in {prompt_ref.query for prompt_ref in rollout.prompt_refs}


def trace(algorithm: Cory, updates: int) -> list[Any]:
    reports = [algorithm.train()["cory"] for _ in range(updates)]
    return [
        {key: report[key] for key in ("samples", "tokens", "replaced_queries", "discarded_tokens", "policy")}
        for report in reports
    ]


@pytest.mark.slow
def test_a_resumed_run_replaces_the_same_queries(make_cory: MakeCory, tmp_path: Path) -> None:
    algorithm = make_cory(**DYNAMIC, dynamic_sampling=2)
    first = trace(algorithm, 2)
    assert all(update["replaced_queries"] > 0 for update in first)
    algorithm.save_to_path(tmp_path)
    expected = trace(algorithm, 2)
    resumed = make_cory(**DYNAMIC, dynamic_sampling=2)
    resumed.restore_from_path(tmp_path)
    np.testing.assert_equal(trace(resumed, 2), expected)  # NaN equals NaN there
    algorithm.restore_from_path(tmp_path)  # an older checkpoint into a running algorithm
    np.testing.assert_equal(trace(algorithm, 2), expected)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_the_number_of_runners_changes_nothing(make_cory: MakeCory, lag: int) -> None:
    settings = {**DYNAMIC, "dynamic_sampling": 2, "num_policies": 4, "max_lag": lag}
    one, three = (trace(make_cory(**settings, num_runners=runners, num_updates=3), 3) for runners in (1, 3))
    for key in ("samples", "replaced_queries", "discarded_tokens", "tokens"):  # metrics differ by rounding
        assert [update[key] for update in three] == [update[key] for update in one]
    assert all(update["replaced_queries"] > 0 for update in one)
