"""Settings that contradict each other, although each is right by itself.

Each rule is a condition and a sentence: what is wrong, with the values, and what would work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from policies.settings.fields import Fields
from policies.settings.placement import named_resources

GROUPED = ("rloo", "grpo", "dr_grpo")
"""Estimators that compare a policy's responses to the same query with one another."""


def refuse_contradictions(settings: Fields) -> None:
    """Checks what only settings together can show.

    Raises:
        ValueError: for the first contradiction, in one sentence, with what would work.
    """
    for rules in (_chain, _batch, _advantage, _credit, _averaging, _text, _kl, _quantization, _engines, _processes):
        for contradiction in rules(settings):
            raise ValueError(contradiction)


def _chain(s: Fields) -> Iterator[str]:
    """LLMs that play the roles, and the models that they start from."""
    agents, policies = s.num_agents, len(s.modules)
    if agents % policies and policies % agents:
        fitting = ", ".join(str(d) for d in range(1, agents + 1) if agents % d == 0)
        yield (
            f"num_policies={policies} LLMs cannot play num_agents={agents} roles in equal numbers. Numbers of policies "
            f"that would work: {fitting}, and for several teams multiples of {agents}."
        )
    teams = max(policies // agents, 1)
    if s.queries % teams:
        yield (
            f"queries={s.queries} cannot be dealt to {teams} teams (num_policies={policies}, num_agents={agents}) in "
            f"equal numbers. Set queries to {s.queries + -s.queries % teams}."
        )
    if not isinstance(s.model, str) and len(s.model) != policies:
        yield (
            f"model lists {len(s.model)} for {policies} LLM{'s' * (policies > 1)}. List one for each, or name a single "
            "one that all start from."
        )
    if len(set(s.models.values())) > 1:
        if s.weights == "lora":
            yield f"weights=lora requires one base, not several: {s.started_from}. Set weights=full, or one model."
        asked = {
            "average_period": s.average_period,
            "evaluate_average": s.evaluate_average,
            "select_by=mean": s.select_by == "mean",
        }
        if names := " and ".join(name for name, value in asked.items() if value):
            yield (
                f"{names}: there is no mean of LLMs that start from different models, {s.started_from}. Leave it out, "
                "or name a single model."
            )
    if s.select_by == "chain" and (agents == 1 or not s.knowledge_transfer):
        yield (
            "select_by=chain asks for the last answer of a chain whose agents see the earlier ones. Set num_agents to "
            "2 or more and knowledge_transfer=true, or select_by=bare."
        )


def _batch(s: Fields) -> Iterator[str]:
    """Queries, responses and mini-batches of an update."""
    agents, policies = s.num_agents, len(s.modules)
    teams = max(policies // agents, 1)
    if s.num_siblings > 1 and (agents == 1 or not s.knowledge_transfer):
        yield f"num_siblings={s.num_siblings} requires two agents and knowledge_transfer=true. Set num_siblings=1."
    batch = f"queries={s.queries}{f' / {teams} teams' * (teams > 1)}"
    batch += f" * num_generations={s.num_generations}" * (s.num_generations > 1)
    if s.num_siblings > 1:
        batch += f" * (1 + {agents - 1} * num_siblings={s.num_siblings})"
        batch += f" / {policies // teams} policies" * (policies > teams)
        times = "the pioneer answers each query once for num_siblings responses of every later role"
    else:
        batch += f" * {agents // policies} roles" * (agents > policies)
        count = s.num_generations * max(agents // policies, 1)
        which = "of its queries" if teams > 1 else "query"
        times = f"every policy answers each {which} {'once' if count == 1 else f'{count} times'}"
    if s.responses % s.minibatch:
        small = [d for d in range(1, math.isqrt(s.responses) + 1) if s.responses % d == 0]
        fitting = ", ".join(map(str, sorted({*small, *(s.responses // d for d in small)})))
        yield f"minibatch={s.minibatch} does not divide {batch}: {times}. Mini-batches that would work: {fitting}."
    learners = max(s.num_learners, 1)
    if s.shards_per_policy is None and s.minibatch % learners:
        yield (
            f"minibatch={s.minibatch} is not divisible by num_learners={learners}. The next one that would work is "
            f"{(s.minibatch // learners + 1) * learners} (it must divide {batch} too)."
        )
    if s.warmup >= s.updates:
        yield f"warmup={s.warmup} takes all updates={s.updates}. Set warmup to {s.updates - 1} or less."


def _advantage(s: Fields) -> Iterator[str]:
    """What estimators of advantages need, and what has an effect with one of them only."""
    name, grouped = s.advantage, s.advantage in GROUPED
    if grouped and s.num_generations == 1:
        yield f"advantage={name} requires num_generations of 2 or more (4 or 8 are usual), not 1."
    if grouped and s.gamma != 1.0:
        yield f"advantage={name} takes a response as one action, so gamma={s.gamma:g} has no effect. Set gamma=1."
    if s.kl_in_loss and s.kl_coef and s.kl_estimator != "k3":
        why = "has no gradient on average" if s.kl_estimator == "k1" else "is not computed"
        yield (
            f"advantage={name} has the KL in its loss, where kl_estimator={s.kl_estimator} {why}. Set kl_estimator=k3, "
            "or kl_coef=0."
        )
    if s.drop_flat_groups and not grouped:
        yield f"drop_flat_groups=true requires advantage=rloo, grpo or dr_grpo, not {name}. Set it to false."
    if s.group_baseline and (name != "gae" or s.num_generations == s.num_siblings == 1):
        yield f"group_baseline={s.group_baseline:g} requires advantage=gae and groups of responses. Set it to 0."
    if s.critic_inputs == "chain" and (name != "gae" or s.num_agents == 1):
        yield "critic_inputs=chain requires advantage=gae and two agents or more. Set critic_inputs=tokens."


def _credit(s: Fields) -> Iterator[str]:
    """How rewards are paid out along the chain."""
    for scheme, names in {"sum": ("partner_reward",), "chain": ("chain_gamma", "chain_lam")}.items():
        for name in names:
            value = getattr(s, name)
            if s.credit != scheme and value != type(s).model_fields[name].default:
                yield (
                    f"{name}={value:g} has no effect with credit={s.credit}. Set credit={scheme}, or leave {name} out."
                )
    share = {"sum": "partner_reward", "chain": "chain_gamma"}.get(s.credit)
    if share is None and ":" not in s.credit:
        yield f"credit={s.credit} is unknown. Set it to sum, chain, or a function of your own as module:function."
    if s.num_agents == 1:
        return
    if s.rewarded == "last" and share is not None and getattr(s, share) == 0:
        yield f"rewarded=last leaves earlier agents nothing with {share}=0. Set {share} above 0, or rewarded=all."
    if s.rewarded == "last" and not s.knowledge_transfer:
        yield "rewarded=last requires that agents see each other. Set knowledge_transfer=true, or rewarded=all."
    if s.credit != "chain" or s.chain_gamma == 0:
        return
    if not s.knowledge_transfer:
        yield "credit=chain requires that agents see each other. Set knowledge_transfer=true, or chain_gamma=0."
    if s.chain_lam != 1 and s.advantage != "gae":
        yield f"chain_lam={s.chain_lam:g} requires a critic. Set advantage=gae, or chain_lam=1."
    if s.score_scaling != "none":
        yield f"score_scaling={s.score_scaling} conflicts with credit=chain, which adds LLMs' rewards. Set it to none."


def _averaging(s: Fields) -> Iterator[str]:
    """Means of LLMs."""
    if s.select_by == "mean" and not s.evaluate_average:
        yield "select_by=mean chooses by the mean of the LLMs, which is not evaluated. Set evaluate_average=true."
    alone = "num_agents=1" if s.num_agents == 1 else "num_policies=1"
    if len(s.modules) == 1 and s.average_period is not None:
        yield f"average_period={s.average_period} requires two LLMs, but {alone}. Set it to null, or train two."
    if len(s.modules) == 1 and s.evaluate_average:
        yield f"evaluate_average=true requires two LLMs, but {alone}. Set it to false, or train two."
    if s.average_period is None and s.average_share != 1:
        yield f"average_share={s.average_share:g} has no effect without averaging. Set average_period, or omit it."


def _text(s: Fields) -> Iterator[str]:
    """Queries, responses and what frames them."""
    for what, low, high in (
        ("query", s.min_query, s.max_query),
        ("response", s.min_response, s.max_response),
    ):
        if low is not None and (high is None or low > high):
            yield f"min_{what}={low}, but max_{what}={high}. Set max_{what} to {low} or more."
    if s.stop == "":
        yield "stop is empty, so every token would end a response. Name a text, or leave it null."
    if s.system is not None and not s.chat:
        yield "system is set, but chat is off, so no model would see it. Set chat=true."


def _kl(s: Fields) -> Iterator[str]:
    """The adaptive controller must be able to move `kl_coef`, and keep it above 0."""
    if s.kl_control == "adaptive" and s.kl_coef == 0:
        yield "kl_control=adaptive multiplies kl_coef, which is 0. Set kl_coef above 0, or kl_control=fixed."
    if s.kl_control == "adaptive" and s.kl_horizon < s.responses:
        yield f"kl_horizon={s.kl_horizon} is shorter than an update. Set kl_horizon to {s.responses} or more."


def _quantization(s: Fields) -> Iterator[str]:
    """A base in 4 bits."""
    if s.quantization == "none":
        return
    if s.weights != "lora":
        yield f"quantization={s.quantization} cannot be trained. Set weights=lora, or quantization=none."
    if s.shards_per_policy is not None and s.shards_per_policy > 1:
        yield f"quantization={s.quantization} cannot be split. Set quantization=none, or shards_per_policy=1."
    if s.backend == "vllm":
        yield "quantization=nf4 is not in vLLM 0.32. Use backend=transformers, or quantization=none."
    if not (s.gpus_per_learner and s.gpus_per_runner):
        yield f"quantization={s.quantization} requires GPUs. Set gpus_per_learner and gpus_per_runner (0.5 share one)."


def _engines(s: Fields) -> Iterator[str]:
    """Engines of vLLM: what they can do, the devices that they are split over, and how weights reach them."""
    vllm, parts, transfer = s.backend == "vllm", s.tensor_parallel, s.weight_transfer
    if vllm and s.temperature < 0.01:
        yield f"temperature={s.temperature:g}: vLLM samples at 0.01 or above. Raise it, or set backend=transformers."
    if vllm and s.weights == "lora" and s.gpus_per_runner and s.dtype == "fp32":
        yield (
            "weights=lora with dtype=fp32: on a GPU, vLLM 0.32 computes adapters in 16 bits only. Set dtype=bf16, or "
            "backend=transformers."
        )
    if parts > 1 and not vllm:
        yield f"tensor_parallel={parts} requires vLLM. Use backend=vllm, or tensor_parallel=1."
    if parts > 1 and s.num_runners == 0:
        yield f"tensor_parallel={parts} requires runners. Set num_runners to 1 or more, or tensor_parallel=1."
    if parts > 1 and s.gpus_per_runner not in (0, parts):
        yield (
            f"gpus_per_runner={s.gpus_per_runner:g} with tensor_parallel={parts}: an engine is split over whole GPUs, "
            f"and no others of its runner would be used. Set gpus_per_runner={parts}, or lower tensor_parallel."
        )
    if parts > 1 and s.gpus_per_runner == 0 and s.runner_threads < parts:
        yield (
            f"tensor_parallel={parts} without GPUs splits an engine over {parts} processes, but runner_threads="
            f"{s.runner_threads}. Set runner_threads to {parts} or more, or gpus_per_runner={parts}."
        )
    if transfer is None:
        return
    if not vllm or s.weights == "lora" or s.num_runners == 0:
        yield f"weight_transfer={transfer} requires backend=vllm, weights=full and runners. Leave it null."
    if transfer != "gloo" and not (s.gpus_per_learner and s.gpus_per_runner):
        yield f"weight_transfer={transfer} requires GPUs: set gpus_per_learner and gpus_per_runner. Or use gloo."
    if transfer == "nccl" and (s.gpus_per_learner < 1 or s.gpus_per_runner < 1):
        yield "weight_transfer=nccl requires whole GPUs of learners and runners. Or set weight_transfer=ipc."
    if transfer == "ipc" and max(s.num_learners, s.num_runners, parts) > 1:
        yield "weight_transfer=ipc requires one learner and one engine, not several. Set weight_transfer=nccl."


def _processes(s: Fields) -> Iterator[str]:
    """Runners and learners, and what they compute on."""
    llms, shards = len(s.modules), s.shards_per_policy
    if shards is not None and s.num_learners != (wanted := shards * llms):
        yield f"shards_per_policy={shards} requires num_learners={wanted}, {shards} per LLM, not {s.num_learners}."
    if s.num_learners > 1 and 0 < s.gpus_per_learner < 1:
        yield f"gpus_per_learner={s.gpus_per_learner:g} is refused by NCCL. Set it to 1, or num_learners=1."
    if s.offload_optimizer and not s.gpus_per_learner:
        yield "offload_optimizer=true requires GPUs. Set gpus_per_learner, or offload_optimizer=false."
    if s.max_lag and s.num_runners == 0:
        yield f"max_lag={s.max_lag} requires runners. Set num_runners to 1 or more, or max_lag=0."
    if s.max_lag and s.importance_cap is None:
        yield f"max_lag={s.max_lag} requires importance_cap. Set it to 1 or more (2 is usual), or max_lag=0."
    learns = s.gpus_per_learner if s.num_learners == 0 else 0
    if s.num_runners == 0 and s.gpus_per_runner and s.gpus_per_runner + learns > 1:
        yield (
            f"num_runners=0 generates in the driver, on one GPU, and gpus_per_runner={s.gpus_per_runner:g}"
            f"{f' and gpus_per_learner={learns:g}' * bool(learns)} ask for more. Set 0.5 of each, or num_runners=1."
        )
    for kind, count, resources in (
        ("runner", s.num_runners, s.runner_resources),
        ("learner", s.num_learners, s.learner_resources),
    ):
        if resources is not None and not named_resources(f"{kind}_resources", resources):
            yield f"{kind}_resources is empty. Name a resource, such as sampling=1, or leave it null."
        if resources is not None and count == 0:
            yield f"{kind}_resources={resources} requires num_{kind}s of 1 or more. Or set {kind}_resources=null."
