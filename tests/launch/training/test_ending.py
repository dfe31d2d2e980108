"""How a run ends: nothing of it is lost by a signal that comes late, or by what fails after the last update."""

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch.console.errors import CommandError
from launch.console.interrupts import Interrupts
from launch.display import curves
from launch.display.terminal import Terminal
from launch.run_folder.run import Run
from launch.run_folder.sources import Sources
from launch.training import training
from launch.training.saving import CheckpointWriter
from launch.training.summary import print_summary
from policies.settings.settings import Settings
from tests.forked import forked
from tests.launch.conftest import ENVIRONMENT, record
from tests.launch.run_folder.conftest import SETTINGS
from tests.launch.run_folder.test_checkpoints import write


def ending(uri: str, recorded: Path, happens: str) -> int:
    """Ends a run whose updates are all done, while something happens."""
    run = Run.create(uri)
    run.write_settings(SETTINGS, "cory train")
    for line in record(recorded, SETTINGS).updates():
        run.metrics.append(line)
    run.checkpoints.save(12, write)

    def work(self: training.Trainer, *_: object) -> int:
        self.interrupts.training = True
        return 12

    def draw(*_: object) -> None:
        if happens == "defect":
            raise ValueError("no fonts")
        signal.raise_signal(signal.SIGTERM)
        if happens == "signals":
            signal.raise_signal(signal.SIGTERM)

    training.Trainer.train, curves.draw_curves = work, draw  # type: ignore[assignment, method-assign]
    return training.train_locked_run(run, SETTINGS, 0, quiet=True, debug=True)


@pytest.mark.parametrize(
    ("happens", "code", "said"),
    [("signal", 0, ""), ("signals", 143, "Update 12 is saved. Resume with"), ("defect", 1, "ValueError: no fonts")],
)
def test_what_happens_after_the_last_update_costs_nothing_of_a_run(
    cluster: dict[str, str], tmp_path: Path, happens: str, code: int, said: str
) -> None:
    place = tmp_path / "storage" / "run"
    own = {**ENVIRONMENT, **cluster, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    arguments = (f"file://{place}", tmp_path / "recorded", happens)
    ended = forked(ending, *arguments, folder=tmp_path, environment=own)
    assert (ended.returncode, said in ended.stdout + ended.stderr) == (code, True), ended.stdout + ended.stderr
    local = list((tmp_path / "cache" / "cory-rllib" / "runs").iterdir())
    if happens != "signals":  # of which the second one aborts at once, and all is on this machine
        assert Run.open(place).checkpoints.choose("latest")[0] == 12
    assert bool(local) == (happens != "signal")


class SignalledLate(int):
    """A period of saving, at the look at which a signal comes: after it was asked whether one had come."""

    def __rmod__(self, update: int) -> int:
        """Says that the period is not over."""
        if update == 2:
            signal.raise_signal(signal.SIGTERM)
        return 1


def test_a_signal_after_the_decision_not_to_save_an_update_loses_none(tmp_path: Path) -> None:
    settings = Settings(num_updates=12, samples_every=100).model_copy(update={"checkpoint_every": SignalledLate(10)})
    run = record(tmp_path / "run", Settings(num_updates=12), updates=[0])
    lines = iter(record(tmp_path / "other", Settings(num_updates=12)).updates()[1:])
    algo = SimpleNamespace(
        updates=0,
        get_state=lambda not_components: {},
        save_to_path=lambda folder, state: (Path(folder) / "weights").write_text("learned"),
        learners=SimpleNamespace(begin_save=lambda folder: None, saved=lambda: True, finish_save=lambda: None),
    )

    def learn() -> dict[str, Any]:
        algo.updates += 1
        return {"cory": {**next(lines), "samples": [], "collapsed": False}}

    algo.train = learn
    terminal = Terminal(settings, sys.stdout, bar=False)
    interrupts = Interrupts(lambda: None)
    with terminal, interrupts, CheckpointWriter(run, 2, pytest.fail) as saving:
        training.Trainer(run, settings, terminal, interrupts, debug=True)._loop(cast(Any, algo), saving)
    assert interrupts.requested == signal.SIGTERM and algo.updates == 2
    assert run.checkpoints.updates() == [2] and [line["update"] for line in run.updates()] == [0, 1, 2]


def test_a_run_whose_folder_is_renamed_or_removed_ends_in_a_sentence_and_makes_none_anew(tmp_path: Path) -> None:
    run = record(tmp_path / "run", Settings(num_updates=6), updates=[0])
    run.path.rename(tmp_path / "kept")
    gone = pytest.raises(CommandError, match="run is gone: it was removed or renamed")
    with gone as raised, training._explain_failure(run):
        run.metrics.append({"update": 1})
    assert "the path that its folder has now" in raised.value.__notes__[-1]
    assert not run.path.exists() and Run(tmp_path / "kept").updates()


def test_a_run_that_is_refused_removes_nothing_of_another_that_has_its_path_now(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    run.path.rename(tmp_path / "kept")
    other = Run.create(tmp_path / "run")
    for one in (run, other):
        one.write_settings(Settings(), "cory train")
    run.abort()
    assert other.exists()
    other.abort()
    assert not other.path.exists()
    run.unlock()


def test_the_summary_has_texts_the_best_update_and_what_does_not_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record(tmp_path / "run", Settings(num_updates=12))
    changes = [{"update": 6, "part": part, "text": "q.jsonl differs"} for part in ("train", "test")]
    Sources({}, None, {}, {}, [], changes).write(run.path)
    for update, text in ((0, "before"), (12, "after")):
        response = {"role": "pioneer", "policy": "llm_1", "text": text, "task_reward": 1.0}
        run.samples.append({"update": update, "held_out": True, "query": "Is it", "responses": [response]})
    print_summary(run, Settings(num_updates=12), Terminal(Settings(num_updates=12), sys.stdout, bar=False))
    output = capsys.readouterr().out
    assert output.count("Warning: Metrics before and after update 6 are not comparable. q.jsonl differs.") == 1
    assert "before" in output and "after" in output and "from update " in output
