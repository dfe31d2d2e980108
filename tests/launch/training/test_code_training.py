"""Training on code: one small update of the preset."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cory_env.sandbox.machine import SandboxError, require_sandbox
from policies.models import smollm2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_code_preset_trains_and_tests_programs(tmp_path: Path) -> None:
    try:
        smollm2.find_package()
        require_sandbox()
    except (smollm2.SmolLM2Error, SandboxError) as error:
        pytest.skip(str(error))
    out = tmp_path / "run"
    words = "backend=transformers num_runners=0 num_updates=1 queries_per_update=2 minibatch_size=8"
    words += " eval_every=1 eval_queries=2"
    result = subprocess.run(
        [sys.executable, "-m", "cory_rllib", "train", "code-smollm2", *words.split(), "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    (update,) = [line for line in map(json.loads, (out / "metrics.jsonl").open()) if line["update"] == 1]
    assert all(0 <= update["role"][role]["task_reward"] <= 1 for role in ("pioneer", "observer"))
    assert update["dropped_chains"] == 0
    samples = [json.loads(line) for line in (out / "samples.jsonl").open()]
    assert any("def " in response["text"] for sample in samples for response in sample["responses"])
