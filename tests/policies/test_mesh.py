"""Policies with their own learners, possibly sharded: training is the same as in one process."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest

from policies.checkpoint import Checkpoint
from policies.cory import Cory
from policies.learning import stored_policy
from policies.rllib import learners
from policies.rllib.learners import LearnerError
from policies.rllib.token_ppo_learner import TokenPPOLearner
from tests.policies.test_scale import build, run_in_own_session

Weights = dict[str, Mapping[str, np.ndarray]]
"""By policy id and parameter name."""
SETTINGS: dict[str, Any] = {
    **{
        "advantage": "rloo",
        "num_generations": 2,
        "queries_per_update": 4,
        "minibatch_size": 4,
        "lr": 2e-5,
        "exchange_period": 1,
    },
    **{"average_period": 2, "average_tau": 0.5, "eval_average": True},
}
"""The second update ends with averaging."""


class RunResult(NamedTuple):
    """Results of a run."""

    responses: list[list[list[str]]]
    """By update."""
    metrics: list[dict[str, dict[str, float]]]
    """By update."""
    evaluate: dict[str, dict[str, float]]
    weights: Weights
    policy_ids: list[list[str]]
    """By learner."""


def weights_of(algorithm: Cory) -> Weights:
    return {policy_id: algorithm.weights(policy_id) for policy_id in algorithm.settings.policy_ids}


def run_updates(algorithm: Cory, updates: int) -> RunResult:
    reports = [algorithm.train()["cory"] for _ in range(updates)]
    return RunResult(
        [[[turn["text"] for turn in sample["responses"]] for sample in report["samples"]] for report in reports],
        [report["policy"] for report in reports],
        algorithm.evaluator.evaluate()["evaluation"],
        weights_of(algorithm),
        algorithm.learners.call_all(lambda learner: list(learner.policies)),
    )


def run_on_meshes(meshes: list[dict[str, Any]], folder: Path, settings: dict[str, Any]) -> list[RunResult]:
    """Runs three updates on each mesh, then repeats the third from the previous mesh's checkpoint."""
    results = []
    for number, mesh in enumerate(meshes):
        algorithm = build(**settings, **mesh, check_weight_sync=True)
        results.append(run_updates(algorithm, 2))
        algorithm.save_to_path(folder / str(number))
        results.append(run_updates(algorithm, 1))
        algorithm.restore_from_path(folder / str((number or 1) - 1))
        results.append(run_updates(algorithm, 1))
        algorithm.load_policies(folder / str(number), 2)
        assert all(
            np.array_equal(array, results[-3].weights[policy_id][name])
            for policy_id, weights in weights_of(algorithm).items()
            for name, array in weights.items()
        )
        algorithm.stop()
    return results


def assert_close(one: RunResult, other: RunResult) -> None:
    assert one.responses == other.responses
    for metrics, expected in zip(one.metrics, other.metrics, strict=True):
        for policy_id, values in expected.items():
            assert metrics[policy_id] == pytest.approx(values, rel=1e-3, abs=1e-5)
    for policy_id, values in other.evaluate.items():
        assert one.evaluate[policy_id] == pytest.approx(values, rel=1e-3, abs=1e-5)
    for policy_id, weights in other.weights.items():
        assert one.weights[policy_id].keys() == weights.keys()
        assert max(float(np.abs(one.weights[policy_id][name] - weights[name]).max()) for name in weights) < 5e-5


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [
        pytest.param({}, [(None, 0), (1, 2)], id="two policies", marks=pytest.mark.slow),
        pytest.param({}, [(None, 0), (None, 2), (2, 4)], id="unsharded to sharded", marks=pytest.mark.slow),
        pytest.param({}, [(None, 0), (4, 8)], id="other meshes", marks=pytest.mark.slow),
        pytest.param(
            {
                "num_policies": 1,
                "average_period": None,
                "average_tau": 1.0,
                "eval_average": False,
                "weights": "lora",
            },
            [(None, 0), (3, 3)],
            id="one policy with adapters",
            marks=pytest.mark.slow,
        ),
        pytest.param({"num_agents": 3, "advantage": "gae"}, [(None, 0), (2, 6)], id="three", marks=pytest.mark.slow),
    ],
)
def test_sharded_learners_learn_the_same_and_resume_from_one_anothers_checkpoints(
    settings: dict[str, Any], shapes: list[tuple[int | None, int]], tmp_path: Path
) -> None:
    meshes = [{"shards_per_policy": shards, "num_learners": learners} for shards, learners in shapes]
    results = run_in_own_session(run_on_meshes, meshes, tmp_path, SETTINGS | settings)
    for policy_id, weights in results[1].weights.items():  # resuming from the mesh's own checkpoint is exact
        assert all(np.array_equal(results[2].weights[policy_id][name], array) for name, array in weights.items())
    for number, (shards, count) in enumerate(shapes):
        for stage in range(3):
            assert_close(results[3 * number + stage], results[stage if stage < 2 else 1])
        names = sorted(results[0].weights)
        assert results[3 * number].policy_ids == (
            [names] * max(count, 1) if shards is None else [[name] for name in names for _ in range(shards)]
        )


