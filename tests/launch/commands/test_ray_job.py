"""`cory train` and `cory tune` as the driver of a Ray job: errors before anything is loaded. No cluster is needed.

`tests/cluster/test_jobs.py` runs `ray job submit` on a real cluster.
"""

import json
import shutil
from pathlib import Path

import pytest

from cory_env.home import IN_JOB
from policies.models.model_names import BUNDLED_LM, model_path
from tests.launch.conftest import Cory

IGNORED = "which excludes those in .gitignore and .rayignore: change these, or use an absolute path"
RUN = ("--out", "/nowhere/run")
TUNE = ("tune", "imdb-tiny", "backend=transformers", "--over", "lr=1e-5,1e-4")
TASK = ("task=custom", "backend=transformers", "reward=rewards:length")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a Ray job, with data, a reward and a file of settings."""
    monkeypatch.setenv(IN_JOB, json.dumps({"runtime_env": {}, "metadata": {"job_submission_id": "raysubmit_1"}}))
    (tmp_path / "data.jsonl").write_text('{"query": "Name a fruit."}\n' * 40)
    (tmp_path / "rewards.py").write_text(
        "import scales\n\ndef length(completions):\n    return [1.0] * len(completions)\n"
    )
    (tmp_path / "scales.py").touch()
    (tmp_path / "mine.yaml").write_text("base: {task: custom}\n")
    shutil.copytree(model_path(BUNDLED_LM), tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "other.yaml", *RUN), "other.yaml does not exist."),
        (("train", "-c", "other.yaml", *RUN), "The settings file other.yaml cannot be read: No such file"),
        (("train", *TASK, "data=other.jsonl", *RUN), "Data file other.jsonl not found in "),
        (("train", *TASK, "data=other.jsonl?query_column=text", *RUN), "Data file other.jsonl not found in "),
        (("train", *TASK, "data=hub:./held", *RUN), "Data set hub:./held not found."),
        (("train", *TASK, "data=data.jsonl", "eval_data=held/out.csv", *RUN), "Data file held/out.csv not found in "),
        (("train", "imdb-tiny", "reward=other:length", *RUN), "Module 'other' of the reward 'other:length' not found"),
        (("train", "imdb-tiny", "credit=mine.credit:pay", *RUN), "Module 'mine' of the credit"),
        (("train", "imdb-tiny", "model=./models/mine", *RUN), "No model in ./models/mine: no such folder."),
        (("train", "imdb-tiny", "start_from=runs/old", *RUN), "start_from=runs/old is not a folder on this machine."),
        (("study", "other.yaml", "--list"), "Unknown study `other.yaml`."),
        (("tune", *TASK, "data=other.jsonl", "--over", "lr=1e-5,1e-4", *RUN), "Data file other.jsonl not found in "),
        (("tune", *TASK, "data=data.jsonl", "--over", "eval_data=a.csv,b.csv", *RUN), "Data file a.csv not found in "),
    ],
)
def test_a_file_that_is_missing_in_the_job_s_working_directory_may_have_been_ignored(
    words: tuple[str, ...], message: str, job: Path, cory_in_process: Cory
) -> None:
    result = cory_in_process(*words)
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
    assert message in result.stderr and IGNORED in result.stderr


@pytest.mark.parametrize(
    ("ignored", "words", "message"),
    [
        ("scales.py", (*TASK, "data=data.jsonl"), "Module 'scales' of the reward"),
        ("model/*.safetensors", ("imdb-tiny", "model=model"), "`model` holds no weights"),
        ("model/config.json", ("imdb-tiny", "model=model"), "No model in model: it has no config.json."),
        ("model/tokenizer*", ("imdb-tiny", "model=model"), "The tokenizer of 'model' "),
    ],
)
def test_an_ignored_part_of_a_model_or_reward_is_named(
    ignored: str, words: tuple[str, ...], message: str, job: Path, cory_in_process: Cory
) -> None:
    for file in job.glob(ignored):
        file.unlink()
    result = cory_in_process("train", *words, *RUN)
    assert result.returncode == 2 and message in result.stderr and IGNORED in result.stderr, result.stderr


def test_an_absolute_path_and_a_command_outside_of_a_job_have_no_hint_at_ignored_files(
    job: Path, cory_in_process: Cory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (("data=/nowhere/data.jsonl",), ("data=data.jsonl", "model=/nowhere/model")):
        result = cory_in_process("train", *TASK, *words, *RUN)
        assert result.returncode == 2 and "/nowhere/" in result.stderr and "ignore" not in result.stderr
    monkeypatch.delenv(IN_JOB)
    result = cory_in_process("train", *TASK, "data=other.jsonl", *RUN)
    assert "Data file other.jsonl not found" in result.stderr and "ignore" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("train", "imdb-tiny"),
        ("train", "imdb-tiny", "--out", "runs/a"),
        ("train", "imdb-tiny", "--out", "runs/a", "--continue"),
        ("train", "--resume", "runs/a"),
        TUNE,
        (*TUNE, "--out", "runs/a"),
        (*TUNE, "--out", "runs/a", "--continue"),
    ],
)
def test_a_relative_output_folder_is_rejected_because_it_would_be_lost(
    words: tuple[str, ...], job: Path, cory_in_process: Cory
) -> None:
    result = cory_in_process(*words)
    assert result.returncode == 2
    assert "is relative, and a Ray job's working directory is removed when the job ends." in result.stderr
    uri = {"train": "run, or a URI such as s3://bucket/runs/NAME", "tune": "search"}[words[0]]
    assert f"Use an absolute path that all nodes share, such as --out /shared/{uri}.\n" in result.stderr
    assert not (job / "runs").exists()
