"""How a command ends: one sentence for what the user can put right, a traceback for defects."""

import errno

import pytest
import torch

from launch.commands import train, validate
from launch.console.errors import CommandError
from launch.console.parser import Parser, run


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "1e-5"], "`--lr` is not an option: settings are written as `lr=1e-5`"),
        (["--lr=1e-5"], "`--lr=1e-5` is not an option: settings are written as `lr=1e-5`"),
        (["imdb-tiny", "--max-response", "5"], "settings are written as `max_response=5`"),
        (["lr", "=", "1e-5"], "`lr =` is not an option: settings are written as `lr=1e-5`"),
        (["lr", "=1e-5"], "settings are written as `lr=1e-5`"),
        (["--learning-rate", "1"], "Unrecognized arguments: --learning-rate"),
    ],
)
def test_a_setting_that_is_spelled_as_an_option_or_with_spaces_is_refused_with_the_right_spelling(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for main in (train.main, validate.main):
        with pytest.raises(SystemExit) as raised:
            main(words)
        assert raised.value.code == 2 and message in capsys.readouterr().err


def test_an_option_s_name_and_words_of_other_commands_are_left_alone() -> None:
    parser = Parser()
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--seed")
    assert parser.parse_intermixed_args(["a", "--seed", "3"]).seed == "3"
    plain = Parser()
    plain.add_argument("query")
    assert plain.parse_args(["= 3"]).query == "= 3"


@pytest.mark.parametrize("error", [ValueError("a defect"), OSError(errno.EBADF, "Bad file descriptor"), KeyError("x")])
def test_a_defect_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        ending(error)
