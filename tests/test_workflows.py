"""The CI workflows are well-formed, and agree with the Makefile and the package metadata."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

CHECKOUT = Path(__file__).parents[1]
WORKFLOWS = sorted((CHECKOUT / ".github" / "workflows").glob("*.yml"))


def schema(file: Path) -> "subprocess.CompletedProcess[str]":
    command = [Path(sys.executable).parent / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", file]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60)


def jobs(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((CHECKOUT / ".github" / "workflows" / f"{name}.yml").read_text())["jobs"]
    return content


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_match_the_schema_and_a_misspelled_one_would_not(file: Path, tmp_path: Path) -> None:
    result = schema(file)
    assert result.returncode == 0, result.stdout
    misspelled = tmp_path / file.name
    misspelled.write_text(file.read_text().replace("runs-on:", "run-on:"))
    assert schema(misspelled).returncode == 1


def test_ci_runs_the_makefile_on_every_supported_python() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    versions = [name.removeprefix(prefix[:-2]) for name in project["classifiers"] if name.startswith(prefix)]
    assert set(versions) <= set(jobs("test")["test"]["strategy"]["matrix"]["python"])
    assert [step["run"] for step in jobs("test")["test"]["steps"] if "make" in step.get("run", "")] == [
        "make test PYTHON=python"
    ]
    assert jobs("test")["lint"]["steps"][-1]["run"] == "make lint PYTHON=python"


def test_publishing_requires_building_and_smoke_tests() -> None:
    release = jobs("release")
    assert [release[name].get("needs") for name in ("build", "smoke", "publish", "github")] == [
        None,
        "build",
        "smoke",
        "publish",
    ]
    assert release["publish"]["permissions"] == {"id-token": "write"}  # PyPI's trust, without a token
    assert "secrets." not in (CHECKOUT / ".github" / "workflows" / "release.yml").read_text()
