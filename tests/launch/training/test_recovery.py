"""Which failures a run may get past, and where it goes on."""

import errno
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, ObjectLostError, RayActorError, RayTaskError

from cory_env.rewarding.worker import RewardError, RewardKilled
from launch.console.errors import CommandError
from launch.console.retry import retry
from launch.run_folder.run import Run
from launch.training.start import is_retryable, latest_valid_checkpoint
from policies.generation.generator import GenerationError
from policies.learning.rows import NonFiniteUpdate
from policies.models.model_check import ModelError
from policies.rllib.learners import LearnerError
from policies.settings.settings import Settings, SettingsError
from tests.launch.conftest import record
from tests.launch.run_folder.test_checkpoints import write


def raised_in_a_process(error: Exception) -> Exception:
    return RayTaskError("sample", "", error).as_instanceof_cause()


@pytest.mark.parametrize(
    "error",
    [
        LearnerError("gone"),
        GenerationError("all gone"),
        raised_in_a_process(GenerationError("all gone")),
        RewardKilled("no memory"),
        raised_in_a_process(RewardKilled("no memory")),
        RayActorError(),
        NodeDiedError("gone"),
        ObjectLostError("", "", ""),
    ],
)
def test_the_loss_of_processes_and_machines_may_pass(error: Exception) -> None:
    assert is_retryable(error)


@pytest.mark.parametrize(
    "error",
    [
        RewardError("wrong"),
        raised_in_a_process(RewardError("wrong")),
        SettingsError("wrong"),
        CommandError("wrong"),
        NonFiniteUpdate("llm_1", 3, {}),
        OSError(errno.ENOSPC, "No space left on device"),
        raised_in_a_process(OSError(errno.ENOSPC, "No space left on device")),
        KeyError("a defect"),
        ActorDiedError(RayTaskError("__init__", "", ModelError("no such layer"))),
    ],
)
def test_what_would_only_come_again_may_not(error: Exception) -> None:
    assert not is_retryable(error)


def test_a_run_goes_on_from_its_latest_whole_checkpoint(tmp_path: Path) -> None:
    run: Run = record(tmp_path / "run", Settings(num_updates=12), updates=range(7))
    told: list[str] = []
    assert latest_valid_checkpoint(run, told.append) is None and not told
    for update in (3, 6):
        run.checkpoints.save(update, write)
    assert latest_valid_checkpoint(run, told.append) == 6 and not told
    (run.path / "checkpoints" / "update_000006" / "deep" / "weights").write_text("torn")
    assert latest_valid_checkpoint(run, told.append) == 3
    assert len(told) == 1 and told[0].startswith("Warning: ") and "damaged_update_000006" in told[0]


def test_a_cluster_may_take_a_while_to_come_back_but_at_the_first_start_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("launch.console.retry.RETRY_INTERVAL", 0.05)
    tries: list[str] = []

    def start() -> None:
        tries.append("try")
        if len(tries) < 3:
            raise ConnectionError("no head yet")

    with pytest.raises(ConnectionError):
        retry(start, 0.0)
    assert len(tries) == 1
    retry(start, 60.0)
    assert len(tries) == 3
