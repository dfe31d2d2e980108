"""Checks of `--resume` and `--continue` before training starts."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from launch.commands.train import _merge_resumable, _open_run, _resume_settings
from launch.console.configuration import settings_to_yaml
from launch.console.errors import CommandError
from launch.main import main
from launch.run_folder.run import Run
from launch.training.steps import reopen
from tests.launch.conftest import record_test_run
from tests.launch.run_folder.test_checkpoints import write_checkpoint
from tests.paper import paper_settings

SETTINGS = paper_settings(num_updates=12)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with 6 of 12 updates, and checkpoints of updates 3 and 6."""
    run = record_test_run(tmp_path / "run", SETTINGS, updates=range(7))
    for update in (3, 6):
        run.checkpoints.save(update, write_checkpoint)
    run.unlock()
    return run


def test_resume_continues_from_the_latest_checkpoint_and_drops_later_updates(run: Run) -> None:
    run.metrics_file.append({"update": 7})
    assert reopen(run, SETTINGS, "cory train") == 6
    assert [line["update"] for line in run.metrics] == list(range(7))


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / "checkpoints" / "update_000006" / "deep" / "weights").write_text("torn")
    assert reopen(run, SETTINGS, "cory train") == 3
    assert "update_000006 has a damaged file deep/weights; it is now damaged_update_000006" in capsys.readouterr().err
    assert [line["update"] for line in run.metrics] == list(range(4))


def test_a_run_with_only_damaged_checkpoints_is_rejected_and_keeps_its_folder(run: Run) -> None:
    for update in (3, 6):
        (run.path / "checkpoints" / f"update_{update:06d}" / "manifest.json").write_text("{")
    with pytest.raises(CommandError, match="no checkpoint to resume from"):
        reopen(run, SETTINGS, "cory train")
    run.unlock()
    with pytest.raises(CommandError, match="choose another folder"):
        Run.create(run.path)


def test_a_run_without_checkpoint_is_rejected(tmp_path: Path) -> None:
    record_test_run(tmp_path, SETTINGS, updates=[0]).unlock()
    with pytest.raises(CommandError, match=r"no checkpoint to resume from\. Start a new run"):
        reopen(Run.open(tmp_path), SETTINGS, "cory train")


def test_a_running_run_is_rejected_with_its_process(run: Run) -> None:
    run.lock()
    with pytest.raises(CommandError, match=r"in use by another run \(process \d+ on .+\)"):
        reopen(Run.open(run.path), SETTINGS, "cory train")


def test_a_run_whose_last_checkpoint_is_damaged_is_not_done(run: Run) -> None:
    done = SETTINGS.model_copy(update={"num_updates": 6})
    assert reopen(run, done, "cory train") == 6
    (run.path / "checkpoints" / "update_000006" / "deep" / "weights").write_text("torn")
    assert reopen(run, done, "cory train") == 3


@pytest.mark.parametrize("command", ["--resume", "--continue"])
def test_unavailable_devices_are_rejected_on_resume(
    run: Run, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = ["gpus_per_runner=1", "gpus_per_learner=1"]
    same = tmp_path / "same.yaml"
    same.write_text(settings_to_yaml(SETTINGS))
    words = ["--resume", str(run.path)] if command == "--resume" else ["-c", str(same), "--out", str(run.path), command]
    before = run.metrics
    assert main(["train", *words, *gpus, "--allow-changes"]) == 2
    assert "the driver learns on the first GPU, which Ray assigns to runners too" in capsys.readouterr().err
    assert run.metrics == before and run.settings == SETTINGS


def test_a_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"is not a run's folder: it has no run's config\.yaml"):
        _resume_settings(Run.open(tmp_path), [])
    (tmp_path / "config.yaml").write_text("trainer:\n  epochs: 3\n")
    with pytest.raises(CommandError, match=r"is not a run's folder: it has no run's config\.yaml"):
        _resume_settings(Run.open(tmp_path), [])


@pytest.mark.parametrize(("line", "message"), [("colour: red", "Unknown setting `colour`"), ("lr: -1", "`lr`=-1")])
def test_settings_of_another_version_are_rejected_with_a_hint(run: Run, line: str, message: str) -> None:
    config = run.path / "config.yaml"
    key = line.partition(" ")[0]
    other_lines = [text for text in config.read_text().splitlines() if not text.startswith(key)]
    config.write_text("\n".join([*other_lines, line]) + "\n")
    with pytest.raises(CommandError, match=rf"{message}.* \(see its first lines\)"):
        _resume_settings(run, [])


def test_settings_newer_than_the_run_get_their_defaults(run: Run) -> None:
    config = run.path / "config.yaml"
    config.write_text("".join(line + "\n" for line in config.read_text().splitlines() if not line.startswith("lam:")))
    assert _resume_settings(run, []) == SETTINGS


@pytest.mark.parametrize("word", ["lr=3", "seed=2"])
def test_changes_to_training_settings_are_rejected(run: Run, word: str) -> None:
    with pytest.raises(CommandError, match=r"is a run with .*cannot change when .*; only .*updates.* or start a new"):
        _resume_settings(run, [word])
    assert _resume_settings(run, ["num_updates=20", f"seed={SETTINGS.seed}"]).num_updates == 20


def test_a_damaged_line_of_the_metrics_is_reported(run: Run) -> None:
    lines = run.metrics_file.path.read_text().splitlines()
    run.metrics_file.path.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n")
    with pytest.raises(CommandError, match=r"metrics\.jsonl line 2 is damaged"):
        reopen(run, SETTINGS, "cory train")


def test_continue_reopens_a_run_if_only_resumable_settings_changed(run: Run, tmp_path: Path) -> None:
    with ExitStack() as stack:
        existing_run = _open_run(str(run.path), stack, must_exist=False)
        assert existing_run is not None
        longer = _merge_resumable(existing_run, SETTINGS.model_copy(update={"num_updates": 20}))
        assert (longer.num_updates, existing_run.latest_checkpoint()) == (20, 6)
        with pytest.raises(CommandError, match="is a run with lr="):
            _merge_resumable(existing_run, SETTINGS.model_copy(update={"lr": 0.5}))
        assert _open_run(str(tmp_path / "new"), stack, must_exist=False) is None
        record_test_run(tmp_path / "unsaved", SETTINGS, updates=[0]).unlock()
        assert _open_run(str(tmp_path / "unsaved"), stack, must_exist=False) is None
