"""Seconds that a user waits before the first update and after the last one, by part."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.record import Figure, Record, median

CLAIM = "a run's first update begins soon after the command, and the prompt comes back soon after the last evaluation"
MARKS = {
    "imports and checks": r"Loading the models",
    "models, engines, self-test": r"Evaluating the untrained policies",
    "evaluation of the start": r" *0/2 +held-out",
    "two updates and the evaluation after them": r" *2/2 +held-out",
}
"""Parts of a run, each with the line of the terminal that ends it."""
AFTER = "saving, report and end of the processes"


def run(folder: Path, quick: bool) -> Record:
    """Runs `cory train` repeatedly and records the time of each line."""
    words = ["train", "imdb-tiny", "num_updates=2", "eval_every=1000"]
    if quick:
        words += ["backend=transformers", "num_runners=0", "queries_per_update=2", "minibatch_size=8", "eval_queries=4"]
    record = Record("startup", CLAIM, {"command": f"cory {' '.join(words)}"})
    rounds = [parts([*words, "--out", str(folder / f"run-{number}")]) for number in range(1 if quick else 5)]
    for part in rounds[0]:
        record.figures.append(median(part, [seconds[part] for seconds in rounds], "s"))
    before = list(MARKS)[:-1]
    sums = [sum(seconds[part] for part in before) for seconds in rounds]
    after = [seconds[AFTER] for seconds in rounds]
    record.figures.append(Figure("before the first update", statistics.median(sums), "s", at_most=8.0, runs=sums))
    record.figures.append(Figure("after the last evaluation", statistics.median(after), "s", at_most=1.5, runs=after))
    record.detail["rounds"] = rounds
    return record


def parts(words: list[str]) -> dict[str, float]:
    """Returns the seconds that each part of a run takes.

    Raises:
        RuntimeError: the run fails, or lacks one of the lines.
    """
    left, parts, times = list(MARKS.items()), {}, []
    last = time.monotonic()
    command = [sys.executable, "-u", "-m", "cory_rllib", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            times.append(line)
            if left and re.match(left[0][1], line):
                now = time.monotonic()
                parts[left.pop(0)[0]] = now - last
                last = now
    if process.returncode or left:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(times[-20:])}")
    return parts | {AFTER: time.monotonic() - last}
