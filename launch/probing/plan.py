"""Plans a probe: its settings, its policies, and its chains with and without feedback."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cory_env.chain import Chain
from cory_env.chain_settings import make_positions
from cory_env.pickled import display_name
from cory_env.tasks import TASKS, Split, Task
from launch.console.errors import CommandError
from launch.evaluation.target import find_run, target_settings
from launch.probing.chains import make_local_chains, make_text_chains
from launch.probing.endpoint import Endpoint
from launch.probing.figures import MIN_SAMPLES
from launch.run_folder.sources import Sources, collect_sources
from launch.training import preflight
from policies.models.model_names import AVERAGE_POLICY
from policies.settings.derived import ROLES
from policies.settings.files import read_file, read_preset
from policies.settings.overrides import apply_overrides
from policies.settings.settings import Settings
from policies.settings.yaml12 import Value

if TYPE_CHECKING:
    from launch.models.trained import PolicySet

CPU_BATCH_SIZE = 32
REQUESTS_AHEAD = 4
"""First answers in a batch of an API, for each concurrent request."""


class ProbePlan(NamedTuple):
    """A probe, with everything its responses depend on.

    Attributes:
        settings: Those of the chain with feedback, if there is a feedback function.
        plain: The chain of two without feedback; with a team, see `ProbeChains`.
        with_feedback: The chain of two whose second agent sees the feedback; None: there is no feedback function.
        policies: The policies of a run; None: the model of the settings.
        policy_ids: Of the first and the second agent; with a team, by position.
        queries: Number of queries, the first of the split.
        samples: First answers per query.
        solved_at: Task reward from which an answer is right.
        endpoint: The API whose model responds; None: policies in this process. Its chains have no tokenizer.
        team: The chain of the roles, or an environment's agents; None: there is neither.
    """

    settings: Settings
    task: Task
    plain: Chain
    with_feedback: Chain | None
    sources: Sources
    policies: PolicySet | None
    policy_ids: tuple[str, ...]
    split: Split
    queries: int
    samples: int
    temperatures: tuple[float, ...]
    solved_at: float
    endpoint: Endpoint | None = None
    team: Chain | None = None

    @property
    def distinct_policy_ids(self) -> tuple[str, ...]:
        """The policies, each once."""
        return tuple(dict.fromkeys(self.policy_ids))

    @property
    def batch_size(self) -> int:
        """Maximum number of first answers that are generated at once; small on a CPU, so that progress is seen."""
        if self.endpoint is not None:
            return self.endpoint.concurrency * REQUESTS_AHEAD
        import torch

        from launch.models.trained_chain import MAX_BATCH_SIZE

        return MAX_BATCH_SIZE[self.settings.backend] if torch.cuda.is_available() else CPU_BATCH_SIZE

    def batches(self) -> list[tuple[float, list[tuple[int, int]]]]:
        """All batches in order: a temperature, and pairs of query index and sample index."""
        return [(temperature, chunk) for temperature in self.temperatures for chunk in self.chunks(self.samples)]

    def chunks(self, samples: int) -> list[list[tuple[int, int]]]:
        """The batches of one temperature, with so many samples per query."""
        size = self.batch_size
        prompt_refs = [(query, sample) for query in range(self.queries) for sample in range(samples)]
        return [prompt_refs[start : start + size] for start in range(0, len(prompt_refs), size)]


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
    solved_at: float | None,
    endpoint: Endpoint | None = None,
) -> ProbePlan:
    """Plans the probe of a run's policies, of a model, or of a model behind an API.

    Args:
        target: Folder of a run; or folder, hub id or bundled name of a model; or the model's name in the API.
        preset, files: For a model: the settings; the defaults if there are neither.
        checkpoint: Of a run: `best`, `latest` or an update; None: the best, or the latest if none was evaluated.
        roles: Of a run: the policies of the first and the second agent, or of all agents of its roles; None: those
            after training.
        queries: Number of queries, the first of the split; None: all.
        solved_at: Task reward from which an answer is right; None: the task's.
        endpoint: The API; None: policies in this process.
    """
    if endpoint is not None:
        endpoint.check()
    if samples < MIN_SAMPLES:
        raise CommandError(f"samples={samples} must be at least {MIN_SAMPLES}, for best-of-3.")
    if queries is not None and queries < 2:
        raise CommandError(f"queries={queries} must be at least 2, because intervals resample queries.")
    for temperature in temperatures:
        if not (math.isfinite(temperature) and temperature > 0):
            raise CommandError(f"Temperature {temperature:g} must be above 0: at 0, all samples of a query are equal.")
    if not temperatures or len(set(temperatures)) < len(temperatures):
        raise CommandError("Set at least one temperature, and none of them twice.")
    run = None if endpoint is not None else find_run(target)
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
        from launch.models.trained import open_trained  # imports torch

        policies = open_trained(target, checkpoint)
        for text in policies.warnings():
            warn(text)
        policy_ids = None if roles is None else policies.resolve_names(roles)
    overrides, model_roles = _split_roles(overrides, base)
    has_roles = model_roles is not None if run is None else run.settings.roles is not None
    agents = None if has_roles or (run is not None and run.settings.num_agents > 1) else 2
    settings = target_settings(target, run, overrides, agents, base, model_roles)
    if settings.feedback is None and settings.task in TASKS and TASKS[settings.task].feedback is not None:
        warn(f"Task {settings.task} has a feedback function, which is not used. Add feedback=task to use it.")
    if settings.env is not None:
        if endpoint is not None:
            raise CommandError("--endpoint conflicts with env: an environment requires a model on this machine.")
        settings, has_roles = preflight.fill_in_settings(settings), True
    if not settings.knowledge_transfer and not has_roles:
        raise CommandError("knowledge_transfer=false conflicts with a probe: the second agent must see the answer.")
    policy_ids = _choose_policies(settings, policies, policy_ids)
    if not has_roles:
        settings = settings.model_copy(update={"stop_when": None, "stop_in_training": False})
    chains = make_local_chains(settings, policies, policy_ids) if endpoint is None else make_text_chains(settings)
    settings, task, tokenizers, plain, with_feedback, team = chains
    solved_at = task.solved_at if solved_at is None else solved_at
    if settings.env is not None and solved_at is None:
        raise CommandError(
            f"env={settings.env} does not define which episodes are solved. Set --solved-at to the lowest return of a "
            "solved one, such as --solved-at 1."
        )
    if solved_at is None or not math.isfinite(solved_at):
        raise CommandError(
            f"Task {task.name} with reward {display_name(task.reward)} does not define which answers are right. Set "
            "--solved-at to the lowest task reward of a right answer, such as --solved-at 1."
        )
    available = len(task.queries(split))
    if available < 2:
        raise CommandError(f"The {split} split of task {task.name} has {available} queries, but a probe requires 2.")
    sources = collect_sources(settings, task, tokenizers)
    return ProbePlan(
        *(settings, task, plain, with_feedback, sources, policies, policy_ids),
        *(split, min(queries or available, available), samples, tuple(map(float, temperatures)), solved_at),
        *(endpoint, team),
    )


def _split_roles(overrides: Mapping[str, Value], base: Mapping[str, Value] | None) -> tuple[Mapping[str, Value], Value]:
    """Returns the settings without the roles, and the roles of a model, which has all those of trained policies.

    Raises:
        CommandError: The roles are invalid.
    """
    values = overrides.get("roles") if base is None or "roles" in overrides else base.get("roles")
    if base is None or values is None:
        return {key: value for key, value in overrides.items() if base is None or key != "roles"}, None
    try:
        roles = ROLES.validate_python(values)
        make_positions(roles)
    except ValueError as error:
        raise CommandError(f"roles: {' '.join(str(error).split())}") from error
    trained = [replace(role, policy=role.frozen_model) for role in roles]
    return {key: value for key, value in overrides.items() if key != "roles"}, list(map(asdict, trained))


def _choose_policies(
    settings: Settings, policies: PolicySet | None, policy_ids: Sequence[str] | None
) -> tuple[str, ...]:
    """Returns the policies of the first and the second agent, or with `roles` of all agents."""
    count = 2 if settings.roles is None else settings.num_agents
    if policy_ids is None:
        assigned = settings.policy_ids if settings.roles is None else settings.assignment
        policy_ids = (assigned if policies is None else policies.policy_ids)[:count]
        policy_ids = policy_ids if len(policy_ids) == count else (*policy_ids, *policy_ids)
    if len(policy_ids) != count:
        number = "two" if count == 2 else str(count)
        agents = "" if settings.roles is None else f", for {', '.join(settings.agents)}"
        raise CommandError(
            f"--roles names {len(policy_ids)} policies, but a probe requires {number}, such as "
            f"{','.join((*settings.policy_ids, *settings.policy_ids * count)[:count])}{agents}."
        )
    if settings.lora is not None and AVERAGE_POLICY in policy_ids:
        raise CommandError("The mean of adapters cannot be probed, because it has a higher rank. Choose other --roles.")
    return tuple(policy_ids)
