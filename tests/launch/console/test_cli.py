"""Errors of commands: one sentence for user errors, a traceback for bugs; parsing of arguments."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launch.console.cli import COMMANDS, parse_command, run
from launch.console.errors import CommandError
from launch.main import main
from tests.launch.conftest import ENVIRONMENT


def run_failing(error: Exception) -> int:
    def command() -> int:
        raise error

    return run(command, debug=False)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_file_error_is_one_sentence_with_a_remedy(capsys: pytest.CaptureFixture[str], number: int) -> None:
    assert run_failing(OSError(number, "whatever a library says", "runs/a")) == 2
    advice = "Free disk space, correct the permissions, or use another folder."
    assert capsys.readouterr().err == f"Error: runs/a: {os.strerror(number)}. {advice}\n"


def test_notes_of_an_exception_follow_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    error = CommandError("No.")
    error.add_note("Resume with:\n  cory train --resume runs/a")
    assert run_failing(error) == 2
    assert capsys.readouterr().err == "Error: No.\nResume with:\n  cory train --resume runs/a\n"


def test_out_of_memory_is_one_sentence_with_the_settings_to_lower(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        return len(torch.empty(2**60, dtype=torch.uint8))

    assert run(command, debug=False) == 2
    message = capsys.readouterr().err
    assert message.startswith("Error: Out of memory: ") and message.endswith(
        "max_prompt_tokens or max_response_tokens.\n"
    )
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "1e-5"], "Unknown option --lr. Write settings as lr=1e-5."),
        (["--lr=1e-5"], "Unknown option --lr=1e-5. Write settings as lr=1e-5."),
        (["imdb-tiny", "--max-response-tokens", "5"], "Write settings as max_response_tokens=5."),
        (["lr", "=", "1e-5"], "One preset or file"),
        (["--out="], "An argument is empty. Is a shell variable unset?"),
        (["--out", ""], "An argument is empty. Is a shell variable unset?"),
        ([""], "An argument is empty. Is a shell variable unset?"),
        (["prompt=caf\udce9"], r"The argument 'prompt=caf\udce9' is not text in UTF-8."),
        (["--out", "caf\udce9"], r"The argument 'caf\udce9' is not text in UTF-8."),
    ],
)
def test_invalid_arguments_are_rejected(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    assert message in capsys.readouterr().err


def test_arguments_are_parsed_without_running_the_command() -> None:
    options = parse_command("train", ["imdb-tiny", "--out", "runs/a", "lr=1e-5", "-c", "a.yaml", "-c", "b.yaml"])
    assert (options.words, options.out, options.continue_) == (["imdb-tiny", "lr=1e-5"], "runs/a", False)
    assert options.config == [Path("a.yaml"), Path("b.yaml")]


def test_a_removed_working_directory_is_reported_at_the_start_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = 'cd "$0" && rmdir "$0" && exec "$@"'
    command = ["sh", "-c", script, str(tmp_path / "gone"), sys.executable, "-m", "cory_rllib", "train", "imdb-tiny"]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"Error: The working directory {tmp_path / 'gone'} no longer exists")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"cory {name}" in capsys.readouterr().out


@pytest.mark.parametrize("error", [ValueError("a defect"), OSError(errno.EBADF, "Bad file descriptor"), KeyError("x")])
def test_an_unexpected_error_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_failing(error)
