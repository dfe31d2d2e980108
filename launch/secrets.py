"""Secrets, such as HF_TOKEN and WANDB_API_KEY: from a file on each machine, never from a job's description.

Whoever may list a cluster's jobs reads their commands, metadata and environment variables. So the file lies on the
nodes (a mounted secret, say), and only its path travels.
"""

import os
import re
from pathlib import Path
from typing import Any

from launch.command import IN_JOB, CommandError

FILE = "CORY_SECRETS"
"""The variable that names the file; by default it is `~/.config/cory/secrets.env`, if that exists."""
_DEFAULT = Path("~/.config/cory/secrets.env")
_SECRET = re.compile(r"((TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_?ID)?|\bSIG|SIGNATURE)$", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Tells whether an environment variable, or an option in a URI, of this name holds a secret."""
    return _SECRET.search(name) is not None


def on_workers() -> dict[str, Any]:
    """Returns the runtime environment by which a cluster's workers load their own node's file too."""
    hook = {"worker_process_setup_hook": f"{__name__}.{load_secrets.__name__}"}
    file = os.environ.get(FILE)
    # A job has the variable for all its processes already, and Ray refuses to be told twice.
    return hook if IN_JOB in os.environ or not file else {**hook, "env_vars": {FILE: file}}


def load_secrets() -> None:
    """Adds the file's `NAME=VALUE` lines to the environment; what is set there already stays.

    Raises:
        CommandError: the file that CORY_SECRETS names cannot be read, or a line of it is none of these.
    """
    named = os.environ.get(FILE)
    file = Path(named) if named else _DEFAULT.expanduser()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        if not named:
            return
        raise CommandError(f"{file}, the secrets that {FILE} names, cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, start=1):
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and name.isidentifier():
            os.environ.setdefault(name, value.strip("'\""))
        elif name and not name.startswith("#"):
            raise CommandError(f"{file} line {number} is not NAME=VALUE.")
