"""Conflicts between settings that are valid individually."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cory_env.chain_settings import Role, make_positions
from cory_env.tasks.task import FEEDBACK_PLACEHOLDER, placeholders, references
from policies.settings.derived import DerivedSettings
from policies.settings.overrides import GROUP_ESTIMATORS, reject_unused_settings


def reject_conflicts(settings: DerivedSettings) -> None:
    """Checks combinations of settings."""
    reject_unused_settings(settings)
    for rules in (_chain, _batch, _objective, _engines, _processes):
        for conflict in rules(settings):
            raise ValueError(conflict)


def _chain(s: DerivedSettings) -> Iterator[str]:
    """Policies, their initial models, and credit assignment."""
    if s.roles is not None:
        yield from _roles(s)
    agents, policies = s.num_agents, len(s.policy_ids)
    if s.roles is None and agents % policies and policies % agents:
        yield (
            f"num_policies={policies} is neither a divisor nor a multiple of num_agents={agents}. Set it to a "
            "divisor or multiple."
        )
    if s.queries_per_update % s.teams:
        yield (
            f"queries_per_update={s.queries_per_update} is not divisible by the {s.teams} teams. Set a multiple of "
            f"{s.teams}."
        )
    if not isinstance(s.model, str) and len(s.model) != policies:
        yield (
            f"model is a list of length {len(s.model)}, not {policies}, the number of LLMs. List one model per LLM, or "
            "name a single one for all."
        )
    if len(set(s.models.values())) > 1 and s.weights == "lora":
        yield f"weights=lora requires a single base model, not {s.model_names}. Set weights=full, or one model."
    if s.stop is not None and s.thinking is not None:
        yield f"stop={s.stop!r} conflicts with thinking, as it would end thoughts too. Remove one."
    weight = {"sum": "partner_reward", "chain": "chain_gamma"}.get(s.credit)
    if weight is None and ":" not in s.credit:
        yield f"credit={s.credit} is unknown. Set it to sum, chain, or your own function as module:function."
    if agents == 1:
        return
    if s.reward_scope == "last" and weight is not None and getattr(s, weight) == 0:
        yield (
            f"reward_scope=last with {weight}=0 gives earlier agents no reward. Set {weight} above 0, or "
            "reward_scope=all."
        )
    along_chain = s.credit == "chain" and s.chain_gamma > 0
    if not s.knowledge_transfer and (s.reward_scope == "last" or along_chain):
        name = "reward_scope=last" if s.reward_scope == "last" else "credit=chain with chain_gamma above 0"
        yield f"{name} requires knowledge_transfer=true."
    if along_chain and s.reward_scaling != "none":
        yield (
            f"reward_scaling={s.reward_scaling} conflicts with credit=chain, which adds LLMs' rewards. Set it to none."
        )


def _roles(s: DerivedSettings) -> Iterator[str]:
    """Roles, whose own values are valid."""
    total = len(make_positions([role.role for role in s.roles or ()]))
    if s.num_agents > total:
        yield f"num_agents={s.num_agents} is more than the {total} agents of roles. Remove it, or set {total} or less."
    for role in s.chain_roles:
        if role.repeat > 1 and s.stop_when is None:
            yield f"repeat={role.repeat} of role {role.name} requires feedback, and stop_when=solved."
        if role.max_response_tokens is not None and role.max_response_tokens > s.max_response_tokens:
            yield (
                f"max_response_tokens={role.max_response_tokens} of role {role.name} is above the run's limit of "
                f"{s.max_response_tokens}. Raise max_response_tokens of the run."
            )
        prompt = role.prompt or ""
        shown = placeholders(prompt) | {attribute for _, attribute in references(prompt)}
        if s.feedback is None and FEEDBACK_PLACEHOLDER in shown:
            yield f"The prompt of role {role.name} shows feedback, but the run has none. Set feedback."
    if s.frozen_models:
        yield from _frozen_models(s)
    first, last = s.positions[0].role, s.positions[-1].role
    yield from _role_rewards(s, first, last)


def _frozen_models(s: DerivedSettings) -> Iterator[str]:
    """Roles of models that are not trained."""
    if not s.knowledge_transfer:
        yield "knowledge_transfer=false conflicts with a frozen model, whose responses no trained LLM would see."
    if not s.pioneers and s.select_by == "bare":
        yield f"The model of role {s.chain_roles[0].name} is frozen, so no LLM answers alone. Set select_by=chain."


def _role_rewards(s: DerivedSettings, first: Role, last: Role) -> Iterator[str]:
    """Rewards of roles, given the chain's first and last one."""
    if not last.produces_response:
        yield (
            f"num_agents={s.num_agents} ends the chain with role {last.name}, which produces no response. Set another "
            "num_agents."
        )
    judged, other = (last, "bare") if s.select_by == "chain" else (first, "chain")
    if not judged.has_reward:
        yield f"select_by={s.select_by} requires a reward of role {judged.name}. Set one, or select_by={other}."
    if s.reward_scope == "last" and last.count > 1:
        yield f"reward_scope=last conflicts with count={last.count} of role {last.name}. Set reward_scope=all."
    weight = {"sum": "partner_reward", "chain": "chain_gamma"}.get(s.credit)
    unrewarded = [p.role.name for p in s.positions if not p.role.has_reward]
    if unrewarded and weight is not None and getattr(s, weight) == 0:
        yield (
            f"Role {unrewarded[0]} has no reward of its own, and with {weight}=0 no other one. Set {weight} above 0, "
            f"or a reward of {unrewarded[0]}."
        )


