"""The runs of the study: each is `cory train` and then `cory probe`, and results in a small file.

Beside the files of `benchmarks.arm_runs` there is OUT/runs/ARM/seed_N.probe/. It and the run's folder are removed at
the end.
"""

from __future__ import annotations

import datetime
import json
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from benchmarks.arm_runs import ArmRun, by_seed, run_command, write
from benchmarks.feedback.design import PRESET, SHARED, Arm, prompt_lengths
from benchmarks.record import BenchmarkError
from launch.evaluation.batches import RESPONSES
from launch.evaluation.figures import BASE
from launch.experiments.results import StudyRun
from launch.experiments.study import to_cli_setting
from launch.experiments.study_runs import collect_result
from launch.probing.figures import Outcomes, best_of, compute_figures
from launch.probing.probe import RESULT, collect_outcomes
from launch.probing.sampler import ProbedSample
from launch.run_folder.environment import Hardware, hardware, versions
from launch.run_folder.records import Update
from policies.settings.migration.removed import WITHOUT_EFFECT
from policies.settings.settings import Settings


class Way(TypedDict):
    """A way to answer queries."""

    score: float
    """Share of right answers."""
    tokens: float
    """Generated tokens per query."""
    prompt_tokens: float
    """Tokens of all prompts of a query."""


class Measured(TypedDict):
    """What a probe measured at one temperature."""

    figures: dict[str, float | None]
    """The shares of `launch.probing.figures.conditional_shares`."""
    best_of: list[Way]
    """Best-of-n by the same check, n = 1, 2, ..."""
    chain: Way
    """The chain that ends at a right first answer."""


class Training(TypedDict):
    """The cost and the curve of a training run."""

    status: str
    reason: str | None
    updates: int
    steps: int
    """Optimizer steps of each LLM."""
    tokens: int
    """Generated in training."""
    prompt_tokens: int
    seconds: float
    """Of all updates, without startup and evaluations."""
    curve: list[dict[str, float | None]]
    """Held-out task rewards at the training temperature, by update and generated tokens."""


class Result(TypedDict):
    """The result of a run."""

    arm: str
    seed: int
    commands: list[str]
    train: Training | None
    """None: not trained."""
    probe: dict[str, Measured] | None
    """By temperature; None: the run diverged."""
    probe_seconds: float
    versions: dict[str, str]
    hardware: Hardware
    date: str


class Job(ArmRun[Arm]):
    """A run of an arm, finished or not."""

    study, preset, shared = "feedback", PRESET, SHARED

    @property
    def settings(self) -> Settings:
        """The settings of the training run."""
        return self.study_job.study.settings(self.study_job.arm, self.seed)

    @property
    def probe_words(self) -> list[str]:
        """Arguments of `cory probe` after the target, without the folder."""
        options = {key: getattr(self.arm.probe, key) for key in ("queries", "samples", "split")}
        temperatures = ",".join(map(str, self.arm.probe.temperatures))
        words = [f"--{key}={value}" for key, value in options.items()] + [f"--temperatures={temperatures}"]
        if self.arm.settings is None:
            evaluation = {"eval_queries": self.settings.eval_queries, "seed": self.seed}
            return [PRESET, *(to_cli_setting(*item) for item in evaluation.items()), *words]
        return ["feedback=task", "--checkpoint=latest", *words]

    @property
    def evaluate_words(self) -> list[str]:
        """Arguments of `cory evaluate` after the run, without the folder: for chains of more than two agents."""
        plan = self.arm.probe
        options = [f"--queries={plan.queries}", "--samples=1", f"--split={plan.split}", "--checkpoint=latest"]
        return [f"temperature={plan.temperatures[0]:g}", *options]

    @property
    def measure_words(self) -> list[str]:
        """Arguments of the command that measures, with its name, without the folders."""
        if "roles" in (self.arm.settings or {}):
            return ["evaluate", "RUN", *self.evaluate_words]
        return ["probe", self.model if self.arm.settings is None else "RUN", *self.probe_words]

    @property
    def commands(self) -> list[str]:
        """The command lines without folders, by which a result is recognized."""
        train = [] if self.arm.settings is None else [shlex.join(["cory", "train", *self.study_job.words])]
        return [*train, shlex.join(["cory", *self.measure_words])]

    @property
    def model(self) -> str:
        """Name of the initial model."""
        return self.settings.model_names

    def read(self) -> Result | None:
        """Reads the result, if there is one.

        Raises:
            BenchmarkError: it was created with other settings.
        """
        if not self.result.exists():
            return None
        result: Result = json.loads(self.result.read_text(encoding="utf-8"))
        words = [command.split(" ") for command in result["commands"]]
        recorded = [" ".join(w for w in command if w.partition("=")[0] not in WITHOUT_EFFECT) for command in words]
        if recorded != self.commands:
            raise BenchmarkError(
                f"{self.result} was created by other commands than {' and '.join(self.commands)}. Remove it, or choose "
                "another folder with --out."
            )
        return result


def list_jobs(arms: Sequence[Arm], out: Path) -> list[Job]:
    """Returns the runs of some arms, ordered by seed."""
    return by_seed(Job(arm, seed, out) for arm in arms for seed in arm.seeds)


