"""Memory of this machine: its RAM, or its container's limit, and its GPU."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""Lines `ID:CONTROLLERS:PATH`; version 2 has the id 0 and no controllers."""


def ram_bytes(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """Bytes of RAM that processes here can use: the machine's, or the smallest limit of a control group."""
    limits = [float(psutil.virtual_memory().total)]
    for line in _read(membership).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.strip("/")  # in a container often not mounted, but the root has the limit then
        for folder in [group, *group.parents][: len(Path(path).parts)]:
            if (text := _read(folder / name).strip()).isdecimal():  # version 2 has `max` if there is no limit
                limits.append(float(text))
    return min(limits)


def gpu_bytes() -> float | None:
    """Bytes of this machine's first GPU; None without one that PyTorch can use."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read by torch on import
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def _read(path: Path) -> str:
    """Text of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
