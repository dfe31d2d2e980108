"""`cory submit` and `cory jobs` on a real cluster: exit codes, output, secrets, tokens, stopping and going on."""

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from launch.experiments.search import read_reports
from launch.run_folder.run import Run
from tests.cluster.head import SECRET, Head
from tests.launch.conftest import CHECKOUT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # much of it is waiting for processes that start
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
def work(tmp_path: Path) -> Path:
    """A user's folder: a reward, with modules named as our packages, and queries."""
    folder = tmp_path / "work"
    (folder / "launch").mkdir(parents=True)
    (folder / "policies.py").write_text("SCALE = 1.0\n")
    (folder / "launch" / "__init__.py").touch()
    (folder / "launch" / "lengths.py").write_text("length = len\n")
    (folder / "my_rewards.py").write_text(REWARD)
    (folder / "questions.csv").write_text("query\nName a fruit.\nName a colour.\n")
    return folder


def test_a_job_has_the_secret_of_its_node_and_the_job_list_has_not(head: Head, work: Path) -> None:
    validate = ("validate", "custom", "data=questions.csv", "reward=my_rewards:knows_the_secret")
    words = ("submit", "--name", "proof", "--secrets", str(head.secrets), "--", *validate)
    job = head.cory(*words, cwd=work, HF_TOKEN=SECRET)
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 0, output + errors
    assert "(proof)" in output and "questions.csv" in output

    job = head.cory("submit", "--name", "blank", "--", *validate, cwd=work)
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 2, output + errors  # the driver's own, not Ray's 1
    assert "HF_TOKEN" in output

    code = "import cory_rllib; from launch.cluster.client import connect; print(connect(None).list_jobs())"
    listing = head.python("-c", code, cwd=work)
    told, errors = listing.communicate(timeout=120)
    assert "proof" in told and "CORY_SECRETS" in told, errors
    assert SECRET not in told
    listing = head.cory("jobs", cwd=work)
    told, _ = listing.communicate(timeout=120)
    assert [line.split()[1:3] for line in told.splitlines()[1:]] == [["proof", "SUCCEEDED"], ["blank", "FAILED"]]


PROBE = """
import os, ray
import cory_rllib
from launch.commands import train
from launch.console.credentials import on_workers

ray.init(runtime_env=on_workers())
told = ray.remote(lambda: os.environ["HF_TOKEN"][:3])
print("a worker has", ray.get(told.remote()), flush=True)
raise SystemExit(main(["train", "imdb-tiny"]))
"""


@pytest.mark.slow
def test_rays_own_command_works_and_workers_have_the_secret(head: Head, work: Path) -> None:
    (work / "probe.py").write_text(PROBE)
    given = json.dumps({"env_vars": {"CORY_SECRETS": str(head.secrets)}})
    submit = ("-m", "ray.scripts.scripts", "job", "submit", "--working-dir", ".", "--runtime-env-json", given, "--")
    job = head.python(*submit, "python", "probe.py", cwd=work)
    output, errors = job.communicate(timeout=240)
    assert "a worker has hf_" in output, output + errors
    assert "is relative: in a Ray job it would vanish with the job's working directory" in output
    assert job.returncode == 1  # Ray's, for any failure


def test_rays_own_command_trains_in_an_uploaded_checkout(head: Head, work: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for package in ("cory_env", "policies", "launch", "cory_rllib"):
        shutil.copytree(CHECKOUT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "my_rewards.py").write_text("def brevity(completions):\n    return [-len(c) for c in completions]\n")
    (checkout / "launch" / "mark.py").write_text("import launch.main\nprint('launch is in', launch.main.__file__)\n")
    out = tmp_path / "run"
    shell = f"python -m launch.mark && python -m cory_rllib train {' '.join(SMALL)} num_updates=1 --out {out}"
    submit = ("-m", "ray.scripts.scripts", "job", "submit", "--working-dir", str(checkout), "--")
    job = head.python(*submit, "env", "-u", "PYTHONPATH", "bash", "-c", shell, cwd=work)
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 0, output + errors
    assert re.search(r"launch is in .*/runtime_resources/working_dir_files/", output), output
    assert Run.open(out).checkpoints.updates()[-1] == 1


@pytest.mark.parametrize("token", [None, "0" * 64])
def test_a_missing_or_wrong_token_is_one_sentence(head: Head, tmp_path: Path, token: str | None) -> None:
    file = tmp_path / "token"
    if token:
        file.write_text(token)
    mode = "token" if token else "disabled"
    listing = head.cory("jobs", cwd=tmp_path, RAY_AUTH_MODE=mode, RAY_AUTH_TOKEN_PATH=str(file))
    output, errors = listing.communicate(timeout=120)
    assert (listing.returncode, output) == (2, "")
    assert errors.count("\n") == 1 and "refuses this client's token. Set RAY_AUTH_MODE=token" in errors


def test_a_stopped_job_is_saved_and_its_command_given_again_goes_on(head: Head, work: Path, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    words = ("submit", "--storage", f"file://{storage}", "--name", "run", "--", "train", *SMALL, "num_runners=1")
    job = head.cory(*words, "num_updates=100", cwd=work)
    rest = stopped_at(job, "1/100", head, work)
    run = Run.open(storage / "run")
    done = run.checkpoints.updates()[-1]
    assert f"Update {done} is saved. Resume with:\n  cory train --resume file://{storage}/run" in rest
    assert 0 < done < 100 and run.updates()[-1]["update"] == done

    job = head.cory(*words, f"num_updates={done + 1}", cwd=work)
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 0, output + errors
    assert f"resuming after update {done}" in output
    assert [line["update"] for line in run.updates()] == list(range(done + 2))
    assert run.checkpoints.updates()[-1] == done + 1


def stopped_at(job: "subprocess.Popen[str]", sign: str, head: Head, work: Path) -> str:
    """Stops a job when its output shows a sign; returns what it prints after that."""
    assert job.stdout
    seen: list[str] = []
    while not seen or sign not in seen[-1]:
        seen.append(job.stdout.readline())
        assert seen[-1], "".join(seen) + (job.stderr.read() if job.stderr else "")
    stop = head.cory("jobs", "stop", seen[0].split()[1], cwd=work)
    output, errors = stop.communicate(timeout=120)
    assert stop.returncode == 0 and "STOPPED" in output, errors
    rest, errors = job.communicate(timeout=120)
    assert job.returncode == 143, errors
    return rest


def test_a_search_as_a_job_is_stopped_and_its_command_given_again_goes_on(
    head: Head, work: Path, tmp_path: Path
) -> None:
    found = tmp_path / "storage" / "rates"
    search = ("tune", *SMALL, "num_updates=16", "eval_every=1", "exchange_period=1", "--over", "lr=1e-4,1e-3")
    words = ("submit", "--storage", str(found.parent), "--name", "rates", "--", *search, "--concurrent", "1")
    rest = stopped_at(head.cory(*words, cwd=work), "1/16", head, work)
    assert "Running trials finish their update and are saved." in rest and f"cory tune --resume {found}" in rest

    job = head.cory(*words, cwd=work)
    output, errors = job.communicate(timeout=360)
    assert job.returncode == 0, output + errors
    assert "trial_00000  goes on from trial_00000 after update" in output
    with (found / "results.csv").open() as file:
        assert [(row["lr"], row["status"], row["exchanges"]) for row in csv.DictReader(file)] == [
            ("0.0001", "done", "16"),
            ("0.001", "done", "16"),
        ]
    of_first = [report["updates"] for report in read_reports(found) if report["trial"] == "trial_00000"]
    assert of_first == list(range(1, 17))
