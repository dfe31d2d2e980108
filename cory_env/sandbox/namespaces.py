"""Sandboxes a process of root by Linux namespaces, with the same view as bubblewrap's and as an unprivileged user.

It runs first in the process to sandbox, and then replaces itself by the command.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
NEW_ROOT = "/sys"  # exists on every system; the new root is built there, visible to this process only

LIBC = ctypes.CDLL(None, use_errno=True)


View = Sequence[tuple[str, str, str]]
"""What a process sees: links, read-only files and devices, each as its kind, source and path inside."""


def enter(view: View, size: int, uid: int, command: Sequence[str]) -> None:
    """Sandboxes this process, which then becomes the command; does not return.

    Args:
        size: Bytes of the temporary folder.
    """
    _call("unshare", CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET)
    if child := os.fork():  # the first process of the new namespace; it dies with this one
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    _build_root(view, size)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.execv(command[0], list(command))  # as a user other than 0 it keeps no capability


def _build_root(view: View, size: int) -> None:
    """Builds a new root file system, makes it the root, and unmounts the old one."""
    _mount(None, "/", MS_REC | MS_PRIVATE)
    _mount("tmpfs", NEW_ROOT, MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir(f"{NEW_ROOT}/tmp")  # before the paths, some of which may be below /tmp
    _mount("tmpfs", f"{NEW_ROOT}/tmp", MS_NOSUID | MS_NODEV, f"size={size},mode=1777")
    for kind, source, inside in view:
        target = NEW_ROOT + inside
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if kind == "link":
            os.symlink(source, target)
            continue
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
        else:
            open(target, "w").close()
        _mount(source, target, MS_BIND)
        if kind == "file":
            _mount(None, target, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    _mount(None, NEW_ROOT, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(NEW_ROOT)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", MNT_DETACH)
    os.chdir("/tmp")


def _mount(source: str | None, target: str, flags: int, options: str | None = None) -> None:
    kind = source if flags & (MS_BIND | MS_REMOUNT | MS_PRIVATE) == 0 else None
    words = [None if word is None else word.encode() for word in (source, target, kind, options)]
    _call("mount", *words[:3], ctypes.c_ulong(flags), words[3], about=target)


def _call(name: str, *arguments: object, about: str = "") -> None:
    if getattr(LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} {about}: {os.strerror(number)}")


def main(*arguments: Any) -> None:
    """Calls `enter` with the arguments; exits with a one-line error message if it fails."""
    try:
        enter(*arguments)
    except OSError as error:
        sys.exit(str(error))
