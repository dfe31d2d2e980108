"""Every setting: its type, default and meaning, and what it decides."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Literal

from pydantic import BaseModel, ConfigDict

from cory_env.chain import Observed, role_names
from cory_env.tasks import Operations
from policies.generation.installed import vllm_installed
from policies.learning.hyperparameters import Advantage, Hyperparameters, KLEstimator, RewardScope
from policies.models.lora import Lora
from policies.models.model_names import BUNDLED_LM
from policies.settings.metadata import (
    computing_setting,
    learning_setting,
    monitoring_setting,
    output_setting,
    policy_setting,
    sampling_setting,
    task_setting,
)


class Fields(BaseModel):
    """The settings of one run, and what follows from them alone. Defaults are the paper's, where it names one (the IMDB
    column of its table).
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )

    # What is trained, on what.
    task: str = task_setting("imdb")
    """The task: `arithmetic`, `code`, `custom`, `drafts`, `gsm8k`, `imdb`, `math`, or your own (docs/tasks.md)."""
    data: str | None = task_setting(None, content=True)
    """The training queries, instead of the task's own: a .jsonl, .json, .csv or .parquet file, `hub:OWNER/NAME`
    or `hub:FOLDER`. Settings may follow: `?query_column=COLUMN`, for `hub:` also
    `&split=train&config=...&revision=...`."""
    eval_data: str | None = task_setting(None, content=True)
    """The held-out queries, in the same form; without it every tenth row of `data` is held out."""
    validation: bool = task_setting(True)
    """Choose (the best checkpoint, the best trial of a search) by the first `eval_queries` of the held-out queries, at
    most half of them (of held-out rows of `data`: every second one), and report on the others. Without it, all choose
    and are reported on."""
    max_query_tokens: int | None = task_setting(None, ge=1)
    """Cut queries to their first tokens, at most so many; null: leave them whole."""
    min_query_tokens: int | None = task_setting(None, ge=1)
    """With `max_query_tokens`: each query is cut to a length drawn from these two."""
    digits: int | None = task_setting(None, ge=1)
    """Digits of each number in the queries (`arithmetic`); null: 2."""
    operations: Operations | None = task_setting(None)
    """What is asked (`arithmetic`): `sums`, `differences` or `both`; null: `both`."""
    prompt: str | None = task_setting(None)
    """Template of the pioneer's prompt (`custom`): `{query}` and the data's columns."""
    observer_prompt: str | None = task_setting(None)
    """Template of every later agent's prompt (`custom`): `{query}`, `{reference}` and the data's columns."""
    reward: str | list[str] | None = task_setting(None)
    """The reward function, `module:function`, or a list of several; each task but `custom` has its own."""
    reward_weights: list[float] | None = task_setting(None)
    """Of several: the weight of each in the sum that is the reward; null: 1 each."""
    on_reward_error: Literal["stop", "skip"] = monitoring_setting("stop", resume=True)
    """What a failing reward does: `stop` the run, or `skip`: drop that chain and count it (docs/faults.md)."""
    reward_timeout: float = computing_setting(300.0, gt=0)
    """Seconds that one reward call may take before its process is killed."""
    model: str | list[str] = policy_setting(BUNDLED_LM, content=True)
    """A Hugging Face causal LM: a bundled one's name, `smollm2` (extra `smollm2`), a folder, or a hub id; or a list of
    one per LLM, `[small, large]` (docs/chains.md)."""
    start_from: str | None = policy_setting(None)
    """Start from the policies of another run, its folder or URI (those of its best checkpoint), or of one checkpoint,
    its folder. The reference stays `model`, and optimizers start anew."""
    trust_remote_code: bool = sampling_setting(False)
    """Run Python code that comes with the model."""
    chat: bool = sampling_setting(False)
    """Give prompts to the model as a user's message in its chat template, as instruction-tuned models expect them."""
    system_prompt: str | None = sampling_setting(None)
    """With `chat`: a system message before it."""
    chat_date: str | None = sampling_setting(None, pattern=r"^\d{4}-\d\d-\d\d$")
    """With `chat`: the date, YYYY-MM-DD, that a template gets that asks for today's; null: the day on which the run
    starts, which it keeps."""
    stop: str | None = task_setting(None, min_length=1)
    """A response also ends with the token that completes this text, such as a line break; rewards and later agents see
    what stands before it. Where no token holds all of it, generation goes on to the limit, and the rest is dropped."""

    # The chain.
    num_agents: int = policy_setting(2, ge=1)
    """Agents in the chain: 1 is a single agent, 2 is CORY."""
    num_policies: int | None = policy_setting(None, ge=1)
    """LLMs that play the agents' roles; null: as many as agents. A divisor of `num_agents`: 1 is one LLM in all roles,
    which learns from all responses and has nobody to exchange roles with. Or a multiple: teams, each of which plays the
    chain on queries of its own."""
    exchange_period: int | None = learning_setting(5, ge=1, clone=True)
    """Updates between role exchanges (T_REx); null: never."""
    reset_on_exchange: bool = learning_setting(False, clone=True)
    """At each role exchange forget Adam's moments, the adaptive KL coefficient and the moments of score scaling, as the
    paper's code does. One agent has no exchanges, so is never reset."""
    average_period: int | None = learning_setting(None, ge=1, clone=True)
    """At every so many-th update all LLMs move to the mean of their weights (docs/averaging.md); null: never."""
    average_tau: float = learning_setting(1.0, gt=0, le=1, clone=True)
    """With `average_period`: the share of the way to the mean that they move; 1 makes them equal."""
    knowledge_transfer: bool = sampling_setting(True)
    """Later agents see the responses before them."""
    observed: Observed = sampling_setting("all")
    """Which of them, from the third agent on: `all`, the `last`, or the `best` by task reward. For `best`, rewards are
    computed position by position instead of all at once."""
    credit: str = learning_setting("sum")
    """Who is paid for what (docs/credit.md): `sum`, every agent for the others' rewards too, as in the paper; `chain`,
    each for its own reward and those of the agents after it; or a function of your own, `module:function`."""
    reward_scope: RewardScope = learning_setting("all")
    """Whose rewards are paid out by `credit`: those of `all`, or the `last` agent's alone, so that the agents before it
    learn only from what it got. What is reported of each agent stays its own task reward."""
    partner_reward: float = learning_setting(1.0, clone=True)
    """With `credit=sum`: agent i trains on r_i + partner_reward * sum of the others' r."""
    chain_gamma: float = learning_setting(1.0, ge=0, le=1)
    """With `credit=chain`: discount from an agent to the next; 0 pays each its own reward alone."""
    chain_lam: float = learning_setting(1.0, ge=0, le=1)
    """With `credit=chain`: GAE's lambda from an agent to the next: 1 pays what the next one got, 0 what its critic
    expected, so none of its luck."""

    # How it is computed.
    weights: Literal["full", "lora"] = policy_setting("full")
    """How a policy owns its weights: `full`, a copy each; `lora`, an adapter each on one frozen base, which is the
    reference too."""
    lora_rank: int = policy_setting(16, ge=1, le=512)
    """Rank of the adapters (r)."""
    lora_alpha: float = policy_setting(32.0, gt=0)
    """An adapter's output is scaled by lora_alpha / lora_rank."""
    lora_target_modules: str | None = policy_setting(None)
    """The layers that get an adapter, such as `q_proj,v_proj`; null: every linear layer but the output head."""
    quantization: Literal["none", "nf4"] = policy_setting("none")
    """Store the frozen base in 4 bits per weight, by bitsandbytes (`lora` on CUDA GPUs, backend `transformers`)."""
    offload_optimizer: bool = computing_setting(False)
    """Keep Adam's moments in the machine's memory instead of a GPU's (docs/plan.md): more room, slower steps."""
    gradient_checkpointing: bool = computing_setting(False)
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more time."""
    backend: Literal["vllm", "transformers"] = sampling_setting("vllm" if vllm_installed() else "transformers")
    """What generates the responses; by default `vllm` where that is installed, else `transformers`, which is slower."""
    dtype: Literal["auto", "bf16", "fp32"] = sampling_setting("auto")
    """Compute type; trained weights stay fp32. `auto`: bf16 where the device multiplies it in hardware, else fp32."""
    seed: int = sampling_setting(0, ge=0, lt=2**31)
    """Seed of everything that is drawn: query order, responses, mini-batches."""
    num_runners: int = computing_setting(1, ge=0)
    """Rollout processes; 0 generates in the driver (`transformers`, and vLLM on a CPU)."""
    num_learners: int = computing_setting(0, ge=0)
    """Learner processes; 0 learns in the driver."""
    shards_per_policy: int | None = computing_setting(None, ge=1)
    """Learner processes of each policy's own, over which its weights, gradients and Adam's moments are split
    (docs/sharding.md); null: every learner holds every policy whole."""
    gpus_per_runner: float = computing_setting(None, ge=0)
    """GPUs of each runner, fractions allowed. Null, with `gpus_per_learner` null too: learner and runners share a GPU
    of this machine, if there is one (docs/plan.md); else 0."""
    tensor_parallel_size: int = computing_setting(1, ge=1)
    """Devices that each vLLM engine's model is split over: GPUs of its runner, or without any, processes on CPUs."""
    weight_transfer: Literal["gloo", "nccl", "ipc"] | None = computing_setting(None)
    """vLLM's backend by which learners send full weights straight to engines; null: through Ray and shared memory."""
    gpus_per_learner: float = computing_setting(None, ge=0)
    """GPUs of each learner; null: as of `gpus_per_runner`."""
    runner_threads: int = computing_setting(1, ge=1)
    """CPU threads (and Ray CPUs) of each runner."""
    runner_resources: str | None = computing_setting(None)
    """What else a node must have to hold a runner, and how much of it one takes: custom resources of a Ray cluster,
    such as `sampling=1,fast=0.5`."""
    learner_resources: str | None = computing_setting(None)
    """The same of learner processes."""
    generation_timeout: float = computing_setting(600.0, gt=0)
    """Seconds that one update's rollout may take, beside its rewards, before its runner is given up and restarted."""
    learner_timeout: float = computing_setting(3600.0, gt=0)
    """Seconds that a learner process may take for anything, such as one update, before it is given up."""
    check_weight_sync: bool = computing_setting(True)
    """At start, prove that perturbed weights reach the generation engine."""

    # One update.
    num_updates: int = learning_setting(100, ge=1, search=False, resume=True)
    """Updates of the whole run."""
    max_lag: int = learning_setting(0, ge=0, le=1)
    """With 1, runners play the next update while learners learn the present one, so with weights an update older, which
    `importance_sampling_clip_max` corrects (docs/plan.md). A run that goes on from a checkpoint is then not exactly
    the one that was
    not interrupted: its first update is played with the present weights."""
    queries_per_update: int = learning_setting(256, ge=1)
    """Queries per update."""
    num_generations: int = learning_setting(1, ge=1)
    """Responses of the pioneer to each query."""
    num_siblings: int = learning_setting(1, ge=1)
    """Chains that go on from each response of the pioneer, so responses to it in every later role, which are compared
    with one another (docs/credit.md)."""
    minibatch_size: int = learning_setting(256, ge=1, clone=True)
    """Responses of one policy per optimizer step, over all learners."""
    micro_batch_size: int = computing_setting(64, ge=1)
    """Most responses per forward and backward pass."""
    micro_batch_tokens: int | None = computing_setting(None, ge=1)
    """Most tokens per forward and backward pass, with prompts and padding; a longer row comes alone. Null: no limit."""
    num_epochs: int = learning_setting(4, ge=1, clone=True)
    """PPO passes over each batch."""
    lr: float = learning_setting(1.41e-5, gt=0, clone=True)
    """AdamW's learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = learning_setting("constant")
    """How the learning rate falls over the run's `num_updates`, after `warmup_updates`: not, or to 0 after the last
    one. A resume
    with other `num_updates` changes it."""
    warmup_updates: int = learning_setting(0, ge=0)
    """Updates over which the learning rate rises to `lr`."""
    weight_decay: float = learning_setting(0.0, ge=0, clone=True)
    """AdamW's decoupled weight decay."""
    max_prompt_tokens: int = sampling_setting(64, ge=1)
    """Longest prompt, in tokens."""
    max_response_tokens: int = sampling_setting(15, ge=1)
    """Longest response, in tokens."""
    min_response_tokens: int | None = sampling_setting(None, ge=1)
    """Draw each training update's longest response from `min_response_tokens` to `max_response_tokens`; null: always
    the latter."""
    temperature: float = sampling_setting(1.0, gt=0, clone=True)
    """Sampling temperature; also divides the logits that are trained."""

    # The objective.
    advantage: Advantage = policy_setting("gae")
    """What an action is compared with (docs/estimators.md): the estimate of a value head (`gae`: PPO); without one, the
    policy's other responses to the query in the same role (`rloo`, `grpo`, `dr_grpo`), or all of its responses
    (`reinforce`)."""
    kl_coef: float = learning_setting(0.3, ge=0, clone=True)
    """Weight of the KL penalty to the reference policy (eta)."""
    kl_estimator: KLEstimator = learning_setting("k1")
    """Per-token KL of the penalty: from the sampled token (k1, k3), or over the whole vocabulary (full). Only k1's
    gradient is that of the KL: full does not depend on the token that was chosen, so restrains later tokens alone.
    `grpo` and `dr_grpo` have it in the loss instead of the reward, and there it is k3."""
    kl_control: Literal["fixed", "adaptive"] = learning_setting("fixed")
    """Keep `kl_coef`, or steer it towards `kl_target`."""
    kl_target: float = learning_setting(6.0, gt=0, clone=True)
    """KL per response that the adaptive controller seeks, in nats."""
    kl_horizon: int = learning_setting(10000, ge=1, clone=True)
    """Responses over which the adaptive controller moves."""
    reward_scaling: Literal["none", "scale", "normalize"] = learning_setting("none", clone=True)
    """Divide training rewards by their running deviation, or also subtract their running mean."""
    eval_kl_coef: float | None = learning_setting(None, ge=0, search=False)
    """KL weight in the combined reward that is reported; default: the initial `kl_coef`."""
    gamma: float = learning_setting(1.0, ge=0, le=1, clone=True)
    """Discount per token."""
    lam: float = learning_setting(0.95, ge=0, le=1, clone=True)
    """GAE's lambda."""
    group_baseline: float = learning_setting(0.0, ge=0, le=1)
    """With a critic (`gae`): the share that is taken off each advantage of how much better the other responses of its
    group (to the same query, or to the same response of the pioneer) did than the critic expected."""
    clip_ratio: float = learning_setting(0.2, gt=0, clone=True)
    """Clip range of the probability ratio."""
    clip_ratio_high: float | None = learning_setting(None, gt=0, clone=True)
    """Clip range above 1, where it is another than below; null: `clip_ratio`."""
    importance_sampling_clip_max: float | None = learning_setting(2.0, ge=1)
    """Weigh each token by learner's / sampler's probability, which differ in bf16 and with `max_lag`, at most by so
    much; null: not."""
    drop_zero_std_groups: bool = learning_setting(False)
    """Learn only from responses to queries whose responses, in that role, were not all paid alike (`rloo`, `grpo`,
    `dr_grpo`: the others teach nothing but their KL)."""
    value_clip: float = learning_setting(0.2, gt=0, clone=True)
    """Clip range of the value's change."""
    critic_inputs: Literal["tokens", "chain"] = policy_setting("tokens")
    """What the value head sees (`gae`): prompt and response, or the response's role and the task rewards of those
    before it too, in training alone."""
    value_coef: float = learning_setting(0.1, ge=0, clone=True)
    """Weight of the value loss (beta)."""
    grad_clip: float | None = learning_setting(1.0, gt=0, clone=True)
    """Largest global gradient norm of a policy; null: no limit, as in the paper's code."""

    # Health: when to warn. The limits lie well outside of what healthy runs showed (docs/health.md).
    stop_on_collapse: bool = monitoring_setting(False)
    """End the run, saved, when a policy has collapsed: repetition, a lost end of sequence, or KL beyond its limit."""
    health_patience: int = monitoring_setting(3, ge=1)
    """Updates in a row that a sign must show before it is a warning."""
    max_repetition: float = monitoring_setting(0.2, gt=0, le=1)
    """Share of a response's token pairs that stand earlier in it too."""
    min_eos_ratio: float = monitoring_setting(0.5, ge=0, le=1)
    """Least end-of-sequence rate, as a share of the first update's."""
    max_token_kl: float = monitoring_setting(2.0, gt=0)
    """Most KL to the reference per response token, in nats."""
    max_observer_deficit: float = monitoring_setting(0.5, gt=0)
    """By how many standard deviations a later role's task reward may lie below the pioneer's."""
    max_role_gap: float = monitoring_setting(2.0, gt=0)
    """By how many standard deviations the roles' task rewards may differ."""
    max_logprob_diff: float | None = monitoring_setting(None, gt=0, resume=True)
    """Most mean |sampler - learner| log-probability of a token under the same weights, in nats; more ends the run
    (docs/health.md). Null: 0.001 in fp32 (0.005 with vLLM on a GPU), 0.05 in bf16."""

    # What is written, and when.
    eval_every: int = monitoring_setting(10, ge=1)
    """Updates between held-out evaluations."""
    eval_queries: int = monitoring_setting(128, ge=1)
    """Held-out queries of one evaluation in training, which choose the best checkpoint (see `validation`)."""
    select_by: Literal["bare", "chain", "mean"] = monitoring_setting("bare", search=False)
    """What the best checkpoint, or trial of a search, is the best in, by the combined reward: the policies' answers to
    the `bare` query, the last answer of the `chain`, or, with `eval_average`, the answers of the LLMs' `mean`."""
    eval_average: bool = monitoring_setting(False)
    """Also evaluate the LLM whose weights are the mean of all LLMs', `llm_mean` (docs/averaging.md)."""
    test_queries: int | None = monitoring_setting(None, ge=1, resume=True)
    """Held-out queries, none of which chose, of a last evaluation, of which every response is kept, in `final.json`;
    null: none."""
    checkpoint_every: int = output_setting(10, ge=1)
    """Updates between checkpoints."""
    keep_checkpoints: int = output_setting(2, ge=1)
    """Latest checkpoints kept, beside the best."""
    samples_every: int = output_setting(5, ge=1)
    """Updates between sample texts."""
    wandb: bool = output_setting(False)
    """Also log to Weights & Biases (extra `wandb`)."""
    trackio: bool = output_setting(False)
    """Also log to Trackio's dashboard on this machine (extra `trackio`)."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The environment's agents, in the order they answer."""
        return role_names(self.num_agents)

    @property
    def policy_ids(self) -> tuple[str, ...]:
        """The LLMs: `llm_1 ... llm_n`."""
        return tuple(f"llm_{k + 1}" for k in range(self.num_policies or self.num_agents))

    @property
    def models(self) -> dict[str, str]:
        """By LLM, the model that it starts from, which is its reference."""
        names = [self.model] * len(self.policy_ids) if isinstance(self.model, str) else self.model
        return dict(zip(self.policy_ids, names, strict=True))

    @property
    def model_names(self) -> str:
        """The models as texts name them: one, or those of all LLMs in their order."""
        names = list(self.models.values())
        return ", ".join(names if len(set(names)) > 1 else names[:1])

    @property
    def ranks(self) -> int:
        """Processes that learn one policy together."""
        return self.shards_per_policy or max(self.num_learners, 1)

    @property
    def chains(self) -> int:
        """Chains played per update."""
        return self.queries_per_update * self.num_generations * self.num_siblings

    @property
    def teams(self) -> int:
        """Chains of LLMs that play side by side, each on queries of its own."""
        return max(len(self.policy_ids) // self.num_agents, 1)

    @property
    def responses(self) -> int:
        """Responses of one policy per update; with siblings, whose roles differ in that, the mean over the policies."""
        of_all = self.queries_per_update * self.num_generations + self.chains * (self.num_agents - 1)
        return of_all // len(self.policy_ids)

    @property
    def hyperparameters(self) -> Hyperparameters:
        """What the learning of each policy depends on."""
        same = {field.name: getattr(self, field.name) for field in fields(Hyperparameters) if field.name != "steps"}
        return Hyperparameters(**same, steps=self.responses // self.minibatch_size)

    @property
    def critic(self) -> bool:
        """Whether policies have a value head."""
        return self.hyperparameters.critic

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL penalty is a term of the loss, instead of the reward."""
        return self.hyperparameters.kl_in_loss

    @property
    def lora(self) -> Lora | None:
        """What the adapters are like; None: there are none."""
        if self.weights == "full":
            return None
        targets = (
            () if self.lora_target_modules is None else tuple(self.lora_target_modules.replace(" ", "").split(","))
        )
        return Lora(self.lora_rank, self.lora_alpha, targets, self.seed)

    def response_limit(self, update: int) -> int:
        """The longest response of one training update, the same on all runners and at all positions of the chain."""
        if self.min_response_tokens is None:
            return self.max_response_tokens
        drawn = random.Random(f"response limit {self.seed} {update}")
        return drawn.randint(self.min_response_tokens, self.max_response_tokens)

    @property
    def report_kl_coef(self) -> float:
        """The fixed KL weight of the combined reward."""
        return self.kl_coef if self.eval_kl_coef is None else self.eval_kl_coef
