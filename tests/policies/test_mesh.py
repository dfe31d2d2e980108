"""LLMs that each have learners of their own, over which they may be split: the same training as in one process."""

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
"""By LLM and parameter."""
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
"""The second update ends with a step to the mean."""


class RunResult(NamedTuple):
    """What a run came to."""

    responses: list[list[list[str]]]
    """Of each update."""
    measured: list[dict[str, dict[str, float]]]
    held_out: dict[str, dict[str, float]]
    weights: Weights
    llms: list[list[str]]
    """Of each learner."""


def weights_of(algorithm: Cory) -> Weights:
    return {policy_id: algorithm.weights(policy_id) for policy_id in algorithm.settings.policy_ids}


def run_updates(algorithm: Cory, updates: int) -> RunResult:
    reports = [algorithm.train()["cory"] for _ in range(updates)]
    return RunResult(
        [[[one["text"] for one in sample["responses"]] for sample in report["samples"]] for report in reports],
        [report["policy"] for report in reports],
        algorithm.evaluator.held_out()["evaluation"],
        weights_of(algorithm),
        algorithm.learners.ask_all(lambda learner: list(learner.policies)),
    )


def run_on_meshes(places: list[dict[str, Any]], folder: Path, settings: dict[str, Any]) -> list[RunResult]:
    """Three updates in each place; then the last of them again, in each from what the place before it had saved."""
    courses = []
    for number, place in enumerate(places):
        algorithm = build(**settings, **place, check_weight_sync=True)
        courses.append(run_updates(algorithm, 2))
        algorithm.save_to_path(folder / str(number))
        courses.append(run_updates(algorithm, 1))
        algorithm.restore_from_path(folder / str((number or 1) - 1))
        courses.append(run_updates(algorithm, 1))
        algorithm.load_policies(folder / str(number), 2)
        assert all(
            np.array_equal(array, courses[-3].weights[policy_id][name])
            for policy_id, weights in weights_of(algorithm).items()
            for name, array in weights.items()
        )
        algorithm.stop()
    return courses


def assert_close(one: RunResult, other: RunResult) -> None:
    assert one.responses == other.responses
    for measured, expected in zip(one.measured, other.measured, strict=True):
        for policy_id, figures in expected.items():
            assert measured[policy_id] == pytest.approx(figures, rel=1e-3, abs=1e-5)
    for policy_id, figures in other.held_out.items():
        assert one.held_out[policy_id] == pytest.approx(figures, rel=1e-3, abs=1e-5)
    for policy_id, weights in other.weights.items():
        assert one.weights[policy_id].keys() == weights.keys()
        assert max(float(np.abs(one.weights[policy_id][name] - weights[name]).max()) for name in weights) < 5e-5


@pytest.mark.parametrize(
    ("settings", "places"),
    [
        pytest.param({}, [(None, 0), (1, 2)], id="two LLMs"),
        pytest.param({}, [(None, 0), (None, 2), (2, 4)], id="from whole to split", marks=pytest.mark.slow),
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
            id="one LLM with adapters",
            marks=pytest.mark.slow,
        ),
        pytest.param({"num_agents": 3, "advantage": "gae"}, [(None, 0), (2, 6)], id="three", marks=pytest.mark.slow),
    ],
)
def test_sharded_learners_learn_the_same_and_resume_from_one_anothers_checkpoints(
    settings: dict[str, Any], places: list[tuple[int | None, int]], tmp_path: Path
) -> None:
    meshes = [{"shards_per_policy": shards, "num_learners": learners} for shards, learners in places]
    courses = run_in_own_session(run_on_meshes, meshes, tmp_path, SETTINGS | settings)
    for llm, weights in courses[1].weights.items():  # what goes on from its own checkpoint is exactly the same
        assert all(np.array_equal(courses[2].weights[llm][name], array) for name, array in weights.items())
    for number, (shards, count) in enumerate(places):
        for stage in range(3):
            assert_close(courses[3 * number + stage], courses[stage if stage < 2 else 1])
        held = courses[3 * number].llms
        names = sorted(courses[0].weights)
        assert held == (
            [names] * max(count, 1) if shards is None else [[name] for name in names for _ in range(shards)]
        )


