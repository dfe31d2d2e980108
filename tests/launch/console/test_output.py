"""Separating a run's progress from library output, also in notebooks, and output that cannot be written."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.console.output import dup_stdout, redirect_output
from launch.display.terminal import ProgressPrinter
from tests.launch.conftest import ENVIRONMENT


def test_in_a_notebook_progress_is_shown_and_library_output_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook's kernel does
    output, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", errors)
    progress = ProgressPrinter(dup_stdout(), 3)
    with redirect_output(tmp_path / "log.txt"), progress:
        print("a library")
        print("a warning", file=sys.stderr)
        os.write(1, b"its C++\n")
        progress.stage("Loading")
        progress.print("a row")
    print("the caller")
    assert (output.getvalue(), errors.getvalue()) == ("Loading\na row\nthe caller\n", "")
    assert sorted((tmp_path / "log.txt").read_text().splitlines()) == ["a library", "a warning", "its C++"]


ADVICE = "Free disk space, correct the permissions, or use another folder."
RUN = """
import sys
from pathlib import Path
from launch.console.output import dup_stdout, redirect_output

output = dup_stdout()
with redirect_output(Path(sys.argv[1])):
    for number in range(3):
        print("row", "x" * 10_000, file=output, flush=True)
if sys.argv[2] == "saved":
    print("saved", file=sys.stderr)
"""


@pytest.mark.parametrize("errors_too", [False, True])
@pytest.mark.parametrize(("target", "reason"), [("pipe", "Broken pipe"), ("/dev/full", "No space left on device")])
def test_a_run_continues_if_its_output_cannot_be_written_and_warns_once(
    tmp_path: Path, target: str, reason: str, errors_too: bool
) -> None:
    if target == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(target, os.O_WRONLY)
    result = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "log.txt"), "" if errors_too else "saved"],
        env=ENVIRONMENT,
        stdout=writer,
        stderr=subprocess.STDOUT if errors_too else subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    warning = f"Warning: The output cannot be written ({reason}) and is discarded. The command continues.\n"
    assert result.returncode == 0 and (tmp_path / "log.txt").read_text() == warning
    assert errors_too or result.stderr == "saved\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("plan --help >&-", 0, ""),
        ("plan --help > /dev/full", 2, f"Error: The output: No space left on device. {ADVICE}\n"),
        ("plan --help | true; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
def test_unwritable_output_ends_a_command_with_one_sentence(words: str, code: int, message: str) -> None:
    command = ["bash", "-c", f"{sys.executable} -m cory_rllib {words}"]
    result = subprocess.run(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (code, message)


def test_closed_streams_are_redirected_to_devnull_also_in_child_processes() -> None:
    script = (
        "import os, subprocess; from launch.console.output import prepare_streams; prepare_streams(); print('x');"
        "assert os.open('/dev/null', 0) > 2; assert subprocess.run(['sh', '-c', 'echo x && cat']).returncode == 0"
    )
    command = ["bash", "-c", f'{sys.executable} -c "{script}" <&- >&-']
    assert subprocess.run(command, env=ENVIRONMENT, timeout=60).returncode == 0


def test_unencodable_characters_become_question_marks() -> None:
    script = "from launch.console.output import prepare_streams; prepare_streams(); print('llm_1→llm_2')"
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, env=environment, timeout=60) == b"llm_1?llm_2\n"
