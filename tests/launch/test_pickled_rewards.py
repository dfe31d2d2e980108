"""Rewards given as functions: only the run's folder has their code; all other output has their names."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.commands.train import _merge_resumable
from launch.console.errors import CommandError
from launch.evaluation.evaluation import describe_inputs
from launch.experiments.search import Search, read_same_search
from launch.experiments.space import pin_objective, read_axes
from launch.main import main
from launch.models.export import model_card
from launch.models.trained import open_trained
from launch.run_folder.run import Run
from launch.run_folder.sources import collect_sources
from policies.settings.settings import Settings
from tests.launch.conftest import record_test_run
from tests.paper import make_settings


def settings(length: int, more: Sequence[str] = ()) -> Settings:
    """Returns settings with a local function as the reward."""

    def near(completions: list[str]) -> list[float]:
        return [-abs(len(text) - length) for text in completions]

    reward = [near, *more] if more else near
    return make_settings({"reward": reward, "backend": "transformers", "num_agents": 1, "validation": False})


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Runs with two different rewards of the same name."""
    recorded = [record_test_run(tmp_path / f"near_{length}", settings(length), updates=range(7)) for length in (4, 5)]
    for run in recorded:
        run.checkpoints.save(6, lambda folder: (folder / "file").touch())
        run.unlock()
    return recorded


def test_model_cards_and_comparisons_contain_only_the_function_s_name(
    runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (runs[0].path / "config.yaml").open("a") as file:
        file.write(f"# cory train reward={settings(4).reward}\n")
    assert "\nreward: pickled:near:" in (runs[0].path / "config.yaml").read_text()
    card = model_card(open_trained(runs[0].path), "llm_1", [])
    assert "\nreward: near\n" in card and "pickled" not in card
    assert main(["plot", *(str(run.path) for run in runs), "--out", str(tmp_path / "both.png")]) == 0
    output = capsys.readouterr().out
    assert "pickled" not in output and ["reward", "near", "near"] in [line.split() for line in output.splitlines()]


def test_messages_contain_only_the_function_s_name(runs: list[Run], tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"is a run with reward=near, which cannot change"):
        _merge_resumable(runs[0], settings(5))
    with pytest.raises(CommandError, match=r"is a run with reward=near, start_from=null, which"):
        _merge_resumable(runs[0], settings(5).model_copy(update={"start_from": "runs/other"}))
    axes = read_axes(["lr=1e-4,1e-3"])
    stored, requested = (Search(pin_objective(settings(length, ["a:b"])), axes) for length in (4, 5))
    stored.write(tmp_path, "cory tune")
    with pytest.raises(CommandError, match=r"contains a search with reward=\['near', 'a:b'\]\. Use these"):
        read_same_search(tmp_path, requested)


def test_an_evaluation_records_the_function_s_name_and_a_checksum_of_its_code() -> None:
    def inputs(config: Settings) -> dict[str, Any]:
        task = config.make_task()
        return describe_inputs(config, collect_sources(config, task, config.make_tokenizers()), None)

    first, other = inputs(settings(4)), inputs(settings(5))
    assert "pickled" not in json.dumps(first)
    assert first["sources"].pop("functions") != other["sources"].pop("functions")
    assert first == other
