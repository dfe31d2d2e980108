"""Compiled transformer blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from policies.learning.policy_learner import PolicyLearner
from policies.learning.rows import TrainRows
from policies.learning.sharding import learner_mesh
from tests.forked import run_ranks
from tests.policies.learning.test_policy_learner import make_row_batch, ready
from tests.policies.learning.test_sharding import llama, make_learner, path

__all__ = ["llama", "path"]

CASES = [
    ("full", "aot_eager"),  # traces forward and backward passes, and runs them without generated code
    pytest.param("lora", "inductor", marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Enables the compiler, which a CPU engine of another test disables in this process and in its children."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(disable=False):
        yield


def updated(learner: PolicyLearner, rows: TrainRows) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    metrics = [learner.update(replace(rows), number) for number in range(2)]
    return metrics[-1], learner.model.state()


@pytest.mark.parametrize(("weights", "backend"), CASES)
def test_compiled_blocks_learn_the_same(
    llama: str, weights: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters are trained with gradient checkpointing here. All blocks, of policy and reference, share their code."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    plain = make_learner(llama, weights, micro_batch_size=6)
    plain.check_forward()
    rows, expected_scores = ready(plain), plain.score(make_row_batch()).columns()
    expected_metrics, expected_state = updated(plain, rows)
    compiled = make_learner(llama, weights, micro_batch_size=6)
    compiled.check_forward()
    compiled.model.compile_blocks()
    assert not counters["stats"]["unique_graphs"]
    for name, column in compiled.score(make_row_batch()).columns().items():
        torch.testing.assert_close(column, expected_scores[name], rtol=1e-5, atol=2e-6)
    metrics, state = updated(compiled, rows)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)
    for name, array in expected_state.items():
        np.testing.assert_allclose(state[name], array, atol=2e-6)
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 12 and not counters["graph_break"]
    compiled.score(make_row_batch(count=4))
    assert counters["stats"]["unique_graphs"] == graphs


def rank(number: int, model: str, out: str) -> None:
    """Trains two updates of a compiled policy over two processes."""
    torch.set_num_threads(1)
    os.environ["TORCHDYNAMO_DISABLE"] = "0"  # the fork server may have started after a CPU engine
    torch._dynamo.config.disable = False
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=number, world_size=2)
    learner = make_learner(model, "full", learner_mesh(1, 2, "cpu")["shard"])
    learner.check_forward()
    learner.model.compile_blocks()
    _, state = updated(learner, ready(learner))
    torch.save((state, counters["stats"]["unique_graphs"]), f"{out}/{number}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_sharded_policy_is_compiled_too(llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP changes the classes of blocks."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    plain = make_learner(llama, "full")
    plain.check_forward()
    _, expected = updated(plain, ready(plain))
    run_ranks(rank, 2, llama, str(tmp_path))
    for number in range(2):
        state, graphs = torch.load(tmp_path / str(number), weights_only=False)
        assert graphs > 0
        for name, array in expected.items():
            np.testing.assert_allclose(state[name], array, atol=5e-5)
