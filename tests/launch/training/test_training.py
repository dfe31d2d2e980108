"""`cory train` end to end: stopped by Ctrl-C, resumed, all files written, and the policies used afterwards."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import yaml
from safetensors.torch import load_file

from launch.console.errors import CommandError
from launch.run_folder.run import Run
from tests.launch.conftest import Cory, start_cory

BREVITY = "def brevity(completions):\n    return [-float(len(completion)) for completion in completions]\n"
SMALL = (
    "imdb-tiny",
    *(
        "backend=transformers",
        "num_runners=0",
        "num_updates=3",
        "queries_per_update=2",
        "num_generations=2",
        "minibatch_size=4",
    ),
    *("micro_batch_size=4", "num_epochs=1", "eval_queries=4", "eval_every=2", "exchange_period=1"),
    *("max_response_tokens=6", "check_weight_sync=false", "reward=my_rewards:brevity"),
)


def updates_in(file: Path) -> list[int]:
    return [json.loads(line)["update"] for line in file.read_text().splitlines()]


def test_a_run_stopped_by_ctrl_c_resumes_and_completes(
    cory_forked: Cory, cory_in_process: Cory, cluster: dict[str, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    process = start_cory(tmp_path, "train", *SMALL, "dtype=fp32", "prompt=Go on:\n{query}", "--out", "run")
    assert process.stdout and process.stderr
    lines_printed: list[str] = []
    while not lines_printed or not lines_printed[-1].lstrip().startswith("1/3"):
        lines_printed.append(process.stdout.readline())
        assert lines_printed[-1], process.stderr.read()  # it ended before its first update
    with pytest.raises(CommandError, match="in use by another run"):
        Run.create(run)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    rest, errors = process.communicate(timeout=120)
    output = "".join(lines_printed) + rest
    assert process.returncode == 130, errors
    assert "cory train --resume run" in output
    assert "\x1b" not in output and "\r" not in output
    assert errors == ""
    assert "SIGINT: the run stops after this update." in (run / "log.txt").read_text()
    stopped = updates_in(run / "metrics.jsonl")
    assert stopped == list(range(len(stopped))) and 1 <= stopped[-1] < 3

    # As if killed between the metrics and the checkpoint of the next update.
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"update": stopped[-1] + 1}) + "\n" + '{"torn": ')
    changes = ("num_runners=1", "micro_batch_size=2")  # as on another machine
    resumed = cory_forked("train", "--resume", "run", *changes, **cluster)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming after update {stopped[-1]}" in resumed.stdout
    assert updates_in(run / "metrics.jsonl") == [0, 1, 2, 3]
    roles = [json.loads(line)["roles"]["pioneer"] for line in (run / "metrics.jsonl").read_text().splitlines()[1:]]
    assert roles == ["llm_1", "llm_2", "llm_1"]  # exchanged after every update, also across the resume

    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {sample["update"] for sample in samples if sample["held_out"]} == {0, 3}
    assert {sample["update"] for sample in samples if not sample["held_out"]} == {2, 3}  # with evaluations
    assert {name.name for name in (run / "checkpoints").iterdir()} >= {"best", "update_000003"}
    assert (run / "curves.png").stat().st_size > 10_000
    assert yaml.safe_load((run / "config.yaml").read_text())["exchange_period"] == 1
    assert list((run / "tensorboard").iterdir())

    again = cory_in_process("train", "--resume", "run")
    assert again.returncode == 0 and "is done" in again.stdout and "num_updates=6" in again.stdout

    # The trained chain gives the same responses as the run's last evaluation.
    last = [sample for sample in samples if sample["held_out"] and sample["update"] == 3]
    for response in (response for sample in last for response in sample["responses"]):
        for metric in ("task_reward", "ended", "repetition"):
            del response[metric]
    queries = "\n".join(sample["query"] for sample in last)
    generated = cory_in_process("generate", "run", "--checkpoint", "latest", "--json", stdin=queries)
    assert generated.returncode == 0 and "llm_2 then llm_1, after update 3 of run\n" in generated.stderr
    assert [json.loads(line) for line in generated.stdout.splitlines()] == [
        {"query": sample["query"], "responses": sample["responses"]} for sample in last
    ]
    exported = cory_in_process("export", "run", "--policy", "llm_2", "--out", "llm_2")
    assert exported.returncode == 0 and exported.stdout.startswith("llm_2: llm_2 after update ")
    assert load_file(tmp_path / "llm_2" / "model.safetensors")["transformer.wte.weight"].shape == (4096, 256)


@pytest.mark.slow
def test_a_run_stopped_like_a_ray_job_is_saved_even_if_the_wandb_process_is_killed_too(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    tracked = {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    process = start_cory(tmp_path, "train", *SMALL, "tracker=wandb", "num_updates=50", "--out", "run", **tracked)
    assert process.stdout and process.stderr
    lines_printed: list[str] = []
    while not lines_printed or not lines_printed[-1].lstrip().startswith("1/50"):
        lines_printed.append(process.stdout.readline())
        assert lines_printed[-1], process.stderr.read()  # it ended before its first update
    children = psutil.Process(process.pid).children(recursive=True)
    core, *_ = [child for child in children if child.name() == "wandb-core"]
    core.terminate()
    process.terminate()
    rest, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (143, ""), rest
    assert "Warning: Weights & Biases failed (ConnectionResetError: Connection lost)." in rest
    last = updates_in(tmp_path / "run" / "metrics.jsonl")[-1]
    assert f"Stopped. Update {last} is saved." in rest


def test_an_update_with_a_non_finite_gradient_is_rejected_and_its_batch_saved(
    cory_forked: Cory, cluster: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    result = cory_forked("train", *SMALL, "lr=1e30", "grad_clip=null", "--out", "run", **cluster)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "The gradient of llm_1 is not finite in update 2" in result.stderr
    assert "Update 0 is saved. Resume with:\n  cory train --resume run" in result.stderr
    rows = load_file(tmp_path / "run" / "refused_update_000002_llm_1.safetensors")
    assert rows["responses"].shape[0] == 4 and not rows["advantages"].isfinite().all()
