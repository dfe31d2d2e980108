"""Settings that contradict each other, although each is right by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

from policies.settings.fields import Fields
from policies.settings.overrides import GROUPED, reject_unused_settings
from policies.settings.processes import named_resources


def reject_conflicts(settings: Fields) -> None:
    """Checks what only settings together can show.

    Raises:
        ValueError: for the first contradiction, in one sentence, with what would work.
    """
    reject_unused_settings(settings)
    for rules in (_chain, _batch, _objective, _engines, _processes):
        for contradiction in rules(settings):
            raise ValueError(contradiction)


def _chain(s: Fields) -> Iterator[str]:
    """LLMs that play the roles, the models that they start from, and who is paid."""
    agents, policies = s.num_agents, len(s.policy_ids)
    if agents % policies and policies % agents:
        yield (
            f"num_policies={policies} LLMs cannot play num_agents={agents} roles in equal numbers. Set num_policies to "
            "a divisor or a multiple of num_agents."
        )
    if s.queries_per_update % s.teams:
        yield (
            f"queries_per_update={s.queries_per_update} cannot be dealt to {s.teams} teams in equal numbers. Set a "
            f"multiple of {s.teams}."
        )
    if not isinstance(s.model, str) and len(s.model) != policies:
        yield (
            f"model lists {len(s.model)} for {policies} LLM{'s' * (policies > 1)}. List one for each, or name a single "
            "one that all start from."
        )
    if len(set(s.models.values())) > 1 and s.weights == "lora":
        yield f"weights=lora requires one base, not several: {s.model_names}. Set weights=full, or one model."
    if s.num_siblings > 1 and (agents == 1 or not s.knowledge_transfer):
        yield f"num_siblings={s.num_siblings} requires two agents and knowledge_transfer=true. Set num_siblings=1."
    share = {"sum": "partner_reward", "chain": "chain_gamma"}.get(s.credit)
    if share is None and ":" not in s.credit:
        yield f"credit={s.credit} is unknown. Set it to sum, chain, or a function of your own as module:function."
    if agents == 1:
        return
    if s.reward_scope == "last" and share is not None and getattr(s, share) == 0:
        yield (
            f"reward_scope=last leaves earlier agents nothing with {share}=0. Set {share} above 0, or reward_scope=all."
        )
    along_chain = s.credit == "chain" and s.chain_gamma > 0
    if not s.knowledge_transfer and (s.reward_scope == "last" or along_chain):
        name = "reward_scope=last" if s.reward_scope == "last" else "credit=chain with chain_gamma above 0"
        yield f"{name} requires that agents see each other. Set knowledge_transfer=true."
    if along_chain and s.reward_scaling != "none":
        yield (
            f"reward_scaling={s.reward_scaling} conflicts with credit=chain, which adds LLMs' rewards. Set it to none."
        )


def _batch(s: Fields) -> Iterator[str]:
    """Queries, responses and mini-batches of an update."""
    if s.responses % s.minibatch_size:
        small = [d for d in range(1, math.isqrt(s.responses) + 1) if s.responses % d == 0]
        fitting = ", ".join(map(str, sorted({*small, *(s.responses // d for d in small)})))
        yield (
            f"minibatch_size={s.minibatch_size} does not divide the {s.responses} responses of a policy to "
            f"queries_per_update={s.queries_per_update}. "
            f"Mini-batches that would work: {fitting}."
        )
    learners = max(s.num_learners, 1)
    if s.shards_per_policy is None and s.minibatch_size % learners:
        yield f"minibatch_size={s.minibatch_size} is not divisible by num_learners={learners}. Set a multiple of it."
    if s.warmup_updates >= s.num_updates:
        yield (
            f"warmup_updates={s.warmup_updates} takes all num_updates={s.num_updates}. "
            f"Set warmup_updates to {s.num_updates - 1} or less."
        )
    for name, low, high in (
        ("query_tokens", s.min_query_tokens, s.max_query_tokens),
        ("response_tokens", s.min_response_tokens, s.max_response_tokens),
    ):
        if low is not None and high is not None and low > high:
            yield f"min_{name}={low}, but max_{name}={high}. Set max_{name} to {low} or more."


def _objective(s: Fields) -> Iterator[str]:
    """Advantages and the KL penalty."""
    if s.advantage in GROUPED and s.num_generations == 1:
        yield f"advantage={s.advantage} requires num_generations of 2 or more (4 or 8 are usual), not 1."
    if s.kl_in_loss and s.kl_coef and s.kl_estimator != "k3":
        yield (
            f"advantage={s.advantage} has the KL in its loss, where kl_estimator={s.kl_estimator} does not work. Set "
            "kl_estimator=k3, or kl_coef=0."
        )
    if s.kl_control == "adaptive" and s.kl_coef == 0:
        yield "kl_control=adaptive multiplies kl_coef, which is 0. Set kl_coef above 0, or kl_control=fixed."
    if s.kl_control == "adaptive" and s.kl_horizon < s.responses:
        yield f"kl_horizon={s.kl_horizon} is shorter than an update. Set kl_horizon to {s.responses} or more."


def _engines(s: Fields) -> Iterator[str]:
    """What vLLM can do, how its engines are split, and how weights reach them."""
    vllm, parts, transfer = s.backend == "vllm", s.tensor_parallel_size, s.weight_transfer
    least_gpus = min(s.gpus_per_learner, s.gpus_per_runner)
    if vllm and s.temperature < 0.01:
        yield f"temperature={s.temperature:g}: vLLM samples at 0.01 or above. Raise it, or set backend=transformers."
    if vllm and s.weights == "lora" and s.gpus_per_runner and s.dtype == "fp32":
        yield "weights=lora with dtype=fp32 is not in vLLM 0.32 on a GPU. Set dtype=bf16, or backend=transformers."
    if vllm and s.quantization != "none":
        yield f"quantization={s.quantization} is not in vLLM 0.32. Set backend=transformers, or quantization=none."
    if parts > 1 and s.gpus_per_runner not in (0, parts):
        yield (
            f"gpus_per_runner={s.gpus_per_runner:g} with tensor_parallel_size={parts}: an engine is split over whole "
            "GPUs. "
            f"Set gpus_per_runner={parts}, or lower tensor_parallel_size."
        )
    if parts > 1 and s.gpus_per_runner == 0 and s.runner_threads < parts:
        yield (
            f"tensor_parallel_size={parts} without GPUs splits an engine over {parts} processes, but runner_threads="
            f"{s.runner_threads}. Set runner_threads to {parts} or more, or gpus_per_runner={parts}."
        )
    if transfer == "nccl" and least_gpus < 1:
        yield "weight_transfer=nccl requires whole GPUs of learners and runners. Or set weight_transfer=gloo."
    if transfer == "ipc" and (not least_gpus or max(s.num_learners, s.num_runners, parts) > 1):
        yield "weight_transfer=ipc requires one learner and one engine, which share a GPU. Or set weight_transfer=gloo."


def _processes(s: Fields) -> Iterator[str]:
    """Runners and learners, and what they compute on."""
    llms, shards = len(s.policy_ids), s.shards_per_policy
    if shards is not None and s.num_learners != (wanted := shards * llms):
        yield f"shards_per_policy={shards} requires num_learners={wanted}, {shards} per LLM, not {s.num_learners}."
    if shards is not None and shards > 1 and s.quantization != "none":
        yield f"quantization={s.quantization} cannot be split. Set quantization=none, or shards_per_policy=1."
    if s.quantization != "none" and not (s.gpus_per_learner and s.gpus_per_runner):
        yield f"quantization={s.quantization} requires GPUs. Set gpus_per_learner and gpus_per_runner (0.5 share one)."
    if s.num_learners > 1 and 0 < s.gpus_per_learner < 1:
        yield f"gpus_per_learner={s.gpus_per_learner:g} is refused by NCCL. Set it to 1, or num_learners=1."
    if s.max_lag and s.importance_sampling_clip_max is None:
        yield (
            f"max_lag={s.max_lag} requires importance_sampling_clip_max. Set it to 1 or more (2 is usual), or "
            "max_lag=0."
        )
    in_driver = s.gpus_per_runner + (s.gpus_per_learner if s.num_learners == 0 else 0)
    if s.num_runners == 0 and s.gpus_per_runner and in_driver > 1:
        yield f"num_runners=0 generates in the driver, on one GPU, of which it asks {in_driver:g}. Set num_runners=1."
    for name in ("runner_resources", "learner_resources"):
        named_resources(name, getattr(s, name))
