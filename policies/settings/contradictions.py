"""Settings that contradict each other, although each is right by itself."""

from __future__ import annotations

import math

from policies.settings.fields import Fields
from policies.settings.placement import named_resources


def refuse_contradictions(settings: Fields) -> None:
    """Checks what only settings together can show.

    Raises:
        ValueError: for the first contradiction, in one sentence, with what would work.
    """
    agents, policies = settings.num_agents, len(settings.modules)
    if agents % policies and policies % agents:
        fitting = ", ".join(str(d) for d in range(1, agents + 1) if agents % d == 0)
        raise ValueError(
            f"num_policies={policies} LLMs cannot play num_agents={agents} roles in equal numbers. Numbers of policies "
            f"that would work: {fitting}, and for several teams multiples of {agents}."
        )
    teams = max(policies // agents, 1)
    if settings.queries % teams:
        raise ValueError(
            f"queries={settings.queries} cannot be dealt to {teams} teams (num_policies={policies}, num_agents="
            f"{agents}) in equal numbers. Set queries to {settings.queries + -settings.queries % teams}."
        )
    _refuse_models(settings)
    if settings.num_siblings > 1 and (agents == 1 or not settings.knowledge_transfer):
        raise ValueError(
            f"num_siblings={settings.num_siblings} lets several chains go on from what the pioneer wrote, which nobody "
            "sees with num_agents=1 or knowledge_transfer=false. Set num_siblings=1; num_generations is how many times "
            "a query is answered."
        )
    k = settings.num_generations * max(agents // policies, 1)
    batch = f"queries={settings.queries}{f' / {teams} teams' * (teams > 1)}"
    if settings.num_generations > 1:
        batch += f" * num_generations={settings.num_generations}"
    if settings.num_siblings > 1:
        batch += f" * (1 + {agents - 1} * num_siblings={settings.num_siblings})"
        batch += f" / {policies // teams} policies" * (policies > teams)
        times = "the pioneer answers each query once for num_siblings responses of every later role"
    else:
        batch += f" * {agents // policies} roles" * (agents > policies)
        which = "of its queries" if teams > 1 else "query"
        times = f"every policy answers each {which} {'once' if k == 1 else f'{k} times'}"
    if settings.responses % settings.minibatch:
        small = [d for d in range(1, math.isqrt(settings.responses) + 1) if settings.responses % d == 0]
        fitting = ", ".join(map(str, sorted({*small, *(settings.responses // d for d in small)})))
        raise ValueError(
            f"minibatch={settings.minibatch} does not divide {batch}: {times}. Mini-batches that would work: {fitting}."
        )
    if settings.advantage in ("rloo", "grpo", "dr_grpo"):
        _refuse_for_groups(settings)
    if settings.warmup >= settings.updates:
        raise ValueError(
            f"warmup={settings.warmup} takes all updates={settings.updates}. Set warmup to {settings.updates - 1} or "
            "less."
        )
    if settings.drop_flat_groups and settings.advantage not in ("rloo", "grpo", "dr_grpo"):
        raise ValueError(
            f"drop_flat_groups=true has no groups to drop with advantage={settings.advantage}. Set it to false, or "
            "advantage to rloo, grpo or dr_grpo."
        )
    if settings.group_baseline and (
        settings.advantage != "gae" or settings.num_generations == settings.num_siblings == 1
    ):
        raise ValueError(
            f"group_baseline={settings.group_baseline:g} corrects a critic by other responses to the same query, and "
            f"with advantage={settings.advantage}, num_generations={settings.num_generations}, num_siblings="
            f"{settings.num_siblings} there is no critic or no other response. Set group_baseline=0."
        )
    if settings.critic_inputs == "chain" and (settings.advantage != "gae" or settings.num_agents == 1):
        raise ValueError(
            f"critic_inputs=chain tells a critic of the chain, and with advantage={settings.advantage}, num_agents="
            f"{settings.num_agents} there is no such critic or chain. Set critic_inputs=tokens."
        )
    _refuse_credit(settings)
    if settings.select_by == "chain" and (settings.num_agents == 1 or not settings.knowledge_transfer):
        raise ValueError(
            "select_by=chain asks for the last answer of a chain whose agents see the earlier ones. Set num_agents to "
            "2 or more and knowledge_transfer=true, or select_by=bare."
        )
    _refuse_average(settings)
    for what, low, high in (
        ("query", settings.min_query, settings.max_query),
        ("response", settings.min_response, settings.max_response),
    ):
        if low is not None and (high is None or low > high):
            raise ValueError(f"min_{what}={low}, but max_{what}={high}. Set max_{what} to {low} or more.")
    if settings.stop == "":
        raise ValueError("stop is empty, so every token would end a response. Name a text, or leave it null.")
    if settings.system is not None and not settings.chat:
        raise ValueError("system is set, but chat is off, so no model would see it. Set chat=true.")
    if settings.kl_control == "adaptive":
        _refuse_to_steer(settings)
    learners = max(settings.num_learners, 1)
    if settings.shards_per_policy is not None:
        _refuse_mesh(settings, settings.shards_per_policy)
    elif settings.minibatch % learners:
        raise ValueError(
            f"minibatch={settings.minibatch} is not divisible by num_learners={learners}. The next one that would "
            f"work is {(settings.minibatch // learners + 1) * learners} (it must divide {batch} too)."
        )
    if learners > 1 and 0 < settings.gpus_per_learner < 1:
        raise ValueError(
            f"gpus_per_learner={settings.gpus_per_learner:g} with num_learners={learners} puts several learners on one "
            "GPU, which NCCL, by which they average gradients, refuses. Set gpus_per_learner=1, or num_learners=1."
        )
    if settings.offload_optimizer and not settings.gpus_per_learner:
        raise ValueError(
            "offload_optimizer=true keeps Adam's moments out of a GPU's memory, and gpus_per_learner=0 has none. Set "
            "gpus_per_learner, or offload_optimizer=false."
        )
    if settings.quantization != "none" and settings.weights != "lora":
        raise ValueError(
            f"quantization={settings.quantization} stores weights that cannot be trained. Set weights=lora, or "
            "quantization=none."
        )
    if settings.quantization != "none" and settings.backend == "vllm":
        raise ValueError("quantization=nf4 is not in vLLM 0.32. Use backend=transformers, or quantization=none.")
    if settings.quantization != "none" and not (settings.gpus_per_learner and settings.gpus_per_runner):
        raise ValueError(
            f"quantization={settings.quantization} needs a CUDA GPU for learners and runners. Set gpus_per_learner and "
            "gpus_per_runner (0.5 each share one GPU), or quantization=none."
        )
    if settings.backend == "vllm" and settings.temperature < 0.01:
        raise ValueError(
            f"temperature={settings.temperature:g}: vLLM samples at 0.01 or above, and training would be for another "
            "one. Set temperature to 0.01 or more, or backend=transformers."
        )
    if settings.max_lag and settings.num_runners == 0:
        raise ValueError(
            f"max_lag={settings.max_lag} lets runners play while learners learn, but num_runners=0 starts none. Set "
            "num_runners to 1 or more, or max_lag=0."
        )
    if settings.max_lag and settings.importance_cap is None:
        raise ValueError(
            f"max_lag={settings.max_lag} samples with older weights than are learned, which importance_cap=null leaves "
            "uncorrected. Set importance_cap to 1 or more (2 is usual), or max_lag=0."
        )
    if settings.tensor_parallel > 1:
        _refuse_split(settings)
    if settings.weight_transfer is not None:
        _refuse_transfer(settings)
    _refuse_devices(settings)
    for of, count in (("runner", settings.num_runners), ("learner", settings.num_learners)):
        wanted = settings.runner_resources if of == "runner" else settings.learner_resources
        if wanted is not None and not named_resources(f"{of}_resources", wanted):
            raise ValueError(f"{of}_resources is empty. Name a resource, such as sampling=1, or leave it null.")
        if wanted is not None and count == 0:
            raise ValueError(
                f"{of}_resources={wanted} places processes that num_{of}s=0 does not start: the driver does their "
                f"work. Set num_{of}s to 1 or more, or {of}_resources=null."
            )


def _refuse_models(settings: Fields) -> None:
    """Checks that each LLM has a model, and where they differ that nothing asks for weights in common."""
    count, policies = len(settings.model), len(settings.modules)
    if not isinstance(settings.model, str) and count != policies:
        raise ValueError(
            f"model lists {count} for {policies} LLM{'s' * (policies > 1)}. List one for each, or name a single one "
            "that all start from."
        )
    if len(set(settings.models.values())) == 1:
        return
    if settings.weights == "lora":
        raise ValueError(
            f"weights=lora trains adapters on one base, and model lists different ones: {settings.started_from}. Set "
            "weights=full, or name a single model."
        )
    averaged = {"average_period": settings.average_period, "evaluate_average": settings.evaluate_average}
    if asked := [name for name, on in {**averaged, "select_by=mean": settings.select_by == "mean"}.items() if on]:
        raise ValueError(
            f"{' and '.join(asked)}: there is no mean of LLMs that start from different models, "
            f"{settings.started_from}. Leave {'it' if len(asked) == 1 else 'them'} out, or name a single model."
        )


def _refuse_credit(settings: Fields) -> None:
    """Checks that what says how rewards are paid out along the chain has an effect, and makes sense."""
    of_scheme = {"sum": ("partner_reward",), "chain": ("chain_gamma", "chain_lam")}
    for scheme, names in of_scheme.items():
        for name in names:
            value = getattr(settings, name)
            if settings.credit != scheme and value != type(settings).model_fields[name].default:
                raise ValueError(
                    f"{name}={value:g} has no effect with credit={settings.credit}. Set credit={scheme}, or leave "
                    f"{name} out."
                )
    share = {"sum": "partner_reward", "chain": "chain_gamma"}.get(settings.credit)
    if share is None and ":" not in settings.credit:
        raise ValueError(
            f"credit={settings.credit} is not known. Set it to sum, to chain, or to a function of your own as "
            "module:function."
        )
    if settings.rewarded == "last" and settings.num_agents > 1:
        if share is not None and getattr(settings, share) == 0:
            raise ValueError(
                f"rewarded=last pays earlier agents by their share in the last one's reward, and {share}=0 leaves "
                f"them nothing. Set {share} above 0, or rewarded=all."
            )
        if not settings.knowledge_transfer:
            raise ValueError(
                "rewarded=last pays agents for what their responses do to the last one's, and knowledge_transfer=false "
                "hides these from it. Set rewarded=all, or knowledge_transfer=true."
            )
    if settings.credit != "chain" or settings.chain_gamma == 0 or settings.num_agents == 1:
        return
    if not settings.knowledge_transfer:
        raise ValueError(
            "credit=chain pays an agent for what its response does to the next one's, which knowledge_transfer=false "
            "hides from it. Set chain_gamma=0, or knowledge_transfer=true."
        )
    if settings.chain_lam != 1 and settings.advantage != "gae":
        raise ValueError(
            f"chain_lam={settings.chain_lam:g} asks the next agent's critic, and advantage={settings.advantage} has "
            "none. Set chain_lam=1, or advantage=gae."
        )
    if settings.score_scaling != "none":
        raise ValueError(
            f"score_scaling={settings.score_scaling} scales each LLM's rewards by its own moments, so what one is paid "
            "for the next would be on another's scale. Set score_scaling=none, or chain_gamma=0."
        )


def _refuse_average(settings: Fields) -> None:
    """Checks that there are LLMs to average, and that a share of the way is of a way that they go."""
    if settings.select_by == "mean" and not settings.evaluate_average:
        raise ValueError(
            "select_by=mean chooses by the mean of the LLMs, which is not evaluated. Set evaluate_average=true."
        )
    period, share = settings.average_period, settings.average_share
    alone = "num_agents=1" if settings.num_agents == 1 else "num_policies=1"
    if period is not None and len(settings.modules) == 1:
        raise ValueError(
            f"average_period={period} moves LLMs to their mean, and with {alone} there is one LLM only. Set "
            "average_period=null, or train two LLMs or more."
        )
    if settings.evaluate_average and len(settings.modules) == 1:
        raise ValueError(
            f"evaluate_average=true evaluates the mean of LLMs, and with {alone} there is one LLM only. Set "
            "evaluate_average=false, or train two LLMs or more."
        )
    if period is None and share != 1:
        raise ValueError(
            f"average_share={share:g} has no effect without averaging. Set average_period, or leave average_share out."
        )


def _refuse_to_steer(settings: Fields) -> None:
    """Checks that the adaptive controller can move `kl_coef`, and keeps it above 0."""
    if settings.kl_coef == 0:
        raise ValueError(
            "kl_control=adaptive multiplies kl_coef, and kl_coef=0 stays 0 whatever it is multiplied by. Set kl_coef "
            "above 0, or kl_control=fixed."
        )
    if settings.kl_horizon < settings.responses:
        raise ValueError(
            f"kl_horizon={settings.kl_horizon} is shorter than an update of {settings.responses} responses, so one "
            f"update could turn kl_coef around. Set kl_horizon to {settings.responses} or more."
        )


def _refuse_devices(settings: Fields) -> None:
    """Checks that what the driver and vLLM are to do on a GPU can be done there."""
    learns = settings.gpus_per_learner if settings.num_learners == 0 else 0
    if settings.num_runners == 0 and settings.gpus_per_runner and settings.gpus_per_runner + learns > 1:
        raise ValueError(
            f"num_runners=0 generates in the driver, on one GPU, and gpus_per_runner={settings.gpus_per_runner:g}"
            f"{f' and gpus_per_learner={learns:g}' * bool(learns)} ask for more. Set 0.5 of each, or num_runners=1."
        )
    if (
        settings.backend == "vllm"
        and settings.weights == "lora"
        and settings.gpus_per_runner
        and settings.dtype == "fp32"
    ):
        raise ValueError(
            "weights=lora with dtype=fp32: on a GPU, vLLM 0.32 computes adapters in 16 bits only. Set dtype=bf16, or "
            "backend=transformers."
        )


def _refuse_split(settings: Fields) -> None:
    """Checks that every runner owns the devices that its engines are split over."""
    parts = settings.tensor_parallel
    if settings.backend != "vllm":
        raise ValueError(
            f"tensor_parallel={parts} splits vLLM's engines, and backend={settings.backend} has none. Use "
            "backend=vllm, or tensor_parallel=1."
        )
    if settings.num_runners == 0:
        raise ValueError(
            f"tensor_parallel={parts} splits an engine over devices of its runner, but num_runners=0 starts none. Set "
            "num_runners to 1 or more, or tensor_parallel=1."
        )
    if settings.gpus_per_runner not in (0, parts):
        raise ValueError(
            f"gpus_per_runner={settings.gpus_per_runner:g} with tensor_parallel={parts}: an engine is split over whole "
            f"GPUs, and no others of its runner would be used. Set gpus_per_runner={parts}, or lower tensor_parallel."
        )
    if settings.gpus_per_runner == 0 and settings.runner_threads < parts:
        raise ValueError(
            f"tensor_parallel={parts} without GPUs splits an engine over {parts} processes, but runner_threads="
            f"{settings.runner_threads}. Set runner_threads to {parts} or more, or gpus_per_runner={parts}."
        )


def _refuse_transfer(settings: Fields) -> None:
    """Checks that there are engines of their own to send weights to, by a backend that reaches them."""
    name = settings.weight_transfer
    if settings.backend != "vllm" or settings.weights == "lora" or settings.num_runners == 0:
        raise ValueError(
            f"weight_transfer={name} sends full weights to vLLM's engines in runners, and here are backend="
            f"{settings.backend}, weights={settings.weights}, num_runners={settings.num_runners}. Leave it null."
        )
    if name != "gloo" and not (settings.gpus_per_learner and settings.gpus_per_runner):
        raise ValueError(
            f"weight_transfer={name} goes from GPU to GPU, and learners or runners have none. Set gpus_per_learner and "
            "gpus_per_runner, or weight_transfer=gloo."
        )
    if name == "nccl" and (settings.gpus_per_learner < 1 or settings.gpus_per_runner < 1):
        raise ValueError(
            "weight_transfer=nccl cannot join two processes on one GPU. Give learners and runners whole GPUs, or set "
            "weight_transfer=ipc."
        )
    if name == "ipc" and (max(settings.num_learners, settings.num_runners, settings.tensor_parallel) > 1):
        raise ValueError(
            f"weight_transfer=ipc is for one learner and one engine that share a GPU, and here are num_learners="
            f"{settings.num_learners}, num_runners={settings.num_runners}, tensor_parallel={settings.tensor_parallel}. "
            "Set weight_transfer=nccl."
        )


def _refuse_for_groups(settings: Fields) -> None:
    """Checks what estimators need that compare a policy's responses to the same query."""
    name = settings.advantage
    if settings.num_generations == 1:
        raise ValueError(
            f"advantage={name} compares a policy's responses to the same query, but num_generations=1. Set it to 2 or "
            "more (4 or 8 are usual), or advantage=gae or reinforce, which need one."
        )
    if settings.gamma != 1.0:
        raise ValueError(
            f"advantage={name} takes a response as one action, so gamma={settings.gamma:g} has no effect. Set gamma=1."
        )
    if settings.kl_in_loss and settings.kl_coef and settings.kl_estimator != "k3":
        raise ValueError(
            f"advantage={name} has the KL in its loss, where kl_estimator={settings.kl_estimator} "
            f"{'has no gradient on average' if settings.kl_estimator == 'k1' else 'is not computed'}. Set "
            "kl_estimator=k3, or kl_coef=0."
        )


def _refuse_mesh(settings: Fields, shards: int) -> None:
    llms = len(settings.modules)
    wanted = shards * llms
    if settings.num_learners != wanted:
        raise ValueError(
            f"shards_per_policy={shards} of {llms} LLM{'s' * (llms > 1)} takes num_learners={wanted}, but num_learners="
            f"{settings.num_learners}. Set num_learners={wanted}, or leave shards_per_policy null."
        )
    if shards > 1 and settings.quantization != "none":
        raise ValueError(
            f"quantization={settings.quantization} stores 4-bit weights, which cannot be split. Set quantization=none, "
            "or shards_per_policy=1."
        )
