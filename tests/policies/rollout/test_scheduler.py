"""Updates that are played ahead (`max_lag`): with which weights, in which roles, and what happens when that fails."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cory_env.rewarding.worker import RewardError
from policies.cory import Cory, LearnerError
from policies.rollout import runners
from policies.rollout.role_mapping import RoleMapping
from tests.policies.conftest import MakeCory
from tests.policies.rollout.test_runners import REWARDS, texts

AHEAD: dict[str, Any] = {
    "num_runners": 1,
    "max_lag": 1,
    "queries_per_update": 4,
    "minibatch_size": 4,
    "lr": 1e-3,
    "eval_every": 100,
}


def played_by(algorithm: Cory, update: int, mapping: RoleMapping) -> list[list[str]]:
    """What the algorithm's present weights answer to the queries of an update."""
    return texts({"samples": algorithm.scheduler.generate(update, mapping).samples})


@pytest.mark.parametrize(
    "settings",
    [
        {"exchange_period": 2, "average_period": 1, "num_policies": 4, "minibatch_size": 2},
        # The others show the same one by one.
        pytest.param({"exchange_period": 1}, marks=pytest.mark.slow),
        pytest.param({"exchange_period": 2, "average_period": 1}, marks=pytest.mark.slow),
        pytest.param({"exchange_period": 1, "num_policies": 4, "minibatch_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_an_update_is_played_by_the_weights_before_the_last_update_in_the_roles_of_its_own(
    make_cory: MakeCory, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    ahead = make_cory(**{**AHEAD, "num_updates": 3, **settings})
    calm = make_cory(**{**AHEAD, "num_runners": 0, "max_lag": 0, "num_updates": 3, **settings})
    period = settings["exchange_period"]
    roles = [calm.mapping]
    for update in (1, 2):
        roles.append(roles[-1].rotated() if update % period == 0 else roles[-1])
    expected = [played_by(calm, update, roles[update]) for update in (0, 1)]
    calm.train()
    expected.append(played_by(calm, 2, roles[2]))
    generate, taken = ahead.scheduler.generate, []

    def recorded(*of: Any) -> Any:
        taken.append(generate(*of))
        return taken[-1]

    monkeypatch.setattr(ahead.scheduler, "generate", recorded)
    found = [ahead.train()["cory"] for _ in range(3)]
    assert [texts(report) for report in found] == expected
    assert [report["roles"] for report in found] == [mapping.as_dict() for mapping in roles]
    assert [report["weight_version_lag"] for report in found] == [0, 1, 1]
    for report, rollout in zip(found, taken, strict=True):
        off = [abs(figures["importance_sampling_ratio"] - 1) for figures in report["policy"].values()]
        assert max(off) < 1e-5 if report["weight_version_lag"] == 0 else min(off) > 1e-3
        total, *phases = (report["seconds"][name] for name in ("total", "rollout", "reward", "learn", "sync"))
        assert min(phases) >= 0 and sum(phases) <= total
        seconds = rollout.counters["rollout_seconds"]  # of playing, not of waiting
        assert report["tokens_per_second"] == pytest.approx(report["tokens"] / seconds)
    assert not ahead.scheduler._prefetched and not ahead.scheduler._pending  # the last update has none after it


def test_what_was_played_ahead_counts_for_the_weights_and_roles_of_then_alone(
    make_cory: MakeCory, tmp_path: Path
) -> None:
    algorithm = make_cory(**AHEAD, exchange_period=None)

    def lag() -> int:
        found: int = algorithm.train()["cory"]["weight_version_lag"]
        return found

    assert [lag(), lag()] == [0, 1]
    algorithm.save_to_path(str(tmp_path / "saved"))
    assert lag() == 1
    algorithm.restore_from_path(str(tmp_path / "saved"))
    assert [lag(), lag()] == [0, 1]
    algorithm.exchange_roles()
    report = algorithm.train()["cory"]
    assert (report["roles"]["pioneer"], report["weight_version_lag"]) == ("llm_2", 0)


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_queries_of_a_runner_that_is_killed_while_it_plays_ahead_are_played_all_the_same(
    make_cory: MakeCory, tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    flag = tmp_path / "die"
    settings = {**AHEAD, "exchange_period": 1, "reward": f"{REWARDS}:deadly?flag={flag}"}
    shaken = make_cory(**{**settings, "num_runners": number})
    calm = make_cory(**{**settings, "num_runners": 0, "max_lag": 0})
    shaken.train()
    flag.touch()  # a runner ends itself by SIGKILL while it plays ahead
    assert shaken.train()["cory"]["weight_version_lag"] == 1
    assert not flag.exists()
    report = shaken.train()["cory"]
    if number == 2:  # the other one played its queries
        calm.train()
        assert texts(report) == played_by(calm, 2, calm.mapping.rotated()) and report["weight_version_lag"] == 1
    else:
        assert "All runners died while prefetching the next update. Generating the rollout again." in caplog.messages
        assert len(report["samples"]) == 4 and report["weight_version_lag"] == 0
        assert shaken.train()["cory"]["weight_version_lag"] == 1


def test_what_fails_is_raised_by_the_update_that_needs_it_which_can_be_done_again_or_the_run_be_ended(
    make_cory: MakeCory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "trouble"
    algorithm = make_cory(**AHEAD, reward=f"{REWARDS}:troubled?flag={flag}")
    flag.write_text("fail")
    with pytest.raises(RewardError, match=r"tests\.policies\.sample_rewards:troubled"):
        algorithm.train()  # the first update, which nobody plays ahead
    assert algorithm.updates == 0
    flag.unlink()
    algorithm.train()
    flag.write_text("fail")
    assert algorithm.train()["cory"]["weight_version_lag"] == 1
    flag.unlink()
    with pytest.raises(RewardError, match=r"tests\.policies\.sample_rewards:troubled"):
        algorithm.train()
    assert algorithm.updates == 2
    assert algorithm.train()["cory"]["weight_version_lag"] == 0

    def lost(*_: Any) -> None:
        raise LearnerError("A learner's process died.")

    for trouble in ("", "hang"):
        flag.write_text(trouble)
        with monkeypatch.context() as patch, pytest.raises(LearnerError):
            patch.setattr(algorithm.learners, "learn", lost)
            algorithm.train()
        if not trouble:
            assert algorithm.train()["cory"]["weight_version_lag"] == 0
    assert algorithm.updates == 4
    monkeypatch.setattr(runners, "_STOP_SECONDS", 1.0)
    started = time.monotonic()
    algorithm.stop()
    assert time.monotonic() - started < 15
