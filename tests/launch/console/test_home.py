"""`~` at the start of a path is expanded to the home directory everywhere; no folder `~` is ever created."""

import json
from pathlib import Path

import pytest
import typer

import cory_rllib
from cory_env.functions import load_function
from cory_env.rewards import number
from cory_env.tasks.rows import parse_source, read_queries
from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer
from launch.console.cli import local_path, parse_command, path_or_uri
from launch.console.errors import CommandError
from policies.settings.settings import SettingsError
from tests.launch.conftest import Cory
from tests.paper import make_settings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def test_settings_data_and_rewards_expand_the_home_directory(home: Path) -> None:
    paths = {"data": "~/q.jsonl?query_column=text", "eval_data": "~/e.csv", "start_from": "~/runs/a"}
    settings = make_settings({"task": "custom", "model": ["~/m", "org/model"], **paths, "reward": "r:f"})
    assert (settings.data, settings.eval_data) == (f"{home}/q.jsonl?query_column=text", f"{home}/e.csv")
    assert (settings.model, settings.start_from) == ([f"{home}/m", "org/model"], f"{home}/runs/a")
    assert parse_source("hub:~/shards?split=test") == (f"hub:{home}/shards", {"split": "test"})
    assert make_settings({"start_from": "s3://bucket/~/run"}).start_from == "s3://bucket/~/run"
    function = load_function(f"{number.__name__}:last_number?template=~/t.txt&other=a~/b")
    assert function.keywords == {"template": f"{home}/t.txt", "other": "a~/b"}  # type: ignore[attr-defined]
    (home / "q.jsonl").write_text(json.dumps({"query": "Why?"}) + "\n")
    assert [query.text for query in read_queries("~/q.jsonl")] == ["Why?"]
    (home / "m").symlink_to(DEFAULT_TOKENIZER)
    assert len(load_tokenizer("~/m")) == len(load_tokenizer())


def test_a_missing_home_directory_is_reported() -> None:
    message = "Home directory ~nobody-here not found. Write ./~nobody-here if a file or folder has that name."
    with pytest.raises(SettingsError) as raised:
        make_settings({"data": "~nobody-here/q.jsonl"})
    assert str(raised.value).endswith(f": {message}")
    with pytest.raises(typer.BadParameter, match="Home directory ~nobody-here not found"):
        local_path("~nobody-here/x")


def test_output_folders_expand_the_home_directory(home: Path) -> None:
    assert parse_command("train", ["--out=~/runs/a"]).out == f"{home}/runs/a"
    assert parse_command("train", ["--resume=~/a"]).resume == f"{home}/a"
    assert parse_command("tune", ["--out=~/s"]).out == home / "s"
    assert local_path("~/x") == home / "x" and path_or_uri("file://~/x") == "file://~/x"
    with pytest.raises(CommandError, match=f"{home}/none"):
        cory_rllib.load_run("~/none")


@pytest.mark.parametrize(
    "words",
    [
        *(["generate", "~/none", "x"], ["serve", "~/none"], ["evaluate", "~/none"]),
        *(["export", "~/none", "--out", "~/e"], ["runs", "~/none"]),
        *(["plot", "~/none"], ["train", "--resume", "~/none"]),
        *([command, "~/none.yaml"] for command in ("train", "plan", "validate", "tune", "study")),
        *([command, "imdb-tiny", "-c", "~/none.yaml"] for command in ("train", "plan", "validate", "tune")),
    ],
)
def test_every_command_expands_the_home_directory(words: list[str], home: Path, cory_in_process: Cory) -> None:
    result = cory_in_process(*words, *(["--list"] if words[0] == "study" else []))
    assert result.returncode == 2 and f"{home}/none" in result.stderr, result.stderr
    assert [entry.name for entry in home.parent.iterdir()] == ["home"]
