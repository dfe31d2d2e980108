import errno
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cory_env.home import IN_JOB
from launch.console.errors import CommandError
from launch.run_folder.run import Run
from tests.launch.conftest import ENVIRONMENT, record_test_run
from tests.paper import paper_settings

SETTINGS = paper_settings(num_updates=12)
HOLD = """
import sys
from pathlib import Path
from launch.run_folder.run import Run

run = Run(Path(sys.argv[1]))
run.lock()
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("job", [None, "raysubmit_1"])
def test_a_locked_folder_is_rejected_until_its_process_is_killed(job: str | None, tmp_path: Path) -> None:
    in_job = {IN_JOB: json.dumps({"runtime_env": {}, "metadata": {"job_submission_id": job}})} if job else {}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], env={**ENVIRONMENT, **in_job}, stdin=-1, stdout=-1, text=True
    )
    assert holder.stdout and holder.stdout.readline() == "locked\n"
    process = f"{holder.pid} on {platform.node()}" + (f", Ray job {job}" if job else "")
    with pytest.raises(CommandError, match=rf"in use by another run \(process {process}\)\. Stop it, or"):
        Run.create(tmp_path)
    holder.kill()
    holder.communicate()
    Run.create(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_rejected_with_alternatives(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(CommandError, match=f"^{tmp_path} is on a file system without locks .*file://{tmp_path}, "):
        Run.create(tmp_path)


def test_a_folder_with_a_run_is_rejected_with_the_resume_command(tmp_path: Path) -> None:
    run = record_test_run(tmp_path, SETTINGS)
    run.checkpoints.save(12, lambda folder: None)
    run.unlock()
    with pytest.raises(CommandError, match=f"cory train --resume {tmp_path}"):
        Run.create(tmp_path)


def test_a_run_without_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    record_test_run(tmp_path, SETTINGS, updates=[0]).unlock()
    (tmp_path / "wandb" / "offline-run").mkdir(parents=True)
    for name in ("wandb.id", "trackio.id"):
        (tmp_path / name).write_text("1a2b3c4d")
    run = Run.create(tmp_path)
    assert not run.exists() and run.metrics == []


def test_incomplete_first_files_are_replaced(tmp_path: Path) -> None:
    (tmp_path / ".config.yaml.new").write_text("task: im")
    Run.create(tmp_path).unlock()  # killed before the run started
    record_test_run(tmp_path, SETTINGS, updates=[]).unlock()
    (tmp_path / ".sources.json.new").write_text('{"llms": ')
    run = Run.create(tmp_path)
    assert not run.exists() and not list(tmp_path.glob(".*.new"))


def test_a_folder_with_other_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CommandError, match="not empty"):
        Run.create(tmp_path)


def test_settings_round_trip_and_their_commands_are_kept(tmp_path: Path) -> None:
    run = record_test_run(tmp_path, SETTINGS)
    longer = SETTINGS.model_copy(update={"num_updates": 24})
    run.write_settings(longer, "cory train --resume here 'prompt=a\nb: c'")
    assert run.settings == longer
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    assert lines[:2] == ["# cory train", "# cory train --resume here 'prompt=a b: c'"]


def test_a_run_of_an_earlier_version_is_read_unless_a_removed_setting_had_an_effect(tmp_path: Path) -> None:
    run = record_test_run(tmp_path / "run", paper_settings())
    config, settings = run.path / "config.yaml", run.settings
    text = config.read_text()
    config.write_text(f"{text}num_siblings: 1\nwandb: false\n")
    assert Run(run.path).settings == settings
    config.write_text(f"{text}num_siblings: 2\n")
    with pytest.raises(CommandError, match=r"Unknown setting `num_siblings` in .*use that version"):
        _ = Run(run.path).settings


def test_the_best_update_has_the_highest_mean_held_out_combined_reward(tmp_path: Path) -> None:
    run = record_test_run(tmp_path, SETTINGS)
    scores = {line["update"]: line["evaluation"]["mean"]["combined_reward"] for line in run.metrics[::6]}
    assert set(scores) == {0, 6, 12}
    assert run.best_update == max(scores, key=lambda update: scores[update] or 0.0)


def test_a_process_that_records_updates_knows_the_best_one_without_reading_all_again(tmp_path: Path) -> None:
    run = record_test_run(tmp_path, SETTINGS, updates=[])
    lines = record_test_run(tmp_path / "other", SETTINGS).metrics
    scores = {0: 0.5, 6: 0.75, 12: 0.75}  # the earliest of equal ones is the best
    for line in lines:
        if "evaluation" in line:
            line["evaluation"]["mean"]["combined_reward"] = scores[line["update"]]
        run.record(line)
        run.metrics_file.path.write_text("unreadable\n")
        assert run.best_update == (0 if line["update"] < 6 else 6)
    run.metrics_file.path.write_text("")
    run.cut_after(0)
    assert run.best_update is None


def test_runs_started_in_the_same_second_have_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-120000")
    with ThreadPoolExecutor(8) as threads:
        runs = list(threads.map(lambda _: Run.create(None, "imdb-tiny"), range(8)))
    names = {f"imdb-tiny-20260101-120000{'' if number == 1 else f'-{number}'}" for number in range(1, 9)}
    assert {run.path.name for run in runs} == {folder.name for folder in (tmp_path / "runs").iterdir()} == names


def test_a_folder_named_after_a_custom_task_has_safe_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.create(None, "my_package.riddles:make?file=a/b")
    assert run.path.parent == Path("runs") and run.path.name.startswith("my_package.riddles-make-file-a-b-2")


def test_aborting_a_run_before_its_first_record_removes_the_folder_it_created(
    tmp_path: Path,
) -> None:
    (tmp_path / "theirs").mkdir()
    for name in ("new", "theirs"):
        run = Run.create(tmp_path / name)
        run.write_settings(SETTINGS, "cory train")
        run.abort()
    assert [entry.name for entry in tmp_path.iterdir()] == ["theirs"] and not list((tmp_path / "theirs").glob("*.yaml"))
    started = record_test_run(tmp_path / "begun", SETTINGS, updates=[0])
    started.abort()
    assert len(started.metrics) == 1


def test_a_folder_of_another_program_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: something else\n")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "model.pt").write_text("weights")
    with pytest.raises(CommandError, match="is not empty"):
        Run.create(tmp_path)
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["checkpoints", "config.yaml", "model.pt"]
