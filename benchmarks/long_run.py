"""A long run of a very small model: memory and handles stay flat, and neither its end nor a kill leaves anything."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.models import make_model
from benchmarks.processes import kinds
from benchmarks.record import Figure, Record

CLAIM = "1,000 updates leave memory and file handles flat; a kill at any moment loses and leaves nothing"
SHARED_MEMORY = Path("/dev/shm")
SETTLED = 0.3
"""Share of a run after which caches are full and allocators have their arenas."""
REWARD = "def length(completions):\n    return [float(len(text)) for text in completions]\n"
SETTINGS = (
    *(
        "queries_per_update=8",
        "minibatch_size=8",
        "num_epochs=1",
        "lr=1e-5",
        "max_response_tokens=6",
        "eval_queries=4",
        "eval_every=50",
    ),
    *("checkpoint_every=20", "num_runners=1", "check_weight_sync=false", "reward=my_reward:length"),
)


@dataclass
class Look:
    """Resources of a run's processes after an update."""

    update: int
    megabytes: dict[str, float] = field(default_factory=dict)
    """Unshared memory (USS) by kind of process."""
    handles: dict[str, int] = field(default_factory=dict)
    """Open files and sockets by kind."""


class SmallRun:
    """`cory train` on a very small model, in a separate folder, which is also its temporary folder."""

    def __init__(self, folder: Path, backend: str, updates: int) -> None:
        """Writes the model and the reward."""
        self.folder = folder
        self.words = [f"model={make_model('test', folder)}", f"backend={backend}", f"num_updates={updates}", *SETTINGS]
        self.temporary = folder / "t"
        self.temporary.mkdir()
        (folder / "my_reward.py").write_text(REWARD)

    @property
    def update(self) -> int:
        """The last recorded update; -1 before the first line."""
        metrics = self.folder / "run" / "metrics.jsonl"
        return metrics.read_text().count("\n") - 1 if metrics.exists() else -1

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Starts the run, or continues it, and yields its process, which is gone afterwards."""
        resume = (self.folder / "run" / "checkpoints").exists()
        words = ["--resume", "run"] if resume else [*self.words, "--out", "run"]
        temporary = dict.fromkeys(("TMPDIR", "RAY_TMPDIR"), str(self.temporary))
        with (self.folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "cory_rllib", "train", *words],
                cwd=self.folder,
                env={**os.environ, **temporary, "PYTHONPATH": os.pathsep.join(map(str, _path()))},
                stdout=output,
                stderr=output,
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def run_to_its_end(self, every: int) -> list[Look]:
        """Trains to the end and samples the processes' resources at intervals.

        Raises:
            RuntimeError: it failed.
        """
        looks: list[Look] = []
        due = self.update + every
        with self.started() as process:
            while process.poll() is None:
                time.sleep(0.2)
                if self.update >= due:
                    looks.append(look(process.pid, self.update))
                    due += every
            if process.returncode:
                raise RuntimeError(f"The run failed:\n{(self.folder / 'output.txt').read_text()[-3000:]}")
        return looks

    def kill_after(self, update: int, seconds: float) -> None:
        """Starts or continues the run, and kills it some time after an update has been recorded."""
        with self.started() as process:
            while self.update < update and process.poll() is None:
                time.sleep(0.02)
            time.sleep(seconds)


def _path() -> list[Path]:
    return [Path(__file__).parents[1]]


def look(pid: int, update: int) -> Look:
    """Sums the resources of a process and its descendants."""
    sample = Look(update)
    for kind, process in kinds(psutil.Process(pid)):
        try:
            size, handles = process.memory_full_info().uss / 1e6, process.num_fds()
        except psutil.Error:
            continue
        sample.megabytes[kind] = sample.megabytes.get(kind, 0.0) + size
        sample.handles[kind] = sample.handles.get(kind, 0) + handles
    return sample


def growth(looks: list[Look]) -> tuple[dict[str, float], dict[str, int]]:
    """Megabytes and handles that each kind of process gained once it had settled.

    The median of the last third less that of the third after settling: single looks are off by what happens to be
    in flight.
    """
    settled = looks[int(SETTLED * len(looks)) :]
    third = max(len(settled) // 3, 1)
    early, late = settled[:third], settled[-third:]
    kinds_seen = sorted({kind for sample in settled for kind in sample.megabytes})
    megabytes = {
        kind: _median([x.megabytes.get(kind, 0.0) for x in late]) - _median([x.megabytes.get(kind, 0.0) for x in early])
        for kind in kinds_seen
    }
    handles = {
        kind: int(_median([x.handles.get(kind, 0) for x in late]) - _median([x.handles.get(kind, 0) for x in early]))
        for kind in kinds_seen
    }
    return megabytes, handles


def _median(values: list[float] | list[int]) -> float:
    return sorted(values)[len(values) // 2]


def left_in_shared_memory(since: float, patience: float = 30.0) -> list[str]:
    """Names in shared memory that are newer than `since` (seconds) and that no living process holds.

    Ray's processes notice within seconds that their driver is gone, so it looks again until there are none.
    """
    deadline = time.monotonic() + patience
    while True:
        new = [entry for entry in SHARED_MEMORY.iterdir() if entry.lstat().st_mtime >= since]
        orphans = sorted(entry.name for entry in new if not _is_mapped(entry))
        if not orphans or time.monotonic() > deadline:
            return orphans
        time.sleep(1.0)


def _is_mapped(entry: Path) -> bool:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if str(entry) in (process / "maps").read_text():
                    return True
                if any(os.readlink(handle).startswith(str(entry)) for handle in (process / "fd").iterdir()):
                    return True
            except OSError:
                continue  # it has ended
    return False


def run(folder: Path, quick: bool) -> Record:
    """Measures a complete run, then one that is killed repeatedly."""
    updates, kills = (60, 2) if quick else (1000, 10)
    record = Record("long_run", CLAIM, {"updates": updates, "kills": kills, "words": SETTINGS})
    since = time.time()
    with short_folder() as folder:
        calm = SmallRun(folder, "vllm", updates)
        looks = calm.run_to_its_end(every=updates // 20)
        megabytes, handles = growth(looks)
        record.detail["looks"] = [vars(sample) for sample in looks]
        for kind, size in megabytes.items():
            record.figures.append(Figure(f"{kind}: memory gained", size, "MB", at_most=10.0))
            record.figures.append(Figure(f"{kind}: handles gained", handles[kind], at_most=0))
        left = sorted(entry.name for entry in calm.temporary.iterdir())
        record.figures.append(Figure("temporary files left", len(left), at_most=0))
    with short_folder() as folder:
        shaken = SmallRun(folder, "vllm", updates)
        chance = random.Random(0)
        for kill in range(kills):
            shaken.kill_after(max(shaken.update, 0) + 1 + chance.randrange(updates // (2 * kills)), chance.random())
            record.detail[f"kill {kill}"] = shaken.update
        shaken.run_to_its_end(every=updates)
        recorded = [json.loads(line)["update"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        lost = len(set(range(updates + 1)) - set(recorded)) + len(recorded) - len(set(recorded))
        record.figures.append(Figure(f"updates lost or doubled over {kills} kills", lost, at_most=0))
    left = left_in_shared_memory(since)
    record.detail["left in shared memory"] = left
    record.figures.append(Figure("files left in shared memory", len(left), at_most=0))
    return record


@contextmanager
def short_folder() -> Iterator[Path]:
    """A temporary folder with a short name: Ray's sockets lie deep in it, and their paths have a limit."""
    folder = Path(tempfile.mkdtemp(prefix="c-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
