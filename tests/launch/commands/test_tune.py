"""`cory tune` end to end: a stopped and a killed driver, resuming, a failing trial, and invalid arguments."""

import csv
import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from launch.commands.tune import read_search
from launch.console.cli import parse_command
from launch.console.errors import CommandError
from launch.experiments.search import Search, check_same_search, is_resumable
from launch.experiments.space import pin_objective, read_axes
from launch.main import main
from launch.run_folder.layout import LOCK
from launch.run_folder.run import Run
from tests.launch.conftest import Cory, start_cory
from tests.launch.training.test_training import BREVITY, SMALL
from tests.paper import paper_settings

SEARCH = (*SMALL, "dtype=fp32", "grad_clip=null", "checkpoint_every=1", "eval_every=1")
PBT = ("imdb-tiny", "backend=transformers", "--over", "lr=log:1e-5:1e-3", "--scheduler", "pbt")
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
    assert "Stopped. Continue with:\n  cory tune --resume found" in output and not errors
    assert "Continue it with `cory tune --resume found`" in error_line(cory(*command))
    changed = cory(*command, "--over", "seed=1", "--continue")
    assert "contains a search with over=['lr=0.0001,1e+30']." in error_line(changed)

    process = start_search(tmp_path, (*command, "--continue"), until="2/3", TUNE_GLOBAL_CHECKPOINT_S="0")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    spent = cory("tune", "--resume", "found", "--max-minutes", "0.01")
    assert spent.returncode == 0 and "The time budget is exhausted. Continue with:" in spent.stdout, spent.stderr

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


@pytest.mark.parametrize("words", [("--resume", "found"), (*PBT, "--out", "found", "--continue")])
def test_a_population_does_not_resume(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    search, _ = read_search(parse_command("tune", list(PBT)))
    (tmp_path / "found").mkdir()
    search.write(tmp_path / "found", "cory tune")
    (tmp_path / "found" / "tuner.pkl").touch()
    assert main(["tune", *words]) == 2
    error = capsys.readouterr().err
    assert "found is a search with --scheduler pbt, which cannot resume" in error and error.count("\n") == 1


def test_a_search_resumes_only_unchanged(tmp_path: Path) -> None:
    search = Search(
        pin_objective(paper_settings(backend="transformers")), read_axes(["lr=0.000123456,1e-4"]), None, 1, 2, None
    )
    search.write(tmp_path, "cory tune")
    assert not is_resumable(tmp_path)
    (tmp_path / "tuner.pkl").touch()
    assert is_resumable(tmp_path)
    check_same_search(tmp_path, search)  # all digits are preserved
    dated = paper_settings(backend="transformers", chat=True, chat_date="2024-07-26")  # as the search has set it
    search._replace(settings=pin_objective(dated)).write(tmp_path, "cory tune")
    check_same_search(tmp_path, search._replace(settings=pin_objective(dated.model_copy(update={"chat_date": None}))))
    search.write(tmp_path, "cory tune")
    with pytest.raises(CommandError, match=r"contains a search with over=\['lr=0\.000123456,0\.0001'\], seeds=2\. Use"):
        check_same_search(tmp_path, search._replace(axes=read_axes(["lr=1e-4"]), seeds=1))
    with pytest.raises(CommandError, match="contains a search with queries_per_update=256, minibatch_size=256"):
        check_same_search(
            tmp_path,
            search._replace(
                settings=pin_objective(paper_settings(queries_per_update=8, minibatch_size=8, backend="transformers"))
            ),
        )


@pytest.mark.parametrize("option", ["--out", "--resume"])
def test_a_search_in_storage_is_rejected(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", option, "s3://bucket/search"]) == 2
    assert "s3://bucket/search is a URI, but must be a path" in capsys.readouterr().err


def error_line(result: "subprocess.CompletedProcess[str]") -> str:
    """Returns the one-line error message of a command."""
    assert result.returncode == 2 and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("imdb-tiny",), "Nothing to search"),
        (("imdb-tiny", "--over", "lr=log:1:0"), "LOW must be above zero and below HIGH"),
        (("imdb-tiny", "--over", "lr=1e-5,1e-4", "--samples", "3"), "--samples requires a range in --over"),
        (("imdb-tiny", "--over", "seed=1,2", "--seeds", "2"), "conflicts with --over seed"),
        (
            ("imdb-tiny", "--over", "lr=1e-5,1e-4", "--scheduler", "pbt", "--seeds", "2"),
            "--scheduler pbt conflicts with --seeds and --concurrent",
        ),
        (
            ("imdb-tiny", "--over", "lr=1e-5,1e-4", "--scheduler", "asha", "--seeds", "2"),
            "stops a point's unlucky seeds",
        ),
        (
            ("imdb-tiny", "--over", "num_agents=1,2", "--scheduler", "pbt"),
            "cannot change num_agents while a trial runs",
        ),
        (
            ("imdb-tiny", "--over", "queries_per_update=128,256", "--scheduler", "pbt"),
            "cannot change queries_per_update",
        ),
        (
            ("imdb-tiny", "--over", "lora_alpha=16,32", "--scheduler", "pbt"),
            "cannot change lora_alpha while a trial runs",
        ),
        (
            ("imdb-tiny", "--over", "lr=1e-5,1e-4", "--scheduler", "asha", "eval_every=50"),
            "it requires one eval_every below num_updates=45",
        ),
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
        (
            ("imdb-tiny", "--over", "eval_every=5,9", "--scheduler", "asha"),
            "it requires one eval_every below num_updates=45",
        ),
        (("--resume", "taken"), "contains no search.yaml"),
        (
            ("--resume", "taken", "lr=1", "--samples", "9", "--seeds", "3", "--continue"),
            "--resume can only be combined with --max-minutes, --allow-changes, --quiet, --debug.",
        ),
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
    assert main(["tune", *(["backend=transformers"] if "--resume" not in words else []), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]
    assert not (tmp_path / "taken" / LOCK).exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--search optuna requires --samples"),
        (("--samples", "4", "--seeds", "2"), "conflicts with --scheduler pbt and --seeds"),
    ],
)
def test_an_invalid_search_with_optuna_is_rejected(words: tuple[str, ...], message: str) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(CommandError, match=re.escape(message)):
        read_search(
            parse_command(
                "tune",
                ["imdb-tiny", "backend=transformers", "--over", "lr=log:1e-5:1e-1", "--search", "optuna", *words],
            )
        )


def test_a_search_with_optuna_is_stored_and_read_back(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    axes = ["--over", "lr=log:1e-5:1e-1", "--over", "exchange_period=1,5,null"]
    search, _ = read_search(
        parse_command("tune", ["imdb-tiny", "backend=transformers", *axes, "--search", "optuna", "--samples", "9"])
    )
    assert search.trials == 9
    search.write(tmp_path, "cory tune")
    assert Search.read(tmp_path) == search
