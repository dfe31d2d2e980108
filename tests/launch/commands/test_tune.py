"""`cory tune` end to end: a stopped and a killed driver, resuming, a failing trial, and invalid arguments."""

import csv
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from launch.commands.tune import read_search
from launch.console.cli import parse_command
from launch.console.errors import CommandError
from launch.experiments.search import Search, is_resumable, read_same_search
from launch.experiments.space import pin_objective, read_axes
from launch.main import main
from launch.run_folder.layout import LOCK
from launch.run_folder.run import Run
from tests.launch.conftest import Cory, start_cory
from tests.launch.training.test_training import BREVITY, SMALL
from tests.paper import paper_settings

SEARCH = (*SMALL, "dtype=fp32", "grad_clip=null", "checkpoint_every=1", "eval_every=1")
WORDS = ("book", "film", "dog", "cat", "sea", "sun", "car", "day", "cup", "end", "tree", "song", "king", "door", "lamp")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stopped_and_killed_search_resumes_exactly_and_a_failed_trial_does_not_stop_others(
    cory: Cory, tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    (tmp_path / "q.jsonl").write_text("".join(f'{{"query": "The {word} was"}}\n' for word in WORDS))
    settings = (*SEARCH, "task=custom", "data=q.jsonl", "eval_queries=2", "prompt=Go on:\n{query}")
    command = ("tune", *settings, "--over", "lr=1e-4,1e30", "--concurrent", "1", "--out", "found")

    process = start_search(tmp_path, command, until="1/3")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, output + errors
    same = shlex.join(["cory", *command, "--continue"])
    assert f"Stopped. Continue with:\n  {same}\n" in output and not errors
    assert "found is not empty. Continue its search with --continue" in error_line(cory(*command))
    changed = cory(*command, "--over", "seed=1", "--continue")
    assert "contains a search with seed=0. Use" in error_line(changed)

    process = start_search(tmp_path, (*command, "--continue"), until="2/3", TUNE_GLOBAL_CHECKPOINT_S="0")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)

    resumed = cory(*command, "--continue")
    assert resumed.returncode == 1 and not resumed.stderr
    with (tmp_path / "found" / "results.csv").open() as file:
        good, bad = csv.DictReader(file)
    assert (good["lr"], good["status"], good["updates"], good["exchanges"]) == ("0.0001", "done", "3", "3")
    assert (bad["lr"], bad["status"]) == ("1e+30", "failed")
    assert "The gradient of llm_1 is not finite in update 2" in bad["reason"]
    assert f"trial_00001 failed (lr=1e+30 seed=0): {bad['reason']}" in resumed.stdout
    assert yaml.safe_load((tmp_path / "found" / "best.yaml").read_text())["lr"] == 1e-4

    trained = cory("train", "found/best.yaml", "--out", "run")
    assert trained.returncode == 0, trained.stderr
    update = Run.open(tmp_path / "run").metrics[-1]
    report = json.loads((tmp_path / "found" / "trial_00000" / "result.json").read_text().splitlines()[-1])["cory"]
    for key in ("update", "roles", "policy", "evaluation"):
        assert report[key] == update[key], key


def start_search(folder: Path, command: Sequence[str], until: str, **environment: str) -> "subprocess.Popen[str]":
    """Starts a search, and returns when its first trial has done some updates."""
    process = start_cory(folder, *command, **environment)
    assert process.stdout and process.stderr
    while line := process.stdout.readline():
        if line.split()[:2] == ["trial_00000", until]:
            return process
    raise AssertionError(process.stderr.read())  # the process has ended too early


