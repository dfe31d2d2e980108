"""Plans a probe: its settings with and without feedback, its policies, and its batches."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cory_env.pickled import display_name
from cory_env.tasks import TASKS, Split, Task
from cory_env.tasks.task import FEEDBACK_PLACEHOLDER, placeholders
from launch.cluster.gpus import check_gpus
from launch.console.errors import CommandError
from launch.evaluation.evaluation import RESPONSE_SETTINGS
from launch.evaluation.target import find_run, target_settings
from launch.models.trained import PolicySet, open_trained
from launch.models.trained_chain import MAX_BATCH_SIZE
from launch.probing.figures import MIN_SAMPLES
from launch.run_folder import manifest
from launch.run_folder.sources import collect_sources
from launch.training import preflight
from policies.models.model_names import AVERAGE_POLICY
from policies.settings.files import read_file, read_preset
from policies.settings.overrides import apply_overrides
from policies.settings.settings import Settings, Tokenizers
from policies.settings.yaml12 import Value

CPU_BATCH_SIZE = 32
ProbeBatch = tuple[float, list[tuple[int, int]]]
"""A temperature, and pairs of query index and sample index."""


class ProbePlan(NamedTuple):
    """A probe, with everything its responses depend on."""

    settings: Settings
    """Those of the chain with feedback, if there is a feedback function."""
    task: Task
    plain_settings: Settings
    """The same without feedback."""
    plain_task: Task
    tokenizers: Tokenizers
    policies: PolicySet | None
    """The policies of a run; None: the model of the settings."""
    policy_ids: tuple[str, str]
    """Of the first and the second agent."""
    split: Split
    queries: int
    """Number of queries, the first of the split."""
    samples: int
    """First answers per query."""
    temperatures: tuple[float, ...]

    @property
    def batch_size(self) -> int:
        """Maximum number of first answers that are generated at once; small on a CPU, so that progress is seen."""
        return MAX_BATCH_SIZE[self.settings.backend] if torch.cuda.is_available() else CPU_BATCH_SIZE

    def batches(self) -> list[ProbeBatch]:
        """All batches in order."""
        size = self.batch_size
        prompt_refs = [(query, sample) for query in range(self.queries) for sample in range(self.samples)]
        chunks = [prompt_refs[start : start + size] for start in range(0, len(prompt_refs), size)]
        return [(temperature, chunk) for temperature in self.temperatures for chunk in chunks]

    def identity(self) -> dict[str, Any]:
        """Everything the responses depend on, as JSON: plans with equal identities give the same responses."""
        sources = collect_sources(self.settings, self.task, self.tokenizers)
        split = self.split if self.split in sources.queries else "test"
        names, values = RESPONSE_SETTINGS - {"temperature", "stop_when"}, self.settings.public_dict()
        checkpoint = None
        if self.policies is not None and self.policies.folder is not None:
            checksum = manifest.manifest_checksum(self.policies.folder)
            checkpoint = {"update": self.policies.update, "checksum": checksum}
        return {
            "settings": {name: value for name, value in values.items() if name in names},
            "at_once": self.batch_size,
            "functions": sources.functions,
            "prompts": [sources.task, self.plain_task.observer_template],
            "llms": {policy_id: asdict(source) for policy_id, source in sources.llms.items()},
            "checkpoint": checkpoint,
            "roles": self.policy_ids,
            "split": self.split,
            "data": {"queries": self.queries, "digest": sources.queries[split].digest},
            "samples": self.samples,
            "temperatures": self.temperatures,
        }

    @property
    def fingerprint(self) -> str:
        """A short hash of the identity."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:8]

    def required_reward(self, solved_at: float | None) -> float:
        """Returns the task reward from which an answer is right: the user's, or else the task's."""
        required = self.task.solved_at if solved_at is None else solved_at
        if required is None or not math.isfinite(required):
            raise CommandError(
                f"Task {self.task.name} with reward {display_name(self.task.reward)} does not define which answers are "
                "right. Set --solved-at to the lowest task reward of a right answer, such as --solved-at 1."
            )
        return required


