"""User errors, reported in a sentence, as opposed to bugs, which have tracebacks."""

import errno
import os
import sys
from pathlib import Path

OWN_PACKAGES = ("cory_env", "policies", "launch")
"""Packages whose exception classes all have messages for the user."""
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
"""Errors of reading or writing files that the user can fix."""


class CommandError(Exception):
    """A user error. The message has the problem, the value and a remedy."""


def describe_error(error: Exception) -> str:
    """Describes an exception in one sentence, even if it is a bug."""
    root = root_cause(error)
    lines = str(root).strip().splitlines()
    return user_message(root) or f"{type(root).__name__}: {lines[-1] if lines else 'no message'}"


def is_bug(error: Exception) -> bool:
    """Whether an exception is a bug rather than something that the user can fix."""
    return user_message(root_cause(error)) is None


def user_message(error: BaseException) -> str | None:
    """Returns a message for the user, or None if the error is a bug."""
    if type(error).__module__.partition(".")[0] in OWN_PACKAGES:
        return str(error)
    if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
        path = error.filename or "The output"
        return f"{path}: {os.strerror(error.errno)}. Free disk space, correct the permissions, or use another folder."
    if _is_out_of_memory(error):
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        return f"Out of memory: {reason}. Lower micro_batch_size, max_prompt_tokens or max_response_tokens."
    if is_process_loss(error):
        reason = str(error).strip().splitlines()[0].rstrip(".:")
        return f"A process or machine of the Ray cluster was lost: {reason}."
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if "torch" not in sys.modules:
        return False
    import torch

    # On a CPU, torch raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def is_process_loss(error: BaseException) -> bool:
    """Whether Ray's exception means that a process, a machine or an object was lost."""
    if "ray" not in sys.modules:
        return False
    from ray import exceptions as ray

    lost = (ray.RayActorError, ray.NodeDiedError, ray.ObjectLostError, ray.WorkerCrashedError, ray.OutOfMemoryError)
    return isinstance(error, (*lost, ray.LocalRayletDiedError))


def root_cause(error: Exception) -> BaseException:
    """Returns the exception that a Ray worker or actor raised, without Ray's wrappers."""
    if "ray" not in sys.modules:
        return error
    from ray.exceptions import RayActorError, RayTaskError

    outer: BaseException = error
    while True:
        inner: object = None
        if isinstance(outer, RayTaskError):
            inner = outer.cause
        elif isinstance(outer, RayActorError) and outer.actor_init_failed and outer.args:
            inner = outer.args[0]
        if not isinstance(inner, BaseException):
            return outer
        outer = inner


def check_working_folder() -> None:
    """Checks that the working directory exists, which libraries and relative paths need."""
    try:
        os.getcwd()
    except OSError as error:
        raise CommandError(
            f"The working directory {os.environ.get('PWD', '')} no longer exists: it was removed or renamed. Change to "
            "another one with cd."
        ) from error


def make_folder(path: Path) -> None:
    """Creates a folder and its parents, unless it exists."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"The folder {path} cannot be created: {error.strerror}.") from error
