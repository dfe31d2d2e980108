"""AdamW with moments in host memory: the same numbers, and no moments left on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import AdamW

from policies.learning import offloaded_adam
from policies.learning.offloaded_adam import MOMENTS, OffloadedAdamW
from tests.policies.learning.test_policy_learner import equal, make_learner, moments, path, ready

__all__ = ["path"]


@pytest.mark.parametrize("weights", ["full", "lora"])
def test_steps_are_bit_identical_to_adamw_and_each_resumes_from_the_other_s_checkpoint(
    path: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloaded_adam, "CHUNK_WEIGHTS", 128)  # most weights take several chunks
    others: dict[str, Any] = {"steps": 2, "num_epochs": 2, "weight_decay": 0.1, "grad_clip": 0.5}
    plain, offloaded = (make_learner(path, weights, offload_optimizer=offload, **others) for offload in (False, True))
    assert type(plain.optimizer) is AdamW and type(offloaded.optimizer) is OffloadedAdamW
    for number, learner in enumerate((plain, offloaded)):
        learner.update(ready(learner), 0)
        learner.save(str(tmp_path / f"{number}/weights"), str(tmp_path / f"{number}/moments"))
        learner.update(ready(learner), 1)
    expected = plain.model.state()
    assert equal(offloaded.model.state(), expected)
    for one, other in zip(moments(plain), moments(offloaded), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("step", *MOMENTS))
    for number, learner in ((1, plain), (0, offloaded)):
        learner.restore(str(tmp_path / f"{number}/weights"), str(tmp_path / f"{number}/moments"))
        learner.update(ready(learner), 1)
        assert equal(learner.model.state(), expected)


def test_on_a_gpu_the_moments_are_in_host_memory() -> None:
    with FakeTensorMode():  # tensors without values, on devices that need not exist
        weight = torch.nn.Parameter(torch.empty(1000, 64, device="cuda"))
        weight.grad = torch.empty_like(weight)
        plain, offloaded = AdamW([weight], fused=True), OffloadedAdamW([weight], fused=True)
        plain.step()
        offloaded.step()
        offloaded.step()

        def moment_devices(optimizer: AdamW) -> set[str]:
            return {optimizer.state[weight][name].device.type for name in MOMENTS}

        assert (moment_devices(plain), moment_devices(offloaded)) == ({"cuda"}, {"cpu"})
        assert offloaded.state[weight]["step"].device.type == "cuda"
