"""All settings of a run: flat keys, validated once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import date
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError, field_validator, model_validator

from cory_env.chain import Chain
from cory_env.chain_settings import ChainSettings
from cory_env.chat import ChatTemplate
from cory_env.functions import load_function
from cory_env.home import expand_home
from cory_env.pickled import display_name, spec_of
from cory_env.rewarding.spec import weighted_sum
from cory_env.tasks import Task, TaskSettings, make_task
from cory_env.text_envs.task import make_env_task
from cory_env.tokenizer import load_tokenizer, same_tokenizer, token_ids_containing
from policies.learning.hyperparameters import Credit
from policies.models.model_names import AVERAGE_POLICY, model_path
from policies.settings.conflicts import reject_conflicts
from policies.settings.derived import DerivedSettings
from policies.settings.error import SettingsError
from policies.settings.metadata import Category, settings_metadata
from policies.settings.migration.names import explain_foreign_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenizers = dict[str, "PreTrainedTokenizerBase"]
"""Policy id → tokenizer."""


class Settings(DerivedSettings):
    """The validated settings of one run, with methods that create its task, tokenizers and chain."""

    def selection_metrics(self, report: Mapping[str, Any]) -> Mapping[str, Any]:
        """The metrics that contain the combined reward of `select_by`.

        Args:
            report: of an evaluation, with `evaluation` and `last_response` as in `metrics.jsonl`.

        Returns:
            Metric name → value; an unknown value is NaN, or None if `report` was read from a file.
        """
        keys = {"bare": ("evaluation", "mean"), "chain": ("last_response",), "mean": ("evaluation", AVERAGE_POLICY)}
        metrics = report
        for key in keys[self.select_by]:
            metrics = metrics[key]
        return metrics

    def selection_score(self, report: Mapping[str, Any]) -> Any:
        """The combined reward that `select_by` maximizes; for the argument see `selection_metrics`."""
        return self.selection_metrics(report)["combined_reward"]

    @property
    def algorithm(self) -> str:
        """Common name of the learning algorithm, such as PPO."""
        return {"gae": "PPO", "dr_grpo": "Dr. GRPO"}.get(self.advantage, self.advantage.upper())

    @property
    def credit_assignment(self) -> Credit:
        """The credit assignment scheme.

        Raises:
            SpecError: the function that `credit` names cannot be loaded.
        """
        function = load_function(self.credit, "credit") if ":" in self.credit else None
        stages = tuple(position.stage for position in self.positions)
        return Credit(
            self.credit, self.partner_reward, self.chain_gamma, self.chain_lam, self.reward_scope, function, stages
        )

    @property
    def reward_spec(self) -> str | None:
        """The reward as one text, such as `module:function` or a weighted sum of several; None: the task's own.

        Raises:
            ValueError: the number of weights is not the number of functions.
        """
        if self.reward is None and self.reward_weights is None:
            return None
        rewards = [self.reward] if isinstance(self.reward, str) else self.reward
        return weighted_sum(rewards or [], self.reward_weights)

    def public_dict(self) -> dict[str, Any]:
        """All settings, for publication: of functions passed from Python only the names, not the code."""
        rewards = self.reward
        names = list(map(display_name, rewards)) if isinstance(rewards, list) else rewards and display_name(rewards)
        return {**self.model_dump(), "reward": names, "feedback": self.feedback and display_name(self.feedback)}

    @property
    def task_settings(self) -> TaskSettings:
        """The settings of the task.

        Raises:
            ValueError: two of them conflict.
        """
        num_validation = self.eval_queries if self.validation else 0
        prompts = tuple(role.prompt for role in self.roles or () if role.prompt is not None)
        own_values = {"reward": self.reward_spec, "validation": num_validation, "role_prompts": prompts}
        names = [field.name for field in fields(TaskSettings) if field.name not in own_values]
        return TaskSettings(**{name: getattr(self, name) for name in names} | own_values)

    def chain_settings(self, tokenizers: Tokenizers, policy_id: str) -> dict[str, Any]:
        """Keyword arguments of `Chain` for the prompts and responses of one LLM.

        Args:
            tokenizers: from `make_tokenizers`.
            policy_id: the LLM.

        Raises:
            ModelError: model, tokenizer and maximum lengths are incompatible.
        """
        values = {field.name: getattr(self, field.name) for field in fields(ChainSettings) if field.name in METADATA}
        values |= {"chat": self.uses_chat(tokenizers), "max_prompt_tokens": self.prompt_limit}
        sizes = self._embeddings(tokenizers, policy_id)  # prompts are shared, so they must fit the smallest one
        values |= {"vocab_size": max(sizes), "num_embeddings": min(sizes)}
        return values | {"stop_token_ids": self.stop_token_ids(tokenizers, policy_id)}

    def make_task(self) -> Task:
        """Creates the task and loads its queries.

        Raises:
            ValueError: the task is unknown, or its data cannot be read; the message names a fix.
        """
        if self.env is not None:
            validation = self.eval_queries if self.validation else 0
            return make_env_task(self.env, self.max_turns, validation, self.data, self.eval_data)
        tokenizer = None if self.max_query_tokens is None else self.make_tokenizers()[self.policy_ids[0]]
        return make_task(self.task_settings, tokenizer=tokenizer)

    def make_tokenizers(self) -> Tokenizers:
        """Loads the LLMs' tokenizers; tokenizers that are equivalent for responses are the same object.

        Raises:
            ValueError: one cannot be loaded.
        """
        by_path: Tokenizers = {}
        for path in dict.fromkeys(self.model_paths.values()):
            tokenizer = load_tokenizer(path, trust_remote_code=self.trust_remote_code)
            same = (known for known in by_path.values() if same_tokenizer(tokenizer, known, bool(self.chat)))
            by_path[path] = next(same, tokenizer)
        return {policy_id: by_path[path] for policy_id, path in self.model_paths.items()}

    def chat_formats(self, tokenizers: Tokenizers) -> dict[str, ChatTemplate]:
        """Policy id → its tokenizer's chat template, checked; empty without `chat`.

        Raises:
            ChatError: a template is missing or invalid.
        """
        if not self.uses_chat(tokenizers):
            return {}
        arguments = (self.system_prompt, self.chat_date, self.chat_template_kwargs)
        formats = {id(tokenizer): ChatTemplate(tokenizer, *arguments) for tokenizer in tokenizers.values()}
        return {policy_id: formats[id(tokenizer)] for policy_id, tokenizer in tokenizers.items()}

    def uses_chat(self, tokenizers: Tokenizers) -> bool:
        """Whether prompts are formatted with chat templates: `chat`, or with `auto` whether all tokenizers have one."""
        if self.chat == "auto":
            return all(tokenizer.chat_template for tokenizer in tokenizers.values())
        return self.chat

    def make_chain(
        self, task: Task, tokenizers: Tokenizers, policy_ids: Sequence[str] | None = None, *, training: bool = False
    ) -> Chain:
        """Creates the chain.

        Args:
            task: the task.
            tokenizers: from `make_tokenizers`.
            policy_ids: the LLM in each role; None: all roles, assigned to the LLMs in turn, starting with the first.
            training: whether the chain generates training data, which `stop_when` affects only with `stop_in_training`.

        Raises:
            ModelError: model, tokenizer and maximum lengths are incompatible.
        """
        if policy_ids is None:
            policy_ids = self.assignment

        def make_own_chain(policy_id: str) -> Chain:
            values = self.chain_settings(tokenizers, policy_id) | {"num_agents": len(policy_ids)}
            if training and not self.stop_in_training:
                values["stop_when"] = None
            return Chain(task, tokenizers[policy_id], **values)

        chains = {id(tokenizers[policy_id]): make_own_chain(policy_id) for policy_id in reversed(policy_ids)}
        own_chains = [chains[id(tokenizers[policy_id])] for policy_id in policy_ids]
        return own_chains[0].with_encoders([chain.encoders[0] for chain in own_chains])

    def env_settings(self) -> dict[str, Any]:
        """Keyword arguments of `cory_v0.env` for the same chain with the first LLM's tokenizer.

        Tokenizers that need `trust_remote_code` are not supported.

        Raises:
            ModelError: model, tokenizer and maximum lengths are incompatible.
        """
        tokenizers, first = self.make_tokenizers(), self.policy_ids[0]
        return {
            **vars(replace(self.task_settings, validation=0)),
            **self.chain_settings(tokenizers, first),
            "stop_when": self.stop_when if self.stop_in_training else None,
            "tokenizer": self.model_paths[first],
            "reward_timeout": self.reward_timeout,
        }

    def vocab_size(self, tokenizers: Tokenizers, policy_id: str) -> int:
        """Checks the models that share an LLM's tokenizer against it and these settings.

        Args:
            tokenizers: from `make_tokenizers`.
            policy_id: the LLM.

        Returns:
            Rows of their largest embedding; may differ from the tokenizer's number of tokens.

        Raises:
            ModelError: a model is missing or incompatible.
        """
        return max(self._embeddings(tokenizers, policy_id))

    def _embeddings(self, tokenizers: Tokenizers, policy_id: str) -> list[int]:
        from policies.models.model_check import check_model  # imports torch

        paths = self._sharing(tokenizers, policy_id)
        return [check_model(path, self.max_length, self.trust_remote_code, self.tensor_parallel_size) for path in paths]

    def families(self) -> dict[str, str]:
        """Policy id → description of its model's family.

        Raises:
            ModelError: a model is missing.
        """
        from policies.models.adapters import describe_family  # imports torch

        return {
            name: describe_family(path, self.max_length, self.trust_remote_code)
            for name, path in self.model_paths.items()
        }

    def stop_token_ids(self, tokenizers: Tokenizers, policy_id: str) -> list[int]:
        """Ids of tokens that end an LLM's response besides its tokenizer's end of sequence.

        These are the tokens of `stop`, and the ends of sequence of all models with this tokenizer.

        Args:
            tokenizers: from `make_tokenizers`.
            policy_id: the LLM.

        Raises:
            ModelError: a model is missing.
        """
        from policies.models.language_model import stop_token_ids

        paths = self._sharing(tokenizers, policy_id)
        ids = list(dict.fromkeys(token for path in paths for token in stop_token_ids(path, self.trust_remote_code)))
        return ids if self.stop is None else [*ids, *token_ids_containing(tokenizers[policy_id], self.stop)]

    def _sharing(self, tokenizers: Tokenizers, policy_id: str) -> list[str]:
        """The paths of all models that share an LLM's tokenizer."""
        tokenizer = tokenizers[policy_id]
        return list(dict.fromkeys(path for name, path in self.model_paths.items() if tokenizers[name] is tokenizer))

    @property
    def model_paths(self) -> dict[str, str]:
        """Policy id → path or hub id of its model in this process, trained or frozen (`model_path`).

        Raises:
            SmolLM2Error: the model is `smollm2`, but its package is not installed.
            CacheError: `smollm2` is used for the first time, and the cache cannot be written.
        """
        return {policy_id: model_path(name) for policy_id, name in self.all_models.items()}

    @field_validator("chat_date")
    @classmethod
    def _check_date(cls, value: str | None) -> str | None:
        """Rejects dates that match the pattern but do not exist."""
        if value is not None:
            date.fromisoformat(value)
        return value

    @field_validator("reward", "feedback", mode="before")
    @classmethod
    def _functions_to_specs(cls, value: Any) -> Any:
        """Accepts Python functions."""
        if isinstance(value, list):
            return [spec_of(reward) if callable(reward) else reward for reward in value]
        return spec_of(value) if callable(value) else value

    @field_validator("data", "eval_data", "model", "start_from")
    @classmethod
    def _expand_home(cls, value: Any) -> Any:
        """Expands a leading `~`, as shells do not expand it in files or after `key=`."""
        if isinstance(value, list):
            return [expand_home(path) for path in value]
        return None if value is None else expand_home(value)

    @model_validator(mode="after")
    def _reject_conflicts(self) -> Self:
        reject_conflicts(self)
        _ = self.reward_spec  # raises if the numbers of functions and weights differ
        return self


