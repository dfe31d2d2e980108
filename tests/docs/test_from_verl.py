"""The page for users of verl: its files and settings work."""

import json
import re
import shutil
from pathlib import Path

import pytest
from datasets import Dataset

from launch.console.configuration import split_arguments
from launch.main import main
from launch.training import preflight
from policies.settings.settings import Settings

PAGE = (Path(__file__).parents[2] / "docs" / "from-verl.md").read_text(encoding="utf-8")
MODEL = Path(__file__).parents[2] / "cory_env" / "assets" / "imdb-gpt2-tiny"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def code_block(language: str) -> str:
    (block,) = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    return str(block)


def test_its_files_configure_runs_of_one_and_two_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, tmp_path / "my-model")
    (tmp_path / "my-model" / "chat_template.jinja").write_text(TEMPLATE)
    rows = [json.loads(line) for line in code_block("json").splitlines()] * 10
    for split in ("train", "test"):
        Dataset.from_list(rows).to_parquet(tmp_path / f"{split}.parquet")
    (tmp_path / "my_reward.py").write_text(code_block("python"))
    (tmp_path / "mine.yaml").write_text(code_block("yaml"))
    settings = split_arguments(["mine.yaml"]).settings()
    assert settings.responses == 64 == 2 * settings.responses_per_step and settings.chat
    task, _ = preflight.check_run_settings(settings)
    assert task.train[0].columns["reward_model"] == {"style": "rule", "ground_truth": "7"}
    (arguments,) = re.findall(r"cory train mine.yaml (num_agents=2 .*)", PAGE)
    pair = split_arguments(["mine.yaml", *(word.strip("'") for word in arguments.split(" ", 1))]).settings()
    assert preflight.check_run_settings(pair)[0].observer_template.startswith("{query} Another answer")
    assert main(["validate", "mine.yaml"]) == 0


def test_the_settings_that_it_names_exist() -> None:
    rows = re.findall(r"^\| .*? \| (.*?) \|", PAGE, flags=re.MULTILINE)
    settings = {name.split("=")[0] for row in rows for name in re.findall(r"`([a-z_]+(?:=\w+)?)`", row)}
    assert len(settings) > 30 and settings <= Settings.model_fields.keys()