def save_and_restore_without_access(folder: Path) -> tuple[set[str], bool]:
    """Saves where learners do not see the folder, and restores what they do not see as it is; returns the names of the
    files, and whether all came back.
    """
    algorithm = build(num_policies=1, shards_per_policy=2, num_learners=2)
    algorithm.train()
    before = algorithm.weights("llm_1")
    missing = folder / "not there"
    written = algorithm.learners.ask_all(lambda learner: learners._begin_save(learner, missing))
    for _, own in filter(None, written):
        shutil.copytree(own, folder, dirs_exist_ok=True)
    algorithm.train()
    other = {name: (size, time + 1) for name, (size, time) in learners._files(folder).items()}
    machine = learners._address()
    algorithm.learners.ask_all(lambda learner: learners._restore(learner, folder, other, machine, True))
    after = algorithm.weights("llm_1")
    algorithm.learners.ask_all(lambda _: learners._remove([own for _, own in filter(None, written)]))
    algorithm.stop()
    return set(other), all(np.array_equal(before[name], array) for name, array in after.items())


@pytest.mark.slow
def test_learners_without_access_to_the_checkpoint_folder_write_and_read_copies(tmp_path: Path) -> None:
    files, same = run_in_own_session(save_and_restore_without_access, tmp_path / "checkpoint")
    assert len(files) == 4 and same


def copy_before_saving(learner: TokenPPOLearner) -> None:
    """Has a learner copy what it saves."""
    assert learner.mesh is not None
    TokenPPOLearner._copies = True  # type: ignore[assignment, method-assign]
    learner._of_saving = stored_policy.writing_group(learner.mesh.get_group("shard"))


def train_while_saving(folder: Path) -> list[Weights]:
    """Learns while a checkpoint is written, and again from it; returns weights before, after, restored, and after."""
    algorithm = build(**SETTINGS, shards_per_policy=2, num_learners=4)
    algorithm.train()
    found = [weights_of(algorithm)]
    algorithm.learners.ask_all(copy_before_saving)
    folder.mkdir()
    checkpoint = Checkpoint(algorithm, folder)
    algorithm.train()
    checkpoint.finish()
    found.append(weights_of(algorithm))
    algorithm.restore_from_path(str(folder))
    found.append(weights_of(algorithm))
    algorithm.train()
    found.append(weights_of(algorithm))
    algorithm.stop()
    return found


@pytest.mark.slow
def test_a_checkpoint_is_a_snapshot_even_if_training_continues(tmp_path: Path) -> None:
    before, after, restored, again = run_in_own_session(train_while_saving, tmp_path / "checkpoint")
    for llm, weights in before.items():
        for name, array in weights.items():
            np.testing.assert_array_equal(restored[llm][name], array)
            np.testing.assert_array_equal(again[llm][name], after[llm][name])


def kill_one_learner(signal_number: int) -> tuple[str, float, int]:
    """Ends one learner of four while all learn; returns what is said, after how many seconds, and how many are left."""
    algorithm = build(**SETTINGS, shards_per_policy=2, num_learners=4, learner_timeout=60)
    pids = algorithm.learners.ask_all(lambda learner: os.getpid())
    algorithm.train()
    threading.Timer(0.5, os.kill, (pids[3], signal_number)).start()
    began = time.monotonic()
    try:
        while True:
            algorithm.train()
    except LearnerError as error:
        took = time.monotonic() - began
        algorithm.stop()
        deadline = time.monotonic() + 10
        while (left := sum(psutil.pid_exists(pid) for pid in pids)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return str(error), took, left


@pytest.mark.slow
def test_if_one_rank_dies_the_run_fails_and_all_other_ranks_end() -> None:
    said, took, left = run_in_own_session(kill_one_learner, signal.SIGKILL)
    assert "A learner's process died" in said and took < 30 and left == 0
