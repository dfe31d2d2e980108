"""`--resume` of what cannot go on, or not from where it stopped. No training: what comes before it."""

from pathlib import Path

import pytest

from launch.commands.train import _find_run, _merge_resumable, _resume_settings
from launch.console.configuration import as_yaml
from launch.console.errors import CommandError
from launch.main import main
from launch.run_folder.run import Run
from launch.training.steps import reopen
from policies.settings.settings import Settings
from tests.launch.conftest import record
from tests.launch.run_folder.test_checkpoints import write

SETTINGS = Settings(num_updates=12)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that did 6 of 12 updates, with checkpoints of 3 and 6."""
    made = record(tmp_path / "run", SETTINGS, updates=range(7))
    for update in (3, 6):
        made.checkpoints.save(update, write)
    made.unlock()
    return made


def test_it_goes_on_from_the_latest_checkpoint_and_forgets_what_came_after(run: Run) -> None:
    run.metrics.append({"update": 7})
    assert reopen(run, SETTINGS, "cory train") == 6
    assert [line["update"] for line in run.updates()] == list(range(7))


def test_a_damaged_checkpoint_is_told_of_and_the_run_goes_on_from_the_one_before(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / "checkpoints" / "update_000006" / "deep" / "weights").write_text("torn")
    assert reopen(run, SETTINGS, "cory train") == 3
    assert "update_000006 has a damaged file deep/weights; it is now damaged_update_000006" in capsys.readouterr().err
    assert [line["update"] for line in run.updates()] == list(range(4))


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_keeps_its_folder(run: Run) -> None:
    for update in (3, 6):
        (run.path / "checkpoints" / f"update_{update:06d}" / "manifest.json").write_text("{")
    with pytest.raises(CommandError, match="no checkpoint to resume from"):
        reopen(run, SETTINGS, "cory train")
    run.unlock()
    with pytest.raises(CommandError, match="name another folder"):
        Run.create(run.path)


def test_a_run_that_was_killed_before_its_first_checkpoint_is_refused(tmp_path: Path) -> None:
    record(tmp_path, SETTINGS, updates=[0]).unlock()
    with pytest.raises(CommandError, match=r"no checkpoint to resume from\. Start a new run"):
        reopen(Run.open(tmp_path), SETTINGS, "cory train")


def test_a_run_that_is_still_running_is_refused_with_its_process(run: Run) -> None:
    run.lock()
    with pytest.raises(CommandError, match=r"in use by another run \(process \d+ on .+\)"):
        reopen(Run.open(run.path), SETTINGS, "cory train")


def test_a_run_whose_last_checkpoint_is_damaged_is_not_done(run: Run) -> None:
    done = SETTINGS.model_copy(update={"num_updates": 6})
    assert reopen(run, done, "cory train") == 6
    (run.path / "checkpoints" / "update_000006" / "deep" / "weights").write_text("torn")
    assert reopen(run, done, "cory train") == 3


@pytest.mark.parametrize("command", ["--resume", "--continue"])
def test_devices_that_a_run_cannot_have_are_refused_when_it_goes_on_too(
    run: Run, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = ["gpus_per_runner=1", "gpus_per_learner=1"]
    same = tmp_path / "same.yaml"
    same.write_text(as_yaml(SETTINGS))
    words = ["--resume", str(run.path)] if command == "--resume" else ["-c", str(same), "--out", str(run.path), command]
    before = run.updates()
    assert main(["train", *words, *gpus, "--allow-changes"]) == 2
    assert "the driver learns on the first GPU, which Ray gives to runners too" in capsys.readouterr().err
    assert run.updates() == before and run.settings() == SETTINGS


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"is not a run's folder: it has no run's config\.yaml"):
        _resume_settings(Run.open(tmp_path), [])
    (tmp_path / "config.yaml").write_text("trainer:\n  epochs: 3\n")
    with pytest.raises(CommandError, match=r"is not a run's folder: it has no run's config\.yaml"):
        _resume_settings(Run.open(tmp_path), [])


@pytest.mark.parametrize(("line", "what"), [("colour: red", "Unknown setting `colour`"), ("lr: -1", "`lr`=-1")])
def test_settings_that_another_version_wrote_are_refused_with_where_to_find_which(
    run: Run, line: str, what: str
) -> None:
    config = run.path / "config.yaml"
    others = [each for each in config.read_text().splitlines() if not each.startswith(line.partition(" ")[0])]
    config.write_text("\n".join([*others, line]) + "\n")
    with pytest.raises(CommandError, match=rf"{what}.* \(its first lines say which\)"):
        _resume_settings(run, [])


def test_settings_that_are_newer_than_the_run_take_their_defaults(run: Run) -> None:
    config = run.path / "config.yaml"
    config.write_text("".join(line + "\n" for line in config.read_text().splitlines() if not line.startswith("lam:")))
    assert _resume_settings(run, []) == SETTINGS


@pytest.mark.parametrize("word", ["lr=3", "seed=2"])
def test_what_would_change_the_training_is_refused(run: Run, word: str) -> None:
    with pytest.raises(CommandError, match=r"holds a run with .*cannot change in .*, only .*updates.* or start a new"):
        _resume_settings(run, [word])
    assert _resume_settings(run, ["num_updates=20", f"seed={SETTINGS.seed}"]).num_updates == 20


def test_a_damaged_line_of_the_metrics_is_named(run: Run) -> None:
    lines = run.metrics.path.read_text().splitlines()
    run.metrics.path.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n")
    with pytest.raises(CommandError, match=r"metrics\.jsonl line 2 is not what a run wrote there"):
        reopen(run, SETTINGS, "cory train")


def test_the_command_of_a_run_goes_on_with_it_when_only_what_may_change_did(run: Run, tmp_path: Path) -> None:
    found = _find_run(str(run.path))
    assert found is not None
    longer = _merge_resumable(found, SETTINGS.model_copy(update={"num_updates": 20}))
    assert (longer.num_updates, found.latest_checkpoint()) == (20, 6)
    with pytest.raises(CommandError, match="holds a run with lr="):
        _merge_resumable(found, SETTINGS.model_copy(update={"lr": 0.5}))
    assert _find_run(str(tmp_path / "new")) is None
    record(tmp_path / "unsaved", SETTINGS, updates=[0]).unlock()
    assert _find_run(str(tmp_path / "unsaved")) is None
