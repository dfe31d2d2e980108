"""The code of a reward that was given as a function stays in the run's folder: what others read has its name."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch.commands.report import report
from launch.commands.train import _merge_resumable
from launch.console.errors import CommandError
from launch.evaluation.evaluation import Plan
from launch.experiments.search import Search, check_same
from launch.experiments.space import pin_objective, read_axes
from launch.main import main
from launch.models.model_card import model_card
from launch.models.trained import open_trained
from launch.run_folder.run import Run
from launch.run_folder.sources import sources_of
from policies.settings.settings import Settings, make_settings
from tests.launch.conftest import record


def settings(length: int, more: Sequence[str] = ()) -> Settings:
    """With a reward of this module's own, which no module's attribute is."""

    def near(completions: list[str]) -> list[float]:
        return [-abs(len(text) - length) for text in completions]

    reward = [near, *more] if more else near
    return make_settings({"reward": reward, "backend": "transformers", "num_agents": 1, "validation": False})


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Of two rewards with one name."""
    found = [record(tmp_path / f"near_{length}", settings(length), updates=range(7)) for length in (4, 5)]
    for run in found:
        run.checkpoints.save(6, lambda folder: (folder / "file").touch())
        run.unlock()
    return found


def test_a_model_card_a_report_and_a_comparison_have_its_name(
    runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (runs[0].path / "config.yaml").open("a") as file:
        file.write(f"# cory train reward={settings(4).reward}\n")
    assert "\nreward: pickled:near:" in (runs[0].path / "config.yaml").read_text()
    card = model_card(open_trained(runs[0].path), "llm_1", [])
    assert "\nreward: near\n" in card and "pickled" not in card
    report([str(run.path) for run in runs], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert "reward: near" in html and "reward=near" in html and "pickled" not in html
    assert main(["compare", *(str(run.path) for run in runs)]) == 0
    assert main(["compare", *(str(run.path) for run in runs), "--json"]) == 0
    said = capsys.readouterr().out
    assert "pickled" not in said and json.loads(said[said.index("\n{") :])["settings"]["reward"] == ["near", "near"]


def test_messages_have_its_name(runs: list[Run], tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"is a run with reward=near, which cannot change"):
        _merge_resumable(runs[0], settings(5))
    with pytest.raises(CommandError, match=r"is a run with reward=near, start_from=null, which"):
        _merge_resumable(runs[0], settings(5).model_copy(update={"start_from": "runs/other"}))
    kept, asked = (
        Search(pin_objective(settings(length, ["a:b"])), read_axes(["lr=1e-4,1e-3"]), None, 1, 1, None)
        for length in (4, 5)
    )
    kept.write(tmp_path, "cory tune")
    with pytest.raises(CommandError, match=r"holds a search with reward=\['near', 'a:b'\]\. Ask for just"):
        check_same(tmp_path, asked)


def test_an_evaluation_keeps_its_name_and_a_checksum_of_its_code() -> None:
    def identity(made: Settings) -> dict[str, object]:
        task = made.make_task()
        return Plan(made, task, sources_of(made, task, made.make_tokenizers()), "test", 1, 1, None).identity()

    first, other = identity(settings(4)), identity(settings(5))
    assert "pickled" not in json.dumps(first) and first["functions"] != other["functions"]
    assert first == {**other, "functions": first["functions"]}
