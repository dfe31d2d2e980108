"""Retryable failures, and the checkpoint from which a run resumes."""

import errno
from pathlib import Path
from typing import cast

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, ObjectLostError, RayActorError, RayTaskError

from cory_env.rewarding.worker import RewardError, RewardKilled
from launch.console.errors import CommandError
from launch.run_folder.run import Run
from launch.training.start import is_retryable, latest_valid_checkpoint
from policies.generation.generator import GenerationError
from policies.learning.rows import NonFiniteUpdate, TrainRows
from policies.models.model_check import ModelError
from policies.rllib.learners import LearnerError
from policies.settings.settings import SettingsError
from tests.launch.conftest import record_test_run
from tests.launch.run_folder.test_checkpoints import write_checkpoint
from tests.paper import paper_settings


def raised_in_worker(error: Exception) -> Exception:
    return RayTaskError("sample", "", error).as_instanceof_cause()


@pytest.mark.parametrize(
    "error",
    [
        LearnerError("gone"),
        GenerationError("all gone"),
        raised_in_worker(GenerationError("all gone")),
        RewardKilled("no memory"),
        raised_in_worker(RewardKilled("no memory")),
        RayActorError(),
        NodeDiedError("gone"),
        ObjectLostError("", "", ""),
    ],
)
def test_lost_processes_and_machines_are_retryable(error: Exception) -> None:
    assert is_retryable(error)


@pytest.mark.parametrize(
    "error",
    [
        RewardError("wrong"),
        raised_in_worker(RewardError("wrong")),
        SettingsError("wrong"),
        CommandError("wrong"),
        NonFiniteUpdate("llm_1", 3, cast(TrainRows, None)),  # the error's rows do not matter here
        OSError(errno.ENOSPC, "No space left on device"),
        raised_in_worker(OSError(errno.ENOSPC, "No space left on device")),
        KeyError("a defect"),
        ActorDiedError(RayTaskError("__init__", "", ModelError("no such layer"))),
    ],
)
def test_recurring_errors_are_not_retryable(error: Exception) -> None:
    assert not is_retryable(error)


def test_a_run_resumes_from_its_latest_valid_checkpoint(tmp_path: Path) -> None:
    run: Run = record_test_run(tmp_path / "run", paper_settings(num_updates=12), updates=range(7))
    warnings: list[str] = []
    assert latest_valid_checkpoint(run, warnings.append) is None and not warnings
    for update in (3, 6):
        run.checkpoints.save(update, write_checkpoint)
    assert latest_valid_checkpoint(run, warnings.append) == 6 and not warnings
    (run.path / "checkpoints" / "update_000006" / "deep" / "weights").write_text("torn")
    assert latest_valid_checkpoint(run, warnings.append) == 3
    assert len(warnings) == 1 and warnings[0].startswith("Warning: ") and "damaged_update_000006" in warnings[0]
