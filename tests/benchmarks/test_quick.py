"""Every benchmark still runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES
from benchmarks.against_comlrl import COMLRL

REQUIRES_TRL = ("against_trl", "time_to_reward")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in REQUIRES_TRL])
def test_a_benchmark_runs_with_tiny_sizes(name: str, tmp_path: Path) -> None:
    if name == "against_comlrl" and not COMLRL.is_dir():
        pytest.skip(f"CoMLRL is not in {COMLRL}")
    options = ["--only", "the learner"] * (name == "faults")  # all of them take more than ten minutes
    command = [sys.executable, "-m", "benchmarks", name, "--quick", *options, "--out", str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record["figures"]
