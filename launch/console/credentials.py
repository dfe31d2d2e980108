"""Secrets such as HF_TOKEN and WANDB_API_KEY, from a file on each machine, never from a job's description.

Everyone who can list a cluster's jobs can read their commands, metadata and environment variables. So the file is on
the nodes (for example a mounted secret), and the job contains only its path.
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

SECRETS_VARIABLE = "CORY_SECRETS"
"""Environment variable with the path of the secrets file; by default `~/.config/cory/secrets.env`, if it exists."""
_DEFAULT_FILE = "~/.config/cory/secrets.env"
_SECRET_NAME = re.compile(
    r"(TOKEN|KEY|(\b|_)KEYS|SECRET|PASSWORD|PASSWD|(\b|_|PG)(PASS|PAT|SIG)|CONNECTION_STRING|SIGNATURE"
    r"|(?<!APPLICATION_)CREDENTIALS?)(_?ID)?(_?\d+)?$",  # Google's APPLICATION_CREDENTIALS is a path
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"(://[^/?#\s:]*:)[^/?#\s]+(?=@)")


def is_secret(name: str) -> bool:
    """Whether an environment variable or URI option of this name contains a secret."""
    return _SECRET_NAME.search(name) is not None


def find_secret(word: str) -> str | None:
    """Finds a secret in an argument: a password in a URI, or a secret option after `?`.

    Returns:
        A message such as `s3://… contains a password`; None if there is no secret.
    """
    options = word.partition("?")[2]
    is_text = re.search(r"\s", options) is not None
    names = [] if is_text else [name for name, _ in parse_qsl(options) if is_secret(name)]
    if not names and not _PASSWORD.search(word):
        return None
    return f"{re.split(r'(?<=://)|(?<=[?])', word)[0]}… contains {names[0] if names else 'a password'}"


def mask_passwords(text: str) -> str:
    """Returns the text with passwords in URIs replaced by `***`."""
    return _PASSWORD.sub(r"\1***", text)


def worker_runtime_env() -> dict[str, Any]:
    """Returns the runtime environment of Ray's workers: a setup hook, and the path of their node's secrets file."""
    hook = {"worker_process_setup_hook": WORKER_SETUP}
    file = os.environ.get(SECRETS_VARIABLE)
    # In a job, all processes have the variable already, and Ray rejects setting it twice.
    return hook if IN_JOB in os.environ or not file else {**hook, "env_vars": {SECRETS_VARIABLE: file}}


def load_secrets() -> None:
    """Adds the secrets file's `NAME=VALUE` lines to the environment, unless the variables are set.

    Values may be quoted, lines may start with `export`, and comments are allowed.

    Raises:
        CommandError: the file cannot be read, or a line is not `NAME=VALUE`.
    """
    path = os.environ.get(SECRETS_VARIABLE)
    file = Path(expand_home(path) if path else os.path.expanduser(_DEFAULT_FILE))  # without a home: no such file
    if not path and not file.is_file():
        return
    try:
        bindings = [*parse_stream(StringIO(file.read_text(encoding="utf-8")))]
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"The secrets file {file} cannot be read: {error}.") from error
    variables: dict[str, str] = {}
    for name, value, original, is_invalid in bindings:
        if is_invalid or (name is not None and value is None):
            num_blank = len(original.string) - len(original.string.lstrip())
            line = original.line + original.string.count("\n", 0, num_blank)
            raise CommandError(f"{file}, line {line}: not NAME=VALUE, or a quote is not closed.")
        if name is not None and value is not None:  # otherwise a comment
            variables[name] = value
    for name, value in variables.items():
        os.environ.setdefault(name, value)
