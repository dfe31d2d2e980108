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

output = own_output()
with output_into(Path(sys.argv[1])):
    for number in range(3):
        print("row", "x" * 10_000, file=output, flush=True)
if sys.argv[2] == "saved":
    print("saved", file=sys.stderr)
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
        [sys.executable, "-c", RUN, str(tmp_path / "log.txt"), "" if errors_too else "saved"],
        env=ENVIRONMENT,
        stdout=writer,
        stderr=subprocess.STDOUT if errors_too else subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    warning = f"Warning: The output cannot be written ({why}), so it is left out. The command continues.\n"
    assert ended.returncode == 0 and (tmp_path / "log.txt").read_text() == warning
    assert errors_too or ended.stderr == "saved\n"
