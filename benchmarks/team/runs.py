"""The runs of the study: each trains with `cory train`, measures its LLMs, and leaves a small file.

Beside the files of `benchmarks.arm_runs` there is OUT/results/ARM/partners_N.json, of a team: its first LLM with the
second one of the next seed. For these, the runs' folders are kept.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import torch

from benchmarks.arm_runs import ArmRun, by_seed, run_command, write
from benchmarks.feedback.design import PRESET
from benchmarks.feedback.runs import Training, summarize
from benchmarks.record import BenchmarkError
from benchmarks.team.design import SHARED, Arm
from benchmarks.team.measuring import Measurement, Policy, Way
from cory_env.rewarding.worker import RewardWorker
from launch.experiments.study_runs import collect_result
from launch.models.trained import open_trained
from launch.run_folder.environment import Hardware, hardware, versions
from launch.training.preflight import load_task
from policies.models.model_names import model_path


class Result(TypedDict):
    """The result of a run."""

    arm: str
    seed: int
    command: str
    parameters: int
    """Of all its LLMs."""
    train: Training
    ways: dict[str, Way]
    """Ways to answer, by name (`measure`); empty if the run diverged."""
    measure_seconds: float
    versions: dict[str, str]
    hardware: Hardware


class Job(ArmRun[Arm]):
    """A run of an arm, finished or not."""

    study, preset, shared = "team", PRESET, SHARED

    @property
    def partners(self) -> Path:
        """Path of the result with the next seed's partner."""
        return self.result.with_name(f"partners_{self.seed}.json")

    @property
    def command(self) -> str:
        """The command line of the training, without the folder, by which a result is recognized."""
        return shlex.join(["cory", "train", *self.study_job.words])

    def read(self) -> Result | None:
        """Reads the result, if there is one.

        Raises:
            BenchmarkError: it was created with other settings.
        """
        if not self.result.exists():
            return None
        result: Result = json.loads(self.result.read_text(encoding="utf-8"))
        if result["command"] != self.command:
            raise BenchmarkError(f"{self.result} was created by {result['command']}, not by {self.command}. Remove it.")
        return result

    def read_partners(self) -> Way | None:
        """Reads the result with the next seed's partner, if there is one."""
        if not self.partners.exists():
            return None
        way: Way = json.loads(self.partners.read_text(encoding="utf-8"))
        return way


def execute(job: Job) -> Result:
    """Trains and measures; a killed training continues.

    Raises:
        BenchmarkError: the training failed.
        KeyboardInterrupt: after a signal; the same call continues.
    """
    folder = job.study_job.run
    folder.parent.mkdir(parents=True, exist_ok=True)
    words = [*job.study_job.words, "--out", str(folder), "--continue", "--quiet"]
    run = collect_result(job.study_job, run_command(["train", *words], job.study_job.output))
    start, ways, parameters = time.monotonic(), dict[str, Way](), 0
    if run.status == "done":
        policies = load_policies(job)
        parameters = sum(count_parameters(policies[name]) for name in ("first", "second")[: job.arm.num_llms])
        ways = measure(job, policies)
    result = Result(
        arm=job.arm.name,
        seed=job.seed,
        command=job.command,
        parameters=parameters,
        train=summarize(run),
        ways=ways,
        measure_seconds=round(time.monotonic() - start, 1),
        versions=versions(),
        hardware=hardware(),
    )
    write(job.result, result)
    return result


def load_policies(job: Job) -> dict[str, Policy]:
    """Returns the LLMs that responded first and second in the last update, and the initial model (`base`)."""
    trained = open_trained(job.study_job.run, "latest")
    names = ("first", "second")
    policy_ids = [*trained.metrics[-1]["roles"].values()]
    policies = {
        name: Policy(trained, policy_id, trained.base_path(policy_id))
        for name, policy_id in zip(names, policy_ids * 2, strict=False)
    }
    return {**policies, "base": Policy(None, "", model_path(SHARED["model"]))}


def measure(job: Job, policies: Mapping[str, Policy]) -> dict[str, Way]:
    """Measures the ways in which a run's LLMs can answer.

    Returns:
        By name: `one_answer`, `best_of_2` and `best_of_3` of the first LLM; `chain` and `blind`, a chain in which the
        second agent sees no feedback. Of a single agent also the same of the initial model, with `base ` in front. Of a
        team also `swapped`; `first only` and `second only`, chains of one LLM; and `best_of_2_both`.
    """
    is_team = job.arm.num_llms == 2
    needed = {"first", "second"} if is_team else {"first", "base"} if job.arm.kind == "single" else {"first"}
    with open_measurement(job, {name: policy for name, policy in policies.items() if name in needed}) as measurement:
        ways = _alone(measurement, "first")
        if not is_team:
            ways |= {kind: measurement.chain("first", "first", kind) for kind in ("chain", "blind")}
        if "base" in needed:
            ways |= {f"base {name}": way for name, way in _alone(measurement, "base").items()}
            ways |= {f"base {kind}": measurement.chain("base", "base", kind) for kind in ("chain", "blind")}
        if is_team:
            ways["chain"] = measurement.chain("first", "second")
            ways["swapped"] = measurement.chain("second", "first")
            ways["first only"] = measurement.chain("first", "first")
            ways["second only"] = measurement.chain("second", "second")
            ways["best_of_2_both"] = measurement.independent("first", "second")
    return ways


def measure_partners(job: Job, other: Job) -> Way:
    """Measures the first LLM of a team with the second one of another seed, and writes the result."""
    policies = {"first": load_policies(job)["first"], "second": load_policies(other)["second"]}
    with open_measurement(job, policies) as measurement:
        way = measurement.chain("first", "second")
    write(job.partners, way)
    return way


def open_measurement(job: Job, policies: Mapping[str, Policy]) -> Measurement:
    """Returns the measurement of the policies of a run, with the queries and random numbers of its seed."""
    torch.set_num_threads(1)
    chain = Job(job.arm._replace(kind="feedback"), job.seed, job.out).study_job
    settings = chain.study.settings(chain.arm, job.seed).model_copy(update={"backend": "transformers"})
    task, _ = load_task(settings)
    worker = RewardWorker(task.reward, feedback=task.feedback, timeout=settings.reward_timeout)
    return Measurement(settings, policies, job.arm.split, job.arm.queries, worker)


def count_parameters(policy: Policy) -> int:
    """Returns the number of trained parameters of a policy."""
    assert policy.trained is not None
    return sum(weight.size for weight in policy.trained.checked_weights(policy.policy_id).values())


def list_jobs(arms: Sequence[Arm], out: Path) -> list[Job]:
    """Returns the runs of some arms, ordered by seed."""
    return by_seed(Job(arm, seed, out) for arm in arms for seed in arm.seeds)


def _alone(measurement: Measurement, name: str) -> dict[str, Way]:
    return {
        "one_answer": measurement.best_of(name, 1),
        **{f"best_of_{n}": measurement.best_of(name, n) for n in (2, 3)},
    }
