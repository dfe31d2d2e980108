"""Runs that start from another run's policies."""

import json
from pathlib import Path

import numpy as np
import pytest

from launch.models.trained import open_trained
from tests.launch.conftest import Cory
from tests.launch.training.test_training import BREVITY, SMALL

FIRST = (*SMALL, "updates=1", "lr=1e-3", "eval_every=1", "dtype=fp32", "--quiet")


def test_a_run_starts_from_another_ones_policies_and_keeps_the_model_as_its_reference(
    cory: Cory, tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    assert cory("train", *FIRST, "--out", "first").returncode == 0
    (tmp_path / "first" / "checkpoints" / "best").unlink()  # so that the latest is taken
    alike = (*FIRST, "start_from=first")
    for words, differs in (
        (("num_policies=1", "minibatch=8"), "that run has 2 policies"),
        (("weights=lora",), "that run has weights=full"),
    ):
        refused = cory("train", *alike, *words, "--out", "second")
        assert refused.returncode == 2 and differs in refused.stderr and not (tmp_path / "second").exists()
    begun = cory("train", *alike, "--out", "second")
    assert begun.returncode == 0, begun.stderr
    before = open_trained(str(tmp_path / "first"), "1")
    (tmp_path / "second" / "checkpoints" / "best").unlink(missing_ok=True)
    start = open_trained(str(tmp_path / "second"), "0")
    for policy in ("llm_1", "llm_2"):
        given, taken = before.weights(policy), start.weights(policy)
        assert all(np.array_equal(given[name], taken[name]) for name in given)
    lines = [[json.loads(line) for line in (tmp_path / run / "metrics.jsonl").open()] for run in ("first", "second")]
    (ends, starts) = (lines[0][-1]["evaluation"], lines[1][0]["evaluation"])
    assert starts["llm_1"]["kl"] == pytest.approx(ends["llm_1"]["kl"], rel=1e-3) and starts["llm_1"]["kl"] > 1e-4
