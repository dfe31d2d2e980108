"""Dynamic sampling: which queries are replaced, by which, and what that changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policies.cory import Cory
from policies.rollout.episodes import Rollout
from policies.rollout.prompt_sampling import PromptRef, query_at, sample_prompts, sample_replacements
from tests.policies.conftest import MakeCory

DYNAMIC: dict[str, Any] = {
    "advantage": "rloo",
    "num_generations": 2,
    "queries_per_update": 8,
    "minibatch_size": 16,
    "reward": "tests.policies.sample_rewards:parity",
    "kl_coef": 0.0,
    "eval_every": 100,
}


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


@pytest.mark.parametrize("siblings", [1, 2])
def test_only_queries_without_a_signal_in_any_role_are_replaced(make_cory: MakeCory, siblings: int) -> None:
    algorithm = make_cory(**DYNAMIC, num_siblings=siblings, dynamic_sampling=1)
    plain = make_cory(**DYNAMIC, num_siblings=siblings)
    before = plain.scheduler.generate(0, plain.mapping)
    after = algorithm.scheduler.generate(0, algorithm.mapping)
    has_signals = {query: has_signal(rewards) for query, rewards in rewards_by_query(before).items()}
    replaced = [query for query, signal in has_signals.items() if not signal]
    assert 0 < len(replaced) < 8
    new = iter(query_at(0, index, algorithm.scheduler.num_queries) for index in range(8, 8 + len(replaced)))
    expected = [query if signal else next(new) for query, signal in has_signals.items()]
    refs = [PromptRef(query, sample, sib) for query in expected for sample in range(2) for sib in range(siblings)]
    assert after.prompt_refs == refs
    texts = dict(zip(before.prompt_refs, before.samples, strict=True))
    for ref, sample in zip(after.prompt_refs, after.samples, strict=True):
        if ref.query in has_signals:
            assert sample == texts[ref]
    assert after.counters["replaced_queries"] == len(replaced) == algorithm.scheduler.used_queries
    assert before.counters["replaced_queries"] == before.counters["discarded_tokens"] == 0
    lengths = {
        ref: [len(agent.actions[0]["tokens"]) for agent in episode.agent_episodes.values()]
        for ref, episode in zip(before.prompt_refs, before.episodes, strict=True)
    }
    discarded = sum(
        sum(tokens[1:]) + (tokens[0] if ref.sibling == 0 else 0)
        for ref, tokens in lengths.items()
        if ref.query in replaced
    )
    assert after.counters["discarded_tokens"] == discarded > 0
    replacement = Rollout([e for e, r in zip(after.episodes, refs, strict=True) if r.query not in has_signals], {})
    generated = sum(
        sum(len(agent.actions[0]["tokens"]) for agent in list(episode.agent_episodes.values())[ref.sibling > 0 :])
        for ref, episode in zip(replacement.prompt_refs, replacement.episodes, strict=True)
    )
    assert after.counters["tokens"] == before.counters["tokens"] + generated


def test_rounds_continue_until_no_query_is_left_to_replace(make_cory: MakeCory) -> None:
    algorithm = make_cory(**DYNAMIC, dynamic_sampling=50)
    rollout = algorithm.scheduler.generate(0, algorithm.mapping)
    assert all(map(has_signal, rewards_by_query(rollout).values())) and len(rollout.episodes) == 16
    assert algorithm.scheduler.used_queries == rollout.counters["replaced_queries"]


def test_queries_stay_if_the_data_has_no_others(make_cory: MakeCory, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"query": "This film, number {number},"}}\n' for number in range(9)))
    settings = {**DYNAMIC, "reward": "tests.policies.sample_rewards:constant", "data": str(data)}
    algorithm = make_cory(**settings, dynamic_sampling=3)
    assert algorithm.scheduler.num_queries == 8  # the tenth is held out
    report = algorithm.train()["cory"]
    assert (report["replaced_queries"], report["discarded_tokens"]) == (0, 0)
    assert {metrics["frac_zero_std"] for metrics in report["policy"].values()} == {1.0}


def trace(algorithm: Cory, updates: int) -> list[Any]:
    reports = [algorithm.train()["cory"] for _ in range(updates)]
    return [
        {key: report[key] for key in ("samples", "tokens", "replaced_queries", "discarded_tokens", "policy")}
        for report in reports
    ]


def test_a_resumed_run_replaces_the_same_queries(make_cory: MakeCory, tmp_path: Path) -> None:
    algorithm = make_cory(**DYNAMIC, dynamic_sampling=2)
    first = trace(algorithm, 2)
    assert all(update["replaced_queries"] > 0 for update in first)
    algorithm.save_to_path(tmp_path)
    expected = trace(algorithm, 2)
    resumed = make_cory(**DYNAMIC, dynamic_sampling=2)
    resumed.restore_from_path(tmp_path)
    assert trace(resumed, 2) == expected
    algorithm.restore_from_path(tmp_path)  # an older checkpoint into a running algorithm
    assert trace(algorithm, 2) == expected


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_the_number_of_runners_changes_nothing(make_cory: MakeCory, lag: int) -> None:
    settings = {**DYNAMIC, "dynamic_sampling": 2, "num_policies": 4, "minibatch_size": 8, "max_lag": lag}
    one, three = (trace(make_cory(**settings, num_runners=runners, num_updates=3), 3) for runners in (1, 3))
    assert one == three and all(update["replaced_queries"] > 0 for update in one)
