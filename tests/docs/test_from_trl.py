"""The page for users of TRL: its files and settings work."""

import re
from pathlib import Path

import pytest

from launch.console.configuration import split_arguments
from launch.main import main
from launch.training import preflight
from policies.settings.settings import Settings

PAGE = (Path(__file__).parents[2] / "docs" / "from-trl.md").read_text(encoding="utf-8")
MODEL = Path(__file__).parents[2] / "cory_env" / "assets" / "imdb-gpt2-tiny"


def code_block(language: str, index: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)[index]


def test_its_files_configure_runs_of_one_and_two_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").symlink_to(MODEL)
    (tmp_path / "my_rewards.py").write_text(code_block("python", 1))
    (tmp_path / "mine.yaml").write_text(code_block("yaml"))
    (tmp_path / "prompts.jsonl").write_text(code_block("json") * 10)
    settings = split_arguments(["mine.yaml"]).settings()
    assert settings.responses == 64 == settings.minibatch_size and settings.advantage == "grpo"
    task, _ = preflight.check_run_settings(settings)
    assert task.train[0].columns == {"likes": "great"} and len(task.test) + len(task.queries("validation")) == 6
    (arguments,) = re.findall(r"cory train mine.yaml (num_agents=2 .*)", PAGE)
    pair = split_arguments(["mine.yaml", *(word.strip("'") for word in arguments.split(" ", 1))]).settings()
    assert preflight.check_run_settings(pair)[0].observer_template.startswith("{query} (another one said")
    assert main(["validate", "mine.yaml"]) == 0


def test_the_settings_that_it_names_exist() -> None:
    rows = re.findall(r"^\| .*? \| (.*?) \|", PAGE, flags=re.MULTILINE)
    settings = {name.split("=")[0] for row in rows for name in re.findall(r"`([a-z_]+(?:=\w+)?)`", row)}
    assert len(settings) > 20 and settings <= Settings.model_fields.keys()
