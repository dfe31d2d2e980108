"""Values derived from settings: agents, policies, batch sizes and hyperparameters."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from types import NoneType
from typing import Any

from pydantic import TypeAdapter, field_serializer, field_validator, model_validator

from cory_env.chain_settings import ChainSettings, Position, Role, make_positions
from cory_env.functions import parse_spec
from cory_env.rewarding.spec import parse_sum
from policies.learning.hyperparameters import Hyperparameters
from policies.models.lora import Lora
from policies.settings.fields import Fields
from policies.settings.gpus import choose_gpus
from policies.settings.roles import assign_policies, frozen_policies

DEFAULT_LR = {"lora": 1e-5, "full": 1e-6}
ROLES = TypeAdapter(list[Role])


class DerivedSettings(Fields):
    """The settings of one run with values derived from them."""

    @field_serializer("roles")
    def _dump_roles(self, roles: list[Role] | None) -> list[dict[str, Any]] | None:
        """Returns the values that differ from the defaults, which are attributes of the class."""
        if roles is None:
            return None
        return [
            {name: value for name, value in vars(role).items() if value != getattr(Role, name, None)} for role in roles
        ]

    @field_validator("roles", mode="before")
    @classmethod
    def _reject_other_numbers(cls, roles: Any) -> Any:
        """Rejects texts such as `1_0`, which pydantic would read as numbers, as it reads `no` as a boolean."""
        for role in roles if isinstance(roles, list | tuple) else ():
            for name in ("count", "repeat", "max_response_tokens") if isinstance(role, Mapping) else ():
                if type(role.get(name)) not in (int, NoneType):
                    raise ValueError(f"Input should be a valid integer, but {name} is {role[name]!r}")
        return roles

    @field_validator("roles")
    @classmethod
    def _check_roles(cls, roles: list[Role] | None) -> list[Role] | None:
        for reward in (role.own_reward for role in roles or () if role.own_reward is not None):
            parse_spec(reward)  # a single function
            parse_sum(reward)
        return roles

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Fills in the GPU assignment, and `num_agents` from `roles`. Values of wrong types are rejected later."""
        if not isinstance(values, Mapping):
            return values
        values = choose_gpus(values)
        if values.get("roles") and "num_agents" not in values:
            with suppress(ValueError):
                return {**values, "num_agents": len(make_positions(ROLES.validate_python(values["roles"])))}
        return values

    @property
    def positions(self) -> tuple[Position, ...]:
        """The positions in the chain, with their agents and roles."""
        return ChainSettings(num_agents=self.num_agents, roles=self.roles).make_positions()

    @property
    def agents(self) -> tuple[str, ...]:
        """The environment's agents, in the order in which they respond."""
        return tuple(position.agent for position in self.positions)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a prompt and its response."""
        return self.prompt_limit + self.max_response_tokens

    @property
    def prompt_limit(self) -> int:
        """`max_prompt_tokens`, which must be resolved (`policies.settings.resolve`)."""
        assert self.max_prompt_tokens is not None, "unresolved settings"
        return self.max_prompt_tokens

    @property
    def learning_rate(self) -> float:
        """`lr`, or the default for the kind of weights."""
        return self.lr or DEFAULT_LR[self.weights]

    @property
    def micro_batch_limit(self) -> int | None:
        """`micro_batch_tokens`; None while it is `auto`."""
        return None if self.micro_batch_tokens == "auto" else self.micro_batch_tokens

    @property
    def responses_per_step(self) -> int:
        """Responses of one policy per optimizer step."""
        return self.minibatch_size or self.responses

    @property
    def chain_roles(self) -> list[Role]:
        """The role at each position."""
        return [position.role for position in self.positions]

    @property
    def assignment(self) -> tuple[str, ...]:
        """By position, the policy id that has it at first."""
        if self.roles is None:
            return tuple(self.policy_ids[k % len(self.policy_ids)] for k in range(self.num_agents))
        role_policies = self._role_policies
        return tuple(role_policies[role.name] for role in self.chain_roles)

    @property
    def _role_policies(self) -> dict[str, str]:
        """Role of the chain → its policy id at first."""
        roles = {role.name: role for role in self.chain_roles}
        return dict(zip(roles, assign_policies(list(roles.values()), self.num_policies), strict=True))

    @property
    def policy_ids(self) -> tuple[str, ...]:
        """Ids of the trained LLMs: `llm_1 ... llm_n`."""
        if self.roles is None:
            count = self.num_policies or self.num_agents
        else:
            count = self.num_policies or len({*self._role_policies.values()} - {*self.frozen_models})
        return tuple(f"llm_{k + 1}" for k in range(count))

    @property
    def pioneers(self) -> tuple[str, ...]:
        """Trained LLMs that respond first in some update: all, or with `roles` and no role exchange a single one.

        Empty if a frozen model responds first.
        """
        first = self.assignment[0]
        if first in self.frozen_models:
            return ()
        return self.policy_ids if self.roles is None or self.exchange_period else (first,)

    @property
    def frozen_models(self) -> dict[str, str]:
        """Policy id → folder or hub id of the frozen models that have roles: `frozen_1`, ..."""
        return frozen_policies(self.chain_roles)

    @property
    def all_models(self) -> dict[str, str]:
        """Policy id → initial model of the trained LLMs, and then the frozen models."""
        return self.models | self.frozen_models

    @property
    def models(self) -> dict[str, str]:
        """Policy id of each trained LLM → name of its initial model, which is also its reference."""
        names = [self.model] * len(self.policy_ids) if isinstance(self.model, str) else self.model
        return dict(zip(self.policy_ids, names, strict=True))

    @property
    def model_names(self) -> str:
        """Names of the initial models for texts: one, or one per LLM if they differ."""
        names = list(self.models.values())
        return ", ".join(names if len(set(names)) > 1 else names[:1])

    @property
    def ranks(self) -> int:
        """Number of learner processes of one policy."""
        return self.shards_per_policy or max(self.num_learners, 1)

    @property
    def chains(self) -> int:
        """Chains per update."""
        return self.queries_per_update * self.num_generations

    @property
    def teams(self) -> int:
        """Number of teams: groups of LLMs that each form a chain with their own queries."""
        return max(len(self.policy_ids) // self.num_agents, 1)

    @property
    def responses(self) -> int:
        """Responses per policy and update; with `roles`, of the policy with the most; with `env` episodes."""
        if self.env is not None:
            return self.chains // self.teams
        if self.roles is not None:
            return self.chains * max(map(self.assignment.count, self.policy_ids))
        return self.chains * self.num_agents // len(self.policy_ids)

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Hyperparameters of each policy's learner."""
        values = {field.name: getattr(self, field.name) for field in fields(Hyperparameters) if field.name != "steps"}
        values |= {"lr": self.learning_rate, "micro_batch_tokens": self.micro_batch_limit}
        return Hyperparameters(**values, steps=self.responses // self.responses_per_step)

    @property
    def clip_range(self) -> tuple[float, float]:
        """The clip range of the probability ratio, below and above 1."""
        return self.hyperparameters.clip_range

    def comparable_dump(self) -> dict[str, Any]:
        """The settings as plain data, equal for equal runs: a clip range that is the loss's default is null."""
        default = replace(self.hyperparameters, clip_ratio=None, clip_ratio_high=None).clip_range
        return self.model_dump() | ({"clip_ratio": None, "clip_ratio_high": None} if self.clip_range == default else {})

    @property
    def gdpo_weights(self) -> tuple[float, ...]:
        """With `advantage=gdpo`, the weight of each reward function."""
        if self.advantage != "gdpo" or not isinstance(self.reward, list):
            return ()
        return tuple(self.reward_weights or [1.0] * len(self.reward))

    @property
    def response_limits(self) -> tuple[int, ...]:
        """By position, the maximum length of a response in tokens."""
        return tuple(role.max_response_tokens or self.max_response_tokens for role in self.chain_roles)

    @property
    def critic(self) -> bool:
        """Whether policies have a value head."""
        return self.hyperparameters.critic

    @property
    def lora(self) -> Lora | None:
        """Configuration of the adapters; None with full weights."""
        if self.weights == "full":
            return None
        targets = (self.lora_target_modules or "").replace(" ", "").split(",")
        return Lora(self.lora_rank, self.lora_alpha, tuple(filter(None, targets)), self.seed)

    def response_limit(self, update: int) -> int:
        """Length limit of responses in a training update; the same on all runners. Roles may have lower limits."""
        if self.min_response_tokens is None:
            return self.max_response_tokens
        generator = random.Random(f"response limit {self.seed} {update}")
        return generator.randint(self.min_response_tokens, self.max_response_tokens)

    @property
    def report_kl_coef(self) -> float:
        """Fixed KL weight of the reported combined reward."""
        return self.kl_coef if self.eval_kl_coef is None else self.eval_kl_coef

    @property
    def trains_with_reference(self) -> bool:
        """Whether training has a KL penalty, and so needs the reference's log-probabilities."""
        return self.kl_coef > 0

    @property
    def evaluates_with_reference(self) -> bool:
        """Whether evaluations measure the KL. If not, no process loads the reference."""
        return self.trains_with_reference or self.report_kl_coef > 0
