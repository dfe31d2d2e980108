"""Sandboxes processes by bubblewrap, or by `namespaces` for root, who would keep privileges in bubblewrap.

In both, a process has its own read-only file system with the system's libraries, Python and its packages, but no home
directories or user data; its own temporary folder in memory; no network; and it sees no other processes. It runs as an
unprivileged user and dies with the process that started it. It sets its memory and time limits itself (`confinement`).
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
LINKS = {"/dev/stdin": "/tmp/.stdin", "/dev/stdout": "/tmp/.stdout"}  # the files of a script (`script`)
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
CODE_ROOT = "/sandbox"
CODE = f"{CODE_ROOT}/cory_env/sandbox"  # path of this folder in the sandbox
BWRAP_OPTIONS = {"link": "--symlink", "file": "--ro-bind", "device": "--dev-bind"}
TEMPORARY = 16 * 2**20  # bytes of the temporary folder, and of any file
# Unnamed users, the same range as systemd's. Each process gets one, so that the system counts its resources separately.
UNNAMED_UIDS = range(61184, 65520)
OPTIONS = ("-P", "-s", "-S")  # Python options: no current folder, user folder or site packages on the search path
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROBE_SECONDS = 20.0
PROBE = f"import sys; sys.path.insert(0, {CODE_ROOT!r}); import cory_env.sandbox.peer; open('/dev/null'); print('in')"


class SandboxError(RuntimeError):
    """Programs cannot be sandboxed on this machine."""


def interpreter() -> str:
    """Returns the path of Python itself, not of the link to it in a virtual environment."""
    return os.path.realpath(sys.executable)


def packages() -> str:
    """Returns the folder of installed packages."""
    return sysconfig.get_path("purelib")


def sandbox_command(command: Sequence[str]) -> list[str]:
    """Returns a command that runs `command` in the sandbox."""
    return _namespaces_command(command) if os.geteuid() == 0 else _bwrap_command(command)


@cache
def require_sandbox() -> None:
    """Checks that programs can be sandboxed on this machine."""
    command = sandbox_command([interpreter(), *OPTIONS, "-c", PROBE])
    try:
        probe = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS, env=environment()
        )
        if probe.stdout == "in\n":
            return
        reason = " ".join(probe.stderr.split())[-200:] or f"exit code {probe.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    raise SandboxError(
        f"The sandbox does not work on this machine ({reason}). Install bubblewrap and allow user namespaces. If the "
        "machine may run untrusted code, disable the sandbox in the names of the reward and of the feedback, such as "
        "cory_env.rewards.code:share_passed?sandbox=off and cory_env.rewards.code:test_feedback?sandbox=off."
    )


def environment() -> dict[str, str]:
    """Returns the environment variables of a sandboxed process. The hash seed makes programs deterministic."""
    return {
        "PATH": PATH,
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def _view() -> list[tuple[str, str, str]]:
    """Returns what a process sees: links, read-only files and devices, each as its kind, source and path inside."""
    paths = [path for path in SYSTEM if os.path.exists(path)]
    for path in dict.fromkeys((sys.base_prefix, os.path.dirname(interpreter()), packages())):
        if not any(Path(path).is_relative_to(other) for other in paths):
            paths.append(path)
    return [
        *(("link", os.readlink(path), path) if os.path.islink(path) else ("file", path, path) for path in paths),
        ("file", str(HERE), CODE),
        *(("device", path, path) for path in DEVICES),
        *(("link", target, path) for path, target in LINKS.items()),
    ]


def _bwrap_command(command: Sequence[str]) -> list[str]:
    namespaces = ("user", "ipc", "pid", "net", "uts", "cgroup-try")
    words = [
        shutil.which("bwrap") or "bwrap",
        *(f"--unshare-{namespace}" for namespace in namespaces),
        "--die-with-parent",
        "--as-pid-1",
        *("--perms", "1777", "--size", str(TEMPORARY), "--tmpfs", "/tmp"),  # before the paths, which may be below it
    ]
    view = _view()
    parents = dict.fromkeys(str(above) for *_, inside in view for above in reversed(Path(inside).parents))
    for parent in parents:  # bwrap itself would make them accessible only to its own user
        words += ["--dir", parent]
    for kind, source, inside in view:
        words += [BWRAP_OPTIONS[kind], source, inside]
    return [*words, "--remount-ro", "/", "--chdir", "/tmp", "--", *command]


def _namespaces_command(command: Sequence[str]) -> list[str]:
    uid = random.SystemRandom().choice(UNNAMED_UIDS)
    enter = f"import sys; sys.path.insert(0, {str(HERE.parents[1])!r}); from cory_env.sandbox.namespaces import main; "
    return [interpreter(), *OPTIONS, "-c", f"{enter}main{(_view(), TEMPORARY, uid, list(command))!r}"]
