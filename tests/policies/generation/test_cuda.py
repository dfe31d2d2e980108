"""Errors if PyTorch cannot use a GPU, simulated for other machines."""

from __future__ import annotations

import pytest
import torch

from policies.generation.cuda import DeviceError, check_cuda

OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update it.\nAlternatively, ..."


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError(OLD),
            r"PyTorch reports: The NVIDIA driver .* \(found version 12040\)\. Please update it\. Check",
        ),
        (
            AssertionError("Torch not compiled with CUDA enabled"),
            "PyTorch reports: Torch not compiled with CUDA enabled. Check",
        ),
        (None, "requires a GPU, but PyTorch finds none"),
    ],
)
def test_an_unusable_gpu_raises_an_error_with_the_cause_the_setting_and_a_fix(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, message: str
) -> None:
    def init() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(DeviceError, match=message) as raised:
        check_cuda("gpus_per_runner", 0.5)
    assert str(raised.value).startswith("gpus_per_runner=0.5 requires a GPU")
    assert str(raised.value).endswith("gpus_per_runner=0 gpus_per_learner=0 backend=transformers.")
