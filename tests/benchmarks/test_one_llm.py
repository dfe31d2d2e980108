"""The learner is measured on machines that have PyTorch and transformers alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

WITHOUT = (
    "import runpy, sys\n"
    "for name in ('ray', 'vllm', 'pettingzoo', 'gymnasium', 'pydantic', 'rich'): sys.modules[name] = None\n"
    "sys.argv[1:1] = '--updates 1 --rows 4 --prompt 6 --response 5 --micro-batch-size 2'.split()\n"
    "runpy.run_module('benchmarks.one_llm', run_name='__main__')"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--lora-rank", "2", "--advantage", "reinforce", "--gradient-checkpointing"],
    ],
)
def test_one_llm_is_trained_and_measured_without_ray_vllm_or_an_environment(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, *words], capture_output=True, text=True, check=True)
    head, update, *results = done.stdout.splitlines()
    assert "M parameters" in head and update.startswith("update 1: ")
    figures = json.loads("\n".join(results))
    assert figures["tokens_per_second"] > 0 and figures["teraflops"] > 0 and 0.1 < figures["peak_gb"] < 8
    assert figures["options"]["rows"] == 4
