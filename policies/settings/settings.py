"""Every setting of a run: flat keys, validated once, trusted afterwards."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError, model_validator

from cory_env.chain import Chain
from cory_env.tasks import Task, make_task
from cory_env.tokenizer import difference, load_tokenizer, tokens_holding
from policies.models.model_names import model_path
from policies.settings.about import Decides, about
from policies.settings.contradictions import refuse_contradictions
from policies.settings.fields import Fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SettingsError(ValueError):
    """A setting is unknown, of the wrong type, or contradicts another; the message says which and what would work."""


class Settings(Fields):
    """The settings of one run, which go together; how to make what they describe."""

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
            validation=self.eval_queries if self.validation else 0,
        )

    def make_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of all models.

        Raises:
            ValueError: none can be loaded.
            SettingsError: the models do not have the same.
        """
        first, *others = dict.fromkeys(self.models.values())
        tokenizer = load_tokenizer(model_path(first), trust_remote_code=self.trust_remote_code)
        for name in others:
            other = load_tokenizer(model_path(name), trust_remote_code=self.trust_remote_code)
            if found := difference(tokenizer, other, self.chat):
                raise SettingsError(
                    f"The models `{first}` and `{name}` have different tokenizers: {found}. All LLMs of a chain "
                    "need the same one: list models of one family, or name a single model."
                )
        return tokenizer

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
            vocab_size=self.check_model(tokenizer),
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
            "tokenizer": next(iter(self.model_paths.values())),
            "vocab_size": self.check_model(tokenizer),
            "stop_token_ids": self.stop_token_ids(tokenizer),
        }

    def check_model(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Checks that every LLM's model can be used with a tokenizer, and with the lengths of these settings.

        Returns:
            Rows of the largest embedding, which may be more than the tokenizer has tokens.

        Raises:
            ModelError: one is not there, or cannot.
        """
        from policies.models.model_check import check_model  # brings torch along

        longest = self.max_prompt + self.max_response
        return max(
            check_model(path, len(tokenizer), longest, self.trust_remote_code, self.tensor_parallel)
            for path in dict.fromkeys(self.model_paths.values())
        )

    def stop_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The tokens that end a response beside the tokenizer's own: those that a model names, and those of `stop`.

        Raises:
            ModelError: there is no model.
            SettingsError: no token holds the text of `stop`.
        """
        from policies.models.language_model import stop_token_ids

        paths = dict.fromkeys(self.model_paths.values())
        ends = list(dict.fromkeys(end for path in paths for end in stop_token_ids(path, self.trust_remote_code)))
        if self.stop is None:
            return ends
        found = tokens_holding(tokenizer, self.stop)
        if not found:
            raise SettingsError(
                f"stop={self.stop!r}: no single token of `{self.started_from}` holds it. Set a shorter text."
            )
        return [*ends, *found]

    @property
    def model_paths(self) -> dict[str, str]:
        """By LLM, what `from_pretrained` is given for its model, in this process.

        Raises:
            SmolLM2Error: `smollm2` is named, but its package is not installed.
            CacheError: `smollm2` is named for the first time, and the cache cannot be written.
        """
        return {module_id: model_path(name) for module_id, name in self.models.items()}

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
        value = repr(first["input"])
        shown = value if len(value) <= 100 else f"{value[:97]}..."
        raise SettingsError(f"Setting `{first['loc'][0]}`={shown}: {reason}.") from None


def refuse_idle(given: Mapping[str, Any], settings: Settings) -> None:
    """Refuses a setting that was asked for and has no effect: one of adapters where there are none.

    Not so a default, which files that list every setting hold; nor what was asked for together with adapters, where
    something that wins over it took these away.

    Args:
        given: what one file says, or the command line.
        settings: what came of it and all others.

    Raises:
        SettingsError: names the setting and what would make it count.
    """
    if settings.weights == "lora" or given.get("weights") == "lora":
        return
    for name in ("lora_rank", "lora_alpha", "lora_targets"):
        value = getattr(settings, name)
        if name in given and value != Settings.model_fields[name].default:
            raise SettingsError(
                f"{name}={value} has no effect: it describes adapters, and weights={settings.weights} has none. Set "
                f"weights=lora, or leave {name} out."
            )


def kept_settings(values: Mapping[str, Any]) -> Settings:
    """Validates settings that were written down, maybe by an earlier version, which had fewer.

    Raises:
        SettingsError: as of `make_settings`.
    """
    earlier = {name: known.earlier for name, known in ABOUT.items() if known.earlier is not ...}
    return make_settings({**earlier, **values})


ABOUT = about(Settings)
"""What is known of each setting."""
RESUMABLE = tuple(name for name, known in ABOUT.items() if known.resume)
"""Settings that may change when a run goes on."""


def deciding(*what: Decides) -> frozenset[str]:
    """Returns the names of the settings that decide any of this."""
    return frozenset(name for name, known in ABOUT.items() if known.decides in what)
