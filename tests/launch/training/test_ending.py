"""The end of a run: late signals and failures after the last update lose no data."""

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.console.interrupts import Interrupts
from launch.display import plot
from launch.display.terminal import Terminal
from launch.run_folder.records import Update
from launch.run_folder.run import Run
from launch.run_folder.sources import Sources
from launch.run_folder.stored_run import StoredRun
from launch.training import training
from launch.training.saving import CheckpointWriter
from launch.training.summary import last_answer_note, print_summary
from policies.files import MissingFolderError
from tests.forked import run_forked
from tests.launch.conftest import ENVIRONMENT, record_test_run
from tests.launch.run_folder.conftest import SETTINGS
from tests.launch.run_folder.test_checkpoints import write_checkpoint
from tests.paper import paper_settings


def finish_run(uri: str, recorded: Path, event: str) -> int:
    """Finishes a run whose updates are all done, with a signal or failure in between."""
    run = StoredRun.create(uri)
    run.write_settings(SETTINGS, "cory train")
    for line in record_test_run(recorded, SETTINGS).metrics:
        run.metrics_file.append(line)
    run.checkpoints.save(12, write_checkpoint)

    def no_training(self: training.Trainer, *_: object) -> int:
        self.interrupts.training = True
        return 12

    def draw(*_: object) -> None:
        if event == "defect":
            raise ValueError("no fonts")
        signal.raise_signal(signal.SIGTERM)
        if event == "signals":
            signal.raise_signal(signal.SIGTERM)

    training.Trainer.train, plot.draw_run = no_training, draw  # type: ignore[assignment, method-assign]
    return training.train_locked_run(run, SETTINGS, 0, quiet=True, debug=True)


