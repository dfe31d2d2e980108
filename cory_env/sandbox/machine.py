"""Shuts processes in: by bubblewrap, or for root, who would keep rights inside of that, by `namespaces`.

Either way a process sees a file system of its own, read-only, of the system's libraries, Python and its packages, and
no home or data of anyone; a temporary folder of its own, in memory; no network; no other process. It runs as a user
that has no rights, and dies with the process that started it. Limits of memory and time it gives itself (`inside`).
"""

import os
import random
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
CODE_ROOT = "/sandbox"
CODE = f"{CODE_ROOT}/cory_env/sandbox"  # where this folder lies inside
TEMPORARY = 16 * 2**20  # bytes of the temporary folder, and of any file
UNNAMED_UIDS = range(
    61184, 65520
)  # users without a name, as systemd draws them; one each, so that each is counted alone
OPTIONS = ("-P", "-s", "-S")  # of Python: no folder of this process or user on its path, and no packages by themselves
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TRIED = 20.0  # seconds
PROBE = f"import sys; sys.path.insert(0, {CODE_ROOT!r}); import cory_env.sandbox.inside; open('/dev/null'); print('in')"


class SandboxError(RuntimeError):
    """Programs cannot be shut in here."""


def interpreter() -> str:
    """Python itself, not the link to it in a virtual environment."""
    return os.path.realpath(sys.executable)


def packages() -> str:
    """The folder of installed packages."""
    return sysconfig.get_path("purelib")


def sandboxed(command: Sequence[str]) -> list[str]:
    """Returns the command that runs another one shut in."""
    return _by_namespaces(command) if os.geteuid() == 0 else _by_bwrap(command)


@cache
def require_sandbox() -> None:
    """Finds out whether programs can be shut in here.

    Raises:
        SandboxError: they cannot.
    """
    command = sandboxed([interpreter(), *OPTIONS, "-c", PROBE])
    try:
        probe = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRIED, env=environment()
        )
        if probe.stdout == "in\n":
            return
        reason = " ".join(probe.stderr.split())[-200:] or f"exit code {probe.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    raise SandboxError(
        f"This machine cannot shut programs in ({reason}): install bubblewrap and allow user namespaces, or, where it "
        "may run code that nobody has read, write sandbox=off after the reward's name, such as "
        "cory_env.rewards.code:share_passed?sandbox=off."
    )


def environment() -> dict[str, str]:
    """All that a process inside knows of the environment. The hash seed makes a program do the same each time."""
    return {
        "PATH": PATH,
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def _seen() -> list[tuple[str, str]]:
    """What is seen inside: where it lies outside, and inside."""
    places = [place for place in SYSTEM if os.path.exists(place)]
    for place in dict.fromkeys((sys.base_prefix, os.path.dirname(interpreter()), packages())):
        if not any(Path(place).is_relative_to(other) for other in places):
            places.append(place)
    return [*((place, place) for place in places), (str(HERE), CODE)]


def _by_bwrap(command: Sequence[str]) -> list[str]:
    own = ("user", "ipc", "pid", "net", "uts", "cgroup-try")
    words = [
        shutil.which("bwrap") or "bwrap",
        *(f"--unshare-{what}" for what in own),
        "--die-with-parent",
        "--as-pid-1",
    ]
    insides = [*(inside for _, inside in _seen()), *DEVICES]
    parents = dict.fromkeys(str(above) for inside in insides for above in reversed(Path(inside).parents))
    for parent in parents:  # by itself it makes them such that its own user alone may enter
        words += ["--dir", parent]
    for outside, inside in _seen():
        link = os.path.islink(outside)
        words += ["--symlink", os.readlink(outside), inside] if link else ["--ro-bind", outside, inside]
    for device in DEVICES:
        words += ["--dev-bind", device, device]
    words += ["--perms", "1777", "--size", str(TEMPORARY), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    return [*words, "--", *command]


def _by_namespaces(command: Sequence[str]) -> list[str]:
    uid = random.SystemRandom().choice(UNNAMED_UIDS)
    arguments = (_seen(), DEVICES, TEMPORARY, uid, list(command))
    enter = f"import sys; sys.path.insert(0, {str(HERE.parents[1])!r}); from cory_env.sandbox.namespaces import main; "
    return [interpreter(), *OPTIONS, "-c", f"{enter}main{arguments!r}"]
