"""Every setting of a run: flat keys, validated once, trusted afterwards."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import date
from typing import TYPE_CHECKING, Any, Self, get_args

from pydantic import ValidationError, ValidationInfo, field_validator, model_validator

from cory_env.chain import Chain, ChainSettings
from cory_env.chat import ChatFormat
from cory_env.functions import load_function
from cory_env.home import expand_home
from cory_env.pickled import display_name, spec_of
from cory_env.rewarding.spec import weighted_sum
from cory_env.tasks import Task, TaskSettings, make_task
from cory_env.tokenizer import load_tokenizer, same_tokenizer, tokens_holding
from policies.learning.hyperparameters import Credit
from policies.models.model_names import AVERAGE, model_path
from policies.settings.conflicts import reject_conflicts
from policies.settings.error import SettingsError
from policies.settings.fields import Fields
from policies.settings.gpus import choose_gpus
from policies.settings.metadata import Category, settings_metadata

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenizers = dict[str, "PreTrainedTokenizerBase"]
"""By LLM."""


class Settings(Fields):
    """The settings of one run, which go together; how to make what they describe."""

    def selection_metrics(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """The figures by whose combined reward `select_by` chooses.

        Args:
            found: of an evaluation, with `evaluation` and `last_response` as in `metrics.jsonl`.

        Returns:
            As they stand there: NaN, or None in what was written, where one is not known.
        """
        of = {"bare": ("evaluation", "mean"), "chain": ("last_response",), "mean": ("evaluation", AVERAGE)}
        for key in of[self.select_by]:
            found = found[key]
        return found

    def selection_score(self, found: Mapping[str, Any]) -> Any:
        """The combined reward by which `select_by` chooses, of an evaluation as in `selection_metrics`."""
        return self.selection_metrics(found)["combined_reward"]

    @property
    def algorithm(self) -> str:
        """What the field calls the learning of one policy."""
        return {"gae": "PPO", "dr_grpo": "Dr. GRPO"}.get(self.advantage, self.advantage.upper())

    @property
    def credit_assignment(self) -> Credit:
        """Who is paid for what.

        Raises:
            SpecError: the function that `credit` names cannot be loaded.
        """
        own = load_function(self.credit, "credit") if ":" in self.credit else None
        return Credit(self.credit, self.partner_reward, self.chain_gamma, self.chain_lam, self.reward_scope, own)

    @property
    def reward_spec(self) -> str | None:
        """The name of the reward, which may be the weighted sum of several functions; None: the task's own.

        Raises:
            ValueError: the weights are not those of the functions.
        """
        if self.reward is None and self.reward_weights is None:
            return None
        rewards = [self.reward] if isinstance(self.reward, str) else self.reward
        return weighted_sum(rewards or [], self.reward_weights)

    def public_dict(self) -> dict[str, Any]:
        """All settings, for what leaves the run's folder: a reward that was given with its code is its name alone."""
        rewards = self.reward
        names = list(map(display_name, rewards)) if isinstance(rewards, list) else rewards and display_name(rewards)
        return {**self.model_dump(), "reward": names}

    @property
    def task_settings(self) -> TaskSettings:
        """The settings that make the task.

        Raises:
            ValueError: one conflicts with another.
        """
        held_out = self.eval_queries if self.validation else 0
        values = {field.name: getattr(self, field.name) for field in fields(TaskSettings)}
        return TaskSettings(**values | {"reward": self.reward_spec, "validation": held_out})

    def chain_settings(self, tokenizers: Tokenizers, policy_id: str) -> dict[str, Any]:
        """Keyword arguments of `Chain` for what an LLM reads and writes.

        Raises:
            ModelError: model, tokenizer and lengths do not go together.
        """
        return {field.name: getattr(self, field.name) for field in fields(ChainSettings) if field.name in METADATA} | {
            name: getattr(self, name)(tokenizers, policy_id)
            for name in ("vocab_size", "num_embeddings", "stop_token_ids")
        }

    def make_task(self) -> Task:
        """The task, with its queries loaded.

        Raises:
            ValueError: the task is unknown, or its data cannot be read; the message says what to do.
        """
        tokenizer = None if self.max_query_tokens is None else self.make_tokenizers()[self.policy_ids[0]]
        return make_task(self.task_settings, tokenizer=tokenizer)

    def make_tokenizers(self) -> Tokenizers:
        """The tokenizers of the LLMs' models; those that do not differ in what matters to a response are one object.

        Raises:
            ValueError: one cannot be loaded.
        """
        found: Tokenizers = {}  # by model
        for name in dict.fromkeys(self.models.values()):
            own = load_tokenizer(model_path(name), trust_remote_code=self.trust_remote_code)
            found[name] = next((other for other in found.values() if same_tokenizer(own, other, self.chat)), own)
        return {policy_id: found[name] for policy_id, name in self.models.items()}

    def chat_formats(self, tokenizers: Tokenizers) -> dict[str, ChatFormat]:
        """By LLM, the chat template of its tokenizer, checked; nothing without `chat`.

        Raises:
            ChatError: one cannot be used.
        """
        if not self.chat:
            return {}
        formats = {id(t): ChatFormat(t, self.system_prompt, self.chat_date) for t in tokenizers.values()}
        return {policy_id: formats[id(tokenizer)] for policy_id, tokenizer in tokenizers.items()}

    def with_chat_date(self) -> Self:
        """These settings as a run keeps them: with today's date, if a chat template asks for it and none is set.

        Raises:
            ValueError: a tokenizer or its chat template cannot be used.
        """
        if not self.chat or self.chat_date is not None:
            return self
        formats = self.chat_formats(self.make_tokenizers()).values()
        asked = any(chat_format.asks_date for chat_format in formats)
        return self.model_copy(update={"chat_date": date.today().isoformat()}) if asked else self

    def make_chain(self, task: Task, tokenizers: Tokenizers, policy_ids: Sequence[str] | None = None) -> Chain:
        """The chain these settings describe.

        Args:
            task: what is asked.
            tokenizers: what `make_tokenizers` gave.
            policy_ids: the LLM in each role; None: all roles, played by the LLMs by turns from the first one on.

        Raises:
            ModelError: model, tokenizer and lengths do not go together.
        """
        if policy_ids is None:
            policy_ids = tuple(self.policy_ids[k % len(self.policy_ids)] for k in range(self.num_agents))

        def make_reader(policy_id: str) -> Chain:
            values = self.chain_settings(tokenizers, policy_id) | {"num_agents": len(policy_ids)}
            return Chain(task, tokenizers[policy_id], **values)

        chains = {id(tokenizers[policy_id]): make_reader(policy_id) for policy_id in reversed(policy_ids)}
        chain = chains[id(tokenizers[policy_ids[0]])]
        return (
            chain.with_readers([chains[id(tokenizers[policy_id])] for policy_id in policy_ids])
            if len(chains) > 1
            else chain
        )

    def env_settings(self) -> dict[str, Any]:
        """Keyword arguments of `cory_v0.env` for the same chain, as the first LLM reads it; not for tokenizers that are
        code of a model's own.

        Raises:
            ModelError: model, tokenizer and lengths do not go together.
        """
        tokenizers, first = self.make_tokenizers(), self.policy_ids[0]
        return {
            **vars(replace(self.task_settings, validation=0)),
            **self.chain_settings(tokenizers, first),
            "tokenizer": self.model_paths[first],
            "reward_timeout": self.reward_timeout,
        }

    def vocab_size(self, tokenizers: Tokenizers, policy_id: str) -> int:
        """Checks that the models that share an LLM's tokenizer can be used with it, and with these settings.

        Returns:
            Rows of their largest embedding, which may be more than the tokenizer has tokens, or fewer.

        Raises:
            ModelError: one is not there, or cannot.
        """
        return max(self._embeddings(tokenizers, policy_id))

    def num_embeddings(self, tokenizers: Tokenizers, policy_id: str) -> int:
        """The rows of their smallest embedding, as each of them may be asked the prompts of all; else `vocab_size`."""
        return min(self._embeddings(tokenizers, policy_id))

    def _embeddings(self, tokenizers: Tokenizers, policy_id: str) -> list[int]:
        from policies.models.model_check import check_model  # brings torch along

        longest, paths = self.max_prompt_tokens + self.max_response_tokens, self._sharing(tokenizers, policy_id)
        return [check_model(path, longest, self.trust_remote_code, self.tensor_parallel_size) for path in paths]

    def families(self) -> dict[str, str]:
        """By LLM, its model's family in words.

        Raises:
            ModelError: there is no such model.
        """
        from policies.models.adapters import describe_family  # brings torch along

        return {name: describe_family(path, self.trust_remote_code) for name, path in self.model_paths.items()}

    def stop_token_ids(self, tokenizers: Tokenizers, policy_id: str) -> list[int]:
        """The tokens that end an LLM's response beside its tokenizer's own: those of `stop`, and those that a model
        with this tokenizer names.

        Raises:
            ModelError: there is no model.
        """
        from policies.models.language_model import stop_token_ids

        paths = self._sharing(tokenizers, policy_id)
        ends = list(dict.fromkeys(end for path in paths for end in stop_token_ids(path, self.trust_remote_code)))
        return ends if self.stop is None else [*ends, *tokens_holding(tokenizers[policy_id], self.stop)]

    def _sharing(self, tokenizers: Tokenizers, policy_id: str) -> list[str]:
        """The models of all LLMs that have the tokenizer of one."""
        own = tokenizers[policy_id]
        return list(dict.fromkeys(path for name, path in self.model_paths.items() if tokenizers[name] is own))

    @property
    def model_paths(self) -> dict[str, str]:
        """By LLM, what `from_pretrained` is given for its model, in this process.

        Raises:
            SmolLM2Error: `smollm2` is named, but its package is not installed.
            CacheError: `smollm2` is named for the first time, and the cache cannot be written.
        """
        return {policy_id: model_path(name) for policy_id, name in self.models.items()}

    @model_validator(mode="before")
    @classmethod
    def _choose_gpus(cls, values: Any) -> Any:
        """Fills in which GPU is used, if that is left out."""
        return choose_gpus(values) if isinstance(values, Mapping) else values

    @field_validator("*", mode="before")
    @classmethod
    def _is_what_it_seems(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses `lr=true`, which pydantic takes for 1, and text that no file can hold."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:
            raise ValueError("should be a number, not true or false")
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
            raise ValueError("should be text in UTF-8, but holds bytes or half characters that are not")
        return value

    @field_validator("chat_date")
    @classmethod
    def _is_date(cls, value: str | None) -> str | None:
        """Refuses days that no calendar has, which the pattern lets pass."""
        if value is not None:
            date.fromisoformat(value)
        return value

    @field_validator("reward", mode="before")
    @classmethod
    def _is_named(cls, value: Any) -> Any:
        """Takes functions themselves, too."""
        if isinstance(value, list):
            return [spec_of(each) if callable(each) else each for each in value]
        return spec_of(value) if callable(value) else value

    @field_validator("data", "eval_data", "model", "start_from")
    @classmethod
    def _expand_home(cls, value: Any) -> Any:
        """Expands `~` at the start of a path, which a shell does not where it stands in a file or after `key=`."""
        if isinstance(value, list):
            return [expand_home(path) for path in value]
        return None if value is None else expand_home(value)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        reject_conflicts(self)
        _ = self.reward_spec  # its functions and weights go together
        return self


def nearest_key(key: str, known: list[str]) -> str:
    """Returns ` Did you mean X?` for the closest known key, or an empty string."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f" Did you mean `{close[0]}`?" if close else ""


def reject_unknown_settings(keys: Iterable[str], where: str = "") -> None:
    """Refuses what is the name of no setting.

    Args:
        keys: of which each should be one.
        where: they stand, with a space before it, for the message.

    Raises:
        SettingsError: names the first such key, and the closest setting.
    """
    known = list(Settings.model_fields)
    for key in keys:
        if key not in known:
            raise SettingsError(f"Unknown setting `{key}`{where}.{nearest_key(key, known)}")


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Validates flat settings.

    Args:
        values: setting name → value; names that are left out take their defaults.

    Raises:
        SettingsError: for the first unknown key, wrong value or contradiction, in one sentence.
    """
    reject_unknown_settings(values)
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        reason = str(first["msg"]).removeprefix("Value error, ")
        if not first["loc"]:
            raise SettingsError(reason) from None
        value = repr(first["input"])
        shown = value if len(value) <= 100 else f"{value[:97]}..."
        raise SettingsError(f"Setting `{first['loc'][0]}`={shown}: {reason.rstrip('.')}.") from None


def changed_settings(kept: Settings, asked: Settings) -> list[str]:
    """Returns the names of the settings in which a run differs from what is asked for.

    A date that the run filled in, because a chat template asks for one and none was set, is no difference.
    """
    old, new = kept.model_dump(), asked.model_dump()
    return [name for name in old if old[name] != new[name] and (name != "chat_date" or new[name] is not None)]


METADATA = settings_metadata(Settings)
"""What is known of each setting."""
RESUMABLE = tuple(name for name, known in METADATA.items() if known.resume)
"""Settings that may change when a run goes on."""
BY_CONTENT = tuple(name for name, known in METADATA.items() if known.content)
"""Settings that may then name other files, if these hold the same."""


def settings_in(*what: Category) -> frozenset[str]:
    """Returns the names of the settings that decide any of this."""
    return frozenset(name for name, known in METADATA.items() if known.category in what)