def nearest_key(key: str, keys: list[str]) -> str:
    """Returns ` Did you mean X?` for the closest of `keys`, or an empty string if none is close."""
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    return f" Did you mean `{close[0]}`?" if close else ""


def reject_unknown_settings(keys: Iterable[str], source: str = "") -> None:
    """Rejects keys that are not settings.

    The message has the setting that a key is in another library, or the closest one; `source` is its origin, such as
    ` in FILE`.
    """
    names = list(Settings.model_fields)
    for key in keys:
        if key not in names:
            hint = explain_foreign_name(key)
            raise SettingsError(f"Unknown setting `{key}`{source}.{f' {hint}' if hint else nearest_key(key, names)}")


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Validates flat settings.

    Args:
        values: setting name → value; missing settings take their defaults.

    Raises:
        SettingsError: for the first unknown key, invalid value or conflict.
    """
    reject_unknown_settings(values)
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        reasons = [str(each["msg"]) for each in error.errors() if each["loc"][:1] == first["loc"][:1]]
        reason = reasons[0].removeprefix("Value error, ")
        if len(reasons) > 1 and all(text.startswith(EXPECTED) for text in reasons):  # a value of several types
            reason = EXPECTED + " or ".join(dict.fromkeys(text.removeprefix(EXPECTED) for text in reasons))
        if not first["loc"]:
            raise SettingsError(reason) from None
        setting = ".".join(map(str, first["loc"][: 2 if first["loc"][0] == "thinking" else 1]))
        value = repr(first["input"])
        value = value if len(value) <= 100 else f"{value[:97]}..."
        raise SettingsError(f"Setting `{setting}`={value}: {reason.rstrip('.')}.") from None


def changed_settings(recorded: Settings, requested: Settings) -> list[str]:
    """Returns the names of settings whose requested values differ from those that a run recorded.

    A value that a request leaves open, and that the run filled in, is not a difference.
    """
    old, new = recorded.comparable_dump(), requested.comparable_dump()
    unchanged: list[tuple[str, object]] = [*OPEN_VALUES.items()]
    if requested.env is not None and requested.roles is None:  # they are the environment's
        unchanged += [("roles", None), ("num_agents", requested.num_agents)]
    return [name for name in old if old[name] != new[name] and (name, new[name]) not in unchanged]


EXPECTED = "Input should be "
"""How pydantic says which type is expected."""
OPEN_VALUES = {"chat": "auto", "chat_date": None, "lr": None, "max_prompt_tokens": None, "micro_batch_tokens": "auto"}
"""Values that a run fills in when it starts (`policies.settings.resolve`)."""
METADATA = settings_metadata(Settings)
"""Setting name → metadata."""
RESUMABLE = tuple(name for name, metadata in METADATA.items() if metadata.resume)
"""Settings that may change when a run resumes."""
BY_CONTENT = tuple(name for name, metadata in METADATA.items() if metadata.content)
"""Settings that may name other files with the same content when a run resumes."""


def settings_in_categories(*categories: Category) -> frozenset[str]:
    """Returns the names of the settings in any of these categories."""
    return frozenset(name for name, metadata in METADATA.items() if metadata.category in categories)
