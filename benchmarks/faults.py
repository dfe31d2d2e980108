"""Kills processes and machines of a run at random moments: updates lost, and seconds until the run continues."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil

from benchmarks.long_run import short_folder
from benchmarks.models import make_model
from benchmarks.nodes import ENGINE, LEARNER, RUNNER, Nodes, kill, named, wait_until
from benchmarks.record import Figure, Record, median

CLAIM = "a process or machine that dies costs no more than the updates since the last checkpoint, and none is doubled"
REWARD = "def brevity(completions):\n    return [-float(len(text)) for text in completions]\n"
SETTINGS = (
    *("dtype=fp32", "queries_per_update=8", "minibatch_size=8", "micro_batch_size=8", "num_epochs=1", "lr=1e-5"),
    *("max_response_tokens=6", "eval_queries=4", "eval_every=100", "checkpoint_every=5"),
    *(
        "exchange_period=3",
        "check_weight_sync=false",
        "reward=my_reward:brevity",
        "num_updates=100000",
        "generation_timeout=60",
    ),
)
TRANSFORMERS, VLLM = "backend=transformers", "backend=vllm"
LIMIT = 600.0
"""Seconds without a new update after which a run counts as lost."""
_NEAR = 1e-4  # figures of runs with other numbers of processes differ by rounding


class LostRun(RuntimeError):
    """The run did not continue."""


class Shaken:
    """A run into which faults are injected, in its own folder."""

    def __init__(self, folder: Path, *words: str) -> None:
        """Writes model and reward; nothing is started.

        Args:
            folder: a short path, for Ray's sockets lie in it.
            *words: settings beside `SETTINGS`, and options.
        """
        self.folder = folder
        self.settings = [f"model={make_model('test', folder)}", *SETTINGS, *(word for word in words if "=" in word)]
        self.options = [word for word in words if "=" not in word]
        self.environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{folder}"}
        self.process: subprocess.Popen[bytes] | None = None
        (folder / "my_reward.py").write_text(REWARD)

    @property
    def update(self) -> int:
        """The last recorded update; -1 before the first line."""
        return len(self.lines()) - 1

    def lines(self) -> list[dict[str, Any]]:
        """The whole lines of the metrics."""
        file = self.folder / "run" / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    def start(self) -> None:
        """Starts the run, or continues it."""
        resume = any((self.folder / "run" / "checkpoints").glob("update_*"))
        words = ["--resume", "run"] if resume else [*self.settings, "--out", "run"]
        with (self.folder / "output.txt").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cory_rllib", "train", *words, *self.options],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=output,
            )

    def reach(self, update: int) -> None:
        """Waits for an update to be recorded.

        Raises:
            LostRun: the process ended, or nothing came in `LIMIT` s.
        """
        assert self.process is not None
        process = self.process
        try:
            wait_until(lambda: self.update >= update or process.poll() is not None, LIMIT, every=0.05)
        except TimeoutError:
            raise LostRun(self.ending()) from None
        if self.update < update:
            raise LostRun(self.ending())

    def ending(self) -> str:
        """The last lines that the run printed."""
        return (self.folder / "output.txt").read_text()[-2000:]

    def end(self, how: signal.Signals) -> None:
        """Ends the driver, and waits for it."""
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(LIMIT)


Fault = Callable[[Shaken, random.Random], None]
"""Injects the fault; returns when the run continues, or could continue."""


def runner(run: Shaken, chance: random.Random) -> None:
    """SIGKILL to one of two runners."""
    kill(*chance.sample(named(RUNNER), 1))


def learner(run: Shaken, chance: random.Random) -> None:
    """SIGKILL to one of the learners."""
    kill(chance.choice(named(LEARNER)))


def engine(run: Shaken, chance: random.Random) -> None:
    """SIGKILL to one of the processes of the vLLM engines."""
    kill(chance.choice(named(ENGINE)))


def still_learner(run: Shaken, chance: random.Random) -> None:
    """SIGSTOP to the learner, for good."""
    named(LEARNER)[0].send_signal(signal.SIGSTOP)


def driver(run: Shaken, chance: random.Random) -> None:
    """SIGKILL to the driver, which is started again."""
    run.end(signal.SIGKILL)
    run.start()


def checkpoint(run: Shaken, chance: random.Random) -> None:
    """SIGKILL to the driver while it writes a checkpoint."""
    unfinished = run.folder / "run" / "checkpoints"
    wait_until(lambda: any(unfinished.glob(".unfinished-update_*")), LIMIT, every=0.0)
    sleep(chance.random() * 0.02)
    driver(run, chance)


def straggler(run: Shaken, chance: random.Random) -> None:
    """SIGSTOP to one of two runners, for good."""
    chance.choice(named(RUNNER)).send_signal(signal.SIGSTOP)


def shake(run: Shaken, fault: Fault, times: int, chance: random.Random) -> tuple[list[float], int]:
    """Injects a fault into a run at random moments.

    Returns:
        Each time's seconds from the fault to the first update beyond those recorded before it; runs lost.
    """
    seconds, lost = [], 0
    run.start()
    run.reach(2)
    for _ in range(times):
        sleep(3 * chance.random())
        before, started = run.update, monotonic()
        try:
            fault(run, chance)
            run.reach(before + 1)
            seconds.append(monotonic() - started)
            run.reach(before + 2)
        except LostRun as error:
            lost += 1
            print(error, file=sys.stderr, flush=True)
            run.end(signal.SIGKILL)
            run.start()
            run.reach(before + 2)
    run.end(signal.SIGINT)
    return seconds, lost


def compare(shaken: list[dict[str, Any]], calm: list[dict[str, Any]]) -> int:
    """Counts updates that are missing, doubled, or different from those of an undisturbed run."""
    numbers = [line["update"] for line in shaken]
    wrong = len(set(range(max(numbers) + 1)) - set(numbers)) + len(numbers) - len(set(numbers))
    undisturbed = {line["update"]: line for line in calm}
    for line in shaken[1:]:
        other = undisturbed[line["update"]]
        same = all(line[key] == other[key] for key in ("roles", "exchanges", "tokens", "weight_version_lag"))
        wrong += not (same and _near(line["policy"], other["policy"]))
    return wrong


def _near(one: Mapping[str, Mapping[str, float | None]], two: Mapping[str, Mapping[str, float | None]]) -> bool:
    for module, figures in one.items():
        for name, value in figures.items():
            other = two[module][name]
            if value is None or other is None:  # NaN
                if value != other:
                    return False
            elif not math.isclose(value, other, rel_tol=_NEAR, abs_tol=1e-5):
                return False
    return True


def undisturbed(updates: int, words: tuple[str, ...]) -> list[dict[str, Any]]:
    """Metrics of an undisturbed run with these settings besides `SETTINGS`."""
    with short_folder() as folder:
        run = Shaken(folder, *words)
        run.settings.append(f"num_updates={updates}")
        run.start()
        run.reach(updates)
        run.end(signal.SIGINT)
        return run.lines()


LOCAL: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "a runner of two": (runner, (TRANSFORMERS, "num_runners=2")),
    "the only runner, with its vLLM engines": (runner, (VLLM, "num_runners=1")),
    "a process of a vLLM engine over two": (
        engine,
        (VLLM, "num_runners=1", "runner_threads=2", "tensor_parallel_size=2"),
    ),
    "the learner": (learner, (TRANSFORMERS, "num_runners=0", "num_learners=1", "--max-failures", "1000")),
    "a learner that stands still": (
        still_learner,
        (TRANSFORMERS, "num_runners=0", "num_learners=1", "learner_timeout=10", "--max-failures", "1000"),
    ),
    "a learner of four, two per LLM": (
        learner,
        (TRANSFORMERS, "num_runners=0", "shards_per_policy=2", "num_learners=4", "--max-failures", "1000"),
    ),
    "a runner of two that learners send weights to": (
        runner,
        (VLLM, "num_runners=2", "shards_per_policy=1", "num_learners=2", "weight_transfer=gloo"),
    ),
    "the driver": (driver, (TRANSFORMERS, "num_runners=0")),
    "the driver, writing a checkpoint": (checkpoint, (TRANSFORMERS, "num_runners=0", "checkpoint_every=1")),
    "a straggler of two": (straggler, (TRANSFORMERS, "num_runners=2", "generation_timeout=10", "reward_timeout=2")),
}
"""Faults within one machine, and the settings besides `SETTINGS`."""
TWO: tuple[tuple[str, ...], int, int] = (("num_runners=2", "runner_threads=2"), 2, 2)
"""Each runner fits on a node, and both on none."""
MESH = ("num_runners=1", "shards_per_policy=2", "num_learners=4")
ON_NODES: dict[str, tuple[bool, tuple[str, ...], int, int]] = {
    "a node of two, and another joins": (False, *TWO),
    "the whole cluster, and a new one": (True, *TWO),
    "a node of four, with a learner or the runner, and another joins": (False, (*MESH, "--max-failures", "1000"), 4, 1),
}
"""Faults of machines: whether all are lost, the settings besides `SETTINGS`, the nodes, and the CPUs of each."""


def on_local(fault: Fault, words: tuple[str, ...], times: int) -> tuple[list[float], int, list[dict[str, Any]]]:
    """Runs `shake` on a local Ray; returns its result and the run's metrics."""
    with short_folder() as folder:
        run = Shaken(folder, *words)
        try:
            return *shake(run, fault, times, random.Random(0)), run.lines()
        finally:
            _end_all(run)