def _batch(s: DerivedSettings) -> Iterator[str]:
    """Queries, responses and mini-batches of an update."""
    if s.responses % s.responses_per_step:
        small = [d for d in range(1, math.isqrt(s.responses) + 1) if s.responses % d == 0]
        divisors = ", ".join(map(str, sorted({*small, *(s.responses // d for d in small)})))
        yield (
            f"minibatch_size={s.minibatch_size} does not divide the {s.responses} responses per policy and update "
            f"(queries_per_update={s.queries_per_update}). Valid sizes: {divisors}."
        )
    learners = max(s.num_learners, 1)
    if s.shards_per_policy is None and s.responses_per_step % learners:
        size = s.responses_per_step
        yield f"minibatch_size={size} is not divisible by num_learners={learners}. Set a multiple of it."
    if s.warmup_updates >= s.num_updates:
        yield (
            f"warmup_updates={s.warmup_updates} is not below num_updates={s.num_updates}. "
            f"Set warmup_updates to {s.num_updates - 1} or less."
        )
    for name, low, high in (
        ("query_tokens", s.min_query_tokens, s.max_query_tokens),
        ("response_tokens", s.min_response_tokens, s.max_response_tokens),
    ):
        if low is not None and high is not None and low > high:
            yield f"min_{name}={low} exceeds max_{name}={high}. Set max_{name} to {low} or more."


def _objective(s: DerivedSettings) -> Iterator[str]:
    """Advantages, the policy loss and penalties."""
    if s.advantage in GROUP_ESTIMATORS and s.num_generations == 1:
        yield f"advantage={s.advantage} requires num_generations of 2 or more (4 or 8 are usual), not 1."
    if s.loss == "gspo" and s.advantage not in GROUP_ESTIMATORS:
        yield (
            f"loss=gspo clips whole responses and conflicts with the advantages per token of advantage={s.advantage}. "
            "Set advantage=rloo, grpo, dr_grpo or gdpo, or loss=ppo."
        )
    if s.kl_in_loss and s.kl_coef and s.kl_estimator != "k3":
        yield (
            f"advantage={s.advantage} has the KL in its loss and requires kl_estimator=k3, not {s.kl_estimator}. Set "
            "kl_estimator=k3, or kl_coef=0."
        )
    if s.kl_target is not None and s.kl_coef == 0:
        yield "kl_target multiplies kl_coef, which is 0. Set kl_coef above 0, or kl_target=null."
    if s.advantage == "gdpo":
        if not isinstance(s.reward, list) or len(s.reward) < 2:
            yield "advantage=gdpo requires reward to be a list of two or more functions. Set it, or advantage=grpo."
        if any(position.role.own_reward is not None for position in s.positions):
            yield "advantage=gdpo requires the same reward functions in all roles. Remove those of roles."
        if s.reward_scaling != "none":
            yield f"advantage=gdpo conflicts with reward_scaling={s.reward_scaling}. Set reward_scaling=none."
        if s.overlong == "penalty":
            yield "advantage=gdpo conflicts with overlong=penalty. Set overlong=keep; a reward function can do it."
    if s.overlong == "penalty":
        limit = min(s.response_limits)
        if s.overlong_buffer is None:
            yield "overlong=penalty requires overlong_buffer, in tokens. A fifth of max_response_tokens is usual."
        elif s.overlong_buffer >= limit:
            yield f"overlong_buffer={s.overlong_buffer} is not below the limit of {limit} response tokens. Lower it."
        if s.min_response_tokens is not None:
            yield "overlong=penalty conflicts with min_response_tokens, which varies the length limit. Remove one."
    if s.kl_target is not None and s.kl_horizon < s.responses:
        yield f"kl_horizon={s.kl_horizon} is shorter than one update. Set kl_horizon to {s.responses} or more."


def _engines(s: DerivedSettings) -> Iterator[str]:
    """Limits of vLLM, tensor parallelism and weight transfer."""
    vllm, parts, transfer = s.backend == "vllm", s.tensor_parallel_size, s.weight_transfer
    min_gpus = min(s.gpus_per_learner, s.gpus_per_runner)
    if vllm and s.temperature < 0.01:
        yield f"backend=vllm requires temperature of 0.01 or more, not {s.temperature:g}. Or set backend=transformers."
    if vllm and s.weights == "lora" and s.gpus_per_runner and s.dtype == "fp32":
        yield "vLLM 0.32 does not support weights=lora dtype=fp32 on a GPU. Set dtype=bf16, or backend=transformers."
    if vllm and s.quantization != "none":
        yield (
            f"vLLM 0.32 does not support quantization={s.quantization}. Set backend=transformers, or quantization=none."
        )
    if parts > 1 and s.gpus_per_runner not in (0, parts):
        yield (
            f"tensor_parallel_size={parts} requires gpus_per_runner={parts} (or 0), not {s.gpus_per_runner:g}. "
            "Set that, or lower tensor_parallel_size."
        )
    if parts > 1 and s.gpus_per_runner == 0 and s.runner_threads < parts:
        yield (
            f"tensor_parallel_size={parts} without GPUs requires runner_threads of {parts} or more, not "
            f"{s.runner_threads}. Set that, or gpus_per_runner={parts}."
        )
    if transfer == "nccl" and min_gpus < 1:
        yield "weight_transfer=nccl requires whole GPUs for learners and runners. Or set weight_transfer=gloo."
    if transfer == "ipc" and (not min_gpus or max(s.num_learners, s.num_runners, parts) > 1):
        yield "weight_transfer=ipc requires one learner and one engine on the same GPU. Or set weight_transfer=gloo."


def _processes(s: DerivedSettings) -> Iterator[str]:
    """Runners, learners and their devices."""
    policies, shards = len(s.policy_ids), s.shards_per_policy
    if shards is not None and s.num_learners != (required := shards * policies):
        yield f"shards_per_policy={shards} requires num_learners={required}, {shards} per LLM, not {s.num_learners}."
    if shards is not None and shards > 1 and s.quantization != "none":
        yield f"quantization={s.quantization} requires shards_per_policy=1. Or set quantization=none."
    if s.quantization != "none" and not (s.gpus_per_learner and s.gpus_per_runner):
        yield f"quantization={s.quantization} requires gpus_per_learner and gpus_per_runner (0.5 each share one GPU)."
    if s.num_learners > 1 and 0 < s.gpus_per_learner < 1:
        yield (
            f"gpus_per_learner={s.gpus_per_learner:g} conflicts with num_learners={s.num_learners}, as NCCL requires "
            "whole GPUs. Set gpus_per_learner=1, or num_learners=1."
        )
    if s.max_lag and s.importance_sampling_clip_max is None:
        yield (
            f"max_lag={s.max_lag} requires importance_sampling_clip_max. Set it to 1 or more (2 is usual), or "
            "max_lag=0."
        )
    in_driver = s.gpus_per_runner + (s.gpus_per_learner if s.num_learners == 0 else 0)
    if s.num_runners == 0 and s.gpus_per_runner and in_driver > 1:
        yield f"num_runners=0 generates in the driver, which uses one GPU, not {in_driver:g}. Set num_runners=1."
