"""Resuming, evaluating or using a run in another folder, or after its sources changed. No training."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from cory_env.tasks import Query
from launch.console.configuration import parse_overrides, settings_to_yaml
from launch.console.errors import CommandError
from launch.console.interrupts import Interrupts
from launch.display.terminal import Terminal
from launch.evaluation.evaluation import changes_since, located_settings
from launch.evaluation.target import target_settings
from launch.main import main
from launch.models.export import export_policy as write_export
from launch.models.trained import open_trained
from launch.models.trained_chain import TrainedChain, make_env_chain
from launch.run_folder.run import Run
from launch.run_folder.sources import Sources, collect_sources
from launch.run_folder.stored_run import StoredRun
from launch.training.preflight import load_task
from launch.training.training import Trainer
from tests.launch.conftest import record_test_run, write_policies
from tests.paper import make_settings

ROWS = [{"query": f"The film number {number} was", "want": "good"} for number in range(1, 21)]
VALUES = {
    **{"task": "custom", "data": "q.jsonl", "reward": "kind_words:score", "model": "m", "backend": "transformers"},
    **{
        "num_runners": 0,
        "queries_per_update": 4,
        "num_generations": 2,
        "minibatch_size": 8,
        "micro_batch_size": 8,
        "max_response_tokens": 8,
    },
    **{"eval_queries": 2, "num_updates": 4, "dtype": "fp32"},
}


def write_rows(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def project(tmp_path: Path, small_model: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with data, reward and model, and a run of 4 updates that uses them."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # commands may extend it
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_rows(project / "q.jsonl", ROWS)
    Path("kind_words.py").write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    shutil.copytree(small_model, "m")
    settings = make_settings(VALUES)
    run = record_test_run(project / "run", settings, updates=range(5))
    collect_sources(settings, *load_task(settings)).write(run.path)
    run.checkpoints.save(4, lambda folder: write_policies(folder, settings, seed=1))
    run.unlock()
    return project


@pytest.fixture
def elsewhere(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another folder, which is the current one."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend(project)
    monkeypatch.setenv("PYTHONPATH", str(project), prepend=os.pathsep)  # of the reward's process
    return tmp_path / "elsewhere"


def run_train(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Returns the exit code and output of `cory train`, which does not train a run that is done."""
    code = main(["train", *words])
    output = capsys.readouterr()
    return code, output.err + output.out


