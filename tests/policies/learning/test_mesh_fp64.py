"""Policies on meshes of learners, in fp64: they differ from one process only by rounding, by less than 1e-10."""

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
"""Rows per update. With a single row, all ranks of a policy but one get none."""
Case = tuple[str, str, dict[str, Any]]


def start(case: Case, number: int, mesh: Any = None, **others: Any) -> PolicyLearner:
    """A learner of policy `number`: policies start equal and train on the same rows, with different learning rates."""
    model, weights, settings = case
    return make_learner(model, weights, mesh, dtype="fp64", lr=1e-4 * (1 + number), steps=1, **settings, **others)


def learn(learner: PolicyLearner) -> None:
    for update, count in enumerate(COUNTS):
        learner.update(batch(learner, count), update)


def rank(number: int, cases: list[Case], meshes: list[tuple[int, int]], out: str) -> None:
    """Trains one policy per mesh, and moves it halfway to the mean of all policies on the mesh."""
    torch.set_num_threads(1)
    policies, shards = meshes[0]
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=number, world_size=policies * shards)
    for mesh_index, (policies, shards) in enumerate(meshes):
        mesh = learner_mesh(policies, shards, "cpu")
        policy = mesh.get_local_rank("policy")
        for index, case in enumerate(cases):
            learner = start(case, policy, mesh["shard"])
            learn(learner)
            state = learner.model.state()
            move_to_mean([learner.model.local_weights()], 0.5, mesh.get_group("policy"))
            torch.save((policy, state, learner.model.state()), f"{out}/{mesh_index} {index} {number}")
    for index, case in enumerate(cases):  # data parallel: each rank has the full policy, and a share of the rows
        learner = start(case, 0)
        data_parallel = PolicyLearner(learner.model, learner.hyperparameters, group=dist.group.WORLD)
        learn(data_parallel)
        torch.save((0, data_parallel.model.state(), None), f"{out}/{len(meshes)} {index} {number}")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "meshes"),
    [
        pytest.param(2, [(2, 1), (1, 2)], id="2 learners"),
        pytest.param(4, [(4, 1), (2, 2), (1, 4)], id="4 learners", marks=pytest.mark.slow),
        pytest.param(8, [(2, 4), (4, 2), (1, 8)], id="8 learners", marks=pytest.mark.slow),
    ],
)
def test_policies_on_a_mesh_end_within_1e_10_of_one_process(
    ranks: int, meshes: list[tuple[int, int]], path: str, llama: str, tmp_path: Path
) -> None:
    cases: list[Case] = [
        (path, "full", {}),  # GPT-2: tied embeddings; a critic
        (llama, "full", {"advantage": "rloo", "offload_optimizer": True}),
        (llama, "lora", {}),
    ]
    run_ranks(rank, ranks, cases, meshes, str(tmp_path))
    for index, case in enumerate(cases):
        learners = [start(case, number) for number in range(max(policies for policies, _ in meshes))]
        before = learners[0].model.state()
        for learner in learners:
            learn(learner)
        states = [learner.model.state() for learner in learners]
        assert all(array.dtype == "float64" for array in before.values())
        assert max(abs(array - before[name]).max() for name, array in states[0].items()) > 1e-4
        for mesh_index, (policies, _) in enumerate([*meshes, (1, 1)]):
            for number in range(ranks):
                policy, state, averaged = torch.load(tmp_path / f"{mesh_index} {index} {number}", weights_only=False)
                difference = max(abs(state[name] - array).max() for name, array in states[policy].items())
                assert difference < 1e-10, (mesh_index, case, number, difference)
                for name, array in (averaged or {}).items():
                    mean = sum(weights[name] for weights in states[:policies]) / policies
                    assert abs(array - (states[policy][name] + mean) / 2).max() < 1e-10
