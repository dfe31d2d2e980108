"""What `cory evaluate` and `cory probe` are given: a run or a model, and the settings for its evaluation."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from cory_env.chain_settings import make_positions
from launch.console.errors import CommandError
from launch.evaluation.evaluation import located_settings
from launch.run_folder.run import Run
from launch.run_folder.storage import is_uri
from policies.settings.derived import ROLES
from policies.settings.overrides import apply_overrides
from policies.settings.settings import Settings, make_settings, settings_in_categories
from policies.settings.yaml12 import Value


def find_run(target: str) -> Run | None:
    """Returns the run in a folder, or None if the target is a model."""
    path = Path(target)
    if is_uri(target) or Run(path).exists():
        return Run.open(target)
    if (path / "adapter_config.json").is_file():
        raise CommandError(f"{target} is an adapter. Evaluate its run, or export it with --merge.")
    is_path = path.exists() or target.startswith((".", "/")) or (len(path.parts) > 1 and path.parent.is_dir())
    if is_path and not (path / "config.json").is_file():
        raise CommandError(f"No run or model found in {target}.")
    return None


def default_folder(kind: str, target: str, checkpoint: Path | None) -> Path:
    """Returns a folder for results: in the folder of the checkpoint's run; for models `./evaluations` or `./probes`."""
    parent = Path(f"{kind}s") if checkpoint is None else checkpoint.parents[1] / kind
    name = Path(target).resolve().name if checkpoint is None else checkpoint.name
    return parent / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def target_settings(
    target: str,
    run: Run | None,
    overrides: Mapping[str, Value],
    agents: int | None,
    model_settings: Mapping[str, Value] | None = None,
    roles: Value = None,
) -> Settings:
    """Returns the settings for the evaluation of a run or a model.

    Args:
        run: The run; None: a model.
        agents: Number of agents in the chain; None: the run's, 1 for a model.
        model_settings: The settings of a model, whose policy settings are ignored; None: the defaults.
        roles: For a model: the roles that it has, all of them.
    """
    overrides = dict(overrides)
    policy: dict[str, Value] = {"model": target, "num_agents": 1, "weights": "full", "advantage": "gae"}  # as it is
    if roles is not None:
        policy |= {"roles": roles, "num_agents": len(make_positions(ROLES.validate_python(roles))), "num_policies": 1}
    if policy_overrides := settings_in_categories("policy") & overrides.keys():
        raise CommandError(f"`{min(policy_overrides)}` cannot be changed: it is fixed by {target}.")
    if ("data" in overrides) != ("eval_data" in overrides):  # evaluate on the whole file
        overrides["data"] = overrides["eval_data"] = overrides.get("data", overrides.get("eval_data"))
        overrides["validation"] = False
    base: Mapping[str, Value] = {} if model_settings is None else model_settings
    if run is not None:
        base = located_settings(run, overrides).model_dump()
        policy = {key: base[key] for key in settings_in_categories("policy")}
    if agents is not None and policy.get("roles"):
        raise CommandError(f"--agents conflicts with the roles of {target}, which define its agents. Remove --agents.")
    if agents is not None:
        policies = policy.get("num_policies") or policy["num_agents"]
        policy |= {"num_agents": agents, "num_policies": policies}
    task = base.get("task")
    if task is not None and overrides.get("task", task) != task:
        if "max_response_tokens" not in overrides:
            raise CommandError(
                f"task={overrides['task']} requires max_response_tokens=TOKENS: the value of {target}, "
                f"{base.get('max_response_tokens')}, is for task={task}."
            )
        base = {key: value for key, value in base.items() if key == "task" or key not in settings_in_categories("task")}
    values = {key: value for key, value in {**base, **overrides}.items() if key not in settings_in_categories("policy")}
    if "queries_per_update" in overrides or agents is not None:
        values |= {"minibatch_size": 1, "num_learners": 0, "shards_per_policy": None}  # unused: there is no training
        size = cast(int, policy["num_agents"])
        teams = max(cast(int, policy.get("num_policies") or size) // size, 1)
        queries = values.get("queries_per_update", Settings.model_fields["queries_per_update"].default)
        values["queries_per_update"] = math.ceil(cast(int, queries) / teams) * teams
    final_overrides = {key: values[key] for key in overrides if key in values}
    return make_settings(apply_overrides(values, {**final_overrides, **policy, "min_response_tokens": None}))