@pytest.mark.parametrize(
    "words", [("--resume", "run"), ("-c", "same.yaml", "--out", "run", "--continue", "num_updates=5")]
)
def test_a_resume_with_changed_queries_is_rejected_and_the_run_unchanged(
    project: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("same.yaml").write_text(settings_to_yaml(make_settings(VALUES)))
    write_rows(project / "q.jsonl", [{**ROWS[0], "query": "Another book was"}, *ROWS[1:]])
    before = {file: file.read_bytes() for file in (project / "run").iterdir() if file.is_file()}
    code, text = run_train(capsys, *words)
    assert code == 2 and text == (
        "Error: run cannot resume unchanged. q.jsonl has changed since training started: its training queries differ "
        "(14 now, 14 then). Undo this change, or resume with --allow-changes.\n"
    )
    assert {file: file.read_bytes() for file in (project / "run").iterdir() if file.is_file()} == before


def test_allow_changes_resumes_with_changed_queries_and_warns(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(project / "q.jsonl", [*ROWS[:17], *({**row, "want": "bad"} for row in ROWS[17:])])
    code, text = run_train(capsys, "--resume", "run", "--allow-changes")
    assert code == 0 and "run is done" in text
    for kind, count in (("training", 14), ("test", 4)):
        assert f"its {kind} queries differ ({count} now, {count} then). Metrics up to update 4 are not" in text


def test_a_reward_may_change_between_resumes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("kind_words.py").write_text("def score(completions):\n    return [1.0 for _ in completions]\n")
    code, text = run_train(capsys, "--resume", "run")
    assert (
        code == 0
        and "Warning: The code of kind_words:score changed since training started. Metrics up to update 4 are not"
        in text
    )


def test_a_run_without_recorded_sources_requires_allow_changes(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "run" / "sources.json").unlink()
    code, text = run_train(capsys, "--resume", "run")
    assert code == 2 and "Error: run has no sources.json, so its data and model cannot be checked" in text
    code, text = run_train(capsys, "--resume", "run", "--allow-changes")
    assert code == 0 and "is done" in text


def test_a_resume_in_another_folder_finds_data_and_model(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run_train(capsys, "--resume", "../project/run")
    assert code == 0 and "Warning" not in text


def test_data_and_model_may_be_moved_if_unchanged(
    project: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.move(project / "q.jsonl", elsewhere / "moved.jsonl")
    code, text = run_train(capsys, "--resume", "../project/run")
    assert code == 2 and text == (
        f"Error: data=q.jsonl: q.jsonl was found neither in {elsewhere} nor in {project}, where the run had it. "
        "Restore it, or set data=PATH.\n"
    )
    code, text = run_train(capsys, "--resume", "../project/run", "data=moved.jsonl")
    assert code == 0 and "Warning" not in text
    shutil.move(project / "m", elsewhere / "other")
    code, text = run_train(capsys, "--resume", "../project/run", "data=moved.jsonl", "model=./other")
    assert code == 0 and "Warning" not in text
    write_rows(elsewhere / "moved.jsonl", ROWS[::-1])
    code, text = run_train(capsys, "--resume", "../project/run", "data=moved.jsonl", "model=./other")
    assert code == 2 and "moved.jsonl has changed since training started: its training queries differ" in text


def test_a_different_file_of_the_same_name_is_rejected(
    elsewhere: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(elsewhere / "q.jsonl", ROWS[::-1])
    code, text = run_train(capsys, "--resume", "../project/run")
    assert code == 2
    assert f"q.jsonl has changed since training started with {project}/q.jsonl: its training queries" in text


def test_allow_changes_requires_a_resume(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_train(capsys, "imdb-tiny", "--allow-changes") == (
        2,
        "Error: --allow-changes requires --resume or --continue.\n",
    )


def test_a_chain_generates_in_another_folder_without_data_and_reward(elsewhere: Path, project: Path) -> None:
    def generate() -> object:
        trained = open_trained("../project/run")
        assert trained.warnings() == []
        return TrainedChain(trained, trained.policy_ids, 1.0, 0).answer(0, "The film")["responses"]

    before = generate()
    for name in ("q.jsonl", "kind_words.py"):
        (project / name).unlink()
    assert generate() == before
    make_env_chain(open_trained("../project/run"), ["llm_1"])  # as `cory serve` does for each policy


def test_a_custom_task_builds_the_same_prompts_in_another_folder_without_data(
    elsewhere: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "loud_task.py").write_text(
        "from cory_env.tasks import Query, Task\n"
        "class Loud(Task):\n"
        "    def prompt(self, query):\n"
        "        return super().prompt(query).upper()\n"
        "def make(data):\n"
        "    queries = [Query(0, line) for line in open(data)]\n"
        "    return Loud(name='loud', train=queries, test=queries, reward='kind_words:score')\n"
    )
    settings = make_settings({**VALUES, "task": "loud_task:make", "reward": None, "validation": False})
    run = Run(project / "run")
    run.write_settings(settings, "cory train")
    with monkeypatch.context() as context:
        context.chdir(project)
        collect_sources(settings, *load_task(settings)).write(run.path)
        context.delitem(sys.modules, "loud_task")
    (project / "q.jsonl").unlink()
    chain = make_env_chain(open_trained("../project/run"), ["llm_1"])
    assert chain.task.prompt(Query(0, "quiet")) == "QUIET"


def test_the_error_about_a_missing_model_names_its_old_location(elsewhere: Path, project: Path) -> None:
    shutil.move(project / "m", elsewhere / "n")
    with pytest.raises(
        CommandError, match=rf"model=m: m was found neither in {elsewhere} nor in {project}, where .* in its folder"
    ):
        open_trained("../project/run")
    shutil.move(elsewhere / "n", elsewhere / "m")
    assert open_trained("../project/run").warnings() == []


def test_a_changed_model_is_reported_when_a_run_is_used(project: Path) -> None:
    config = json.loads(Path("m/config.json").read_text())
    Path("m/config.json").write_text(json.dumps({**config, "embd_pdrop": 0.5}))
    trained = open_trained("run")
    assert trained.warnings() == ["The model m has changed since training started."]


def test_an_export_needs_no_data_and_works_in_another_folder(elsewhere: Path, project: Path) -> None:
    (project / "q.jsonl").unlink()
    trained = open_trained("../project/run")
    write_export(trained, "llm_1", elsewhere / "exported", "fp32", merge=False)
    assert "Reference: {reference}" in (elsewhere / "exported" / "README.md").read_text()


def test_an_evaluation_in_another_folder_finds_the_runs_data(elsewhere: Path, project: Path) -> None:
    run = Run.open(Path("../project/run"))

    def settings(*words: str) -> object:
        return target_settings(str(run.path), run, parse_overrides(words), None)

    assert settings().data == str(project / "q.jsonl")  # type: ignore[attr-defined]
    (project / "q.jsonl").unlink()
    with pytest.raises(CommandError, match=r"data=q\.jsonl: q\.jsonl was found neither"):
        settings()
    assert settings("data=other.jsonl").data == "other.jsonl"  # type: ignore[attr-defined]


def test_an_evaluation_of_changed_data_warns_about_possible_training_queries(project: Path) -> None:
    run = Run.open(Path("run"))
    write_rows(project / "q.jsonl", ROWS[1:] + ROWS[:1])
    settings = located_settings(run)
    task, tokenizers = load_task(settings)
    now = collect_sources(settings, task, tokenizers)
    assert changes_since(run, settings, now)[0] == (
        "q.jsonl has changed since training started: its training queries differ (14 now, 14 then). Evaluated "
        "queries may have been used in training."
    )
    other = settings.model_copy(update={"data": str(project / "q.jsonl"), "eval_data": "q.jsonl"})
    assert changes_since(run, other, now) == []  # other data was requested


def test_the_sources_of_a_run_in_storage_are_stored_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(project / "cache"))
    run = StoredRun.create(f"file://{project}/stored")
    run.write_settings(make_settings(VALUES), "cory train")
    sources = Sources.read(project / "run")
    assert sources is not None
    sources.write(run.path)
    run.checkpoints.save(0, lambda folder: (folder / "weights").touch())
    run.upload()
    run.unlock()
    monkeypatch.setenv("XDG_CACHE_HOME", str(project / "another_machine"))
    assert Sources.read(project / "stored") == sources
    reopened = StoredRun.open(f"file://{project}/stored")
    assert Sources.read(reopened.path) == sources
    reopened.unlock()


def test_data_changed_during_training_is_rejected_after_a_failure(project: Path) -> None:
    run, settings = Run.open(Path("run")), make_settings(VALUES)
    trainer = Trainer(run, settings, Terminal(settings, sys.stdout), Interrupts(lambda: None), debug=False)
    trainer.check_queries(settings.make_task())
    write_rows(project / "q.jsonl", ROWS[::-1])
    with pytest.raises(CommandError, match=r"The data of task custom changed during training\. Restore the data"):
        trainer.check_queries(settings.make_task())
