"""`cory tune` end to end: a killed driver, resuming, failing trials, and invalid arguments."""

import csv
import json
import math
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.commands.tune import read_search
from launch.console.cli import parse_command
from launch.console.errors import CommandError
from launch.experiments.search import Search, check_same_search, is_resumable, read_reports
from launch.experiments.space import pin_objective, read_axes
from launch.experiments.tuning import optuna_search
from launch.main import main
from launch.run_folder.layout import LOCK
from tests.launch.conftest import Cory, start_cory
from tests.launch.training.test_training import BREVITY, SMALL
from tests.paper import paper_settings

SEARCH = (*SMALL, "dtype=fp32", "grad_clip=null", "checkpoint_every=1", "eval_every=1")


@pytest.mark.slow
def test_a_search_resumes_in_a_moved_folder_after_a_kill_and_a_failed_trial_does_not_stop_others(
    cory: Cory, tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    command = (
        "tune",
        *SEARCH,
        "prompt=Go on:\n{query}",
        "--over",
        "lr=1e-4,1e30",
        "--concurrent",
        "1",
        "--out",
        "found",
    )
    process = start_cory(tmp_path, *command, TUNE_GLOBAL_CHECKPOINT_S="0")
    assert process.stdout and process.stderr
    while line := process.stdout.readline():
        if line.split()[:2] == ["trial_00000", "2/3"]:
            break
    assert line, process.stderr.read()  # the process has ended too early
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)

    assert "Continue it with `cory tune --resume found`" in error_line(cory(*command))
    changed = cory(*command, "--over", "seed=1", "--continue")
    assert "contains a search with over=['lr=0.0001,1e+30']." in error_line(changed)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "found").rename(tmp_path / "elsewhere" / "moved")
    moved = tmp_path / "elsewhere" / "moved"
    command = (*command[:-1], "elsewhere/moved")
    resumed = cory(*command, "--continue")
    assert resumed.returncode == 1, resumed.stderr
    assert "left" in resumed.stdout and not re.search(r"-\d+:\d\d left", resumed.stdout)
    assert not (tmp_path / "found").exists()
    assert "trial_00000  continues from trial_00000 after update" in resumed.stdout
    with (moved / "results.csv").open() as file:
        good, bad = csv.DictReader(file)
    assert (good["lr"], good["status"], good["updates"], good["exchanges"]) == ("0.0001", "done", "3", "3")
    assert (bad["lr"], bad["status"]) == ("1e+30", "failed")
    assert "The gradient of llm_1 is not finite in update 2" in bad["reason"]
    assert bad["reason"] in resumed.stdout
    again = cory(*command, "--continue")
    assert again.returncode == 1 and "trial_00001  continues from trial_00001 after update 1" in again.stdout

    reports = [report for report in read_reports(moved) if report["trial"] == "trial_00000"]
    assert [report["updates"] for report in reports] == [1, 2, 3]
    assert [report["cory"]["roles"]["pioneer"] for report in reports] == ["llm_1", "llm_2", "llm_1"]
    assert float(good["combined_reward"]) == reports[-1]["combined_reward"]
    assert yaml.safe_load((moved / "best.yaml").read_text())["lr"] == 1e-4
    assert json.loads((moved / "trial_00000" / "params.json").read_text())["cory_settings"]["lr"] == 1e-4


