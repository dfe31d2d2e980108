"""All settings: type, default, description and category."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from cory_env.chain_settings import MAX_AGENTS, ChainSettings, ObservedResponses, Role, StopWhen, Thinking
from cory_env.message import has_surrogate
from cory_env.rewarding.worker import REWARD_TIMEOUT
from policies.generation.installed import vllm_installed
from policies.learning.hyperparameters import (
    Advantage,
    ImportanceSamplingMode,
    KLEstimator,
    Loss,
    OldLogprobs,
    Overlong,
    RewardScope,
)
from policies.models.model_names import SMOLLM2
from policies.settings.metadata import (
    computing_setting,
    learning_setting,
    monitoring_setting,
    output_setting,
    policy_setting,
    sampling_setting,
    task_setting,
)

Tokens = Annotated[int, Field(ge=1)]

MAX_POLICIES = 256
"""Maximum number of LLMs of a run."""
MAX_PROCESSES = 1024
"""Maximum number of runners, and of learners."""


class Fields(BaseModel):
    """The settings of one run. Defaults suit an instruct model of 0.1 to 8 B parameters on one's own data.

    docs/reference/settings.md has their sources. The paper's values are the preset `paper`.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plain_values(cls, value: object) -> object:
        """Replaces whole numbers such as 1e3 or NumPy's by integers, and tuples by lists; rejects broken text."""
        if has_surrogate(value):
            raise ValueError("should be text in UTF-8, but contains invalid bytes or half of a surrogate pair")
        if isinstance(value, tuple):
            return list(value)
        if isinstance(value, bool) or not isinstance(value, Real):
            return value
        if isinstance(value, Integral):
            return int(value)
        number = float(value)
        return int(number) if number.is_integer() else number

    # Task, data and model.
    task: str = task_setting("custom")
    """The task: `custom`, your own `data` and `reward`; `arithmetic`, `code`, `drafts`, `gsm8k`, `imdb`, `math`,
    `reasoning_gym` or `sudoku`; or a function of yours that makes one, `module:function` (docs/own-task.md)."""
    env: str | None = task_setting(None)
    """An environment instead of a task, whose agents act several times: a function of yours that makes a PettingZoo AEC
    environment with text, `module:function`; a game, `textarena:ID`; or a class for TRL's `environment_factory`,
    `trl:module:Class` (docs/environments.md). Its agents are the roles."""
    max_turns: int = task_setting(16, ge=1, le=1024)
    """With `env`: maximum number of turns of an agent in an episode; then the episode is truncated."""
    env_processes: int = computing_setting(4, ge=1)
    """With `env`: processes of each runner in which environments run. Each takes one step at a time, which may take
    `reward_timeout`; failures are handled as those of rewards (`on_reward_error`)."""
    data: str | None = task_setting(None, content=True)
    """Training queries instead of the task's own: a .jsonl, .json, .csv or .parquet file, `hub:OWNER/NAME`,
    `hub:FOLDER` or `reasoning_gym:NAME`; options follow as `?query_column=COLUMN`, for `hub:` also
    `&split=train&config=...&revision=...`."""
    eval_data: str | None = task_setting(None, content=True)
    """Held-out queries, in the same form as `data`; null: every tenth row of `data`, 40 of fewer than 400."""
    validation: bool = task_setting(True)
    """Split the held-out queries: the first `eval_queries` (at most half; every second one if they are rows of `data`)
    select checkpoints and trials, and the rest are the test set. If false, all of them serve both purposes."""
    max_query_tokens: int | None = task_setting(None, ge=1)
    """Cut queries to at most this many tokens; null: no limit."""
    min_query_tokens: int | None = task_setting(None, ge=1)
    """Cut each query to a random length from `min_query_tokens` to `max_query_tokens`."""
    prompt: str | None = task_setting(None)
    """Template of the pioneer's prompt (task `custom`), with `{query}` and the data's columns."""
    observer_prompt: str | None = task_setting(None)
    """Template of every later agent's prompt (task `custom`), with `{query}`, `{reference}` (the earlier responses),
    `{feedback}` (on the last of them, requires `feedback`) and the data's columns."""
    feedback: str | None = task_setting(None)
    """Feedback on each response for later agents (docs/feedback-and-roles.md): `task`'s own, or `module:function`;
    null: none."""
    reward: str | list[str] | None = task_setting(None)
    """Reward function, `module:function`, or a list of several; null: the task's own."""
    reward_weights: list[float] | None = task_setting(None)
    """Weights of several reward functions in their sum; null: 1 each."""
    on_reward_error: Literal["stop", "skip"] = monitoring_setting("stop", resume=True)
    """If a reward fails: `stop` the run, or `skip` its chain and count it (docs/clusters.md)."""
    reward_timeout: float = computing_setting(REWARD_TIMEOUT, gt=0)
    """Time limit of one reward call, in seconds; then its process is killed."""
    model: str | list[str] = policy_setting(SMOLLM2, content=True)
    """Hugging Face causal LM: a bundled model's name, `smollm2` (extra `smollm2`), a folder or a hub id, also
    `ID@REVISION` with a commit, tag or branch; or a list with one per LLM, `[small, large]`
    (docs/feedback-and-roles.md)."""
    start_from: str | None = policy_setting(None)
    """Start from the policies of a run's best checkpoint, or of a checkpoint's folder; `model` stays the reference."""
    trust_remote_code: bool = sampling_setting(False)
    """Run Python code that comes with the model."""
    chat: Literal["auto"] | Annotated[bool, Field(strict=False)] = sampling_setting(ChainSettings.chat)
    """Format prompts with the model's chat template, as user messages; `auto`: if all tokenizers have a template."""
    system_prompt: str | None = sampling_setting(None)
    """System message of every conversation (requires `chat`)."""
    chat_date: str | None = sampling_setting(None, pattern=r"^\d{4}-\d\d-\d\d$")
    """Date that chat templates show as today's, YYYY-MM-DD (requires `chat`); null: the day of the run's start."""
    chat_template_kwargs: dict[str, Any] | None = sampling_setting(None, search=False)
    """Further arguments of the chat template, such as `{enable_thinking: false}` (requires `chat`, docs/models.md)."""
    thinking: Thinking | None = sampling_setting(None, search=False)
    """Tags of the thought that a reasoning model writes before its answer, `{start: <think>, end: </think>}`: it is
    trained, but later agents, feedback and reward see only the text after it (docs/models.md)."""
    stop: str | None = task_setting(None, min_length=1)
    """Text that ends a response, such as a line break; rewards and later agents see only the text before it."""

    # The chain.
    num_agents: int = policy_setting(2, ge=1, le=MAX_AGENTS)
    """Agents in the chain: 1 is a single agent, 2 is CORY; with `roles` by default all of theirs."""
    roles: list[Role] | None = policy_setting(None, search=False, min_length=1)
    """Roles of the chain in order, such as `[{name: solver}, {name: critic, produces_response: false}, ...]`
    (docs/feedback-and-roles.md); `num_agents` below their number keeps only the first agents. Null: a pioneer and
    observers."""
    num_policies: int | None = policy_setting(None, ge=1, le=MAX_POLICIES)
    """Number of LLMs; null: one per agent. With a divisor of `num_agents`, each LLM has several roles (1: one LLM in
    all roles); with a multiple, LLMs form teams, each with its own queries."""
    exchange_period: int | None = learning_setting(5, ge=1, clone=True)
    """Updates between role exchanges (T_REx); null: never."""
    reset_on_exchange: bool = learning_setting(False, clone=True)
    """Reset Adam's moments, `kl_coef` and reward scaling at each role exchange, as the paper's code does."""
    average_period: int | None = learning_setting(None, ge=1, clone=True)
    """Updates between averagings of all LLMs' weights (docs/algorithms.md); null: never."""
    average_tau: float = learning_setting(1.0, gt=0, le=1, clone=True)
    """Step size of averaging: 1 sets all LLMs to the mean, smaller values move them towards it."""
    knowledge_transfer: bool = sampling_setting(ChainSettings.knowledge_transfer)
    """Show agents the responses of earlier agents."""
    observed: ObservedResponses = sampling_setting(ChainSettings.observed)
    """Earlier responses that the third and later agents see: `all`, or only the `last`."""
    stop_when: StopWhen | None = sampling_setting(None)
    """`solved`: a chain ends as soon as the feedback has nothing to correct, in evaluation, generation and serving
    (requires `feedback`); null: all agents respond."""
    stop_in_training: bool = learning_setting(False)
    """Apply `stop_when` in training too. If false, later agents also learn to keep right responses."""
    credit: str = learning_setting("sum")
    """Credit assignment (docs/algorithms.md): `sum`, its own reward and `partner_reward` times the others';
    `chain`, its own and those of later agents; or your own function, `module:function`."""
    reward_scope: RewardScope = learning_setting("all")
    """Rewards that `credit` assigns: those of `all` agents, or only the `last` agent's."""
    partner_reward: float = learning_setting(ChainSettings.partner_reward, clone=True)
    """Weight of the other agents' rewards in `credit=sum`: agent i trains on r_i + partner_reward * sum of the others'
    r, except those of other drafts of its role. 0: each agent has its own reward; the paper's sum is 1."""
    chain_gamma: float = learning_setting(1.0, ge=0, le=1)
    """Discount from one agent to the next in `credit=chain`; 0 gives each agent only its own reward. With `env`, from
    one turn of an agent to its next."""
    chain_lam: float = learning_setting(1.0, ge=0, le=1)
    """GAE's lambda between agents in `credit=chain`, with `env` between the turns of an agent: 1 uses the rewards that
    follow, 0 the critic's estimate."""

    # Weights, precision and placement.
    weights: Literal["full", "lora"] = policy_setting("lora")
    """`full`: a copy of all weights per policy; `lora`: adapters on one frozen base, which is also the reference."""
    lora_rank: int = policy_setting(16, ge=1, le=512)
    """Rank of the adapters (r)."""
    lora_alpha: float = policy_setting(32.0, gt=0)
    """Scaling of the adapters: their output is multiplied by lora_alpha / lora_rank."""
    lora_target_modules: str | None = policy_setting(None)
    """Layers with an adapter, such as `q_proj,v_proj`; null: all linear layers except the output head."""
    quantization: Literal["none", "nf4"] = policy_setting("none")
    """Store the frozen base of adapters in 4 bits per weight with bitsandbytes (GPUs, `backend=transformers`)."""
    offload_optimizer: bool = computing_setting(False)
    """Keep Adam's moments in CPU memory instead of on the GPU: less GPU memory, slower steps (docs/gpus.md)."""
    gradient_checkpointing: bool = computing_setting(False)
    """Recompute activations in the backward pass: less memory, a fifth to a third more time."""
    torch_compile: bool = computing_setting(False, resume=False)
    """Compile the learner's transformer blocks, which fuses small operations; not measured on a GPU, no gain on a CPU.
    A resumed run may differ from an uninterrupted one by rounding."""
    backend: Literal["vllm", "transformers"] = sampling_setting("vllm" if vllm_installed() else "transformers")
    """Engine that generates responses; default: `vllm` if installed, else `transformers`, which is slower."""
    dtype: Literal["auto", "bf16", "fp32"] = sampling_setting("auto")
    """Compute type; trained weights stay fp32. `auto`: bf16 if the hardware supports it, else fp32."""
    seed: int = sampling_setting(0, ge=0, lt=2**31)
    """Random seed of query order, responses and mini-batches."""
    num_runners: int = computing_setting(1, ge=0, le=MAX_PROCESSES)
    """Rollout processes; 0 generates in the driver (possible with `transformers`, and with vLLM on a CPU)."""
    num_learners: int = computing_setting(0, ge=0, le=MAX_PROCESSES)
    """Learner processes; 0 learns in the driver."""
    shards_per_policy: int | None = computing_setting(None, ge=1)
    """Learner processes over which each LLM is split (docs/gpus.md); null: every learner holds every LLM."""
    gpus_per_runner: float = computing_setting(None, ge=0)
    """GPUs per runner, fractions allowed; null: if `gpus_per_learner` is null too, learner and runners share this
    machine's GPU (docs/gpus.md); else 0."""
    tensor_parallel_size: int = computing_setting(1, ge=1)
    """Devices per vLLM engine: GPUs of its runner, or processes if there are none."""
    weight_transfer: Literal["gloo", "nccl", "ipc"] | None = computing_setting(None)
    """vLLM backend that sends full weights directly from learners to engines; null: through Ray and shared memory."""
    gpus_per_learner: float = computing_setting(None, ge=0)
    """GPUs per learner; null: as for `gpus_per_runner`."""
    runner_threads: int = computing_setting(1, ge=1)
    """CPU threads (and Ray CPUs) per runner."""
    generation_timeout: float = computing_setting(600.0, gt=0)
    """Time limit of one update's rollout, excluding rewards, in seconds; then its runner is restarted."""
    learner_timeout: float = computing_setting(3600.0, gt=0)
    """Time limit of any call to a learner process, such as one update, in seconds; then it counts as dead."""
    check_weight_sync: bool = computing_setting(True)
    """Check at start that perturbed weights reach the generation engine (docs/faq.md)."""

    # Updates.
    num_updates: int = learning_setting(100, ge=1, search=False, resume=True)
    """Length of the run in updates."""
    num_passes: float | None = learning_setting(None, gt=0, search=False)
    """Length of the run in passes over the training queries, instead of `num_updates`, which is computed from it."""
    max_lag: int = learning_setting(0, ge=0, le=1)
    """1 prefetches the next update's rollouts while learners learn, with weights one update older (docs/gpus.md). A
    resumed run generates its first update with the current weights, so it differs slightly."""
    queries_per_update: int = learning_setting(16, ge=1, le=100_000)
    """Queries per update."""
    num_generations: int = learning_setting(8, ge=1, le=1_000)
    """Chains per query."""
    minibatch_size: int | None = learning_setting(None, ge=1, clone=True)
    """Responses of one policy per optimizer step, over all learners; null: all of an update, so one step per epoch. All
    LLMs take equally many steps, so an LLM with fewer responses than others (`roles`) has smaller mini-batches."""
    micro_batch_size: int = computing_setting(64, ge=1)
    """Maximum responses per forward and backward pass."""
    micro_batch_tokens: Literal["auto"] | Tokens | None = computing_setting("auto")
    """Maximum tokens per forward and backward pass, with prompts and padding, shared prefixes once; a longer row is
    alone. `auto`: as many as fit by estimate (docs/gpus.md), at most 16,384, on a CPU 2,048; null: no limit."""
    num_epochs: int = learning_setting(1, ge=1, clone=True)
    """PPO epochs: passes over each update's responses (`num_passes` counts passes over the data)."""
    lr: float | None = learning_setting(None, gt=0, clone=True)
    """Learning rate of AdamW; null: 1e-5 for adapters, 1e-6 for full weights."""
    lr_schedule: Literal["constant", "linear", "cosine"] = learning_setting("constant")
    """Learning rate after the warmup: `constant`, or `linear` or `cosine` decay to 0 at `num_updates`."""
    warmup_updates: int = learning_setting(0, ge=0)
    """Updates over which the learning rate rises linearly to `lr`."""
    weight_decay: float = learning_setting(0.0, ge=0, clone=True)
    """Decoupled weight decay of AdamW."""
    max_prompt_tokens: int | None = sampling_setting(None, ge=1)
    """Maximum prompt length, in tokens; null: as long as data, earlier responses and model need, at most 4,096."""
    max_response_tokens: int = sampling_setting(ChainSettings.max_response_tokens, ge=1)
    """Maximum response length, in tokens."""
    min_response_tokens: int | None = sampling_setting(None, ge=1)
    """Sample the length limit of each training update from this to `max_response_tokens`; null: always the latter."""
    temperature: float = sampling_setting(1.0, gt=0, clone=True)
    """Sampling temperature; also divides the logits in training."""

    # The objective.
    advantage: Advantage = policy_setting("rloo")
    """Advantage estimator (docs/algorithms.md): `gae` with a value head (PPO); `rloo`, `grpo` or `dr_grpo`, relative to
    the policy's other responses to the query in the same role; `gdpo`, as `grpo` but each of several reward functions
    apart; `reinforce`, relative to all its responses."""
    kl_coef: float = learning_setting(0.01, ge=0, clone=True)
    """Weight of the KL penalty to the reference policy (eta); 0: training loads no reference and measures no KL."""
    kl_estimator: KLEstimator = learning_setting("k1")
    """KL estimator of the penalty: `k1` or `k3` from the sampled token, `full` over the whole vocabulary; `grpo`,
    `dr_grpo` and `gdpo` require k3, in the loss. In rewards, only `k1` has the gradient of the KL
    (docs/algorithms.md)."""
    kl_target: float | None = learning_setting(None, gt=0, clone=True)
    """Adapt `kl_coef` so that a response's KL becomes this many nats, 6 in the paper's code; null: it is fixed."""
    kl_horizon: int = learning_setting(10000, ge=1, clone=True)
    """Time scale of this adaptation, in responses."""
    reward_scaling: Literal["none", "scale", "normalize"] = learning_setting("none", clone=True)
    """Divide training rewards by their running standard deviation; `normalize`: also subtract their mean."""
    eval_kl_coef: float | None = learning_setting(None, ge=0, search=False)
    """KL weight in the reported combined reward; null: the initial `kl_coef`. Above 0, evaluations measure the KL."""
    gamma: float = learning_setting(1.0, ge=0, le=1, clone=True)
    """Discount per token."""
    lam: float = learning_setting(0.95, ge=0, le=1, clone=True)
    """GAE's lambda per token."""
    old_logprobs: OldLogprobs = learning_setting("learner")
    """Old log-probabilities, to which the policy loss compares new ones: the `learner`'s, by a forward pass before
    training, or the `sampler`'s as they are: faster, but not with `max_lag=1` (docs/algorithms.md)."""
    loss: Loss = learning_setting("ppo")
    """Policy loss (docs/algorithms.md): `ppo`, a clipped ratio per token; `gspo`, one per response, all of the same
    weight; `cispo`, ratios as bounded weights without a gradient, so every token has one."""
    clip_ratio: float | None = learning_setting(None, gt=0, clone=True)
    """Clip range of the probability ratio; null: 0.2, `gspo` 3e-4 and 4e-4, `cispo` only 4 above 1."""
    clip_ratio_high: float | None = learning_setting(None, gt=0, clone=True)
    """Upper clip range, if different (DAPO); null: `clip_ratio`. With `cispo`, the largest weight is 1 more."""
    dual_clip: float | None = learning_setting(None, gt=1, clone=True)
    """Bound of the ratio of tokens with negative advantages (`loss=ppo`), such as 3; null: none."""
    entropy_coef: float = learning_setting(0.0, ge=0, clone=True)
    """Weight of the mean entropy per token in the objective, which keeps responses diverse."""
    importance_sampling_mode: ImportanceSamplingMode = learning_setting("token_truncate")
    """Weights by learner's / sampler's probability, which correct for bf16 and `max_lag`: per token, or their product
    over a response (`sequence_*`); out of bounds, they are set to the bound (`*_truncate`) or 0 (`*_mask`)."""
    importance_sampling_clip_max: float | None = learning_setting(2.0, ge=1)
    """Largest importance sampling weight; null: no weights."""
    importance_sampling_clip_min: float | None = learning_setting(None, gt=0, le=1)
    """Smallest importance sampling weight; null: no lower bound."""
    dynamic_sampling: int | None = learning_setting(None, ge=1)
    """Replace queries whose groups have equal rewards in all roles by the next queries (DAPO), in at most this many
    rounds per update; those left then stay. Discarded tokens count in `tokens`. Null: no replacements."""
    overlong: Overlong = learning_setting("keep")
    """Responses that were cut at the length limit: `keep` them as they are, `mask` them out of the loss (they still
    count in baselines), or lower the reward of responses near the limit (`penalty`, DAPO)."""
    overlong_buffer: int | None = learning_setting(None, ge=1)
    """With `overlong=penalty`: number of tokens before the length limit over which the penalty rises from 0."""
    overlong_penalty: float = learning_setting(1.0, gt=0)
    """With `overlong=penalty`: the penalty at the length limit."""
    value_clip: float = learning_setting(0.2, gt=0, clone=True)
    """Clip range of the change of a value estimate during an update."""
    value_coef: float = learning_setting(0.1, ge=0, clone=True)
    """Weight of the value loss (beta)."""
    grad_clip: float | None = learning_setting(1.0, gt=0, clone=True)
    """Maximum gradient norm per policy; null: no clipping, as in the paper's code."""

    # Evaluation and output. The limits of health checks are fixed (docs/faq.md).
    max_logprob_diff: float | None = monitoring_setting(None, gt=0, resume=True)
    """End the run if the mean |sampler - learner| log-probability per token under the same weights exceeds this, in
    nats. Null: three times the difference at start, at least 0.05 in bf16 and 0.001 in fp32 (docs/faq.md)."""
    eval_every: int = monitoring_setting(10, ge=1)
    """Updates between evaluations on held-out queries."""
    eval_queries: int = monitoring_setting(128, ge=1)
    """Held-out queries per evaluation during training, which selects the best checkpoint (see `validation`)."""
    select_by: Literal["bare", "chain", "mean"] = monitoring_setting("bare", search=False)
    """Combined reward that selects the best checkpoint or trial: of the policies on the `bare` query, of the last
    response of the `chain`, or, with `eval_average`, of the LLM with the `mean` weights."""
    eval_average: bool = monitoring_setting(False)
    """Also evaluate `llm_mean`, the LLM with the mean of all LLMs' weights (docs/algorithms.md)."""
    test_queries: int | None = monitoring_setting(None, ge=1, resume=True)
    """Number of held-out test queries (not used for selection) in a final evaluation, which stores all its responses in
    `final.json`; null: no final evaluation."""
    checkpoint_every: int = output_setting(10, ge=1)
    """Updates between checkpoints."""
    checkpoint_minutes: float | None = output_setting(None, gt=0)
    """Also save a checkpoint after an update if the last one is at least this many minutes old; null: never."""
    keep_checkpoints: int = output_setting(2, ge=1)
    """Number of latest checkpoints to keep, besides the best one."""
    tracker: Literal["wandb", "trackio"] | None = output_setting(None)
    """Also log to Weights & Biases (`wandb`), or to Trackio, a local dashboard (`trackio`); each is an extra."""
