"""What a run says and what libraries print go different ways, where a notebook has put streams of its own, too."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.console.output import output_into, own_output
from launch.display.terminal import Voice
from tests.launch.conftest import ENVIRONMENT


def test_in_a_notebook_what_is_said_is_shown_there_and_what_libraries_print_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook's kernel does
    shown, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", errors)
    voice = Voice(own_output(), 3)
    with output_into(tmp_path / "log.txt"), voice:
        print("a library")
        print("a warning", file=sys.stderr)
        os.write(1, b"its C++\n")
        voice.stage("Loading")
        voice.say("a row")
    print("the caller")
    assert (shown.getvalue(), errors.getvalue()) == ("Loading\na row\nthe caller\n", "")
    assert sorted((tmp_path / "log.txt").read_text().splitlines()) == ["a library", "a warning", "its C++"]


RUN = """
import sys
from pathlib import Path
from launch.console.output import output_into, own_output
from launch.console.cli import until_unread

def run():
    output = own_output()
    with output_into(Path(sys.argv[1])):
        for number in range(3):
            print("row", "x" * 10_000, file=output, flush=True)
    print("saved", file=sys.stderr)
    return 0

raise SystemExit(until_unread(run))
"""


@pytest.mark.parametrize("errors_too", [False, True])
@pytest.mark.parametrize(("place", "why"), [("pipe", "Broken pipe"), ("/dev/full", "No space left on device")])
def test_a_run_outlives_whoever_reads_its_table_and_says_so_once(
    tmp_path: Path, place: str, why: str, errors_too: bool
) -> None:
    if place == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(place, os.O_WRONLY)
    ended = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "log.txt")],
        env=ENVIRONMENT,
        stdout=writer,
        stderr=subprocess.STDOUT if errors_too else subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    warning = f"Warning: The output cannot be written ({why}), so it is left out. The command continues.\n"
    assert ended.returncode == 0 and (tmp_path / "log.txt").read_text() == warning
    assert errors_too or ended.stderr == f"{warning}saved\n"


PRINTS = """
import sys
from launch.console.cli import run, until_unread

def command():
    sys.stderr.write("a note\\n")
    print("漢" * 20_000)
    return 0

raise SystemExit(until_unread(lambda: run(command, debug=False)))
"""


@pytest.mark.parametrize(
    ("redirection", "code", "errors"),
    [
        ("| true", 141, "a note\n"),
        (">/dev/full", 2, "a note\nError: The output cannot be written: No space left on device.\n"),
        (">&-", 0, "a note\n"),
        ("2>&- | cat >/dev/null", 0, ""),
        ("<&- >/dev/null", 0, "a note\n"),
        ("2>/dev/full | cat >/dev/null", 0, ""),
        ("2>&1 | true", 141, ""),
    ],
)
def test_a_command_whose_output_cannot_be_written_ends_without_a_traceback(
    redirection: str, code: int, errors: str
) -> None:
    command = f'set -o pipefail; "$0" -c "$1" {redirection}'
    words = ["bash", "-c", command, sys.executable, PRINTS]
    ended = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", errors)


@pytest.mark.parametrize(
    ("environment", "printed"),
    [
        ({"PYTHONIOENCODING": "ascii"}, b"?? gr??er\n"),
        ({"PYTHONIOENCODING": "latin-1"}, b"?? gr\xf6\xdfer\n"),
        ({"PYTHONIOENCODING": "ascii:backslashreplace"}, b"\\u6f22\\ud800 gr\\xf6\\xdfer\n"),
        ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, b"?? gr??er\n"),
        ({"PYTHONIOENCODING": "utf-8"}, "漢? größer\n".encode()),
    ],
)
def test_what_the_encoding_lacks_is_a_question_mark_in_child_processes_too(
    environment: dict[str, str], printed: bytes
) -> None:
    text = r"'\u6f22\ud800 gr\xf6\xdfer'"
    code = f"""
import subprocess, sys
from launch.console.output import print_utf8
from launch.console.cli import until_unread

def command():
    print({text}, flush=True)
    if sys.stdout.encoding != "utf-8":
        subprocess.run([sys.executable, "-c", r"print({text})"], check=True)
    print_utf8("\\u6f22")
    return 0

raise SystemExit(until_unread(command))
"""
    ended = subprocess.run([sys.executable, "-c", code], env={**ENVIRONMENT, **environment}, capture_output=True)
    times = 1 if environment.get("PYTHONIOENCODING") == "utf-8" else 2
    assert (ended.returncode, ended.stdout) == (0, printed * times + "漢".encode()), ended.stderr