def plan_probe(
    target: str,
    overrides: Mapping[str, Value],
    warn: Callable[[str], None],
    *,
    preset: str | None = None,
    files: Sequence[Path] = (),
    checkpoint: str | None = None,
    roles: Sequence[str] | None = None,
    split: Split,
    queries: int | None,
    samples: int,
    temperatures: Sequence[float],
) -> ProbePlan:
    """Plans the probe of a run's policies or of a model.

    Args:
        target: Folder of a run; or folder, hub id or bundled name of a model.
        preset, files: For a model: the settings; the defaults if there are neither.
        checkpoint: Of a run: `best`, `latest` or an update; None: the best, or the latest if none was evaluated.
        roles: Of a run: the policies of the first and the second agent; None: those after training.
        queries: Number of queries, the first of the split; None: all.
    """
    if samples < MIN_SAMPLES:
        raise CommandError(f"samples={samples} must be at least {MIN_SAMPLES}, for best-of-3.")
    if queries is not None and queries < 2:
        raise CommandError(f"queries={queries} must be at least 2, because intervals resample queries.")
    for temperature in temperatures:
        if not (math.isfinite(temperature) and temperature > 0):
            raise CommandError(f"Temperature {temperature:g} must be above 0: at 0, all samples of a query are equal.")
    if not temperatures or len(set(temperatures)) < len(temperatures):
        raise CommandError("Set at least one temperature, and none of them twice.")
    run = find_run(target)
    policies, policy_ids, base = None, None, None
    if run is None:
        if checkpoint is not None or roles is not None:
            name = "checkpoint" if checkpoint is not None else "roles"
            raise CommandError(f"--{name} requires a run, but {target} is a model.")
        base = {} if preset is None else read_preset(preset)
        for file in files:
            base = apply_overrides(base, read_file(file))
    else:
        if preset is not None or files:
            raise CommandError(f"{target} is a run, which has its own settings. Change them with KEY=VALUE.")
        if run.settings.roles is not None:  # the second agent need not see the first answer, nor answer itself
            raise CommandError(f"{target} has roles, which cannot be probed. Probe its model instead.")
        policies = open_trained(target, checkpoint)
        for text in policies.warnings():
            warn(text)
        policy_ids = None if roles is None else policies.resolve_names(roles)
    agents = 2 if run is None or run.settings.num_agents == 1 else None
    settings = target_settings(target, run, overrides, agents, base)
    if settings.feedback is None and settings.task in TASKS and TASKS[settings.task].feedback is not None:
        warn(f"Task {settings.task} has a feedback function, which is not used. Add feedback=task to use it.")
    if not settings.knowledge_transfer:
        raise CommandError("knowledge_transfer=false conflicts with a probe: the second agent must see the answer.")
    policy_ids = _choose_policies(settings, policies, policy_ids)
    settings = settings.model_copy(update={"stop_when": None, "stop_in_training": False})
    settings = preflight.fill_in_settings(settings)
    task, tokenizers = preflight.check_run_settings(settings)
    if policies is not None:
        preflight.check_rope_factors(settings, policies.settings.max_length)
    plain_settings, plain_task = settings, task
    if settings.feedback is not None:
        plain_settings = _without_feedback(settings)
        plain_task, _ = preflight.load_task(plain_settings)
    check_gpus(settings)
    available = len(task.queries(split))
    if available < 2:
        raise CommandError(f"The {split} split of task {task.name} has {available} queries, but a probe requires 2.")
    number = min(queries or available, available)
    return ProbePlan(
        *(settings, task, plain_settings, plain_task, tokenizers, policies, policy_ids),
        *(split, number, samples, tuple(map(float, temperatures))),
    )


def _choose_policies(
    settings: Settings, policies: PolicySet | None, policy_ids: Sequence[str] | None
) -> tuple[str, str]:
    """Returns the policies of the first and the second agent."""
    if policy_ids is None:
        policy_ids = (settings.policy_ids if policies is None else policies.policy_ids)[:2]
        policy_ids = policy_ids if len(policy_ids) == 2 else (*policy_ids, *policy_ids)
    if len(policy_ids) != 2:
        raise CommandError(f"--roles names {len(policy_ids)} policies, but a probe requires two, such as llm_1,llm_2.")
    if settings.lora is not None and AVERAGE_POLICY in policy_ids:
        raise CommandError("The mean of adapters cannot be probed, because it has a higher rank. Choose other --roles.")
    return policy_ids[0], policy_ids[1]


def _without_feedback(settings: Settings) -> Settings:
    """Returns the settings without feedback. A user's prompt that shows feedback is replaced by the task's own."""
    prompt = settings.observer_prompt
    if prompt is not None and FEEDBACK_PLACEHOLDER in placeholders(prompt):
        prompt = None
    return settings.model_copy(update={"feedback": None, "observer_prompt": prompt})
