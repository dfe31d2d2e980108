"""LLMs on meshes of learners, in fp64: what is left of a difference to one process is rounding, so 1e-10 is met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from policies.learning.policy_learner import PolicyLearner
from policies.learning.ranks import move_to_mean
from policies.learning.sharding import learner_mesh
from tests.forked import run_ranks
from tests.policies.learning.test_policy_learner import path
from tests.policies.learning.test_sharding import batch, llama, make_learner

__all__ = ["llama", "path"]

COUNTS = (6, 1, 6)
"""Rows of the updates, all of other lengths; of one row all learners of an LLM but one get none."""
Case = tuple[str, str, dict[str, Any]]


def start(case: Case, number: int, mesh: Any = None, **others: Any) -> PolicyLearner:
    """One of the LLMs: they start alike and learn from the same rows, at rates of their own."""
    model, weights, of_case = case
    return make_learner(model, weights, mesh, dtype="fp64", lr=1e-4 * (1 + number), steps=1, **of_case, **others)


def learn(learner: PolicyLearner) -> None:
    for update, count in enumerate(COUNTS):
        learner.update(batch(learner, count), update)


def rank(number: int, cases: list[Case], meshes: list[tuple[int, int]], out: str) -> None:
    """Learns one LLM on each mesh, and moves it to the mean of all that are on it."""
    torch.set_num_threads(1)
    llms, shards = meshes[0]
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=number, world_size=llms * shards)
    for place, (llms, shards) in enumerate(meshes):
        mesh = learner_mesh(llms, shards, "cpu")
        own = mesh.get_local_rank("policy")
        for index, case in enumerate(cases):
            learner = start(case, own, mesh["shard"])
            learn(learner)
            state = learner.model.state()
            move_to_mean([learner.model.local_weights()], 0.5, mesh.get_group("policy"))
            torch.save((own, state, learner.model.state()), f"{out}/{place} {index} {number}")
    for index, case in enumerate(cases):  # each holds one LLM whole, and takes a part of the rows
        learner = start(case, 0)
        together = PolicyLearner(learner.model, learner.hyperparameters, group=dist.group.WORLD)
        learn(together)
        torch.save((0, together.model.state(), None), f"{out}/{len(meshes)} {index} {number}")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "meshes"),
    [
        pytest.param(2, [(2, 1), (1, 2)], id="2 learners"),
        pytest.param(4, [(4, 1), (2, 2), (1, 4)], id="4 learners", marks=pytest.mark.slow),
        pytest.param(8, [(2, 4), (4, 2), (1, 8)], id="8 learners", marks=pytest.mark.slow),
    ],
)
def test_llms_on_a_mesh_end_within_1e_10_of_one_process(
    ranks: int, meshes: list[tuple[int, int]], path: str, llama: str, tmp_path: Path
) -> None:
    cases: list[Case] = [
        (path, "full", {}),  # GPT-2: its head is its embedding; a critic
        (llama, "full", {"advantage": "rloo", "offload_optimizer": True}),
        (llama, "lora", {}),
    ]
    run_ranks(rank, ranks, cases, meshes, str(tmp_path))
    for index, case in enumerate(cases):
        alone = [start(case, number) for number in range(max(llms for llms, _ in meshes))]
        before = alone[0].model.state()
        for learner in alone:
            learn(learner)
        states = [learner.model.state() for learner in alone]
        assert all(array.dtype == "float64" for array in before.values())
        assert max(abs(array - before[name]).max() for name, array in states[0].items()) > 1e-4
        for place, (llms, _) in enumerate([*meshes, (1, 1)]):
            for number in range(ranks):
                own, state, moved = torch.load(tmp_path / f"{place} {index} {number}", weights_only=False)
                far = max(abs(state[name] - array).max() for name, array in states[own].items())
                assert far < 1e-10, (place, case, number, far)
                for name, array in (moved or {}).items():
                    mean = sum(each[name] for each in states[:llms]) / llms
                    assert abs(array - (states[own][name] + mean) / 2).max() < 1e-10