def execute(job: Job) -> Result:
    """Trains and probes; a killed training continues.

    Raises:
        BenchmarkError: one of them failed.
        KeyboardInterrupt: after a signal; the same call continues.
    """
    folder = job.study_job.run
    folder.parent.mkdir(parents=True, exist_ok=True)
    training = None
    if job.arm.settings is not None:
        options = ["--out", str(folder), "--continue", "--quiet"]
        process_result = run_command(["train", *job.study_job.words, *options], job.study_job.output)
        run = collect_result(job.study_job, process_result)
        training = summarize(run)
    measured, seconds = None, 0.0
    if training is None or training["status"] == "done":
        out = folder.with_suffix(".probe")
        shutil.rmtree(out, ignore_errors=True)  # of a killed process
        start = time.monotonic()
        words = [str(folder) if word == "RUN" else word for word in job.measure_words]
        process_result = run_command([*words, "--out", str(out), "--quiet"], job.study_job.output)
        seconds = time.monotonic() - start
        if process_result.code:
            raise BenchmarkError(f"{job.name}: {' '.join(process_result.output.split()[-60:])}")
        measured = read_measured(job, out)
    result = Result(
        arm=job.arm.name,
        seed=job.seed,
        commands=job.commands,
        train=training,
        probe=measured,
        probe_seconds=round(seconds, 1),
        versions=versions(),
        hardware=hardware(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    write(job.result, result)
    for path in (folder, folder.with_suffix(".probe")):
        shutil.rmtree(path, ignore_errors=True)
    return result


def summarize(run: StudyRun) -> Training:
    """Returns the cost and the curve of a run."""
    lines = [line for line in run.metrics if "policy" in line]
    settings = run.settings
    tokens = sum(line["tokens"] for line in lines)
    pioneers = settings.queries_per_update * settings.num_generations * len(lines)
    lengths = prompt_lengths(settings.model_dump())
    mean_length = tokens / max(pioneers, 1) if settings.num_agents == 1 else _mean_length(lines)
    others = max(round(tokens / mean_length) - pioneers, 0)
    return Training(
        status=run.status,
        reason=run.reason,
        updates=len(lines),
        steps=settings.hyperparameters.steps * settings.num_epochs * len(lines),
        tokens=tokens,
        prompt_tokens=round(pioneers * lengths[0] + others * float(np.mean(lengths[1:]))),
        seconds=run.cost["seconds"],
        curve=_curve(run.metrics),
    )


def _mean_length(lines: Sequence[Update]) -> float:
    lengths = [figures["response_length"] or 0.0 for line in lines for figures in line["policy"].values()]
    return float(np.mean(lengths))


def _curve(lines: Sequence[Update]) -> list[dict[str, float | None]]:
    points, tokens = [], 0
    for line in lines:
        tokens += line.get("tokens") or 0
        if "evaluation" in line:
            mean = line["evaluation"]["mean"]
            point = {"update": line["update"], "tokens": tokens, "alone": mean["task_reward"], "kl": mean["kl"]}
            last = line.get("last_response")
            points.append({**point, **({} if last is None else {"chain": last["task_reward"]})})
    return points


def read_measured(job: Job, folder: Path) -> dict[str, Measured]:
    """Reads what a probe or an evaluation measured, by temperature.

    Args:
        job: The run.
        folder: Of the probe or evaluation.
    """
    lengths = prompt_lengths(job.arm.settings or {})
    with (folder / RESPONSES).open(encoding="utf-8") as lines:
        responses = [json.loads(line) for line in lines]
    if job.measure_words[0] == "probe":
        solved_at = json.loads((folder / RESULT).read_text(encoding="utf-8"))["solved_at"]
        by_temperature: dict[float, list[ProbedSample]] = {}
        for sample in responses:
            by_temperature.setdefault(sample["temperature"], []).append(sample)
        return {
            f"{temperature:g}": measure(collect_outcomes(samples, solved_at, str.strip), lengths)
            for temperature, samples in by_temperature.items()
        }
    chains = [chain["responses"] for chain in responses]
    trained = [chain for chain in chains if chain[0]["policy"] != BASE]
    return {f"{job.arm.probe.temperatures[0]:g}": measure_chains(trained, lengths)}


def measure_chains(chains: Sequence[Sequence[Mapping[str, Any]]], lengths: Sequence[int]) -> Measured:
    """Computes the score and tokens of chains that end at a right answer.

    Args:
        chains: The responses of each chain in `responses.jsonl` of an evaluation; they may be fewer than positions.
        lengths: Tokens of each position's prompt.
    """

    def way_after(count: int) -> Way:
        shown = [chain[:count] for chain in chains]
        return Way(
            score=float(np.mean([chain[-1]["metrics"]["task_reward"] for chain in shown])),
            tokens=float(np.mean([sum(len(response["tokens"]) for response in chain) for chain in shown])),
            prompt_tokens=float(np.mean([sum(lengths[: len(chain)]) for chain in shown])),
        )

    return Measured(figures={}, best_of=[way_after(1)], chain=way_after(len(lengths)))


def measure(outcomes: Outcomes, lengths: Sequence[int]) -> Measured:
    """Computes what is compared from the outcomes of a probe.

    Args:
        outcomes: Of a probe with feedback, at one temperature.
        lengths: Tokens of the first and the second agent's prompt.
    """
    ones = outcomes._replace(length=np.ones_like(outcomes.length))
    figures = compute_figures(outcomes)
    assert outcomes.accepted is not None
    asked_again = float((~outcomes.accepted).mean())
    chain = figures["chain_feedback"]
    ways = []
    for n in range(1, outcomes.right.shape[1] + 1):
        strategy = best_of(outcomes, n)
        ways.append(
            Way(
                score=float(strategy.score.mean()),
                tokens=float(strategy.tokens.mean()),
                prompt_tokens=lengths[0] * float(best_of(ones, n).tokens.mean()),
            )
        )
    names = ("p1", "p1_again", "p2", "p2_feedback", "kept", "kept_feedback", "wrongly_accepted", "not_accepted")
    return Measured(
        figures={name: figures[name].estimate.mean for name in names},
        best_of=ways,
        chain=Way(
            score=chain.estimate.mean,
            tokens=chain.tokens or 0.0,
            prompt_tokens=lengths[0] + asked_again * lengths[1],
        ),
    )
