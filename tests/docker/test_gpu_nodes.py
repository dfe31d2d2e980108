"""Machines with 8 GPUs of 80 GB, as Kubernetes and Slurm lend them: the examples that are made for them find room."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from benchmarks.roofline import MODELS, example_settings
from launch.cluster.memory import estimate_processes
from launch.cluster.placement import Node, pack
from launch.console.cli import parse_command
from policies.settings.memory import model_shapes
from policies.settings.processes import processes
from tests.docker.conftest import CHECKOUT, manifests
from tests.docker.test_kubernetes import check_ray, pods

SIZES = {"gsm8k-qwen7b": "7B", "gsm8k-qwen14b": "14B"}


def finds_room(name: str, nodes: list[Node], folder: Path) -> bool:
    MODELS[SIZES[name]].save_pretrained(folder)
    settings = example_settings(name, [f"model={folder}", "dtype=bf16"])
    return not pack(processes(settings), nodes, estimate_processes(settings, model_shapes(settings)))[1]


def gpus(name: str, cpus: int, memory: float, count: int = 8) -> Node:
    return Node(name, cpus, [1.0] * count, memory, 80e9)


def test_the_job_s_pods_hold_its_example_and_one_of_them_the_smaller_one(tmp_path: Path) -> None:
    (job,) = manifests("rayjob-gpus.yaml")
    check_ray(job)
    requested = parse_command("train", shlex.split(job["spec"]["entrypoint"])[2:])
    assert (
        requested.continue_ and requested.words == ["/runs/gsm8k-qwen14b.yaml"] and requested.out.startswith("/runs/")
    )
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    head, worker = (pod["containers"][0] for pod in pods(job))
    limits = worker["resources"]["limits"]
    assert worker["resources"]["requests"] == limits and "nvidia.com/gpu" not in head["resources"]["limits"]
    memory = int(limits["memory"].removesuffix("Gi")) * 2**30
    nodes = [gpus(f"{k}", int(limits["cpu"]), memory, int(limits["nvidia.com/gpu"])) for k in range(group["replicas"])]
    (tmp_path / "7B").mkdir()
    assert finds_room("gsm8k-qwen14b", nodes, tmp_path) and not finds_room("gsm8k-qwen14b", nodes[:1], tmp_path)
    assert finds_room("gsm8k-qwen7b", nodes[:1], tmp_path / "7B")
    twice = 2 * 4 * 14.8e9  # an LLM in fp32
    assert int(head["resources"]["limits"]["memory"].removesuffix("Gi")) * 2**30 > twice


def test_the_job_s_pods_share_the_volume_have_memory_to_share_and_are_no_root() -> None:
    (job,) = manifests("rayjob-gpus.yaml")
    (claim,) = manifests("storage.yaml")
    kubernetes_validate.validate(claim, "1.34", strict=True)
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "3600"
    for pod in pods(job):
        runs, shared = pod["volumes"]
        assert runs["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert shared["emptyDir"] == {"medium": "Memory"}
        (container,) = pod["containers"]
        assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/runs", "/dev/shm"]
        assert pod["securityContext"]["runAsNonRoot"] and "env" not in container
        assert container["image"] == "cory-rllib:gpu"  # one package set, so that what is pickled is read alike


@pytest.mark.parametrize("name", SIZES)
def test_what_the_docs_ask_slurm_for_holds_the_example(name: str, tmp_path: Path) -> None:
    text = (CHECKOUT / "docs" / "clusters.md").read_text()
    (requested,) = re.findall(
        rf"^sbatch (.*) docs/examples/slurm\.sh docs/examples/{name}\.yaml --out /shared/", text, re.MULTILINE
    )
    options = dict(re.findall(r"--([a-z-]+)=(\d+)", requested))
    assert set(options) == {"nodes", "gpus-per-task", "cpus-per-task"}
    nodes = [
        gpus(f"{k}", int(options["cpus-per-task"]), 1e12, int(options["gpus-per-task"]))
        for k in range(int(options["nodes"]))
    ]
    assert finds_room(name, nodes, tmp_path)
