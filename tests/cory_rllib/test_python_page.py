"""Tests that the code of docs/python.md works as a script, where functions belong to no module."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
WRITTEN, _, _ = (CHECKOUT / "docs" / "python.md").read_text(encoding="utf-8").partition("<!-- generated: api -->")
CODE = "\n".join(re.findall(r"^```python\n(.*?)^```$", WRITTEN, re.M | re.S))
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(CHECKOUT),
    "RAY_AUTH_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script with the page's code."""
    file = tmp_path_factory.mktemp("page") / "page.py"
    file.write_text(CODE)
    return file


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_code_of_the_page_runs_unchanged(script: Path) -> None:
    process = subprocess.run(
        [sys.executable, script.name], cwd=script.parent, env=ENVIRONMENT, capture_output=True, text=True, timeout=580
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert re.search(r"^2 observer llm_\d -\d\.\d\d, KL \d\.\d\d$", process.stdout, re.M)
    assert re.search(r"^llm_2 after llm_1 -\d\.\d\d \[", process.stdout, re.M)
    assert (script.parent / "my-model" / "model.safetensors").stat().st_size > 1e6
    run = script.parent / "runs" / "short-words"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [0, 1, 2] and lines[2]["evaluation"]["mean"]["task_reward"] < 0
    assert {"config.yaml", "samples.jsonl", "checkpoints", "log.txt", "curves.png"} <= {f.name for f in run.iterdir()}


def test_the_code_of_the_page_passes_strict_mypy(script: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--config-file", str(CHECKOUT / "pyproject.toml"), str(script)]
    process = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, process.stdout