def on_nodes(
    cluster_lost: bool, words: tuple[str, ...], nodes: int, cpus: int, times: int
) -> tuple[list[float], int, list[dict[str, Any]]]:
    """Shakes a run whose processes are on separate nodes: kills one node, or the `whole` cluster."""
    with short_folder() as folder:
        run = Shaken(folder, TRANSFORMERS, *words)
        machines: list[Any] = []

        def begin() -> None:
            machines[:] = [Nodes(folder)]
            machines.extend(machines[0].add(cpus) for _ in range(nodes))
            run.environment["RAY_ADDRESS"] = machines[0].address

        def lose_node(run: Shaken, chance: random.Random) -> None:
            machines[0].lose(machines.pop(chance.randint(1, nodes)))
            machines.append(machines[0].add(cpus))

        def lose_all(run: Shaken, chance: random.Random) -> None:
            machines[0].close()
            run.end(signal.SIGKILL)  # it was on the head's machine
            begin()
            run.start()

        begin()
        try:
            return *shake(run, lose_all if cluster_lost else lose_node, times, random.Random(0)), run.lines()
        finally:
            _end_all(run)
            machines[0].close()


def _end_all(run: Shaken) -> None:
    if run.process is not None and run.process.poll() is None:
        children = psutil.Process(run.process.pid).children(recursive=True)
        kill(*children)
        with contextlib.suppress(ProcessLookupError):
            run.end(signal.SIGKILL)


