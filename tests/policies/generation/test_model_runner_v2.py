"""The generator's tests with vLLM's Model Runner V2, which GPUs have; on a CPU vLLM 0.32 takes V1 by itself."""

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
    pytest.mark.skipif(vllm_build() != "cpu", reason="not vLLM's CPU build: with CUDA it runs V2 by itself"),
    pytest.mark.skipif(not (TRITON / "triton").is_dir(), reason=f"no Triton in {TRITON}: `make test-all` installs it"),
]


@pytest.mark.parametrize(
    ("file", "least"), [("test_vllm_generator", 20), ("test_weight_transfer", 6), ("test_conversations", 3)]
)
def test_the_engine_tests_pass_with_the_model_runner_of_gpus(file: str, least: int) -> None:
    own = {"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": f"{TESTS / 'triton_on_cpu'}:{TRITON}:{TESTS.parent}"}
    path = str(Path(__file__).with_name(f"{file}.py"))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-q", "--timeout=1200", path],
        cwd=TESTS.parent,
        env=os.environ | own,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    counts = re.search(r"(\d+) passed", ran.stdout)
    assert counts and int(counts[1]) >= least and "skipped" not in ran.stdout, ran.stdout[-2000:]
