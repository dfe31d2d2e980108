"""Tests that the wheel contains all files of the packages and works without the source."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

CHECKOUT = Path(__file__).parents[2]
PACKAGES = ("cory_rllib", "launch", "policies", "cory_env")


def files(package: Path) -> set[str]:
    return {
        str(file.relative_to(package.parent))
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, built from a copy of the source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(CHECKOUT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--no-index"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, timeout=200)
    (wheel,) = folder.glob("cory_rllib-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def run(unpacked: Path, *words: str) -> str:
    """Runs Python in an empty folder with the packages of the wheel."""
    empty = unpacked.parent / "empty"
    empty.mkdir(exist_ok=True)
    process = subprocess.run(
        [sys.executable, *words],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_the_wheel_has_every_file_of_the_packages(unpacked: Path) -> None:
    for package in PACKAGES:
        assert files(unpacked / package) == files(CHECKOUT / package)


def test_commands_and_the_python_api_work_with_only_the_wheel(unpacked: Path) -> None:
    version = (CHECKOUT / "pyproject.toml").read_text().partition('version = "')[2].partition('"')[0]
    assert run(unpacked, "-m", "cory_rllib", "--version") == f"{version}\n"
    settings = yaml.safe_load(
        run(unpacked, "-m", "cory_rllib", "train", "imdb-tiny", "num_updates=7", "--print-config")
    )
    assert (settings["num_updates"], settings["advantage"]) == (7, "rloo")
    output = run(unpacked, "-c", "import cory_rllib; print(cory_rllib.__file__); print(*cory_rllib.presets())")
    file, names = output.splitlines()
    assert file == str(unpacked / "cory_rllib" / "__init__.py") and "imdb-tiny" in names.split()


def test_without_vllm_the_default_backend_is_transformers_with_a_warning(unpacked: Path) -> None:
    code = """
import importlib.metadata as metadata
original_version = metadata.version
def version(name):
    if name.startswith("vllm"):
        raise metadata.PackageNotFoundError(name)
    return original_version(name)
metadata.version = version
from cory_rllib import CoryConfig
from policies.generation.installed import warn_if_vllm_missing
settings = CoryConfig.from_preset("imdb-tiny").settings
import logging, sys
logging.basicConfig(stream=sys.stdout)
warn_if_vllm_missing(settings.backend)
print(settings.backend)
from launch.training import preflight
try:
    preflight.check_run_settings(settings.model_copy(update={"backend": "vllm"}))
except Exception as error:
    print(error)
"""
    warning, backend, error = run(unpacked, "-c", code).splitlines()
    assert "WARNING:policies.generation.installed:vLLM is not installed, so backend=transformers" in warning
    assert backend == "transformers"
    assert error.startswith("backend=vllm requires the package vllm, which is not installed.")