def test_a_search_resumes_only_unchanged(tmp_path: Path) -> None:
    axes = read_axes(["lr=0.000123456,1e-4", "seed=0,1"])
    search = Search(pin_objective(paper_settings(backend="transformers")), axes)
    search.write(tmp_path, "cory tune")
    assert not is_resumable(tmp_path)
    (tmp_path / "tuner.pkl").touch()
    assert is_resumable(tmp_path)
    read_same_search(tmp_path, search)  # all digits are preserved
    dated = paper_settings(backend="transformers", chat=True, chat_date="2024-07-26")  # as the search has set it
    search._replace(settings=pin_objective(dated)).write(tmp_path, "cory tune")
    read_same_search(tmp_path, search._replace(settings=pin_objective(dated.model_copy(update={"chat_date": None}))))
    search.write(tmp_path, "cory tune")
    with pytest.raises(CommandError, match=r"contains a search with lr=\[0\.000123456, 0\.0001\], seed=\[0, 1\]\. Use"):
        read_same_search(tmp_path, search._replace(axes={"lr": [1e-4]}))
    with pytest.raises(CommandError, match="contains a search with minibatch_size=256, queries_per_update=256"):
        read_same_search(
            tmp_path,
            search._replace(
                settings=pin_objective(paper_settings(queries_per_update=8, minibatch_size=8, backend="transformers"))
            ),
        )


def test_results_are_means_over_seeds_however_they_are_chosen() -> None:
    words = ["imdb-tiny", "backend=transformers", "seed=4", "--over", "lr=1e-4,1e-3"]
    search, _ = read_search(parse_command("tune", [*words, "--seeds", "3"]))
    assert (search.axes["seed"], search.keys, search.trials) == ([4, 5, 6], ["lr"], 6)
    assert read_search(parse_command("tune", [*words, "--over", "seed=4,5,6"]))[0] == search


@pytest.mark.parametrize("words", [("--scheduler", "asha"), ("--search", "optuna"), ("--resume", "taken")])
def test_a_removed_option_is_rejected(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "imdb-tiny", "--over", "lr=1e-4,1e-3", *words]) == 2
    assert words[0] in capsys.readouterr().err


def test_a_search_in_storage_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--out", "s3://bucket/search"]) == 2
    assert "s3://bucket/search is a URI, but must be a path" in capsys.readouterr().err


def error_line(result: "subprocess.CompletedProcess[str]") -> str:
    """Returns the one-line error message of a command."""
    assert result.returncode == 2 and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("imdb-tiny",), "Nothing to search"),
        (("imdb-tiny", "--over", "seed=1,2", "--seeds", "2"), "--over seed is given twice"),
        (("imdb-tiny", "--over", "exchange_period=0,1"), "Input should be greater than or equal to 1"),
        (
            ("imdb-tiny", "--over", "max_prompt_tokens=64,5"),
            "4000 of 4000 queries of train do not fit max_prompt_tokens = 5",
        ),
        (
            ("imdb-tiny", "--over", "lr=1e-5", "num_passes=2"),
            "num_passes conflicts with a search, which counts updates",
        ),
        (("imdb-tiny", "--over", "select_by=bare,chain"), "trials that differ in it are not comparable"),
        (("imdb-tiny", "--over", "lr=1e-5", "--out", "taken"), "taken is not empty"),
        (
            ("imdb-tiny", "--over", "lora_target_modules=c_attn,q_proj", "weights=lora"),
            "has no linear layer 'q_proj' to adapt. It has c_",
        ),
        (("imdb-tiny", "--over", "lr=1e-5", "start_from=missing"), "missing is not a folder on this machine"),
        (("imdb-tiny", "--over", "start_from=null,missing"), "missing is not a folder on this machine"),
        (
            ("imdb-tiny", "--over", "lr=1e-5", "start_from=s3://bucket/run"),
            "start_from=s3://bucket/run is a URI. Mount the bucket, or copy the run to a folder",
        ),
        (
            ("imdb-tiny", "--over", "checkpoint_every=1,2"),
            "--over checkpoint_every: trials that differ in it are not comparable",
        ),
        (("imdb-tiny", "--over", "lr=1e-5", "tracker=wandb"), "tracker conflicts with a search"),
        (("imdb-tiny", "--over", "lr=1e-5", "--continue"), "--continue requires --out, the folder of the search."),
    ],
)
def test_an_invalid_search_is_rejected_in_one_line_and_creates_no_folder(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert main(["tune", "backend=transformers", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]
    assert not (tmp_path / "taken" / LOCK).exists()