def save_and_restore_without_access(folder: Path) -> tuple[set[str], bool]:
    """Saves and restores with learners that cannot access the checkpoint folder.

    Returns:
        The names of the files, and whether all weights were restored.
    """
    algorithm = build(num_policies=1, shards_per_policy=2, num_learners=2)
    algorithm.train()
    before = algorithm.weights("llm_1")
    missing = folder / "not there"
    written = algorithm.learners.call_all(lambda learner: learners._begin_save(learner, missing))
    for _, path in filter(None, written):
        shutil.copytree(path, folder, dirs_exist_ok=True)
    algorithm.train()
    other_files = {name: (size, time + 1) for name, (size, time) in learners._tensor_file_stats(folder).items()}
    address = learners._address()
    algorithm.learners.call_all(lambda learner: learners._restore(learner, folder, other_files, address, True))
    after = algorithm.weights("llm_1")
    algorithm.learners.call_all(lambda _: learners._remove([path for _, path in filter(None, written)]))
    algorithm.stop()
    return set(other_files), all(np.array_equal(before[name], array) for name, array in after.items())


@pytest.mark.slow
def test_learners_without_access_to_the_checkpoint_folder_write_and_read_copies(tmp_path: Path) -> None:
    files, same = run_in_own_session(save_and_restore_without_access, tmp_path / "checkpoint")
    assert len(files) == 4 and same


def copy_before_saving(learner: TokenPPOLearner) -> None:
    """Makes a learner copy its state before saving, as on GPUs."""
    assert learner.mesh is not None
    TokenPPOLearner._saves_in_background = True  # type: ignore[assignment, method-assign]
    learner._checkpoint_group = stored_policy.checkpoint_group(learner.mesh.get_group("shard"))


def train_while_saving(folder: Path) -> list[Weights]:
    """Trains while a checkpoint is written, then trains again from the checkpoint.

    Returns:
        Weights before and after the first training, restored, and after the second training.
    """
    algorithm = build(**SETTINGS, shards_per_policy=2, num_learners=4)
    algorithm.train()
    weights = [weights_of(algorithm)]
    algorithm.learners.call_all(copy_before_saving)
    folder.mkdir()
    checkpoint = Checkpoint(algorithm, folder)
    algorithm.train()
    checkpoint.finish()
    weights.append(weights_of(algorithm))
    algorithm.restore_from_path(str(folder))
    weights.append(weights_of(algorithm))
    algorithm.train()
    weights.append(weights_of(algorithm))
    algorithm.stop()
    return weights


@pytest.mark.slow
def test_a_checkpoint_is_a_snapshot_even_if_training_continues(tmp_path: Path) -> None:
    before, after, restored, again = run_in_own_session(train_while_saving, tmp_path / "checkpoint")
    for policy_id, weights in before.items():
        for name, array in weights.items():
            np.testing.assert_array_equal(restored[policy_id][name], array)
            np.testing.assert_array_equal(again[policy_id][name], after[policy_id][name])


def kill_one_learner(signal_number: int) -> tuple[str, float, int]:
    """Kills one of four learners during training; returns the error, its delay in seconds, and the processes left."""
    algorithm = build(**SETTINGS, shards_per_policy=2, num_learners=4, learner_timeout=60)
    pids = algorithm.learners.call_all(lambda learner: os.getpid())
    algorithm.train()
    threading.Timer(0.5, os.kill, (pids[3], signal_number)).start()
    start = time.monotonic()
    try:
        while True:
            algorithm.train()
    except LearnerError as error:
        seconds = time.monotonic() - start
        algorithm.stop()
        deadline = time.monotonic() + 10
        while (num_left := sum(psutil.pid_exists(pid) for pid in pids)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return str(error), seconds, num_left


@pytest.mark.slow
def test_if_one_rank_dies_the_run_fails_and_all_other_ranks_end() -> None:
    message, seconds, num_left = run_in_own_session(kill_one_learner, signal.SIGKILL)
    assert "A learner's process died" in message and seconds < 30 and num_left == 0
