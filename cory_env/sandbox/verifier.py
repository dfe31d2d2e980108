"""Scores answers by the verifiers of reasoning-gym, in a sandbox: some verifiers evaluate an answer as Python code.

The server process imports the package once, and forks a process for each answer.
"""

import contextlib
import dataclasses
import difflib
import importlib
import json
import math
import os
import pickle
import resource
import select
import signal
import sys
from functools import lru_cache
from typing import Any

from cory_env.sandbox.confinement import forbid_processes, kill_with_parent

READY = b"ready\n"
DEFAULT_SEED = 0
MAX_REPLY_BYTES = 64


@lru_cache(maxsize=256)
def make_dataset(name: str, settings: str) -> Any:
    """Returns a data set of reasoning-gym.

    Args:
        name: Of a data set; or of several, joined by +, for a mixture in equal parts.
        settings: A JSON object: `size`, `seed` and, unless it is a mixture, the data set's own.

    Raises:
        ValueError: There is no such data set or setting, or a value is out of range.
        ModuleNotFoundError: The package is not installed.
    """
    library = importlib.import_module("reasoning_gym")
    known = library.factory.DATASETS
    names, values = name.split("+"), {"seed": DEFAULT_SEED, **json.loads(settings)}
    for part in names:
        if part not in known or part == "composite":
            close = difflib.get_close_matches(part, known, n=3)
            advice = f"Similar: {', '.join(close)}." if close else "reasoning_gym.factory.DATASETS lists them."
            raise ValueError(f"reasoning-gym has no data set {part!r}. {advice}")
    valid = ["size", "seed"] if len(names) > 1 else [field.name for field in dataclasses.fields(known[name][1])]
    if unknown := [setting for setting in values if setting not in valid]:
        raise ValueError(f"{name} has no setting {unknown[0]!r}. It has: {', '.join(valid)}.")
    try:
        if len(names) == 1:
            return library.create_dataset(name, **values)
        specs = [library.composite.DatasetSpec(part, 1.0, {}) for part in names]
        return library.create_dataset("composite", datasets=specs, **values)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{name} rejects its settings {settings}: {error or type(error).__name__}.") from error


def main(packages: str, memory: int, die_with_parent: bool) -> None:
    """Serves requests from standard input until it ends: pickled (name, settings, entry, answer, seconds).

    The reply to each is a line: the score, or 0 if the verifier fails or takes too long.

    Args:
        packages: Folder of installed packages.
        memory: Bytes of address space of the process of an answer.
        die_with_parent: Whether this process must arrange to die with its parent, because no sandbox does.
    """
    if die_with_parent:
        kill_with_parent()
    sys.path.append(packages)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    importlib.import_module("reasoning_gym")
    os.write(replies, READY)
    with contextlib.suppress(EOFError):
        while True:
            name, settings, entry, answer, seconds = pickle.load(requests)
            dataset = make_dataset(name, settings)
            score = _in_child(dataset, entry, answer, seconds, memory, (requests.fileno(), replies))
            os.write(replies, f"{score!r}\n".encode())


def _in_child(dataset: Any, entry: Any, answer: str, seconds: float, memory: int, files: tuple[int, int]) -> float:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        for file in (read, *files):
            os.close(file)
        with contextlib.suppress(BaseException):
            kill_with_parent()
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            forbid_processes()
            os.write(write, repr(float(dataset.score_answer(answer, entry))).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb", 0) as stream:
        reply = stream.read(MAX_REPLY_BYTES) if select.select([read], [], [], seconds)[0] else b""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        score = float(reply)
    except ValueError:
        return 0.0
    return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0
