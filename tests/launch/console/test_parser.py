"""How a command ends: one sentence for what the user can put right, a traceback for defects."""

import errno

import pytest
import torch

from launch.console.errors import CommandError
from launch.console.parser import run


def ending(error: Exception) -> int:
    def command() -> int:
        raise error

    return run(command, debug=False)


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, "Error: runs/a: No space left on device. Make room there, or use another folder.\n"),
        (errno.EACCES, "Error: runs/a: Permission denied. Change its permissions, or use another.\n"),
        (errno.EROFS, "Error: runs/a: Read-only file system. Use another folder.\n"),
    ],
)
def test_a_refused_file_is_one_sentence_with_what_to_do(
    capsys: pytest.CaptureFixture[str], number: int, sentence: str
) -> None:
    assert ending(OSError(number, "whatever a library says", "runs/a")) == 2
    assert capsys.readouterr().err == sentence


def test_notes_on_how_to_go_on_follow_the_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    error = CommandError("No.")
    error.add_note("Go on with:\n  cory train --resume runs/a")
    assert ending(error) == 2
    assert capsys.readouterr().err == "Error: No.\nGo on with:\n  cory train --resume runs/a\n"


def test_a_lack_of_memory_is_one_sentence_with_what_to_lower(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        return len(torch.empty(2**60, dtype=torch.uint8))

    assert run(command, debug=False) == 2
    message = capsys.readouterr().err
    assert message.startswith("Error: Memory ran out: ") and message.endswith("max_prompt or max_response.\n")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("error", [ValueError("a defect"), OSError(errno.EBADF, "Bad file descriptor"), KeyError("x")])
def test_a_defect_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        ending(error)
