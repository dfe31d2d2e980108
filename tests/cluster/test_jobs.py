"""`ray job submit` of our commands on a real cluster: files, placement, a killed driver, stopping and resuming."""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from launch.run_folder.locks import lock_holder
from launch.run_folder.run import Run
from tests.cluster.head import Head
from tests.launch.conftest import CHECKOUT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # mostly waiting for processes to start
REWARD = """
import os

from launch.lengths import length
from policies import SCALE

def brevity(completions):
    assert os.environ["HF_TOKEN"].startswith("hf_"), "the environment of the node is missing"
    return [-SCALE * length(completion) for completion in completions]
"""
SMALL = (
    "imdb-tiny-paper",
    *(
        "backend=transformers",
        "num_runners=0",
        "queries_per_update=4",
        "minibatch_size=4",
        "micro_batch_size=4",
        "num_epochs=1",
        "dtype=fp32",
    ),
    *("eval_queries=4", "eval_every=100", "checkpoint_every=100", "max_response_tokens=6", "check_weight_sync=false"),
    *("keep_checkpoints=1", "reward=my_rewards:brevity"),
)
ENVIRONMENT = """
from cory_env.text_envs.base import TurnBasedEnv
from policies import SCALE


class Echo(TurnBasedEnv):
    def __init__(self, rounds="1"):
        super().__init__("sender", "receiver")
        self.rounds = int(rounds)

    def start(self, seed):
        self.said = []

    def observe(self, agent):
        return "".join(self.said[-1:]) + "="

    def act(self, agent, text):
        self.said.append(text)
        self.is_over = len(self.said) == 2 * self.rounds
        return {} if agent == "sender" else dict.fromkeys(self.possible_agents, SCALE * (text == self.said[-2]))
"""
TIME_TO_SAVE = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}})


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder with a reward, modules named like our packages, and queries that are not uploaded."""
    folder = tmp_path / "work"
    (folder / "launch").mkdir(parents=True)
    (folder / "policies.py").write_text("SCALE = 1.0\n")
    (folder / "launch" / "__init__.py").touch()
    (folder / "launch" / "lengths.py").write_text("length = len\n")
    (folder / "my_rewards.py").write_text(REWARD)
    (folder / "questions.csv").write_text("query\nName a fruit.\nName a colour.\n")
    (folder / ".gitignore").write_text("*.csv\n")
    return folder


def submit(head: Head, folder: Path, *entrypoint: str) -> "subprocess.Popen[str]":
    """Starts `ray job submit` as in docs/clusters.md, which follows the job."""
    options = ("--working-dir", ".", "--runtime-env-json", TIME_TO_SAVE)
    return head.ray("job", "submit", *options, "--", *entrypoint, cwd=folder)


def cory(*words: str) -> tuple[str, ...]:
    return ("python", "-m", "cory_rllib", *words)


def read_to(job: "subprocess.Popen[str]", sign: str) -> str:
    """Reads a job's output until a line has `sign`; returns the job's id."""
    assert job.stdout
    lines: list[str] = []
    while not lines or sign not in lines[-1]:
        lines.append(job.stdout.readline())
        assert lines[-1], "".join(lines) + (job.stderr.read() if job.stderr else "")
    match = re.search(r"raysubmit_\w+", "".join(lines))
    assert match
    return match[0]


def stop(head: Head, folder: Path, job: "subprocess.Popen[str]", job_id: str) -> str:
    """Stops a job with `ray job stop`; returns the rest of its output."""
    output, errors = head.ray("job", "stop", job_id, cwd=folder).communicate(timeout=120)
    assert "was stopped" in output, output + errors
    remaining, errors = job.communicate(timeout=120)
    return remaining


def test_a_job_without_its_files_or_room_ends_before_anything_is_loaded(
    head: Head, project: Path, tmp_path: Path
) -> None:
    out = f"{tmp_path}/run"
    commands = [
        cory("train", "task=custom", "data=questions.csv", "reward=my_rewards:brevity", "--out", out),
        cory("train", *SMALL, "num_runners=9", "--out", out),
        cory("train", *SMALL),
    ]
    shell = "; ".join(f"{shlex.join(command)}; echo code=$?" for command in commands)
    output, errors = submit(head, project, "bash", "-c", shell).communicate(timeout=240)
    assert output.count("code=2") == 3, output + errors
    assert re.search(r"Error: Data file questions\.csv not found in .*excludes those in \.gitignore and", output)
    assert re.search(r"Error: Ray has no room for 7 of 9 runners: node .* has 0 CPUs left\.", output)
    assert "is relative, and a Ray job's working directory is removed" in output
    assert not Path(out).exists()


def test_the_same_command_continues_a_run_whose_driver_was_killed(head: Head, project: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = cory(
        "train", *SMALL, "num_runners=1", "num_updates=12", "checkpoint_every=2", "--out", str(out), "--continue"
    )
    job = submit(head, project, *words)
    read_to(job, " 3/12 ")
    holder = lock_holder(out)
    assert holder
    os.kill(int(holder.split()[0]), signal.SIGKILL)
    output, errors = job.communicate(timeout=120)
    assert job.returncode == 1, output + errors
    run = Run.open(out)
    last_update = run.checkpoints.updates()[-1]
    assert 2 <= last_update < 12

    job = submit(head, project, *words)
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 0, output + errors
    assert f"resuming after update {last_update}" in output
    assert [line["update"] for line in run.metrics] == list(range(13))
    assert run.checkpoints.updates()[-1] == 12


def test_a_job_trains_on_an_environment_of_the_uploaded_folder(head: Head, project: Path, tmp_path: Path) -> None:
    (project / "my_games.py").write_text(ENVIRONMENT)
    words = (
        "env=my_games:Echo?rounds=2",
        "num_updates=2",
        "queries_per_update=4",
        "num_generations=2",
        "num_runners=1",
    )
    small = ("eval_every=2", "eval_queries=4", "max_prompt_tokens=16")
    job = submit(head, project, *cory("train", "signals-tiny", *words, *small, "--out", f"{tmp_path}/run"))
    output, errors = job.communicate(timeout=300)
    assert job.returncode == 0, output + errors
    run = Run.open(tmp_path / "run")
    assert [line["update"] for line in run.metrics] == [0, 1, 2]
    samples = [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]
    assert {len(sample["responses"]) for sample in samples} == {4}  # two rounds of two agents


def test_ray_job_submit_trains_in_an_uploaded_checkout(head: Head, project: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for package in ("cory_env", "policies", "launch", "cory_rllib"):
        shutil.copytree(CHECKOUT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "my_rewards.py").write_text("def brevity(completions):\n    return [-len(c) for c in completions]\n")
    (checkout / "launch" / "mark.py").write_text("import launch.main\nprint('launch is in', launch.main.__file__)\n")
    out = tmp_path / "run"
    shell = f"python -m launch.mark && {shlex.join(cory('train', *SMALL, 'num_updates=1', '--out', str(out)))}"
    job = submit(head, checkout, "env", "-u", "PYTHONPATH", "bash", "-c", shell)
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 0, output + errors
    assert re.search(r"launch is in .*/runtime_resources/working_dir_files/", output), output
    assert Run.open(out).checkpoints.updates()[-1] == 1


def test_a_stopped_job_is_saved_and_continued_and_a_second_job_names_the_first(
    head: Head, project: Path, tmp_path: Path
) -> None:
    storage = tmp_path / "run"
    words = cory("train", *SMALL, "num_runners=1", "--out", f"file://{storage}", "--continue")
    job = submit(head, project, *words, "num_updates=2000")
    job_id = read_to(job, "1/2000 ")
    second, errors = submit(head, project, *words, "num_updates=2000").communicate(timeout=240)
    assert re.search(rf"in use by another run \(process \d+ on .*, Ray job {job_id}\)\. Stop it, or", second), second

    remaining = stop(head, project, job, job_id)
    run = Run.open(storage)
    last_update = run.checkpoints.updates()[-1]
    assert f"Update {last_update} is saved. Resume with:\n  cory train --resume file://{storage}" in remaining
    assert 0 < last_update < 2000 and run.metrics[-1]["update"] == last_update

    job = submit(head, project, *words, f"num_updates={last_update + 1}")
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 0, output + errors
    assert f"resuming after update {last_update}" in output
    assert [line["update"] for line in run.metrics] == list(range(last_update + 2))
    assert run.checkpoints.updates()[-1] == last_update + 1


def test_a_stopped_search_job_is_resumed_by_the_same_command(head: Head, project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rates"
    search = ("tune", *SMALL, "num_updates=16", "eval_every=1", "exchange_period=1", "--over", "lr=1e-4,1e-3")
    words = cory(*search, "--concurrent", "1", "--out", str(folder), "--continue")
    job = submit(head, project, *words)
    remaining = stop(head, project, job, read_to(job, "1/16"))
    assert "The search is saved, and stops." in remaining and f"--out {folder} --continue" in remaining

    job = submit(head, project, *words)
    output, errors = job.communicate(timeout=360)
    assert job.returncode == 0, output + errors
    with (folder / "results.csv").open() as file:
        assert [(row["lr"], row["status"], row["exchanges"]) for row in csv.DictReader(file)] == [
            ("0.0001", "done", "16"),
            ("0.001", "done", "16"),
        ]
