import subprocess

import pytest

from launch.console.shell import one_line

WORDS = ["cory", "prompt=Q: {query}\nA:", 'it\'s\t"$HOME" `x` \\n', "\x85\u2028\x07", "😀\xa0\n", "a b", "", "!#~*"]


@pytest.mark.parametrize("word", WORDS)
def test_a_command_is_one_line_that_a_shell_takes_apart_into_the_words_it_was_made_of(word: str) -> None:
    line = one_line([word, "lr=1"])
    assert len(line.splitlines()) == 1
    split = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, env={"LC_ALL": "C.UTF-8"})
    assert split.stdout.decode().split("\0")[:-1] == [word, "lr=1"]
