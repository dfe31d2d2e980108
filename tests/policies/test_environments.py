"""Training on environments: the same as a task if agents act once, exact resumes, runners and learners, failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cory_env.rewarding.worker import RewardError
from cory_env.tasks import DataError, make_task
from cory_env.text_envs.task import FIRST_TEST_SEED, NUM_TRAIN_SEEDS, make_env_task
from policies.models.weights import checksum
from policies.settings.error import SettingsError
from policies.settings.settings import make_settings
from tests.policies.conftest import TINY, MakeCory
from tests.text_games import question

ENV: dict[str, Any] = {
    **dict.fromkeys(("data", "eval_data", "reward")),
    "task": "custom",
    "env": "tests.text_games:TextGame?rounds=2",
    "advantage": "rloo",
    "num_generations": 2,
    "queries_per_update": 4,
    "minibatch_size": 4,
    "max_prompt_tokens": 80,
    "partner_reward": 0.0,
}
DUEL = {"env": "tests.text_games:Duel?rounds=2", "num_policies": 1}


def digits(report: dict[str, Any]) -> dict[str, Any]:
    """The part of a report that must be equal for equal training."""
    return {name: report[name] for name in ("policy", "role", "tokens", "samples")}


def weights(algorithm: Any) -> list[int]:
    return [checksum(algorithm.weights(policy_id)) for policy_id in algorithm.settings.policy_ids]


def test_an_environment_of_one_turn_trains_like_a_task(make_cory: MakeCory, tmp_path: Path) -> None:
    for name, first, number in (("train", 0, NUM_TRAIN_SEEDS), ("test", FIRST_TEST_SEED, 4)):
        lines = [json.dumps({"query": question(first + index)}) for index in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    shared = {"advantage": "rloo", "num_generations": 2, "minibatch_size": 16, "partner_reward": 0.0, "chat": False}
    shared |= {"max_prompt_tokens": 40, "num_epochs": 1, "validation": False}
    data = {"task": "custom", "data": str(tmp_path / "train.jsonl"), "eval_data": str(tmp_path / "test.jsonl")}
    plain = make_cory(**data, **shared, num_agents=1)
    env = make_cory(**ENV | shared | {"env": "tests.text_games:Question", "queries_per_update": 8})
    assert env.settings.agents == ("pioneer",)
    for _ in range(2):
        expected, report = plain.train()["cory"], env.train()["cory"]
        assert report["tokens"] == expected["tokens"]
        for name in ("policy", "role"):
            for key, metrics in expected[name].items():
                assert report[name][key] == pytest.approx({**report[name][key], **metrics}, rel=1e-6), key
        texts, expected_texts = (
            [turn["text"] for sample in each["samples"] for turn in sample["responses"]] for each in (report, expected)
        )
        assert texts == expected_texts
    assert report["evaluation"]["llm_1"] == pytest.approx(expected["evaluation"]["llm_1"], rel=1e-6)
    for name, array in plain.weights("llm_1").items():
        np.testing.assert_allclose(env.weights("llm_1")[name], array, rtol=1e-5, atol=1e-7)


def test_two_agents_of_two_llms_act_in_turn_and_exchange_seats(make_cory: MakeCory) -> None:
    algorithm = make_cory(**ENV, exchange_period=1)
    roles = []
    for _ in range(2):
        report = algorithm.train()["cory"]
        roles.append(report["roles"])
        for sample in report["samples"]:
            assert [turn["role"] for turn in sample["responses"]] == ["first", "second"] * 2
            assert [turn["policy"] for turn in sample["responses"]] == [*report["roles"].values()] * 2
            assert sample["responses"][2]["observation"] == f"{sample['query']}, 2 actions.\n"
        for role, policy_id in report["roles"].items():
            assert report["role"][role]["task_reward"] == pytest.approx(report["policy"][policy_id]["task_reward"])
    assert roles == [{"first": "llm_1", "second": "llm_2"}, {"first": "llm_2", "second": "llm_1"}]
    assert report["truncated_episodes"] == 0
    assert report["evaluation"].keys() == {"llm_1", "llm_2", "mean"} and "last_response" not in report


def test_a_zero_sum_game_in_self_play_is_symmetric(make_cory: MakeCory) -> None:
    algorithm = make_cory(**ENV | DUEL)
    for _ in range(2):
        report = algorithm.train()["cory"]
        assert report["role"]["first"]["task_reward_std"] > 0  # not only draws
        returns = [report["role"][role]["task_reward"] for role in ("first", "second")]
        assert returns[0] == -returns[1]
        assert report["policy"]["llm_1"]["task_reward"] == pytest.approx(0.0)
    assert report["evaluation"]["llm_1"]["task_reward"] == pytest.approx(0.0)


@pytest.mark.parametrize("settings", [{}, {"advantage": "gae", "num_generations": 1, "queries_per_update": 8}])
def test_a_run_resumes_exactly(make_cory: MakeCory, tmp_path: Path, settings: dict[str, Any]) -> None:
    values = ENV | settings
    whole = make_cory(**values)
    whole.train()
    whole.save_to_path(tmp_path / "checkpoint")
    expected = whole.train()["cory"]
    resumed = make_cory(**values)
    resumed.restore_from_path(str(tmp_path / "checkpoint"))
    assert digits(resumed.train()["cory"]) == digits(expected)
    assert weights(resumed) == weights(whole)


def test_digits_do_not_depend_on_processes_of_environments(make_cory: MakeCory) -> None:
    one, three = make_cory(**ENV, env_processes=1), make_cory(**ENV, env_processes=3)
    assert digits(one.train()["cory"]) == digits(three.train()["cory"])
    assert weights(one) == weights(three)


def test_failing_episodes_are_skipped_and_counted_or_end_the_run(make_cory: MakeCory) -> None:
    broken = ENV | {"env": "tests.text_games:Broken?way=raise", "queries_per_update": 8, "eval_every": 10}
    report = make_cory(**broken, on_reward_error="skip").train()["cory"]
    assert 0 < report["dropped_chains"] < 16 and report["dropped_chains"] % 2 == 0
    with pytest.raises(RewardError, match=r"failed at second's turn 1 with seed \d+: it raised RuntimeError: out of"):
        make_cory(**broken).train()


def test_roles_must_be_the_agents(make_cory: MakeCory) -> None:
    with pytest.raises(RewardError, match=r"The roles are first, third, but the agents of .* are first, second"):
        make_cory(**ENV, roles=[{"name": "first"}, {"name": "third"}]).train()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"feedback": "task"}, "feedback=task requires a task instead of env"),
        ({"credit": "chain"}, "credit=chain requires a task instead of env"),
        ({"reward_scaling": "scale"}, "reward_scaling=scale requires a task, or chain_gamma=0"),
        ({"eval_data": "held_out.jsonl"}, "eval_data=held_out.jsonl requires a task, or data"),
        ({"env": None, "max_turns": 3}, "max_turns=3 requires env"),
        ({"select_by": "chain"}, "select_by=chain requires num_agents of 2 or more"),
    ],
)
def test_settings_without_a_meaning_are_rejected(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        make_settings({**TINY, **ENV, **settings})


def test_seeds_of_training_validation_and_test_are_disjoint() -> None:
    task = make_env_task("games:game", 4, validation=10)
    seeds = [{query.columns["seed"] for query in task.queries(split)} for split in task.splits]
    assert [*map(len, seeds)] == [10_000, 10, 1_000] and len(set.union(*seeds)) == 11_010
    assert all(query.id == index for split in task.splits for index, query in enumerate(task.queries(split)))


def test_rows_of_data_have_seeds_and_are_split_like_those_of_tasks(tmp_path: Path) -> None:
    data, eval_data = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    for path, number in ((data, 100), (eval_data, 30)):
        path.write_text("".join(json.dumps({"question": f"{k}+1", "answer": str(k + 1)}) + "\n" for k in range(number)))
    source, eval_source = (f"{path}?query_column=question" for path in (data, eval_data))
    task = make_env_task("games:game", 4, 10, source)
    assert [len(task.queries(split)) for split in task.splits] == [67, 10, 23]
    custom = make_task("custom", data=source, reward="rewards:reward", validation=10)
    for split in task.splits:
        assert [query.text for query in task.queries(split)] == [query.text for query in custom.queries(split)]
        assert [query.id for query in task.queries(split)] == [*range(len(task.queries(split)))]
    seeds = [query.columns["seed"] for split in task.splits for query in task.queries(split)]
    assert len({*seeds}) == 100 and seeds[:67] == [*range(67)]
    assert all(isinstance(seed, int) and seed >= FIRST_TEST_SEED for seed in seeds[67:])
    assert task.train[3].columns["row"] == {"query": custom.train[3].text, "answer": custom.train[3].columns["answer"]}
    task = make_env_task("games:game", 4, 0, source, eval_source)
    assert [len(task.queries(split)) for split in task.splits] == [100, 30]
    with pytest.raises(DataError, match="not found"):
        make_env_task("games:game", 4, 0, tmp_path / "nothing.jsonl")
