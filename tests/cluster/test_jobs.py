"""`cory submit` and `cory jobs` on a real cluster: exit codes, output, secrets, tokens, stopping and resuming."""

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from launch.run_folder.run import Run
from tests.cluster.head import SECRET, Head
from tests.launch.conftest import CHECKOUT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # mostly waiting for processes to start
REWARD = """
import os

from launch.lengths import length
from policies import SCALE

def knows_the_secret(completions):
    assert os.environ["HF_TOKEN"].startswith("hf_")
    return [float(len(completion)) for completion in completions]

def brevity(completions):
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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder with a reward, modules named like our packages, and queries."""
    folder = tmp_path / "work"
    (folder / "launch").mkdir(parents=True)
    (folder / "policies.py").write_text("SCALE = 1.0\n")
    (folder / "launch" / "__init__.py").touch()
    (folder / "launch" / "lengths.py").write_text("length = len\n")
    (folder / "my_rewards.py").write_text(REWARD)
    (folder / "questions.csv").write_text("query\nName a fruit.\nName a colour.\n")
    return folder


def test_a_job_has_its_node_s_secret_and_the_job_list_does_not(head: Head, project: Path) -> None:
    validate = ("validate", "custom", "data=questions.csv", "reward=my_rewards:knows_the_secret")
    words = ("submit", "--name", "proof", "--secrets", str(head.secrets), "--", *validate)
    job = head.cory(*words, cwd=project, HF_TOKEN=SECRET)
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 0, output + errors
    assert "(proof)" in output and "questions.csv" in output

    job = head.cory("submit", "--name", "blank", "--", *validate, cwd=project)
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 2, output + errors  # the driver's exit code, not Ray's 1
    assert "HF_TOKEN" in output

    code = "import cory_rllib; from launch.cluster.client import connect; print(connect(None).list_jobs())"
    listing = head.python("-c", code, cwd=project)
    output, errors = listing.communicate(timeout=120)
    assert "proof" in output and "CORY_SECRETS" in output, errors
    assert SECRET not in output
    listing = head.cory("jobs", cwd=project)
    output, _ = listing.communicate(timeout=120)
    assert [line.split()[1:3] for line in output.splitlines()[1:]] == [["proof", "SUCCEEDED"], ["blank", "FAILED"]]


PROBE = """
import os, ray
import cory_rllib
from launch.console.credentials import worker_runtime_env
from launch.main import main

ray.init(runtime_env=worker_runtime_env())
secret = ray.remote(lambda: os.environ["HF_TOKEN"][:3])
print("a worker has", ray.get(secret.remote()), flush=True)
raise SystemExit(main(["train", "imdb-tiny"]))
"""


@pytest.mark.slow
def test_ray_job_submit_works_and_workers_have_the_secret(head: Head, project: Path) -> None:
    (project / "probe.py").write_text(PROBE)
    runtime_env = json.dumps({"env_vars": {"CORY_SECRETS": str(head.secrets)}})
    submit = (
        "-m",
        "ray.scripts.scripts",
        "job",
        "submit",
        "--working-dir",
        ".",
        "--runtime-env-json",
        runtime_env,
        "--",
    )
    job = head.python(*submit, "python", "probe.py", cwd=project)
    output, errors = job.communicate(timeout=240)
    assert "a worker has hf_" in output, output + errors
    assert "is relative, and a Ray job's working directory is removed" in output
    assert job.returncode == 1  # Ray's exit code for any failure


def test_ray_job_submit_trains_in_an_uploaded_checkout(head: Head, project: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for package in ("cory_env", "policies", "launch", "cory_rllib"):
        shutil.copytree(CHECKOUT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "my_rewards.py").write_text("def brevity(completions):\n    return [-len(c) for c in completions]\n")
    (checkout / "launch" / "mark.py").write_text("import launch.main\nprint('launch is in', launch.main.__file__)\n")
    out = tmp_path / "run"
    shell = f"python -m launch.mark && python -m cory_rllib train {' '.join(SMALL)} num_updates=1 --out {out}"
    submit = ("-m", "ray.scripts.scripts", "job", "submit", "--working-dir", str(checkout), "--")
    job = head.python(*submit, "env", "-u", "PYTHONPATH", "bash", "-c", shell, cwd=project)
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 0, output + errors
    assert re.search(r"launch is in .*/runtime_resources/working_dir_files/", output), output
    assert Run.open(out).checkpoints.updates()[-1] == 1


@pytest.mark.parametrize("token", [None, "0" * 64])
def test_a_missing_or_wrong_token_is_reported_in_one_sentence(head: Head, tmp_path: Path, token: str | None) -> None:
    file = tmp_path / "token"
    if token:
        file.write_text(token)
    mode = "token" if token else "disabled"
    listing = head.cory("jobs", cwd=tmp_path, RAY_AUTH_MODE=mode, RAY_AUTH_TOKEN_PATH=str(file))
    output, errors = listing.communicate(timeout=120)
    assert (listing.returncode, output) == (2, "")
    assert errors.count("\n") == 1 and "rejected this client's token. Set RAY_AUTH_MODE=token" in errors


def test_a_stopped_job_is_saved_and_resumed_by_the_same_command(head: Head, project: Path, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    words = ("submit", "--storage", f"file://{storage}", "--name", "run", "--", "train", *SMALL, "num_runners=1")
    job = head.cory(*words, "num_updates=100", cwd=project)
    remaining = stopped_at(job, "1/100", head, project)
    run = Run.open(storage / "run")
    last_update = run.checkpoints.updates()[-1]
    assert f"Update {last_update} is saved. Resume with:\n  cory train --resume file://{storage}/run" in remaining
    assert 0 < last_update < 100 and run.updates()[-1]["update"] == last_update

    job = head.cory(*words, f"num_updates={last_update + 1}", cwd=project)
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 0, output + errors
    assert f"resuming after update {last_update}" in output
    assert [line["update"] for line in run.updates()] == list(range(last_update + 2))
    assert run.checkpoints.updates()[-1] == last_update + 1


def stopped_at(job: "subprocess.Popen[str]", sign: str, head: Head, project: Path) -> str:
    """Stops a job when `sign` appears in its output; returns the rest of the output."""
    assert job.stdout
    lines: list[str] = []
    while not lines or sign not in lines[-1]:
        lines.append(job.stdout.readline())
        assert lines[-1], "".join(lines) + (job.stderr.read() if job.stderr else "")
    stop = head.cory("jobs", "stop", lines[0].split()[1], cwd=project)
    output, errors = stop.communicate(timeout=120)
    assert stop.returncode == 0 and "STOPPED" in output, errors
    remaining, errors = job.communicate(timeout=120)
    assert job.returncode == 143, errors
    return remaining


def test_a_stopped_search_job_is_resumed_by_the_same_command(head: Head, project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "storage" / "rates"
    search = ("tune", *SMALL, "num_updates=16", "eval_every=1", "exchange_period=1", "--over", "lr=1e-4,1e-3")
    words = ("submit", "--storage", str(folder.parent), "--name", "rates", "--", *search, "--concurrent", "1")
    remaining = stopped_at(head.cory(*words, cwd=project), "1/16", head, project)
    assert "The search is saved, and stops." in remaining and f"cory tune --resume {folder}" in remaining

    job = head.cory(*words, cwd=project)
    output, errors = job.communicate(timeout=360)
    assert job.returncode == 0, output + errors
    with (folder / "results.csv").open() as file:
        assert [(row["lr"], row["status"], row["exchanges"]) for row in csv.DictReader(file)] == [
            ("0.0001", "done", "16"),
            ("0.001", "done", "16"),
        ]
