"""The benchmark of a GPU, on a machine without one; and what an H200 held beside the estimate (docs/lab/gpu.md)."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import gpu
from benchmarks.gpu import Case, cases, config_of, main, operations, play
from policies.learning.policy_model import PolicyModel
from policies.settings import memory

RUN = """
import sys
from benchmarks.gpu import main
main(["--quick", "--only", "offload_optimizer", "--out", sys.argv[1]])
assert not {"ray", "vllm"} & sys.modules.keys()
"""


@pytest.mark.slow
def test_it_runs_without_a_gpu_where_told_and_brings_no_engine_or_cluster_along(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(out)]
    ran = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    plain, split = json.loads(out.read_text())
    assert plain["case"] == "tiny full (offload_optimizer)" and "FSDP2" in split["case"]
    assert 0 < plain["mfu"] < 1 and plain["planned_bytes"] > 1e6 and plain["peak_bytes"] is None


@pytest.mark.slow
def test_changes_of_the_learner_are_compared_with_it(tmp_path: Path) -> None:
    out = tmp_path / "ab.json"
    options = ["--quick", "--cases", "base,logprobs,head,sac,trees:base", "--out", str(out), "--folder", str(tmp_path)]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.learner_ab", *options]
    ran = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    cases = json.loads(out.read_text())
    assert [case["case"] for case in cases] == ["base", "logprobs", "head", "sac", "trees:base"]
    for case in cases:
        assert "error" not in case, case["error"]
        assert case["learn"] > 0 and case["logprobs_to_base"][1] < 1e-3 and case["gradient_to_base"] < 0.02


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_at_full_size_it_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "There is no GPU here. --quick" in capsys.readouterr().err


def test_a_case_that_fails_costs_no_other_and_what_was_measured_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(case: Case, *_: object) -> dict[str, str]:
        if case.fsdp:
            raise RuntimeError("NCCL error\nin two lines")
        if not case.parts:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        if case.offload:
            raise KeyboardInterrupt  # as if the machine were gone
        return {"case": case.name, "line": f"{case.name} measured"}

    monkeypatch.setattr(gpu, "measure", measure)
    out = tmp_path / "gpu.json"
    with pytest.raises(KeyboardInterrupt):
        main(["--quick", "--out", str(out)])
    names = [case.name for case in cases(quick=True)]
    results = json.loads(out.read_text())
    assert [case["case"] for case in results] == names[: names.index("tiny full (offload_optimizer)")]
    failed = {case["case"] for case in results if "error" in case}
    assert failed == {"tiny full (FSDP2, one rank)"}
    printed = capsys.readouterr().out
    assert "failed: in two lines" in printed and "out of memory: CUDA out of memory." in printed
    with pytest.raises(SystemExit, match="1"):
        main(["--quick", "--only", "(FSDP2, one rank)"])
    main(["--quick", "--only", "tiny lora"])


def test_each_switch_is_measured_beside_the_plain_case() -> None:
    names = [case.name for case in cases(quick=False)]
    assert len(set(names)) == len(names) and {"0.5B full", "7B lora", "1.5B full (logits whole)"} <= set(names)
    assert Case("1.5B", offload=True).name in names


def test_operations_are_six_a_weight_and_token_and_less_where_weights_are_frozen(tmp_path: Path) -> None:
    config = config_of("tiny")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = PolicyModel(str(tmp_path), critic=False, dtype="fp32")
    rows = play(argparse.Namespace(rows=2, prompt=3, response=4), config.vocab_size)
    tokens, responses = 6 + float(rows.mask.sum()), float(rows.mask.sum())
    head = config.vocab_size * config.hidden_size
    linear = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    results = operations(model, rows, config, "full")
    assert results == pytest.approx(6 * (linear * tokens + head * responses), rel=0.02)
    assert operations(model, rows, config, "lora") < 0.7 * results


@pytest.mark.parametrize(
    ("case", "micro_batch_size", "gigabytes"),
    [
        (Case("0.5B"), 32, 22.1),
        (Case("0.5B"), 8, 12.6),
        (Case("1.5B"), 32, 43.6),
        (Case("1.5B", rows=8), 32, 33.9),
        (Case("1.5B", tokens=4096), 32, 33.0),
        (Case("1.5B", again=False), 32, 123.8),
        (Case("1.5B", again=False), 8, 55.8),
        (Case("1.5B", offload=True), 8, 21.5),
        (Case("1.5B", "lora"), 32, 16.0),
        (Case("1.5B", "lora"), 8, 6.6),
        (Case("3B"), 32, 75.3),
        (Case("7B", "lora"), 32, 31.5),
    ],
    ids=str,
)
def test_the_estimate_is_within_20_percent_of_what_an_h200_held(
    case: Case, micro_batch_size: int, gigabytes: float, tmp_path: Path
) -> None:
    config_of(case.size).save_pretrained(tmp_path)
    options = argparse.Namespace(rows=64, prompt=256, response=512, micro_batch_size=micro_batch_size)
    settings = gpu.settings(case, options, str(tmp_path), "cuda")
    parts = memory.estimate_learner(settings, memory.model_shapes(settings)).parts
    planned = sum(size for name, size in parts.items() if name not in ("libraries", "allowance"))
    assert gigabytes * 1e9 == pytest.approx(planned, rel=0.2)