@pytest.mark.slow
def test_in_a_population_a_clone_continues_with_the_weights_and_roles_of_its_donor(cory: Cory, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    settings = (*SEARCH, "lr=1e-3", "num_updates=3", "eval_every=2", "keep_checkpoints=3")
    population = ("--over", "clip_ratio=uniform:0.1:0.3", "--scheduler", "pbt", "--samples", "2")
    result = cory("tune", *settings, *population, "--out", "found")
    assert result.returncode == 0, result.stderr
    reports = read_reports(tmp_path / "found")
    second, third = (
        {report["trial"]: report for report in reports if report["updates"] == update} for update in (2, 3)
    )
    worse, better = sorted(second, key=lambda trial: float(second[trial]["combined_reward"]))
    assert second[worse]["combined_reward"] < second[better]["combined_reward"]
    # With one step per batch `clip_ratio` has no effect, so the clone trains exactly like its donor.
    for key in ("roles", "exchanges", "policy", "evaluation"):
        assert third[worse]["cory"][key] == third[better]["cory"][key], key
    assert third[worse]["cory"]["exchanges"] == 3
    values = {report["trial"]: params(tmp_path / "found" / report["trial"])["clip_ratio"] for report in reports}
    assert values[worse] != values[better]
    assert second[worse]["values"]["clip_ratio"] != third[worse]["values"]["clip_ratio"] == values[worse]


def params(trial: Path) -> dict[str, Any]:
    """Returns the settings with which a trial ended."""
    settings: dict[str, Any] = json.loads((trial / "params.json").read_text())["cory_settings"]
    return settings


def test_a_search_resumes_only_unchanged(tmp_path: Path) -> None:
    search = Search(
        pin_objective(paper_settings(backend="transformers")), read_axes(["lr=0.000123456,1e-4"]), None, 1, 2, None
    )
    search.write(tmp_path, "cory tune")
    assert not is_resumable(tmp_path)
    (tmp_path / "experiment_state-1.json").touch()
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
        (("imdb-tiny", "--over", "lr=1e-5", "start_from=missing"), "missing is not a run's folder: it does not exist"),
        (("imdb-tiny", "--over", "start_from=null,missing"), "missing is not a run's folder: it does not exist"),
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
            "--resume can only be combined with --max-updates, --max-minutes, --allow-changes,",
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


def test_optuna_samples_ranges_and_lists_and_is_stored_with_the_search(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    axes = ["--over", "lr=log:1e-5:1e-1", "--over", "num_epochs=uniform:1:3", "--over", "exchange_period=1,5,null"]
    search, _ = read_search(
        parse_command("tune", ["imdb-tiny", "backend=transformers", *axes, "--search", "optuna", "--samples", "9"])
    )
    assert search.trials == 9
    search.write(tmp_path, "cory tune")
    assert Search.read(tmp_path) == search
    suggestions, searcher = [], optuna_search(search)
    for number in range(40):
        settings = searcher.suggest(str(number))["cory_settings"]
        suggestions.append(settings)
        searcher.on_trial_complete(str(number), {"combined_reward": -abs(math.log10(settings["lr"]) + 2)})
    assert {settings["exchange_period"] for settings in suggestions} == {1, 5, None}
    assert {settings["num_epochs"] for settings in suggestions} == {1, 2, 3}
    assert all(1e-5 <= settings["lr"] <= 1e-1 for settings in suggestions)
    first, last = (
        sum(abs(math.log10(settings["lr"]) + 2) for settings in part) for part in (suggestions[:10], suggestions[-10:])
    )
    assert last < 0.75 * first  # later suggestions are closer to the optimum


@pytest.mark.slow
def test_a_search_with_optuna_stops_at_its_budget_and_resumes(cory: Cory, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    words = ("--over", "lr=log:1e-4:1e-2", "--search", "optuna", "--samples", "2", "--concurrent", "1")
    settings = (*SEARCH, "num_updates=2", "wandb=true")
    offline = {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    first = cory("tune", *settings, *words, "--max-updates", "3", "--out", "found", **offline)
    assert first.returncode == 0, first.stderr
    assert "The budget is exhausted after 3 updates. Continue with:\n  cory tune --resume found" in first.stdout
    second = cory("tune", "--resume", "found", **offline)
    assert second.returncode == 0, second.stderr
    with (tmp_path / "found" / "results.csv").open() as file:
        results = list(csv.DictReader(file))
    assert [result["status"] for result in results] == ["done", "done"]
    assert results[0]["lr"] != results[1]["lr"]
    for result in results:
        assert (tmp_path / "found" / result["trial"] / "wandb.id").exists()