@pytest.mark.parametrize(
    ("event", "code", "message"),
    [("signal", 0, ""), ("signals", 143, "Update 12 is saved. Resume with"), ("defect", 1, "ValueError: no fonts")],
)
def test_events_after_the_last_update_lose_no_data(
    cluster: dict[str, str], tmp_path: Path, event: str, code: int, message: str
) -> None:
    stored = tmp_path / "storage" / "run"
    environment = {**ENVIRONMENT, **cluster, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    arguments = (f"file://{stored}", tmp_path / "recorded", event)
    result = run_forked(finish_run, *arguments, folder=tmp_path, environment=environment)
    output = result.stdout + result.stderr
    assert (result.returncode, message in output) == (code, True), output
    local = list((tmp_path / "cache" / "cory-rllib" / "runs").iterdir())
    if event != "signals":  # the second signal aborts at once and leaves everything on this machine
        assert Run.open(stored).checkpoints.choose("latest")[0] == 12
    assert bool(local) == (event != "signal")


class SignallingPeriod(int):
    """A `checkpoint_every` that raises a signal when it is read, after the loop has checked for signals."""

    def __rmod__(self, update: int) -> int:
        """Returns that no checkpoint is due."""
        if update == 2:
            signal.raise_signal(signal.SIGTERM)
        return 1


def recorded_algorithm(folder: Path) -> Any:
    """An algorithm whose updates are recorded, and whose checkpoints are a single file."""
    lines = iter(record_test_run(folder, paper_settings(num_updates=12)).metrics[1:])
    algo = SimpleNamespace(
        updates=0,
        get_state=lambda not_components: {},
        save_to_path=lambda folder, state: (Path(folder) / "weights").write_text("learned"),
        learners=SimpleNamespace(begin_save=lambda folder: None, is_saved=lambda: True, finish_save=lambda: None),
    )

    def train() -> dict[str, Any]:
        algo.updates += 1
        return {"cory": {**next(lines), "samples": [], "collapsed": False}}

    algo.train = train
    algo.evaluator = SimpleNamespace(evaluate=dict, samples=lambda *_: [])
    algo.mapping = None
    return algo


@pytest.mark.parametrize(("minutes", "updates"), [(1e-9, [1, 2, 3, 4]), (1e9, [4]), (None, [4])])
def test_checkpoints_are_also_saved_by_time(tmp_path: Path, minutes: float | None, updates: list[int]) -> None:
    settings = paper_settings(num_updates=4, checkpoint_every=100, checkpoint_minutes=minutes)
    run = record_test_run(tmp_path / "run", settings, updates=[0])
    terminal, interrupts = Terminal(settings, sys.stdout, bar=False), Interrupts(lambda: None)
    with terminal, interrupts, CheckpointWriter(run, 9, pytest.fail) as checkpoints:
        trainer = training.Trainer(run, settings, terminal, interrupts, debug=True)
        trainer._loop(recorded_algorithm(tmp_path / "other"), checkpoints)
    assert run.checkpoints.updates() == updates


def test_a_signal_between_periodic_checkpoints_loses_no_update(tmp_path: Path) -> None:
    settings = paper_settings(num_updates=12).model_copy(update={"checkpoint_every": SignallingPeriod(10)})
    run = record_test_run(tmp_path / "run", paper_settings(num_updates=12), updates=[0])
    algo = recorded_algorithm(tmp_path / "other")
    terminal = Terminal(settings, sys.stdout, bar=False)
    interrupts = Interrupts(lambda: None)
    with terminal, interrupts, CheckpointWriter(run, 2, pytest.fail) as checkpoints:
        training.Trainer(run, settings, terminal, interrupts, debug=True)._loop(algo, checkpoints)
    assert interrupts.requested == signal.SIGTERM and algo.updates == 2
    assert run.checkpoints.updates() == [2] and [line["update"] for line in run.metrics] == [0, 1, 2]


def test_a_run_whose_folder_was_renamed_fails_without_creating_it_again(tmp_path: Path) -> None:
    run = record_test_run(tmp_path / "run", paper_settings(num_updates=6), updates=[0])
    run.path.rename(tmp_path / "renamed")
    expected_error = pytest.raises(MissingFolderError, match="run no longer exists: it was removed or renamed")
    with expected_error as raised, training._explain_failure(run):
        run.metrics_file.append({"update": 1})
    assert "Its folder was moved or removed." in raised.value.__notes__[-1]
    assert not run.path.exists() and Run(tmp_path / "renamed").metrics


def test_aborting_a_renamed_run_does_not_remove_a_new_run_at_its_path(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    run.path.rename(tmp_path / "renamed")
    other = Run.create(tmp_path / "run")
    for new_run in (run, other):
        new_run.write_settings(paper_settings(), "cory train")
    run.abort()
    assert other.exists()
    other.abort()
    assert not other.path.exists()
    run.unlock()


def test_the_summary_has_samples_the_best_update_and_source_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_test_run(tmp_path / "run", paper_settings(num_updates=12))
    changes = [{"update": 6, "part": part, "text": "q.jsonl differs"} for part in ("train", "test")]
    Sources({}, None, {}, {}, [], changes).write(run.path)
    for update, text in ((0, "before"), (12, "after")):
        response = {"role": "pioneer", "policy": "llm_1", "text": text, "task_reward": 1.0}
        run.samples_file.append({"update": update, "held_out": True, "query": "Is it", "responses": [response]})
    print_summary(run, paper_settings(num_updates=12), Terminal(paper_settings(num_updates=12), sys.stdout, bar=False))
    output = capsys.readouterr().out
    assert output.count("Warning: Metrics before and after update 6 are not comparable. q.jsonl differs.") == 1
    before, after = output.partition("A held-out query at update 12")[::2]
    assert "A held-out query at update 0" in before and "before" in before and "after" in after
    assert "from update " in after


def evaluated(update: int, combined: float, last: dict[str, float | None]) -> Update:
    metrics: dict[str, float | None] = {"task_reward": combined, "kl": 0.0, "combined_reward": combined}
    metrics |= {"response_length": 4.0, "eos_rate": 1.0}
    return {
        "update": update,
        "evaluation": {"llm_1": metrics, "llm_2": metrics, "mean": metrics},
        "last_response": {**metrics, **last},
    }


@pytest.mark.parametrize(("before", "after", "is_untrained"), [(0.5, 0.4, True), (0.5, 0.5, True), (0.5, 0.6, False)])
def test_the_summary_says_that_no_evaluation_beat_the_untrained_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: float, after: float, is_untrained: bool
) -> None:
    run = Run.create(tmp_path / "run")
    run.write_settings(paper_settings(num_updates=12), "cory train")
    for update, combined in ((0, before), (12, after)):
        run.metrics_file.append(evaluated(update, combined, {}))
    print_summary(run, paper_settings(), Terminal(paper_settings(), sys.stdout, quiet=True, bar=False))
    output = capsys.readouterr().out
    assert ("No evaluation beat update 0 (select_by=bare), so `best` has the weights" in output) == is_untrained


def test_the_summary_explains_the_kl_of_the_last_answer_if_it_was_measured() -> None:
    first = evaluated(0, 0.5, {"bare_kl": 12.17, "in_chain_kl": 0.0})
    last = evaluated(12, 0.5, {"bare_kl": 14.2, "in_chain_kl": 3.1})
    note = last_answer_note(first, last, arrow=">")
    assert note is not None and note.startswith("KL of the last answer: to the base model given the query alone")
    assert note.endswith("Given the same prompt: 0.00 > 3.10.")
    not_measured = evaluated(0, 0.5, {"bare_kl": None, "in_chain_kl": None})  # kl_coef=0
    single = Update(update=0, evaluation=first["evaluation"])  # num_agents=1
    assert last_answer_note(not_measured, arrow=">") is last_answer_note(single, arrow=">") is None