def run(folder: Path, quick: bool, times: int = 20, only: str = "") -> Record:
    """Runs every fault whose name contains `only`, `times` times each."""
    times = 2 if quick else times
    record = Record("faults", CLAIM, {"times": times, "words": SETTINGS})
    calm: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for name in (name for name in (*LOCAL, *ON_NODES) if only in name):
        if name in LOCAL:
            fault, words = LOCAL[name]
            seconds, lost, lines = on_local(fault, words, times)
        else:
            words = (TRANSFORMERS,)
            seconds, lost, lines = on_nodes(*ON_NODES[name], times)
        in_driver = (TRANSFORMERS, "num_runners=0") if words[0] == TRANSFORMERS else words
        if len(calm.get(in_driver, [])) < len(lines):
            calm[in_driver] = undisturbed(len(lines) - 1, in_driver)
        record.figures.append(Figure(f"{name}: runs lost of {times}", lost, at_most=0))
        record.figures.append(
            Figure(f"{name}: updates lost, doubled or changed", compare(lines, calm[in_driver]), at_most=0)
        )
        if seconds:
            record.figures.append(median(f"{name}: until the next new update", seconds, "s"))
        record.detail[name] = {"seconds": seconds, "updates": len(lines) - 1}
        print(f"{name}: {lost} of {times} lost, {len(lines) - 1} updates", file=sys.stderr, flush=True)
    return record
