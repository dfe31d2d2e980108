"""Runs the engine tests with vLLM's Model Runner V2, which GPUs use. On a CPU, vLLM 0.32 uses V1 by default."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from policies.generation.installed import vllm_build

TESTS = Path(__file__).parents[2]
TRITON = TESTS / ".triton"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(vllm_build() != "cpu", reason="not vLLM's CPU build; with CUDA, V2 is the default"),
    pytest.mark.skipif(not (TRITON / "triton").is_dir(), reason=f"no Triton in {TRITON}: `make test-all` installs it"),
]


@pytest.mark.parametrize(
    ("file", "min_passed"), [("test_vllm_generator", 20), ("test_weight_transfer", 6), ("test_run_requests", 3)]
)
def test_the_engine_tests_pass_with_the_model_runner_of_gpus(file: str, min_passed: int) -> None:
    env = {"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": f"{TESTS / 'triton_on_cpu'}:{TRITON}:{TESTS.parent}"}
    path = str(Path(__file__).with_name(f"{file}.py"))
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-q", "--timeout=1200", path],
        cwd=TESTS.parent,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    passed = re.search(r"(\d+) passed", process.stdout)
    assert passed and int(passed[1]) >= min_passed and "skipped" not in process.stdout, process.stdout[-2000:]
