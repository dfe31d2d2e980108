"""Secrets, such as HF_TOKEN and WANDB_API_KEY: from a file on each machine, never from a job's description.

Whoever may list a cluster's jobs reads their commands, metadata and environment variables. So the file lies on the
nodes (a mounted secret, say), and only its path travels.
"""

import os
import re
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from dotenv.parser import parse_stream

from cory_env.home import expand_home
from cory_env.shadowing import WORKER_SETUP
from launch.console.errors import IN_JOB, CommandError

FILE = "CORY_SECRETS"
"""The variable that names the file; by default it is `~/.config/cory/secrets.env`, if that exists."""
_DEFAULT = "~/.config/cory/secrets.env"
_NAME = re.compile(
    r"(TOKEN|KEY|(\b|_)KEYS|SECRET|PASSWORD|PASSWD|(\b|_|PG)(PASS|PAT|SIG)|CONNECTION_STRING|SIGNATURE"
    r"|(?<!APPLICATION_)CREDENTIALS?)(_?ID)?(_?\d+)?$",  # Google's APPLICATION_CREDENTIALS are a path
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"(://[^/?#\s:]*:)[^/?#\s]+(?=@)")


def is_secret(name: str) -> bool:
    """Tells whether an environment variable, or an option in a URI, of this name holds a secret."""
    return _NAME.search(name) is not None


def secret_in(word: str) -> str | None:
    """Returns which secret a word of a command has, as in `s3://… holds a password`; None where it has none.

    Args:
        word: with a URI, or with options after a `?`, or without.
    """
    options = word.partition("?")[2]
    is_text = re.search(r"\s", options) is not None
    names = [] if is_text else [name for name, _ in parse_qsl(options) if is_secret(name)]
    if not names and not _PASSWORD.search(word):
        return None
    return f"{re.split(r'(?<=://)|(?<=[?])', word)[0]}… holds {names[0] if names else 'a password'}"


def without_passwords(text: str) -> str:
    """Returns a text in which the passwords of URIs are not seen."""
    return _PASSWORD.sub(r"\1***", text)


def on_workers() -> dict[str, Any]:
    """Returns the runtime environment by which Ray's workers import our packages, and load their own node's file."""
    hook = {"worker_process_setup_hook": WORKER_SETUP}
    file = os.environ.get(FILE)
    # A job has the variable for all its processes already, and Ray refuses to be told twice.
    return hook if IN_JOB in os.environ or not file else {**hook, "env_vars": {FILE: file}}


def load_secrets() -> None:
    """Adds the file's `NAME=VALUE` lines to the environment; what is set there already stays.

    Values may be quoted, lines begin with `export`, and comments stand between and behind them.

    Raises:
        CommandError: the file cannot be read, or a line of it is no `NAME=VALUE`.
    """
    named = os.environ.get(FILE)
    file = Path(expand_home(named) if named else os.path.expanduser(_DEFAULT))  # no home directory, no such file
    if not named and not file.is_file():
        return
    try:
        bindings = [*parse_stream(StringIO(file.read_text(encoding="utf-8")))]
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"The file of secrets {file} cannot be read: {error}.") from error
    variables: dict[str, str] = {}
    for name, value, original, is_wrong in bindings:
        if is_wrong or (name is not None and value is None):
            blank = len(original.string) - len(original.string.lstrip())
            line = original.line + original.string.count("\n", 0, blank)
            raise CommandError(f"{file}, line {line}: not NAME=VALUE, or a quote is not closed.")
        if name is not None and value is not None:  # else a comment
            variables[name] = value
    for name, value in variables.items():
        os.environ.setdefault(name, value)
