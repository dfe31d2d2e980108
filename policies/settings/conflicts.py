"""Conflicts between settings that are valid individually."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cory_env.tasks.task import FEEDBACK_PLACEHOLDER, placeholders, references
from policies.settings.derived import DerivedSettings
from policies.settings.overrides import GROUP_ADVANTAGE, GROUP_ESTIMATORS, REQUIREMENTS, Requirement, reject_unmet


def _is_along_chain(s: DerivedSettings) -> bool:
    return s.num_agents > 1 and s.credit == "chain" and s.chain_gamma > 0


def _has_devices(s: DerivedSettings) -> bool:
    gpus = min(s.gpus_per_learner, s.gpus_per_runner)
    if s.weight_transfer == "ipc":
        return gpus > 0 and max(s.num_learners, s.num_runners, s.tensor_parallel_size) <= 1
    return s.weight_transfer != "nccl" or gpus >= 1


def _has_buffer(s: DerivedSettings) -> bool:
    return s.overlong != "penalty" or (s.overlong_buffer or math.inf) < min(s.response_limits)


CONFLICTS = (
    Requirement(("stop",), lambda s: s.thinking is None, "thinking=null"),
    Requirement(("credit",), lambda s: s.knowledge_transfer or not _is_along_chain(s), "knowledge_transfer=true"),
    Requirement(("reward_scope",), lambda s: s.num_agents == 1 or s.knowledge_transfer, "knowledge_transfer=true"),
    Requirement(("reward_scope",), lambda s: s.positions[-1].role.count == 1, "a last role with count=1"),
    Requirement(("reward_scaling",), lambda s: not _is_along_chain(s), "credit=sum"),
    Requirement(("reward_scaling",), lambda s: s.env is None or s.chain_gamma == 0, "a task, or chain_gamma=0"),
    Requirement(("reward_scaling",), lambda s: s.advantage != "gdpo", "an advantage other than gdpo"),
    Requirement(("loss",), lambda s: s.loss != "gspo" or s.advantage in GROUP_ESTIMATORS, GROUP_ADVANTAGE),
    Requirement(("kl_target",), lambda s: s.kl_coef > 0, "kl_coef above 0"),
    Requirement(("overlong",), _has_buffer, "overlong_buffer below the length limit, usually a fifth of it"),
    Requirement(("overlong",), lambda s: s.overlong == "mask" or s.advantage != "gdpo", "an advantage other than gdpo"),
    Requirement(("min_response_tokens",), lambda s: s.overlong != "penalty", "overlong=keep or mask"),
    Requirement(
        ("min_query_tokens",),
        lambda s: (s.min_query_tokens or 0) <= (s.max_query_tokens or math.inf),
        "max_query_tokens of at least as many",
    ),
    Requirement(
        ("min_response_tokens",),
        lambda s: (s.min_response_tokens or 0) <= s.max_response_tokens,
        "max_response_tokens of at least as many",
    ),
    Requirement(
        ("max_lag",),
        lambda s: s.importance_sampling_clip_max is not None or s.old_logprobs == "sampler",
        "importance_sampling_clip_max",
    ),
    Requirement(
        ("old_logprobs",),
        lambda s: s.old_logprobs == "learner" or s.kl_estimator != "full" or s.kl_coef == 0,
        "kl_estimator=k1 or k3",
    ),
    Requirement(("quantization",), lambda s: s.backend == "transformers", "backend=transformers"),
    Requirement(("quantization",), lambda s: s.shards_per_policy in (None, 1), "shards_per_policy=1"),
    Requirement(
        ("quantization",),
        lambda s: s.gpus_per_learner and s.gpus_per_runner,
        "gpus_per_learner and gpus_per_runner (0.5 each share one GPU)",
    ),
    Requirement(
        ("tensor_parallel_size",),
        lambda s: s.gpus_per_runner or s.tensor_parallel_size <= s.runner_threads,
        "as many gpus_per_runner, or without GPUs as many runner_threads",
    ),
    Requirement(
        ("tensor_parallel_size",),
        lambda s: s.gpus_per_runner in (0, s.tensor_parallel_size),
        "as many gpus_per_runner, or 0",
    ),
    Requirement(
        ("weight_transfer",),
        _has_devices,
        "whole GPUs for learners and runners (nccl), or one learner and one engine on the same GPU (ipc)",
    ),
)
"""Conditions without which settings that differ from their defaults fail."""


def reject_conflicts(settings: DerivedSettings) -> None:
    """Checks combinations of settings."""
    reject_unmet(settings, REQUIREMENTS)
    for rules in (_chain, _batch, _objective, _processes):
        for conflict in rules(settings):
            raise ValueError(conflict)
    reject_unmet(settings, CONFLICTS)


def _chain(s: DerivedSettings) -> Iterator[str]:
    """Roles, policies, their initial models, and credit assignment."""
    agents, policies = s.num_agents, len(s.policy_ids)
    if s.roles is not None:
        yield from _roles(s)
    elif agents % policies and policies % agents:
        yield f"num_policies={policies} is neither a divisor nor a multiple of num_agents={agents}. Set one of these."
    if s.num_agents > 1 and s.feedback is None and FEEDBACK_PLACEHOLDER in placeholders(s.observer_prompt or ""):
        yield "observer_prompt shows feedback, but the run has none. Set feedback, or remove it from the prompt."
    if s.queries_per_update % s.teams:
        yield f"queries_per_update={s.queries_per_update} is not divisible by the {s.teams} teams. Set a multiple."
    if not isinstance(s.model, str) and len(s.model) != policies:
        yield f"model lists {len(s.model)} models for {policies} LLMs. List one per LLM, or name a single one for all."
    if len(set(s.models.values())) > 1 and s.weights == "lora":
        yield f"weights=lora requires a single base model, not {s.model_names}. Set weights=full, or one model."
    weight = {"sum": "partner_reward", "chain": "chain_gamma"}.get(s.credit)
    if weight is None and ":" not in s.credit:
        yield f"credit={s.credit} is unknown. Set it to sum, chain, or your own function as module:function."
    unrewarded = [p.role.name for p in s.positions if not p.role.has_reward]
    unrewarded += [p.role.name for p in s.positions[:-1] if s.reward_scope == "last"]
    if unrewarded and weight is not None and getattr(s, weight) == 0:
        ways = "give it a reward" if s.reward_scope == "all" else "reward_scope=all"
        setting = "credit=chain" if s.credit == "sum" else f"{weight} above 0"
        yield f"Role {unrewarded[0]} learns from no reward with {weight}=0. Set {setting}, or {ways}."


def _roles(s: DerivedSettings) -> Iterator[str]:
    """Roles, whose own values are valid."""
    for role in s.chain_roles:
        if s.env is not None and (role.count, role.repeat, role.prompt) != (1, 1, None):
            yield f"Role {role.name} has count, repeat or prompt, but the environment decides who acts. Remove them."
        if role.repeat > 1 and s.stop_when is None:
            yield f"repeat={role.repeat} of role {role.name} requires feedback, and stop_when=solved."
        if (tokens := role.max_response_tokens or 1) > s.max_response_tokens:
            yield (
                f"max_response_tokens={tokens} of role {role.name} is above the run's limit of "
                f"{s.max_response_tokens}. Raise that."
            )
        prompt = role.prompt or ""
        shown = placeholders(prompt) | {attribute for _, attribute in references(prompt)}
        if s.feedback is None and FEEDBACK_PLACEHOLDER in shown:
            yield f"The prompt of role {role.name} shows feedback, but the run has none. Set feedback."
    if s.frozen_models and not s.knowledge_transfer:
        yield "knowledge_transfer=false conflicts with a frozen model, whose responses no trained LLM would see."
    first, last = s.positions[0].role, s.positions[-1].role
    if not s.pioneers and s.env is None and s.select_by == "bare":
        yield f"The model of role {first.name} is frozen, so no LLM answers alone. Set select_by=chain."
    if not last.produces_response:
        yield f"num_agents={s.num_agents} ends the chain with role {last.name}, which produces no response. Change it."
    judged, other = (last, "bare") if s.select_by == "chain" else (first, "chain")
    if not judged.has_reward:
        yield f"select_by={s.select_by} requires a reward of role {judged.name}. Set one, or select_by={other}."


def _batch(s: DerivedSettings) -> Iterator[str]:
    """Queries, responses and mini-batches of an update."""
    if s.responses % s.responses_per_step:
        small = [d for d in range(1, math.isqrt(s.responses) + 1) if s.responses % d == 0]
        divisors = ", ".join(map(str, sorted({*small, *(s.responses // d for d in small)})))
        yield (
            f"minibatch_size={s.minibatch_size} does not divide the {s.responses} responses per policy and update "
            f"(queries_per_update={s.queries_per_update}). Valid sizes: {divisors}."
        )
    learners, size = max(s.num_learners, 1), s.responses_per_step
    if s.shards_per_policy is None and size % learners:
        yield f"minibatch_size={size} is not divisible by num_learners={learners}. Set a multiple of it."
    if s.warmup_updates >= s.num_updates:
        yield f"warmup_updates={s.warmup_updates} is not below num_updates={s.num_updates}. Lower it."


def _objective(s: DerivedSettings) -> Iterator[str]:
    """Advantages and penalties."""
    if s.advantage in GROUP_ESTIMATORS and s.num_generations == 1:
        yield f"advantage={s.advantage} requires num_generations of 2 or more (4 or 8 are usual), not 1."
    if s.hyperparameters.kl_in_loss and s.kl_coef and s.kl_estimator != "k3":
        yield f"advantage={s.advantage} has the KL in its loss: kl_estimator={s.kl_estimator}. Set k3, or kl_coef=0."
    if s.advantage == "gdpo" and (not isinstance(s.reward, list) or len(s.reward) < 2):
        yield "advantage=gdpo requires reward to be a list of two or more functions. Set it, or advantage=grpo."
    if s.advantage == "gdpo" and any(position.role.own_reward is not None for position in s.positions):
        yield "advantage=gdpo requires the same reward functions in all roles. Remove those of roles."
    if s.kl_target is not None and s.kl_horizon < s.responses:
        yield f"kl_horizon={s.kl_horizon} is shorter than one update. Set kl_horizon to {s.responses} or more."


def _processes(s: DerivedSettings) -> Iterator[str]:
    """Engines, runners, learners and their devices."""
    if s.backend == "vllm" and s.temperature < 0.01:
        yield f"backend=vllm requires temperature of 0.01 or more, not {s.temperature:g}. Or set backend=transformers."
    if s.backend == "vllm" and s.weights == "lora" and s.gpus_per_runner and s.dtype == "fp32":
        yield "vLLM 0.32 does not support weights=lora dtype=fp32 on a GPU. Set dtype=bf16, or backend=transformers."
    shards, learners = s.shards_per_policy, s.num_learners
    if shards is not None and learners != (required := shards * len(s.policy_ids)):
        yield f"shards_per_policy={shards} requires num_learners={required}, {shards} per LLM, not {learners}."
    if learners > 1 and 0 < s.gpus_per_learner < 1:
        yield f"num_learners={learners} requires whole GPUs, as NCCL does. Set gpus_per_learner=1, or num_learners=1."
    in_driver = s.gpus_per_runner + (s.gpus_per_learner if learners == 0 else 0)
    if s.num_runners == 0 and s.gpus_per_runner and in_driver > 1:
        yield f"num_runners=0 generates in the driver, which uses one GPU, not {in_driver:g}. Set num_runners=1."
