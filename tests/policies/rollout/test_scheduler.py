"""Prefetched rollouts (`max_lag`): their weights and roles, and failures."""

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
from tests.policies.rollout.test_runners import REWARDS, response_texts

PREFETCH: dict[str, Any] = {
    "num_runners": 1,
    "max_lag": 1,
    "queries_per_update": 4,
    "minibatch_size": 4,
    "lr": 1e-3,
    "eval_every": 100,
}


def generate_texts(algorithm: Cory, update: int, mapping: RoleMapping) -> list[list[str]]:
    """Returns the responses of the algorithm's current weights to an update's queries."""
    return response_texts({"samples": algorithm.scheduler.generate(update, mapping).samples})


@pytest.mark.parametrize(
    "settings",
    [
        {"exchange_period": 2, "average_period": 1, "num_policies": 4, "minibatch_size": 2},
        # The slow cases test these settings one by one.
        pytest.param({"exchange_period": 1}, marks=pytest.mark.slow),
        pytest.param({"exchange_period": 2, "average_period": 1}, marks=pytest.mark.slow),
        pytest.param({"exchange_period": 1, "num_policies": 4, "minibatch_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_prefetched_update_uses_the_weights_before_the_last_update_and_its_own_roles(
    make_cory: MakeCory, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    prefetching = make_cory(**{**PREFETCH, "num_updates": 3, **settings})
    reference = make_cory(**{**PREFETCH, "num_runners": 0, "max_lag": 0, "num_updates": 3, **settings})
    period = settings["exchange_period"]
    roles = [reference.mapping]
    for update in (1, 2):
        roles.append(roles[-1].rotated() if update % period == 0 else roles[-1])
    expected = [generate_texts(reference, update, roles[update]) for update in (0, 1)]
    reference.train()
    expected.append(generate_texts(reference, 2, roles[2]))
    generate, rollouts = prefetching.scheduler.generate, []

    def record(*arguments: Any) -> Any:
        rollouts.append(generate(*arguments))
        return rollouts[-1]

    monkeypatch.setattr(prefetching.scheduler, "generate", record)
    reports = [prefetching.train()["cory"] for _ in range(3)]
    assert [response_texts(report) for report in reports] == expected
    assert [report["roles"] for report in reports] == [mapping.as_dict() for mapping in roles]
    assert [report["weight_version_lag"] for report in reports] == [0, 1, 1]
    for report, rollout in zip(reports, rollouts, strict=True):
        deviations = [abs(figures["importance_sampling_ratio"] - 1) for figures in report["policy"].values()]
        assert max(deviations) < 1e-5 if report["weight_version_lag"] == 0 else min(deviations) > 1e-4
        total, *phases = (report["seconds"][name] for name in ("total", "rollout", "reward", "learn", "sync"))
        assert min(phases) >= 0 and sum(phases) <= total
        seconds = rollout.counters["rollout_seconds"]  # of generating, not of waiting
        assert report["tokens_per_second"] == pytest.approx(report["tokens"] / seconds)
    assert (
        not prefetching.scheduler._prefetched and not prefetching.scheduler._pending
    )  # no update follows the last one


@pytest.mark.slow
def test_prefetched_rollouts_are_discarded_after_a_restore_or_a_role_exchange(
    make_cory: MakeCory, tmp_path: Path
) -> None:
    algorithm = make_cory(**PREFETCH, exchange_period=None)

    def lag() -> int:
        version_lag: int = algorithm.train()["cory"]["weight_version_lag"]
        return version_lag

    assert [lag(), lag()] == [0, 1]
    algorithm.save_to_path(str(tmp_path / "saved"))
    assert lag() == 1
    algorithm.restore_from_path(str(tmp_path / "saved"))
    assert [lag(), lag()] == [0, 1]
    algorithm.exchange_roles()
    report = algorithm.train()["cory"]
    assert (report["roles"]["pioneer"], report["weight_version_lag"]) == ("llm_2", 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_queries_of_a_runner_that_is_killed_while_prefetching_are_not_lost(
    make_cory: MakeCory, tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    flag = tmp_path / "die"
    settings = {**PREFETCH, "exchange_period": 1, "reward": f"{REWARDS}:kill_runner_once?flag={flag}"}
    faulty = make_cory(**{**settings, "num_runners": number})
    reference = make_cory(**{**settings, "num_runners": 0, "max_lag": 0})
    faulty.train()
    flag.touch()  # a runner kills itself while it prefetches
    assert faulty.train()["cory"]["weight_version_lag"] == 1
    assert not flag.exists()
    report = faulty.train()["cory"]
    if number == 2:  # the other runner took over its queries
        reference.train()
        assert response_texts(report) == generate_texts(reference, 2, reference.mapping.rotated())
        assert report["weight_version_lag"] == 1
    else:
        assert "All runners died while prefetching the next update. Generating the rollout again." in caplog.messages
        assert len(report["samples"]) == 4 and report["weight_version_lag"] == 0
        assert faulty.train()["cory"]["weight_version_lag"] == 1


@pytest.mark.slow
def test_prefetch_errors_are_raised_by_the_update_that_needs_it_which_can_be_retried(
    make_cory: MakeCory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "mode"
    algorithm = make_cory(**PREFETCH, reward=f"{REWARDS}:flaky?flag={flag}")
    flag.write_text("fail")
    with pytest.raises(RewardError, match=r"tests\.policies\.sample_rewards:flaky"):
        algorithm.train()  # the first update is never prefetched
    assert algorithm.updates == 0
    flag.unlink()
    algorithm.train()
    flag.write_text("fail")
    assert algorithm.train()["cory"]["weight_version_lag"] == 1
    flag.unlink()
    with pytest.raises(RewardError, match=r"tests\.policies\.sample_rewards:flaky"):
        algorithm.train()
    assert algorithm.updates == 2
    assert algorithm.train()["cory"]["weight_version_lag"] == 0

    def fail(*_: Any) -> None:
        raise LearnerError("A learner's process died.")

    for mode in ("", "hang"):
        flag.write_text(mode)
        with monkeypatch.context() as patch, pytest.raises(LearnerError):
            patch.setattr(algorithm.learners, "learn", fail)
            algorithm.train()
        if not mode:
            assert algorithm.train()["cory"]["weight_version_lag"] == 0
    assert algorithm.updates == 4
    monkeypatch.setattr(runners, "_STOP_SECONDS", 1.0)
    started = time.monotonic()
    algorithm.stop()
    assert time.monotonic() - started < 15
