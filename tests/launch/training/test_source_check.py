"""All trainings of a search or study must use the same sources."""

import json
from pathlib import Path

import pytest

from launch.console.configuration import settings_to_yaml
from launch.console.errors import CommandError
from launch.experiments.search import Search
from launch.experiments.space import distinct_settings, grid_points, pin_objective, read_axes
from launch.experiments.study import load_study
from launch.main import main
from launch.training.preflight import load_task
from launch.training.source_check import absolute_settings, check_all_sources, read_all_sources, write_all_sources
from policies.settings.settings import Settings
from tests.paper import make_settings

ROWS = [{"query": f"The film number {number} was", "want": "good"} for number in range(1, 21)]
VALUES = {
    **{"task": "custom", "data": "q.jsonl", "reward": "warm_words:score", "backend": "transformers", "dtype": "fp32"},
    **{"test_queries": 2, "num_updates": 2, "num_runners": 0, "average_period": None, "eval_queries": 2},
}
STUDY = "about: Two.\nbase: imdb-tiny\nsettings: {settings}\narms:\n  one: {{}}\n  two: {{num_agents: 1}}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with data and a reward."""
    monkeypatch.chdir(tmp_path)
    write_rows(ROWS)
    Path("warm_words.py").write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    return tmp_path


def write_rows(rows: list[dict[str, str]], name: str = "q.jsonl") -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def check(folder: Path | None, *settings: Settings, allow: bool = False) -> list[str]:
    """Checks and records the sources of settings; returns the warnings."""
    warnings: list[str] = []
    sources = check_all_sources(
        folder, [("Arm one", arm_settings) for arm_settings in settings], load_task, warnings.append, allow
    )
    write_all_sources(folder or Path(), sources)
    return warnings


def test_each_kind_of_training_is_compared_with_its_earlier_sources(folder: Path) -> None:
    write_rows(ROWS[::-1], "other.jsonl")
    one, single_agent = make_settings(VALUES), make_settings({**VALUES, "num_agents": 1, "lr": 0.1})
    other = make_settings({**VALUES, "data": "other.jsonl"})
    assert check(None, one, single_agent, other) == []
    assert len(read_all_sources(folder)) == 2  # the number of agents and learning settings are irrelevant
    assert check(folder, one, single_agent, other) == []
    write_rows(ROWS, "other.jsonl")
    assert check(folder, one) == []
    with pytest.raises(CommandError, match=r"other\.jsonl has changed since training started: its training queries"):
        check(folder, single_agent, other)
    warnings = check(folder, one, other, allow=True)
    assert len(warnings) == 3 and all(text.endswith("after this change are not comparable.") for text in warnings)
    assert check(folder, one, other) == []
    (folder / "sources.json").write_text("[]")
    with pytest.raises(CommandError, match=r"sources\.json is damaged"):
        check(folder, one)
    Path("q.jsonl").unlink()
    with pytest.raises(CommandError, match=r"^Arm one: .*q\.jsonl"):
        check(None, one)


def test_trials_use_absolute_paths_except_in_a_ray_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings({**VALUES, "data": "q.jsonl?query_column=want"})
    check(None, settings)
    sources = read_all_sources(folder).values()
    assert absolute_settings(settings, sources).data == f"{folder}/q.jsonl?query_column=want"
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert absolute_settings(settings, sources).data == f"{folder}/q.jsonl?query_column=want"
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert absolute_settings(settings, sources) == settings


def test_a_search_with_changed_data_does_not_resume(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = Search(pin_objective(make_settings(VALUES | {"test_queries": None})), read_axes(["temperature=0.5,1.0"]))
    Path("values.yaml").write_text(settings_to_yaml(search.settings))
    (folder / "search").mkdir()
    search.write(folder / "search", "cory tune")
    (folder / "search" / "tuner.pkl").touch()
    check(None, *distinct_settings(grid_points(search.settings, search.axes)))
    (folder / "sources.json").rename(folder / "search" / "sources.json")
    write_rows([*ROWS[:4], {"query": "Another book was"}, *ROWS[5:]])
    assert main(["tune", "values.yaml", "--over", "temperature=0.5,1.0", "--out", "search", "--continue"]) == 2
    assert capsys.readouterr().err == (
        "Error: search cannot resume unchanged. q.jsonl has changed since training started: its training queries "
        "differ (14 now, 14 then). Undo this change, or resume with --allow-changes.\n"
    )
    assert main(["tune", "imdb-tiny", "--over", "lr=1e-4", "--allow-changes"]) == 2
    assert "--allow-changes requires --continue" in capsys.readouterr().err


def test_a_study_with_changed_data_starts_no_further_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(STUDY.format(settings=json.dumps(VALUES)))
    (folder / "study").mkdir()
    study = load_study("mine.yaml")
    check(None, *(study.settings(arm, 0) for arm in study.arms.values()))
    (folder / "sources.json").rename(folder / "study" / "sources.json")
    write_rows(ROWS[:-1])
    assert main(["study", "mine.yaml", "--out", "study"]) == 2
    assert "Error: study cannot resume unchanged. q.jsonl has changed since training started" in capsys.readouterr().err
    assert not any((folder / "study").rglob("config.yaml"))
