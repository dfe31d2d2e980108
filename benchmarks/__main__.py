"""Runs benchmarks, each in its own process with its threads pinned.

python -m benchmarks                  # all
python -m benchmarks learner          # one
python -m benchmarks learner --quick  # only shows that it runs: tiny sizes, no figure worth quoting
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import RESULTS, BenchmarkError

NAMES = (
    "overhead",
    "generation",
    "learner",
    "shared_prefix",
    "turns",
    "role_exchange",
    "adapters",
    "sharding",
    "sync",
    "engines",
    "memory",
    "against_trl",
    "time_to_reward",
    "against_comlrl",
    "runners",
    "growth",
    "pace",
    "long_run",
    "faults",
    "startup",
)
PINNED = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "RAY_AUTH_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
}
_INSIDE = "CORY_BENCHMARK"  # set in the processes that measure


def main() -> int:
    """Runs the benchmarks named on the command line; 0, 1 if one failed, 2 if one cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measured claims, reproduced.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(NAMES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that the code runs")
    parser.add_argument("--times", type=int, default=20, metavar="N", help="how often `faults` lets each befall a run")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="of `faults`, those whose names hold this; a contest of `time_to_reward`; what grows in `growth`",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in NAMES:
            parser.error(f"There is no benchmark `{name}`. They are: {', '.join(NAMES)}.")
    if os.environ.get(_INSIDE):
        name = arguments.names[0]
        more: dict[str, int | str] = {"times": arguments.times} if name == "faults" else {}
        more |= {"only": arguments.only} if name in ("faults", "time_to_reward", "growth") else {}
        return measure(name, arguments.quick, arguments.out, **more)
    codes = []
    for name in arguments.names or NAMES:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks", name, "--out", str(arguments.out)]
        command += ["--times", str(arguments.times), "--only", arguments.only]
        command += ["--quick"] * arguments.quick
        codes.append(subprocess.run(command, env={**os.environ, **PINNED, _INSIDE: "1"}).returncode)
    return max(codes)


def measure(name: str, quick: bool, out: Path, **more: int | str) -> int:
    """Runs one benchmark in this process."""
    try:
        with tempfile.TemporaryDirectory(prefix="cory-benchmark-") as folder:
            record = importlib.import_module(f"benchmarks.{name}").run(Path(folder), quick, **more)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 2
    record.show()
    print(f"written to {record.write(out)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
