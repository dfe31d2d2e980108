"""Every setting of a run: flat keys, validated once, trusted afterwards."""

from __future__ import annotations

import difflib
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from cory_env.chain import Chain, Observed, role_names
from cory_env.tasks import Operations, Task, make_task
from cory_env.tokenizer import load_tokenizer, tokens_holding
from policies.contradictions import refuse_contradictions
from policies.model_names import BUNDLED_LM, model_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SettingsError(ValueError):
    """A setting is unknown, of the wrong type, or contradicts another; the message says which and what would work."""


class Lora(NamedTuple):
    """What the adapters of `weights=lora` are like."""

    rank: int
    """r, the inner dimension."""
    alpha: float
    """An adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the adapted layers, such as `q_proj`; empty: every linear layer but the output head."""
    seed: int = 0
    """What the random half of a new adapter is drawn from."""


class Settings(BaseModel):
    """The settings of one run. Defaults are the paper's, where it names one (the IMDB column of its table)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )

    # What is trained, on what.
    task: str = "imdb"
    """Name of the task: `arithmetic`, `custom`, `gsm8k` or `imdb`."""
    data: str | None = None
    """The training queries, instead of the task's own: a .jsonl, .csv or .parquet file, or a data set `hub:OWNER/NAME`.
    Settings may follow: `?query=COLUMN`, and those of a data set, `&split=train&config=...&revision=...`."""
    eval_data: str | None = None
    """The held-out queries, in the same form; without it every tenth row of `data` is held out."""
    max_query: int | None = Field(None, ge=1)
    """Cut queries to their first tokens, at most so many; null: leave them whole."""
    min_query: int | None = Field(None, ge=1)
    """With `max_query`: each query is cut to a length drawn from these two."""
    digits: int | None = Field(None, ge=1)
    """Digits of each number in the queries (`arithmetic`); null: 2."""
    operations: Operations | None = None
    """What is asked (`arithmetic`): `sums`, `differences` or `both`; null: `both`."""
    prompt: str | None = None
    """Template of the pioneer's prompt (`custom`): `{query}` and the data's columns."""
    observer_prompt: str | None = None
    """Template of every later agent's prompt (`custom`): `{query}`, `{reference}` and the data's columns."""
    reward: str | None = None
    """The reward function, `module:function`; each task but `custom` has its own."""
    on_reward_error: Literal["stop", "skip"] = "stop"
    """What a failing reward does: stop the run, or drop that query and count it."""
    reward_timeout: float = Field(300.0, gt=0)
    """Seconds that one reward call may take before its process is killed."""
    model: str = BUNDLED_LM
    """A Hugging Face causal LM: the bundled one's name, `smollm2` (extra `smollm2`), a folder, or a hub id."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    chat: bool = False
    """Give prompts to the model as a user's message in its chat template, as instruction-tuned models expect them."""
    system: str | None = None
    """With `chat`: a system message before it."""
    stop: str | None = None
    """A response also ends with the first token that holds this text, such as a line break after a few-shot answer.
    Rewards and later agents see the response without that token."""

    # The chain.
    num_agents: int = Field(2, ge=1)
    """Agents in the chain: 1 is single-agent PPO, 2 is CORY."""
    exchange_period: int | None = Field(5, ge=1)
    """Updates between role exchanges (T_REx); null: never."""
    reset_on_exchange: bool = False
    """At each role exchange forget Adam's moments, the adaptive KL coefficient and the moments of score scaling, as the
    paper's code does. One agent has no exchanges, so is never reset."""
    knowledge_transfer: bool = True
    """Later agents see the responses before them."""
    observed: Observed = "all"
    """Which of them, from the third agent on: `all`, the `last`, or the `best` by task reward. For `best`, rewards are
    computed position by position instead of all at once."""
    partner_reward: float = 1.0
    """Agent i trains on r_i + partner_reward * sum of the others' r."""

    # How it is computed.
    weights: Literal["full", "lora"] = "full"
    """How a policy owns its weights: `full`, a copy each; `lora`, an adapter each on one frozen base, which is the
    reference too."""
    lora_rank: int = Field(16, ge=1, le=512)
    """Rank of the adapters (r)."""
    lora_alpha: float = Field(32.0, gt=0)
    """An adapter's output is scaled by lora_alpha / lora_rank."""
    lora_targets: str | None = None
    """The layers that get an adapter, such as `q_proj,v_proj`; null: every linear layer but the output head."""
    quantization: Literal["none", "nf4"] = "none"
    """Store the frozen base in 4 bits per weight, by bitsandbytes (`lora` on CUDA GPUs, backend `transformers`)."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more time."""
    backend: Literal["vllm", "transformers"] = "vllm"
    """What generates the responses."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type; trained weights stay fp32. `auto`: bf16 where the device multiplies it in hardware, else fp32."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of everything that is drawn: query order, responses, mini-batches."""
    num_runners: int = Field(1, ge=0)
    """Rollout processes; 0 generates in the driver (`transformers` only)."""
    num_learners: int = Field(0, ge=0)
    """Learner processes; 0 learns in the driver."""
    gpus_per_runner: float = Field(0, ge=0)
    """GPUs of each runner, fractions allowed."""
    tensor_parallel: int = Field(1, ge=1)
    """Devices that each vLLM engine's model is split over: GPUs of its runner, or without any, processes on CPUs."""
    gpus_per_learner: float = Field(0, ge=0)
    """GPUs of each learner."""
    runner_threads: int = Field(1, ge=1)
    """CPU threads (and Ray CPUs) of each runner."""
    runner_resources: str | None = None
    """What else a node must have to hold a runner, and how much of it one takes: custom resources of a Ray cluster,
    such as `sampling=1,fast=0.5`."""
    learner_resources: str | None = None
    """The same of learner processes."""
    generation_timeout: float = Field(600.0, gt=0)
    """Seconds that one update's rollout may take, beside its rewards, before its runner is given up and restarted."""
    learner_timeout: float = Field(3600.0, gt=0)
    """Seconds that a learner process may take for anything, such as one update, before it is given up."""
    self_test: bool = True
    """At start, prove that perturbed weights reach the generation engine."""

    # One update.
    updates: int = Field(100, ge=1)
    """Updates of the whole run."""
    queries: int = Field(256, ge=1)
    """Queries per update."""
    num_generations: int = Field(1, ge=1)
    """Chains played per query, so responses of each policy to it."""
    minibatch: int = Field(256, ge=1)
    """Responses of one policy per optimizer step, over all learners."""
    micro_batch: int = Field(64, ge=1)
    """Responses per forward and backward pass."""
    epochs: int = Field(4, ge=1)
    """PPO passes over each batch."""
    lr: float = Field(1.41e-5, gt=0)
    """Adam's learning rate."""
    max_prompt: int = Field(64, ge=1)
    """Longest prompt, in tokens."""
    max_response: int = Field(15, ge=1)
    """Longest response, in tokens."""
    min_response: int | None = Field(None, ge=1)
    """Draw each training update's longest response from `min_response` to `max_response`; null: always the latter."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; also divides the logits that are trained."""

    # The objective.
    advantage: Literal["gae", "rloo", "grpo", "dr_grpo", "reinforce"] = "gae"
    """What an action is compared with (docs/estimators.md): the estimate of a value head (`gae`: PPO); without one, the
    policy's other responses to the query (`rloo`, `grpo`, `dr_grpo`), or all of its responses (`reinforce`)."""
    kl_coef: float = Field(0.3, ge=0)
    """Weight of the KL penalty to the reference policy (eta)."""
    kl_estimator: Literal["full", "k1", "k3"] = "k1"
    """Per-token KL of the penalty: from the sampled token (k1, k3), or over the whole vocabulary (full). Only k1's
    gradient is that of the KL: full does not depend on the token that was chosen, so restrains later tokens alone.
    `grpo` and `dr_grpo` have it in the loss instead of the reward, and there it is k3."""
    kl_control: Literal["fixed", "adaptive"] = "fixed"
    """Keep `kl_coef`, or steer it towards `kl_target`."""
    kl_target: float = Field(6.0, gt=0)
    """KL per response that the adaptive controller seeks, in nats."""
    kl_horizon: int = Field(10000, ge=1)
    """Responses over which the adaptive controller moves."""
    score_scaling: Literal["none", "scale", "normalize"] = "none"
    """Divide training rewards by their running deviation, or also subtract their running mean."""
    eval_kl_coef: float | None = Field(None, ge=0)
    """KL weight in the combined reward that is reported; default: the initial `kl_coef`."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE's lambda."""
    clip: float = Field(0.2, gt=0)
    """Clip range of the probability ratio."""
    value_clip: float = Field(0.2, gt=0)
    """Clip range of the value's change."""
    value_coef: float = Field(0.1, ge=0)
    """Weight of the value loss (beta)."""
    grad_clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm of a policy; null: no limit, as in the paper's code."""

    # Health: when to warn. The limits lie well outside of what healthy runs showed (docs/health.md).
    stop_on_collapse: bool = False
    """End the run, saved, when a policy has collapsed: repetition, a lost end of sequence, or KL beyond its limit."""
    health_patience: int = Field(3, ge=1)
    """Updates in a row that a sign must show before it is a warning."""
    max_repetition: float = Field(0.2, gt=0, le=1)
    """Share of a response's token pairs that stand earlier in it too."""
    min_eos_share: float = Field(0.5, ge=0, le=1)
    """Least end-of-sequence rate, as a share of the first update's."""
    max_token_kl: float = Field(2.0, gt=0)
    """Most KL to the reference per response token, in nats."""
    max_observer_loss: float = Field(0.5, gt=0)
    """By how many standard deviations a later role's task reward may lie below the pioneer's."""
    max_role_gap: float = Field(2.0, gt=0)
    """By how many standard deviations the roles' task rewards may differ."""
    max_sampler_gap: float = Field(0.05, gt=0)
    """Most mean |sampler - learner| log-probability."""

    # What is written, and when.
    eval_every: int = Field(10, ge=1)
    """Updates between held-out evaluations."""
    eval_queries: int = Field(128, ge=1)
    """Held-out queries of one evaluation."""
    final_queries: int | None = Field(None, ge=1)
    """Held-out queries of a last evaluation, of which every response is kept, in `final.json`; null: none."""
    checkpoint_every: int = Field(10, ge=1)
    """Updates between checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """Latest checkpoints kept, beside the best."""
    samples_every: int = Field(5, ge=1)
    """Updates between sample texts."""
    wandb: bool = False
    """Also log to Weights & Biases (extra `wandb`)."""
    mlflow: bool = False
    """Also log to MLflow, where MLFLOW_TRACKING_URI says (extra `mlflow`)."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The environment's agents, in the order they answer."""
        return role_names(self.num_agents)

    @property
    def modules(self) -> tuple[str, ...]:
        """The LLMs: `llm_1 ... llm_n`."""
        return tuple(f"llm_{k + 1}" for k in range(self.num_agents))

    @property
    def responses(self) -> int:
        """Responses of one policy per update."""
        return self.queries * self.num_generations

    @property
    def critic(self) -> bool:
        """Whether policies have a value head."""
        return self.advantage == "gae"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL penalty is a term of the loss, instead of the reward."""
        return self.advantage in ("grpo", "dr_grpo")

    @property
    def algorithm(self) -> str:
        """What the field calls the learning of one policy."""
        return {"gae": "PPO", "dr_grpo": "Dr. GRPO"}.get(self.advantage, self.advantage.upper())

    @property
    def lora(self) -> Lora | None:
        """What the adapters are like; None: there are none."""
        if self.weights == "full":
            return None
        targets = () if self.lora_targets is None else tuple(self.lora_targets.replace(" ", "").split(","))
        return Lora(self.lora_rank, self.lora_alpha, targets, self.seed)

    def make_task(self) -> Task:
        """The task, with its queries loaded.

        Raises:
            ValueError: the task is unknown, or its data cannot be read; the message says what to do.
        """
        return make_task(
            self.task,
            data=self.data,
            eval_data=self.eval_data,
            reward=self.reward,
            prompt=self.prompt,
            observer_prompt=self.observer_prompt,
            min_query=self.min_query,
            max_query=self.max_query,
            digits=self.digits,
            operations=self.operations,
            tokenizer=None if self.max_query is None else self.make_tokenizer(),
        )

    def make_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer.

        Raises:
            ValueError: none can be loaded.
        """
        return load_tokenizer(self.model_path, trust_remote_code=self.trust_remote_code)

    def make_chain(self, task: Task, tokenizer: PreTrainedTokenizerBase, num_agents: int | None = None) -> Chain:
        """The chain these settings describe, or one of another length.

        Raises:
            ModelError: model, tokenizer and lengths do not go together.
        """
        return Chain(
            task,
            tokenizer,
            num_agents=self.num_agents if num_agents is None else num_agents,
            knowledge_transfer=self.knowledge_transfer,
            observed=self.observed,
            partner_reward=self.partner_reward,
            max_prompt=self.max_prompt,
            max_response=self.max_response,
            vocab_size=self._vocab_size(tokenizer),
            stop_token_ids=self.stop_token_ids(tokenizer),
            chat=self.chat,
            system=self.system,
        )

    def env_settings(self) -> dict[str, Any]:
        """Keyword arguments of `cory_v0.env` for the same chain, but for tokenizers that are code of a model's own.

        Raises:
            ModelError: model, tokenizer and lengths do not go together.
        """
        same = "task num_agents knowledge_transfer observed partner_reward max_prompt max_response data eval_data"
        also = "reward prompt observer_prompt min_query max_query digits operations chat system reward_timeout"
        names = [*same.split(), *also.split()]
        tokenizer = self.make_tokenizer()
        return {name: getattr(self, name) for name in names} | {
            "tokenizer": self.model_path,
            "vocab_size": self._vocab_size(tokenizer),
            "stop_token_ids": self.stop_token_ids(tokenizer),
        }

    def _vocab_size(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Rows of the model's embedding, which may be more than the tokenizer has tokens."""
        from policies.language_model import check_model  # brings torch along

        longest = self.max_prompt + self.max_response
        return check_model(self.model_path, len(tokenizer), longest, self.trust_remote_code, self.tensor_parallel)

    def stop_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The tokens that end a response beside the tokenizer's own: those that the model names, and those of `stop`.

        Raises:
            ModelError: there is no model.
            SettingsError: no token holds the text of `stop`.
        """
        from policies.language_model import stop_token_ids

        ends = stop_token_ids(self.model_path, self.trust_remote_code)
        if self.stop is None:
            return ends
        found = tokens_holding(tokenizer, self.stop)
        if not found:
            raise SettingsError(f"stop={self.stop!r}: no single token of `{self.model}` holds it. Set a shorter text.")
        return [*ends, *found]

    def response_limit(self, update: int) -> int:
        """The longest response of one training update, the same on all runners and at all positions of the chain."""
        if self.min_response is None:
            return self.max_response
        drawn = random.Random(f"response limit {self.seed} {update}")
        return drawn.randint(self.min_response, self.max_response)

    @property
    def report_kl_coef(self) -> float:
        """The fixed KL weight of the combined reward."""
        return self.kl_coef if self.eval_kl_coef is None else self.eval_kl_coef

    @property
    def model_path(self) -> str:
        """What `from_pretrained` is given, in this process.

        Raises:
            SmolLM2Error: `smollm2` is named, but its package is not installed.
            CacheError: `smollm2` is named for the first time, and the cache cannot be written.
        """
        return model_path(self.model)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses `lr=yes`, which YAML reads as true and pydantic as 1."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:
            raise ValueError("should be a number, not true or false")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        refuse_contradictions(self)
        return self


def nearest_key(key: str, known: list[str]) -> str:
    """Returns ` Did you mean X?` for the closest known key, or an empty string."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f" Did you mean `{close[0]}`?" if close else ""


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Validates flat settings.

    Args:
        values: setting name → value; names that are left out take their defaults.

    Raises:
        SettingsError: for the first unknown key, wrong value or contradiction, in one sentence.
    """
    known = list(Settings.model_fields)
    for key in values:
        if key not in known:
            raise SettingsError(f"Unknown setting `{key}`.{nearest_key(key, known)}")
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        reason = str(first["msg"]).removeprefix("Value error, ")
        if not first["loc"]:
            raise SettingsError(reason) from None
        raise SettingsError(f"Setting `{first['loc'][0]}`={first['input']!r}: {reason}.") from None
