"""What is said when PyTorch cannot compute on a GPU, for machines that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from policies.generation import cuda
from policies.generation.cuda import DeviceError, check_cuda, cuda_problem, driver_version

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\nGCC version: 12.2.0\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (builder@host)  Sun Jul 27\n"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file by which a driver shows itself, for a PyTorch with CUDA 13 that finds no GPU."""
    monkeypatch.setattr(cuda, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path / "version"


@pytest.mark.parametrize(
    ("text", "version", "problem"),
    [
        (None, None, "there is no NVIDIA driver here (a container needs `--gpus all`, or a device plugin, to see one)"),
        (CLOSED, "550.54.14", "the NVIDIA driver here is 550.54.14, and CUDA 13.0 needs 580 or later"),
        (OPEN, "580.65.06", "the NVIDIA driver 580.65.06 shows this process no GPU (CUDA_VISIBLE_DEVICES hides it"),
        (OPEN.replace("580.65.06", "579.9"), "579.9", "the NVIDIA driver here is 579.9, and CUDA 13.0 needs 580"),
        (CLOSED.replace("550.54.14", "610.12"), "610.12", "the NVIDIA driver 610.12 shows this process no GPU"),
        ("NVRM version: something new\n", None, "there is no NVIDIA driver here"),
    ],
)
def test_the_driver_is_named_when_there_is_no_gpu(
    driver: Path, text: str | None, version: str | None, problem: str
) -> None:
    if text is not None:
        driver.write_text(text)
    assert driver_version() == version
    assert str(cuda_problem()).startswith(problem)
    with pytest.raises(DeviceError) as raised:
        check_cuda("gpus_per_runner", 0.5)
    assert str(raised.value).startswith(f"gpus_per_runner=0.5 asks for a GPU, but {problem}")
    assert str(raised.value).endswith("gpus_per_runner=0 gpus_per_learner=0 backend=transformers.")


def test_a_driver_that_runs_cuda_12_is_enough_for_a_pytorch_with_cuda_12(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.write_text(CLOSED)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "shows this process no GPU" in str(cuda_problem())


@pytest.mark.parametrize(("capability", "usable"), [((7, 0), False), ((7, 5), True), ((9, 0), True), ((12, 0), True)])
def test_a_gpu_that_cuda_13_no_longer_computes_on_is_named(
    driver: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], usable: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    assert cuda_problem(capability=False) is None
    if usable:
        assert cuda_problem() is None
        check_cuda("gpus_per_learner", 1)
    else:
        with pytest.raises(DeviceError, match=r"Tesla V100 has compute capability 7\.0, and 7\.5 is the lowest"):
            check_cuda("gpus_per_learner", 1)


def test_a_pytorch_without_cuda_is_named(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match=r"PyTorch is installed without CUDA \(`make install LOCK=gpu` brings it\)"):
        check_cuda("gpus_per_learner", 1)
