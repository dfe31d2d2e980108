"""What every command shares: a parser with short errors, and one way to end."""

import argparse
import math
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cory_env.home import HomeError, expand_home
from launch.console.errors import cause, sentence

INTERRUPTED = 128 + signal.SIGINT


def path_or_uri(word: str) -> str:
    """Returns the path or URI that a word of a command is, with `~` expanded.

    Raises:
        ArgumentTypeError: there is no such home directory.
    """
    try:
        return expand_home(word)
    except HomeError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error


def local_path(word: str) -> Path:
    """Returns the path that a word of a command is, with `~` expanded.

    Raises:
        ArgumentTypeError: it is a URI, or there is no such home directory.
    """
    if "://" in word:
        raise argparse.ArgumentTypeError(f"{word} is a URI, but a path is needed here")
    return Path(path_or_uri(word))


def number_type(
    kind: type[int] | type[float] = int, least: float = 0, most: float = math.inf
) -> Callable[[str], float]:
    """Returns a function that reads a number in a word of a command, finite and from `least` to `most`."""

    def read(word: str) -> float:
        """Returns the number.

        Raises:
            ArgumentTypeError: there is none.
        """
        try:
            value: float = kind(word)
        except ValueError:
            value = math.nan
        if not least <= value <= most or value == math.inf:
            bounds = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"it is {word}, but must be a {'whole ' * (kind is int)}number, {bounds}")
        return value

    return read


positive_int = number_type(least=1)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence and the place to look, without the usage text.

    It takes no empty words: a shell makes them of variables that are not set, and they would stand for the default.
    Settings, in commands that take them, are `key=value`; other spellings are refused with that one.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses empty words and settings of other spellings, then does as usual."""
        words = list(sys.argv[1:] if args is None else args)
        self._refuse_misspelled_settings(words)
        for before, word in zip(["", *words], words, strict=False):
            option, equals, value = word.partition("=")
            if not word or (option.startswith("--") and equals and not value):
                what = option or (f"what follows {before}" if before else "the first argument")
                self.error(f"{what} is empty: is a shell variable not set?")
        return super().parse_known_args(words, namespace)

    def _refuse_misspelled_settings(self, words: Sequence[str]) -> None:
        """Refuses `--key value`, `--key=value` and `key = value` for a setting that is no option of this command."""
        if not any("key=value" in str(action.metavar) for action in self._actions):
            return
        for number, word in enumerate(words):
            after = words[number + 1] if number + 1 < len(words) else "VALUE"
            if word.startswith("--") and word not in self._option_string_actions:
                name, _, value = word[2:].partition("=")
                name, value, spelled = name.replace("-", "_"), value or after, word
            elif word.startswith("=") and number:
                name, value = words[number - 1], word[1:] or after
                spelled = f"{name} {word}"
            else:
                continue
            from policies.settings.settings import Settings  # takes its time, and is seldom needed

            if name in Settings.model_fields and f"--{name}" not in self._option_string_actions:
                self.error(f"`{spelled}` is not an option: settings are written as `{name}={value}`")

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        self.exit(2, f"{self.prog}: {message[:1].upper()}{message[1:]}. See `{self.prog} --help`.\n")


def run(command: Callable[[], int], *, debug: bool) -> int:
    """Runs a command and turns what the user can put right into one sentence on stderr.

    Args:
        command: does the work, returns the exit code.
        debug: let the traceback be seen.

    Returns:
        The command's own exit code; 2 after a user's mistake; 130 after Ctrl-C. Other exceptions are defects and pass.
    """
    try:
        from launch.console.credentials import load_secrets

        load_secrets()
        return command()
    except KeyboardInterrupt:
        print("Aborted.", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        said = sentence(cause(error))
        if said is None:
            raise
        if debug:
            traceback.print_exception(error)
        print("\n".join([f"Error: {said}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 2
