"""Settings without effect: rejected if the user set them, dropped if a preset did.

Each requirement lists settings that have an effect only in combination with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from policies.settings.error import SettingsError
from policies.settings.fields import Fields
from policies.settings.yaml12 import to_cli

GROUP_ESTIMATORS = ("rloo", "grpo", "dr_grpo", "gdpo")
"""Estimators that compare the responses of a group."""
EARLIER_DEFAULTS = {"partner_reward": 1.0}
"""Defaults of earlier versions, which their runs and the preset `paper` have even if they have no effect."""
GROUP_ADVANTAGE = "advantage=rloo, grpo, dr_grpo or gdpo"
RUNNER_SETTINGS = ("tensor_parallel_size", "weight_transfer", "max_lag")
ADAPTER_SETTINGS = ("lora_rank", "lora_alpha", "lora_target_modules", "quantization")


class Requirement(NamedTuple):
    """A condition that settings require unless they have their defaults."""

    settings: tuple[str, ...]
    is_met: Callable[[Any], object]
    """The argument has all settings, which may be unvalidated."""
    text: str


def _can_average(s: Fields) -> bool:
    one_model = not isinstance(s.model, list) or all(model == s.model[0] for model in s.model)
    roles = s.roles if isinstance(s.roles, list) else []
    names = [role.get("policy") if isinstance(role, Mapping) else getattr(role, "policy", None) for role in roles]
    num_roles = len({*map(str, names)} if any(names) else names)  # each has its own LLM, unless the roles name others
    return one_model and (s.num_policies != 1 if s.num_policies else 1 not in (num_roles, s.num_agents))


def _sees_earlier(s: Fields) -> bool:
    return s.num_agents != 1 and s.knowledge_transfer


_CHAIN = "num_agents of 2 or more, and knowledge_transfer=true"
_TASK_SETTINGS = (
    *("task", "max_query_tokens", "prompt", "observer_prompt", "feedback", "reward"),
    *("reward_weights", "knowledge_transfer", "observed", "stop_when", "credit", "reward_scope", "eval_average"),
    "test_queries",
)
"""Settings without a meaning for an environment."""
REQUIREMENTS = (
    Requirement(_TASK_SETTINGS, lambda s: s.env is None, "a task instead of env"),
    Requirement(("eval_data",), lambda s: s.env is None or s.data, "a task, or data"),
    Requirement(("max_turns", "env_processes"), lambda s: s.env is not None, "env"),
    Requirement(("partner_reward",), lambda s: s.credit == "sum", "credit=sum"),
    Requirement(("chain_gamma", "chain_lam"), lambda s: s.credit == "chain" or s.env, "credit=chain, or env"),
    Requirement(("chain_lam",), lambda s: s.advantage == "gae", "advantage=gae"),
    Requirement(("average_period", "eval_average"), _can_average, "two or more LLMs with the same model"),
    Requirement(("average_tau",), lambda s: s.average_period is not None, "average_period"),
    Requirement(("select_by",), lambda s: s.select_by != "mean" or s.eval_average, "eval_average=true"),
    Requirement(("select_by",), lambda s: s.select_by != "chain" or (s.env is None and _sees_earlier(s)), _CHAIN),
    Requirement(ADAPTER_SETTINGS, lambda s: s.weights == "lora", "weights=lora"),
    Requirement(
        ("feedback",), lambda s: _sees_earlier(s) or (s.num_agents != 1 and s.stop_when), f"{_CHAIN} or stop_when"
    ),
    Requirement(("stop_when",), lambda s: s.feedback is not None and s.num_agents != 1, "feedback"),
    Requirement(("stop_in_training",), lambda s: s.stop_when is not None, "stop_when"),
    Requirement(("system_prompt", "chat_date", "chat_template_kwargs"), lambda s: s.chat, "chat=true"),
    Requirement(("min_query_tokens",), lambda s: s.max_query_tokens is not None, "max_query_tokens"),
    Requirement(("gamma",), lambda s: s.advantage not in GROUP_ESTIMATORS, "advantage=gae or reinforce"),
    Requirement(("dual_clip",), lambda s: s.loss == "ppo", "loss=ppo"),
    Requirement(("kl_horizon",), lambda s: s.kl_target is not None, "kl_target"),
    Requirement(
        ("importance_sampling_mode", "importance_sampling_clip_min"),
        lambda s: s.importance_sampling_clip_max is not None,
        "importance_sampling_clip_max",
    ),
    Requirement(
        ("importance_sampling_mode", "importance_sampling_clip_max", "importance_sampling_clip_min"),
        lambda s: s.old_logprobs == "learner",
        "old_logprobs=learner",
    ),
    Requirement(
        ("old_logprobs",), lambda s: s.old_logprobs == "learner" or s.advantage != "gae", "an advantage other than gae"
    ),
    Requirement(("overlong_buffer", "overlong_penalty"), lambda s: s.overlong == "penalty", "overlong=penalty"),
    Requirement(("dynamic_sampling",), lambda s: s.advantage in GROUP_ESTIMATORS, GROUP_ADVANTAGE),
    Requirement(("tensor_parallel_size", "weight_transfer"), lambda s: s.backend == "vllm", "backend=vllm"),
    Requirement(("weight_transfer",), lambda s: s.weights == "full", "weights=full"),
    Requirement(RUNNER_SETTINGS, lambda s: s.num_runners, "num_runners of 1 or more"),
    Requirement(("offload_optimizer",), lambda s: s.gpus_per_learner, "gpus_per_learner"),
    # CPU engines disable PyTorch's compiler in their process.
    Requirement(("torch_compile",), lambda s: s.num_runners or s.backend != "vllm", "num_runners of 1 or more"),
)


def apply_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Applies overrides to preset values, and drops preset values that lose their effect.

    So `num_agents=1` is enough to turn a preset with averaged LLMs into a single agent. `num_runners=0` is dropped if a
    runner setting is overridden. Overrides are never dropped; `make_settings` rejects those without effect.

    Args:
        values: setting name → value; may be incomplete or invalid, like the overrides.
    """
    if overrides.get("task") is not None:
        values = {name: value for name, value in values.items() if name != "env"}
    if "roles" in overrides:  # their number is the number of agents
        values = {name: value for name, value in values.items() if name != "num_agents"}
    for name, other in (("num_updates", "num_passes"), ("num_passes", "num_updates")):
        if overrides.get(name) is not None:
            if overrides.get(other) is not None:
                raise SettingsError("num_updates and num_passes both set the length of the run. Remove one.")
            values = {key: value for key, value in values.items() if key != other}
    result = {**values, **overrides}
    runner_settings = (*RUNNER_SETTINGS, "runner_threads", "gpus_per_runner")
    if result.get("num_runners") == 0 and "num_runners" not in overrides and any(map(overrides.get, runner_settings)):
        del result["num_runners"]
    for names, is_met, _ in REQUIREMENTS:
        # Drop only values that the overrides left without effect: `average_period` of a preset with two agents, if
        # `num_agents=1` is set. Values without effect before, such as `average_tau` alone in a file, are rejected
        # later.
        if is_met(Fields.model_construct(**values)) and not is_met(Fields.model_construct(**result)):
            result = {
                name: value
                for name, value in result.items()
                if name not in names or name in overrides or value == EARLIER_DEFAULTS.get(name, ())
            }
    return result


def reject_unmet(settings: Fields, requirements: Iterable[Requirement]) -> None:
    """Rejects settings that differ from their defaults and lack what they require."""
    for names, is_met, text in requirements:
        for name in () if is_met(settings) else names:
            value, default = getattr(settings, name), type(settings).model_fields[name].default
            if value not in (default, EARLIER_DEFAULTS.get(name, default)):
                raise ValueError(f"{name}={to_cli(value)} requires {text}. Set that, or {name}={to_cli(default)}.")
