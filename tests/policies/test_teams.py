"""More policies than roles: teams, each with its own queries."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cory_env.rewarding.worker import RewardError
from launch.display.rows import RowFormatter
from launch.training.tracking import flat_metrics
from policies.models.weights import checksum
from policies.rollout.episodes import Rollout
from policies.rollout.prompt_sampling import sample_prompts
from policies.rollout.role_mapping import RoleMapping
from tests.policies.conftest import MakeCory

FOUR = ("llm_1", "llm_2", "llm_3", "llm_4")


def test_an_exchange_moves_every_policy_by_one_role_across_teams() -> None:
    mapping = RoleMapping(("pioneer", "observer"), FOUR)
    assert [list(team.as_dict().values()) for team in mapping.teams()] == [["llm_1", "llm_2"], ["llm_3", "llm_4"]]
    rotated = mapping.rotated()
    assert [list(team.as_dict().values()) for team in rotated.teams()] == [["llm_2", "llm_3"], ["llm_4", "llm_1"]]
    assert rotated == mapping.with_pioneer("llm_2")
    assert RoleMapping(("pioneer", "observer"), ("llm_1",)).teams() == [
        RoleMapping(("pioneer", "observer"), ("llm_1",))
    ]


def test_every_team_has_its_own_queries(make_cory: MakeCory, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = make_cory(num_policies=4, queries_per_update=4, num_generations=2, minibatch_size=4, exchange_period=1)
    generate, rollouts = algorithm.runners.generate, []

    def record(*args: Any, **kwargs: Any) -> Rollout:
        rollout = generate(*args, **kwargs)
        if kwargs["split"] == "train":
            rollouts.append(rollout)
        return rollout

    monkeypatch.setattr(algorithm.runners, "generate", record)
    for update, teams in enumerate(([(0, 1), (2, 3)], [(1, 2), (3, 0)])):
        rollouts.clear()
        report = algorithm.train()["cory"]
        first, second = rollouts
        assert first.prompt_refs + second.prompt_refs == sample_prompts(0, update, 4, len(algorithm.task.train), 2)
        assert not {ref.query for ref in first.prompt_refs} & {ref.query for ref in second.prompt_refs}
        for rollout, team in zip((first, second), teams, strict=True):
            policy_ids = {tuple(turn["policy"] for turn in sample["responses"]) for sample in rollout.samples}
            assert policy_ids == {tuple(FOUR[k] for k in team)}
        assert report["roles"] == {"pioneer": FOUR[teams[0][0]], "observer": FOUR[teams[0][1]]}
        for position, role in enumerate(("pioneer", "observer")):  # each policy has one role, each role two policies
            rewards = [report["policy"][FOUR[team[position]]]["task_reward"] for team in teams]
            assert report["role"][role]["task_reward"] == pytest.approx(np.mean(rewards), rel=1e-6)
        positions = {name: value for name, value in flat_metrics(report).items() if name.startswith("position/")}
        assert positions == {f"position/{FOUR[k]}": float(index) for team in teams for index, k in enumerate(team)}
        sample_policies = [[turn["policy"] for turn in sample["responses"]] for sample in report["samples"]]
        assert sample_policies == [[FOUR[k] for k in team] for team in teams for _ in range(2)]
        assert (
            RowFormatter(algorithm.settings, "→").chain(report["roles"]) == "→".join(report["roles"].values()) + " +1"
        )


def test_a_run_with_teams_resumes_exactly(make_cory: MakeCory, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_policies": 4, "queries_per_update": 4, "minibatch_size": 2, "exchange_period": 1}
    algorithm = make_cory(**settings)
    algorithm.train()
    algorithm.save_to_path(str(tmp_path / "saved"))
    expected = algorithm.train()["cory"]
    resumed = make_cory(**settings)
    resumed.restore_from_path(str(tmp_path / "saved"))
    report = resumed.train()["cory"]
    assert report["roles"] == expected["roles"] == {"pioneer": "llm_2", "observer": "llm_3"}
    assert report["policy"] == expected["policy"] and report["samples"] == expected["samples"]


def test_a_team_without_rewards_for_many_batches_stops_training(
    make_cory: MakeCory, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = make_cory(num_policies=4, queries_per_update=4, minibatch_size=2)
    generate = algorithm.runners.generate

    def drop_second_team(*args: Any, **kwargs: Any) -> Rollout:
        rollout = generate(*args, **kwargs)
        if kwargs["mapping"].rotation == 2:
            rollout = rollout.without_chains()
        return rollout

    monkeypatch.setattr(algorithm.runners, "generate", drop_second_team)
    with pytest.raises(RewardError, match="on every query of 6 batches in a row"):
        algorithm.train()


def test_an_independent_agent_learns_the_same_as_alone_on_its_queries(make_cory: MakeCory) -> None:
    both = make_cory(num_agents=1, num_policies=2, queries_per_update=8, minibatch_size=4)
    single = make_cory(num_agents=1, queries_per_update=4, minibatch_size=4)
    report = both.train()["cory"]
    single.train()
    assert (report["exchanged"], report["roles"]) == (False, {"pioneer": "llm_1"})
    assert checksum(both.weights("llm_1")) == checksum(single.weights("llm_1"))
    assert checksum(both.weights("llm_1")) != checksum(both.weights("llm_2"))


def test_independent_agents_never_exchange_roles_but_can_be_averaged(make_cory: MakeCory) -> None:
    algorithm = make_cory(num_agents=1, num_policies=2, exchange_period=1, average_period=2, minibatch_size=4)
    reports = [algorithm.train()["cory"] for _ in range(2)]
    assert [(report["exchanges"], report["averaged"]) for report in reports] == [(0, False), (0, True)]
    assert checksum(algorithm.weights("llm_1")) == checksum(algorithm.weights("llm_2"))
