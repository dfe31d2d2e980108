"""What a run says and what libraries print go different ways, where a notebook has put streams of its own, too."""

import io
import os
import sys
from pathlib import Path

import pytest

from launch.console.output import output_into, own_output
from launch.display.terminal import Voice


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
