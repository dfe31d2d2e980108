"""`cory study` end to end: arms that train, fail, diverge, are stopped, and resume."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from launch.experiments.results import read_results
from launch.experiments.study_runs import StudyJob
from launch.main import main
from launch.run_folder.locks import try_lock
from launch.run_folder.run import Run
from tests.launch.conftest import Cory, start_cory

BREVITY = """def brevity(completions):
    return [-float(len(completion)) for completion in completions]


def broken(completions):
    raise OSError("It is broken.")
"""
STUDY = """about: A trial.
base: imdb-tiny-paper
settings:
  backend: transformers
  num_runners: 0
  dtype: fp32
  check_weight_sync: false
  reward: my_rewards:brevity
  num_updates: 2
  queries_per_update: 4
  minibatch_size: 4
  micro_batch_size: 4
  num_epochs: 1
  eval_queries: 4
  eval_every: 2
  max_response_tokens: 6
  test_queries: 18
arms:
"""
BROKEN = "  broken: {reward: 'my_rewards:broken'}\n"
TWO = f"{STUDY}  cory: {{label: CORY}}\n{BROKEN}"
CHANGED = f"  cory: {{label: Both}}\n  new: {{lr: 1.0}}\n{BROKEN}"


def test_a_study_trains_missing_runs_and_stores_their_results(
    cory_forked: Cory, cory_in_process: Cory, cluster: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    (tmp_path / "mine.yaml").write_text(TWO)
    result = cory_forked("study", "mine.yaml", "--out", "study", **cluster)
    assert result.returncode == 1, result.stderr + result.stdout
    assert "broken, seed 0, failed: " in result.stdout and "It is broken." in result.stdout
    (trained,) = read_results(tmp_path / "study")
    assert trained.status == "done"
    assert trained.final is not None and trained.final["queries"] == 18
    for policy_id in ("llm_1", "llm_2"):
        assert trained.final["policy"][policy_id]["response_length"] is not None
    assert [line["update"] for line in trained.metrics] == [0, 1, 2]
    assert trained.cost["seconds"] > 0.0
    run = tmp_path / "study" / "runs" / "cory" / "seed_0"
    # Evaluations during training use other held-out queries than the final one.
    queries = {sample["query"] for sample in trained.samples if sample["held_out"]}
    final = json.loads((run / "final.json").read_text())
    assert queries and queries.isdisjoint(response["prompt"] for response in final["policy"]["llm_1"])
    assert (run / "checkpoints" / "update_000002").is_dir()

    before = (tmp_path / "study" / "results" / "cory" / "seed_0.json").read_bytes()
    again = cory_in_process("study", "mine.yaml", "--out", "study", "cory", "--seeds", "0,")
    assert again.returncode == 0 and "CORY" in again.stdout
    assert (tmp_path / "study" / "results" / "cory" / "seed_0.json").read_bytes() == before
    lock = try_lock(tmp_path / "study" / "runs" / "broken" / "seed_0.lock")
    assert lock is not None
    with lock:
        second = cory_in_process("study", "mine.yaml", "--out", "study", "broken")
    assert "other processes of this study train 1 of the runs." in second.stdout

    # Labels of arms may change, but not their settings.
    (tmp_path / "mine.yaml").write_text(STUDY + CHANGED)
    renamed = cory_in_process("study", "mine.yaml", "--out", "study", "cory")
    assert renamed.returncode == 0 and "Both" in renamed.stdout
    changed = cory_in_process("study", "mine.yaml", "lr=1e-3", "--out", "study")
    assert changed.returncode == 2 and "was created with other settings: lr" in changed.stderr


def test_arms_whose_model_cannot_be_loaded_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def record_jobs(todo: list[StudyJob], *_: object) -> int:
        started.extend(job.arm.name for job in todo)
        return 0

    monkeypatch.setattr("launch.commands.study._run_jobs", record_jobs)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    (tmp_path / "mine.yaml").write_text(STUDY + "  cory: {}\n  absent: {model: ./nowhere}\n")
    assert main(["study", "mine.yaml", "--out", "study"]) == 1
    assert started == ["cory"] and "Skipped: Arm absent: " in capsys.readouterr().out
    assert main(["study", "mine.yaml", "absent", "--out", "study"]) == 2
    assert "Error: Arm absent: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "s3://bucket/study"], "s3://bucket/study is a URI, but must be a path"),
        (["--out", "taken"], "taken cannot be created"),
        (["--out", "new", "--seeds", "00"], "Invalid --seeds 00: give a count"),
    ],
)
def test_invalid_arguments_of_a_study_are_rejected(
    cory_in_process: Cory, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "taken").touch()
    result = cory_in_process("study", "imdb", "cory", *words)
    assert result.returncode == 2 and message in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


def test_in_a_ray_job_output_folders_must_be_absolute_and_persistent(
    policies_run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    for command, output, words in (
        ("study", "study", ["imdb", "--out", "here"]),
        ("export", "model", [str(policies_run.path), "--policy", "llm_1", "--out", "here"]),
        ("evaluate", "evaluation", [str(policies_run.path), "--out", "here"]),
    ):
        assert main([command, *words]) == 2
        assert f"Error: The {output}'s folder here is relative, and a Ray job's" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_share_a_study(cory: Cory, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    (tmp_path / "mine.yaml").write_text(STUDY + "  cory: {}\n  ppo: {num_agents: 1}\n  warm: {temperature: 1.5}\n")
    runs = tmp_path / "study" / "runs"
    first = start_cory(tmp_path, "study", "mine.yaml", "--out", "study")
    while not (runs / "cory" / "seed_0").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.1)
    second = cory("study", "mine.yaml", "--out", "study", "--seeds", "0,1")
    output, errors = first.communicate(timeout=180)
    assert (first.returncode, second.returncode) == (0, 0), errors + second.stderr
    assert "cory, seed 0" in output and "cory, seed 0" not in second.stdout
    assert "ppo, seed 0" in second.stdout and "ppo, seed 0" not in output
    study_runs = read_results(tmp_path / "study")
    expected = [(arm, seed) for arm in ("cory", "ppo", "warm") for seed in (0, 1)]
    assert [(run.arm, run.seed) for run in study_runs] == expected
    assert all(run.status == "done" for run in study_runs)


@pytest.mark.slow
def test_a_stopped_study_resumes(cory: Cory, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    settings = STUDY.replace("num_updates: 2", "num_updates: 4")
    (tmp_path / "mine.yaml").write_text(settings + "  cory: {}\n  wild: {lr: 1.0e+30, grad_clip: null}\n")
    process = start_cory(tmp_path, "study", "mine.yaml", "--out", "study")
    metrics = tmp_path / "study" / "runs" / "cory" / "seed_0" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Stopped: 0 of 2 runs are done. The same command continues." in output
    stopped = [json.loads(line)["update"] for line in metrics.read_text().splitlines()]
    assert 1 <= stopped[-1] < 4

    result = cory(
        "study", "mine.yaml", "num_runners=1", "micro_batch_size=2", "--out", "study"
    )  # as on another machine
    assert result.returncode == 0, result.stderr
    trained, wild = read_results(tmp_path / "study")
    assert [line["update"] for line in trained.metrics] == [0, 1, 2, 3, 4]
    assert (wild.status, wild.final) == ("diverged", None)
    assert wild.reason is not None and "is not finite" in wild.reason
    assert "seed 0 diverged, ended early" in result.stdout

    # The remaining checkpoints of a run suffice to use its policies.
    exported = cory("export", "study/runs/cory/seed_0", "--policy", "llm_2", "--out", "llm_2")
    assert exported.returncode == 0, exported.stderr
