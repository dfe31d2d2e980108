"""What went wrong, in a sentence: errors that the user can put right, apart from defects."""

import errno
import os
import sys
from pathlib import Path

OWN_PACKAGES = ("cory_env", "policies", "launch")
"""Every exception class that these define carries a message for the user."""
IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable that Ray sets for the driver of a job."""
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
"""Errors of the operating system that refuse to write or read a file."""


class CommandError(Exception):
    """Something that the user can put right; the message says what, where, and how."""


def describe_error(error: Exception) -> str:
    """Returns in one sentence what an exception says, a defect too."""
    found = cause(error)
    lines = str(found).strip().splitlines()
    return user_message(found) or f"{type(found).__name__}: {lines[-1] if lines else 'no more is known'}"


def is_defect(error: Exception) -> bool:
    """Tells whether an exception is nothing that the user could put right."""
    return user_message(cause(error)) is None


def user_message(error: BaseException) -> str | None:
    """Returns what the user can put right, or None where the error is a defect."""
    if type(error).__module__.partition(".")[0] in OWN_PACKAGES:
        return str(error)
    if isinstance(error, OSError) and error.errno in DISK:
        place = error.filename or "The output"
        return f"{place}: {os.strerror(error.errno)}. Make room there, correct its permissions, or use another folder."
    if _is_lack_of_memory(error):
        what = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        return f"Memory ran out: {what}. Lower micro_batch_size, max_prompt_tokens or max_response_tokens."
    if is_process_loss(error):
        what = str(error).strip().splitlines()[0].rstrip(".:")
        return f"A process or a machine of the Ray cluster was lost: {what}."
    return None


def _is_lack_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if "torch" not in sys.modules:
        return False
    import torch

    # On a CPU, torch raises no class of its own.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def is_process_loss(error: BaseException) -> bool:
    """Tells whether Ray reports by this that a process, a machine or what it held is gone."""
    if "ray" not in sys.modules:
        return False
    from ray import exceptions as ray

    lost = (ray.RayActorError, ray.NodeDiedError, ray.ObjectLostError, ray.WorkerCrashedError, ray.OutOfMemoryError)
    return isinstance(error, (*lost, ray.LocalRayletDiedError))


def cause(error: Exception) -> BaseException:
    """Returns what a Ray worker raised, freed of what Ray wraps it in: of an actor's start, too."""
    if "ray" not in sys.modules:
        return error
    from ray.exceptions import RayActorError, RayTaskError

    found: BaseException = error
    while True:
        inner: object = None
        if isinstance(found, RayTaskError):
            inner = found.cause
        elif isinstance(found, RayActorError) and found.actor_init_failed and found.args:
            inner = found.args[0]
        if not isinstance(inner, BaseException):
            return found
        found = inner


def make_folder(path: Path) -> None:
    """Makes a folder, and those that it is in, unless it is there.

    Raises:
        CommandError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"The folder {path} cannot be made: {error.strerror}.") from error
