"""`cory watch` on recorded runs: output, end and exit codes."""

import re
import signal
from pathlib import Path

import pytest

from launch.commands.watch import watch
from launch.console.errors import CommandError
from tests.launch.conftest import Cory, record_test_run, start_cory
from tests.paper import paper_settings

SETTINGS = paper_settings(num_updates=12)


def rows(output: str) -> list[str]:
    return re.findall(r"^ *(\d+)/12 +llm", output, re.MULTILINE)


def test_watch_prints_a_finished_run_and_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_test_run(tmp_path / "run", SETTINGS).unlock()
    assert watch(str(tmp_path / "run")) == 0
    output = capsys.readouterr().out
    assert rows(output) == [str(update) for update in range(1, 13)]
    assert "  1/12  llm_1→llm_2   +0.31   0.10" in output and "0:22 left" in output and "roles exchanged" in output
    assert re.search(r"Update 12 of 12, \d+ s ago, done\n$", output)


def test_once_prints_the_training_process_and_does_not_wait(cory: Cory, tmp_path: Path) -> None:
    run = record_test_run(tmp_path / "run", SETTINGS, updates=range(4))
    with run.metrics.path.open("a") as file:
        file.write('{"update": 4, "policy": {"llm_1"')
    result = cory("watch", "run", "--once")
    assert result.returncode == 0 and result.stderr == ""
    assert rows(result.stdout) == ["1", "2", "3"]
    owner = (run.path / ".lock").read_text()
    assert re.search(rf"Update 3 of 12, \d+ s ago, training in process {owner}\n$", result.stdout)
    assert "\x1b" not in result.stdout


def test_watch_exits_with_1_if_no_process_is_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_test_run(tmp_path / "run", SETTINGS, updates=range(4)).unlock()
    assert watch(str(tmp_path / "run")) == 1
    assert capsys.readouterr().out.endswith("no process on this machine is training it\n")


def test_a_collapse_and_its_warning_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record_test_run(tmp_path / "run", SETTINGS.model_copy(update={"stop_on_collapse": True}), updates=range(4))
    warning = {"signature": "kl", "subject": "llm_1", "text": "llm_1 is far.", "updates": 3}
    for update, collapsed in ((4, False), (5, True)):
        line = {**run.updates()[3], "update": update, "health": [warning], "collapsed": collapsed}
        run.metrics.append(line)
    run.unlock()
    assert watch(str(tmp_path / "run")) == 3
    output = capsys.readouterr().out
    assert output.count("Warning: ") == 1 and "Warning: Update 4: llm_1 is far.\n" in output
    assert output.endswith("stopped because a policy collapsed\n")


def test_watch_follows_new_updates_and_a_resume_until_ctrl_c(tmp_path: Path) -> None:
    run = record_test_run(tmp_path / "run", SETTINGS, updates=range(4))
    later = record_test_run(tmp_path / "later", SETTINGS, updates=range(7)).updates()
    process = start_cory(tmp_path, "watch", "run", "--follow", PYTHONUNBUFFERED="1")
    assert process.stdout

    def read_to(text: str) -> str:
        output = ""
        while text not in output:
            line = process.stdout.readline()  # type: ignore[union-attr]
            assert line, output
            output += line
        return output

    assert rows(read_to("training in process")) == ["1", "2", "3"]
    with run.metrics.path.open("a") as file:
        file.write('{"update": 4, "policy"')
    run.unlock()
    read_to("no process on this machine is training it")
    run.lock()
    run.cut_after(2)
    for line in later[3:5]:
        line["tokens_per_second"] = 2000.0
        run.metrics.append(line)
    assert rows(read_to("  4/12")) == ["3", "4"]
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130


def test_a_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="is not a run's folder"):
        watch(str(tmp_path / "nothing"))
