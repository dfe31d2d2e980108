"""Checkpoints that are written while training continues."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from policies.learning import stored_policy
from policies.learning.forward.value_head import ValueHead
from policies.learning.sharding import learner_mesh
from tests.forked import run_ranks
from tests.policies.learning.test_policy_learner import path
from tests.policies.learning.test_sharding import learn, make_learner

__all__ = ["path"]

RANKS = 2


def gated(gate: threading.Event, failing: bool = False) -> None:
    """Makes writes wait for the gate, and optionally fail as on a full disk."""
    write = stored_policy.HuggingFaceStorageWriter.write_data

    def wait(self: Any, *args: Any) -> Any:
        assert gate.wait(60)
        if failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *args)

    stored_policy.HuggingFaceStorageWriter.write_data = wait  # type: ignore[method-assign, assignment]


def rank(number: int, path: str, out: str) -> None:
    """Trains while a checkpoint is written, so that both kinds of communication between the ranks interleave."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=number, world_size=RANKS)
    mesh = learner_mesh(1, RANKS, "cpu")["shard"]
    group = stored_policy.checkpoint_group(mesh.get_group())
    learner = make_learner(path, "full", mesh)
    learn(learner, range(1))
    snapshot, gate = learner.model.state(), threading.Event()
    gated(gate)
    saving = stored_policy.begin_save(learner.state(f"{out}/weights", f"{out}/moments"), group)
    learn(learner, range(1, 2))
    assert not saving.done()
    gate.set()
    learn(learner, range(2, 3))
    saving.result(timeout=60)
    end = learner.model.state()
    learner.restore(f"{out}/weights", f"{out}/moments")
    restored = learner.model.state()
    learn(learner, range(1, 3))
    resumed = learner.model.state()
    gated(gate, failing=number == 1)
    failed = stored_policy.begin_save(learner.state(f"{out}/full/weights", f"{out}/full/moments"), group)
    error = failed.exception(timeout=60)
    result = (snapshot, end, restored, resumed, type(error), error.errno)  # type: ignore[union-attr]
    torch.save(result, f"{out}/{number}")
    dist.destroy_process_group()


def test_two_ranks_write_a_snapshot_while_training_and_both_get_a_disk_full_error(path: str, tmp_path: Path) -> None:
    run_ranks(rank, RANKS, path, str(tmp_path))
    for number in range(RANKS):
        snapshot, end, restored, resumed, kind, code = torch.load(tmp_path / str(number), weights_only=False)
        assert (kind, code) == (OSError, errno.ENOSPC)
        assert any((snapshot[name] != end[name]).any() for name in snapshot)
        for name, array in snapshot.items():
            assert (restored[name] == array).all() and (resumed[name] == end[name]).all()
    assert len(list((tmp_path / "weights").iterdir())) == len(list((tmp_path / "moments").iterdir())) == RANKS


def test_begin_save_writes_the_state_at_its_call(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, save = threading.Event(), stored_policy.save
    monkeypatch.setattr(stored_policy, "save", lambda *args: gate.wait(60) and save(*args))
    learner = make_learner(path, "full")
    learn(learner, range(1))
    snapshot = learner.model.state()
    saving = stored_policy.begin_save(learner.state(str(tmp_path / "weights"), str(tmp_path / "moments")), None)
    learn(learner, range(1, 2))
    assert not saving.done() and not list(tmp_path.iterdir())
    gate.set()
    saving.result(timeout=60)
    weights = stored_policy.open_weights(str(tmp_path / "weights"))
    assert weights.keys() == snapshot.keys() and all((weights[name] == array).all() for name, array in snapshot.items())
    resumed = make_learner(path, "full")
    resumed.restore(str(tmp_path / "weights"), str(tmp_path / "moments"))
    learn(resumed, range(1, 2))
    for name, array in learner.model.state().items():
        assert (resumed.model.state()[name] == array).all()


def test_a_stored_value_head_of_another_shape_is_rejected_naming_the_settings(path: str, tmp_path: Path) -> None:
    learner = make_learner(path, "full")
    width = learner.model.value_head.weight.shape[1]
    learner.model.value_head = ValueHead(width + 1)
    learner.save(str(tmp_path / "weights"), str(tmp_path / "moments"))
    with pytest.raises(
        stored_policy.StoredPolicyError,
        match=rf"value_head.weight has shape \[1, {width + 1}\], this run's \[1, {width}\]. Set .*model",
    ) as raised:
        make_learner(path, "full").restore(str(tmp_path / "weights"), None)
    assert "\n" not in str(raised.value)


def test_each_folder_has_its_own_stager(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch 2.11 a stager fails when it is used a second time, after it has copied moments."""

    class ServesOnce(stored_policy.DefaultStager):
        used = False

        def stage(self, *args: Any, **kwargs: Any) -> Any:
            assert not self.used
            self.used = True
            return super().stage(*args, **kwargs)

    monkeypatch.setattr(stored_policy, "DefaultStager", ServesOnce)
    learner = make_learner(path, "full")
    learn(learner, range(1))
    stored_policy.begin_save(learner.state(str(tmp_path / "weights"), str(tmp_path / "moments")), None).result(60)
    assert stored_policy.open_weights(str(tmp_path / "weights")).keys() == learner.model.state().keys()
