"""Limits that both sandboxed processes set for themselves."""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from typing import Any

MAX_OPEN_FILES = 64
MAX_THREADS = 64
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
# A filter of system calls (seccomp): operations, verdicts, and where the kernel keeps architecture, number and flags.
LOAD, IF_EQUAL, IF_ABOVE, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOWED, NO_SUCH_CALL, TRY_AGAIN = 0x7FFF0000, 0x00050000 | 38, 0x00050000 | 11
ARCHITECTURE, NUMBER, FLAGS = 4, 0, 16
CLONE_THREAD = 0x10000
CLONE3, X32_CALLS = 435, 0x40000000
CALLS = {"x86_64": (0xC000003E, 56, 57, 58), "aarch64": (0xC00000B7, 220, -1, -1)}  # architecture, clone, fork, vfork


def read_and_confine(file: int, limits: Sequence[int], packages: str, die_with_parent: bool) -> Any:
    """Reads this process's input, then limits its memory, its CPU time and its files.

    Args:
        limits: Bytes of address space, seconds of CPU time, and bytes of any file that it writes.
        packages: Folder of installed packages, which may be imported.
        die_with_parent: Whether this process must arrange to die with its parent, because no sandbox does.

    Returns:
        The decoded input.
    """
    with open(file, "rb") as stream:
        content = json.load(stream)
    os.setsid()  # signals to its group reach no other process
    if die_with_parent:
        kill_with_parent()
    memory, seconds, file_size = limits
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        _lower(limit, value)
    sys.path.append(packages)
    return content


def kill_with_parent() -> None:
    """Lets the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def forbid_processes() -> None:
    """Lets this process start a few threads, but no processes; neither if the kernel cannot tell them apart."""
    _lower(resource.RLIMIT_NPROC, MAX_THREADS if _filter_calls() else 1)


def _filter_calls() -> bool:
    """Installs a filter of system calls; returns whether the kernel took it."""
    machine = os.uname().machine
    if machine not in CALLS:
        return False
    architecture, clone, fork, vfork = CALLS[machine]
    # Per step: operation, how many steps to skip if it holds, and if not, operand. The last three are the verdicts.
    steps = [
        (LOAD, 0, 0, ARCHITECTURE),
        (IF_EQUAL, 0, 8, architecture),
        (LOAD, 0, 0, NUMBER),
        (IF_ABOVE, 6, 0, X32_CALLS),
        (IF_EQUAL, 5, 0, CLONE3),  # the C library then uses clone, whose flags are in a register
        *((IF_EQUAL, 5 - k, 0, number & 0xFFFFFFFF) for k, number in enumerate((fork, vfork))),
        (IF_EQUAL, 0, 4, clone),
        (LOAD, 0, 0, FLAGS),
        (IF_ANY_BIT, 2, 1, CLONE_THREAD),
        (RETURN, 0, 0, NO_SUCH_CALL),
        (RETURN, 0, 0, TRY_AGAIN),
        (RETURN, 0, 0, ALLOWED),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    return libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0) == 0


def _lower(limit: int, value: int) -> None:
    _, maximum = resource.getrlimit(limit)
    value = value if maximum == resource.RLIM_INFINITY else min(value, maximum)
    resource.setrlimit(limit, (value, value))
