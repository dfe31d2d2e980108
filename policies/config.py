"""`ChainConfig`: an RLlib `AlgorithmConfig` whose fields are derived from our settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ray import tune
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module import MultiRLModuleSpec, RLModuleSpec
from ray.rllib.env.wrappers.pettingzoo_env import PettingZooEnv
from ray.tune.search.sample import Domain
from ray.util.debug import log_once

from cory_env import cory_v0
from policies.compat.rllib import disable_runner_state_sync
from policies.rllib.causal_lm_module import CausalLMModule, module_config
from policies.rllib.learners import Learners
from policies.rllib.token_ppo_learner import TokenPPOLearner
from policies.role_exchange import RoleExchange
from policies.rollout.chain_runner import ChainRunner
from policies.rollout.role_mapping import make_mapping
from policies.settings.files import read_preset
from policies.settings.gpus import GPU_SETTINGS
from policies.settings.overrides import apply_overrides
from policies.settings.processes import processes
from policies.settings.resolve import OPEN_SETTINGS, resolve
from policies.settings.settings import Settings, SettingsError, make_settings, reject_unknown_settings
from policies.settings.start import find_start_checkpoint
from policies.worker_setup import check_workers

ENV = "cory_v0"

tune.register_env(ENV, lambda settings: PettingZooEnv(cory_v0.env(**settings)))


class ChainConfig(AlgorithmConfig):
    """An RLlib configuration that is set through `cory(...)` alone."""

    _validated: tuple[dict[str, Any], Settings] | None = None

    def __init__(self, algo_class: type | None = None) -> None:
        """Initializes all settings to their defaults."""
        super().__init__(algo_class=algo_class)
        self.cory_settings: dict[str, Any] = {}

    @classmethod
    def from_preset(cls, name: str, **settings: Any) -> Self:
        """Creates a configuration from a preset and overrides, as `cory train NAME key=value ...` does.

        Args:
            name: the preset.
            **settings: values that override the preset's.

        Raises:
            SettingsError: the preset or a setting is unknown.
        """
        return cls().cory(**apply_overrides(read_preset(name), settings))

    def cory(self, **settings: Any) -> Self:
        """Changes settings. Values are validated when the algorithm is built.

        Args:
            **settings: fields of `Settings`; the others keep their values. `reward` may also be a function.

        Raises:
            SettingsError: a setting is unknown.
        """
        reject_unknown_settings(settings)
        self.cory_settings = pin_eval_kl_coef(self.cory_settings, settings)
        return self

    def build_algo(self, *args: Any, **kwargs: Any) -> Algorithm:
        """Builds the algorithm, after all checks that need no other process.

        Raises:
            SettingsError: a setting is invalid, `start_from` does not exist, or a module of the user would shadow our
                package in Ray's workers.
        """
        find_start_checkpoint(self.settings)
        if self.settings.num_runners or self.settings.num_learners:
            check_workers()
        return super().build_algo(*args, **kwargs)

    @property
    def settings(self) -> Settings:
        """The settings, validated when `cory_settings` changed; other processes get the object.

        Raises:
            SettingsError: a value is invalid, conflicts with another, or is a search space.
        """
        if self._validated is None or self._validated[0] != self.cory_settings:
            reject_search_spaces(self.cory_settings)
            self._set_settings(make_settings(self.cory_settings))
        assert self._validated is not None
        return self._validated[1]

    def _set_settings(self, settings: Settings) -> None:
        # A frozen configuration refuses attributes, but this one changes nothing.
        object.__setattr__(self, "_validated", ({**self.cory_settings}, settings))

    def to_dict(self) -> dict[str, Any]:
        """Returns RLlib's dictionary, from which Tune's trials and checkpoints make a configuration."""
        return {key: value for key, value in super().to_dict().items() if key != "_validated"}

    def training(self, **settings: Any) -> Self:
        """Rejects RLlib's training settings; `cory` has its own.

        Raises:
            SettingsError: one of them is set.
        """
        # RLlib itself sets these three when it reads a configuration from a dictionary, as in a trial of Tune.
        if unused := sorted(settings.keys() - {"model", "optimizer", "replay_buffer_config"}):
            raise SettingsError(f"RLlib's `{unused[0]}` has no effect here. Use .cory(NAME=value).")
        return super().training(**settings)

    def build_learner_group(self, *, rl_module_spec: MultiRLModuleSpec | None = None, **kwargs: Any) -> Learners:
        """Returns our learner group; overrides RLlib's."""
        spec = rl_module_spec or self.get_multi_rl_module_spec(env=kwargs.get("env"), spaces=kwargs.get("spaces"))
        return Learners(config=self.copy(), module_spec=spec, placement_group=kwargs.get("placement_group"))

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Returns the spec of a causal LM; overrides RLlib's."""
        return RLModuleSpec(module_class=CausalLMModule)

    def validate(self) -> None:
        """Checks the settings and derives RLlib's fields from them.

        Raises:
            SettingsError: a value is invalid or conflicts with another.
        """
        if not self._is_frozen:
            settings = resolve(self.settings)
            # Other processes could choose other values, such as by the GPUs that they see.
            names = [*OPEN_SETTINGS, *GPU_SETTINGS, *(["roles", "num_agents"] if settings.env is not None else [])]
            self.cory(**{name: getattr(settings, name) for name in names})
            self._set_settings(settings)
            self._set_rllib_fields(settings)
        super().validate()

    def _set_rllib_fields(self, s: Settings) -> None:
        # Otherwise RLlib warns about its new API stack and suggests the old one, which this algorithm does not support.
        log_once(f"{self.algo_class.__name__}_on_new_api_stack")
        learners = max(s.num_learners, 1)
        self.environment(ENV, env_config=s.env_settings())
        self.framework("torch")
        self.debugging(seed=s.seed)
        self.multi_agent(policies=set(s.policy_ids), policy_mapping_fn=make_mapping(s))
        self.rl_module(
            rl_module_spec=MultiRLModuleSpec(
                rl_module_specs={
                    policy_id: RLModuleSpec(module_class=CausalLMModule, model_config=module_config(s, policy_id))
                    for policy_id in s.policy_ids
                }
            )
        )
        self.env_runners(
            env_runner_cls=ChainRunner,
            num_env_runners=s.num_runners,
            create_local_env_runner=s.num_runners == 0,
            num_cpus_per_env_runner=s.runner_threads,
            num_gpus_per_env_runner=s.gpus_per_runner,
            batch_mode="complete_episodes",
            sample_timeout_s=None,
            add_default_connectors_to_env_to_module_pipeline=False,
            add_default_connectors_to_module_to_env_pipeline=False,
            merge_env_runner_states=False,
            broadcast_env_runner_states=True,
        )
        disable_runner_state_sync(self)
        # RLlib reserves no GPU for a driver that generates.
        self.resources(custom_resources_for_main_process={"GPU": processes(s)[0].gpus})
        self.learners(
            learner_class=TokenPPOLearner,
            num_learners=s.num_learners,
            num_gpus_per_learner=s.gpus_per_learner,
            add_default_connectors_to_learner_pipeline=False,
        )
        self.train_batch_size_per_learner = s.chains * s.num_agents // learners  # only for RLlib's own reports
        self.fault_tolerance(restart_failed_env_runners=True, ignore_env_runner_failures=False)
        self.callbacks(RoleExchange)


def pin_eval_kl_coef(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Applies changes to settings, and fixes `eval_kl_coef` if `kl_coef` becomes a search space.

    An unset `eval_kl_coef` follows `kl_coef`, so each trial of a search over `kl_coef` would be compared by a different
    combined reward. It is therefore set to the previous `kl_coef`.
    """
    merged = {**values, **changes}
    if is_search_space(merged.get("kl_coef")) and merged.get("eval_kl_coef") is None:
        merged["eval_kl_coef"] = values.get("kl_coef", Settings.model_fields["kl_coef"].default)
    return merged


def reject_search_spaces(values: Mapping[str, Any]) -> None:
    """Rejects search spaces, whose value Tune chooses in each trial.

    Raises:
        SettingsError: a setting is a search space.
    """
    for key, value in values.items():
        if is_search_space(value):
            raise SettingsError(f"`{key}` is a search space. Run it with tune.Tuner(Cory, param_space=...).")


def is_search_space(value: Any) -> bool:
    """Returns whether a setting's value is one of Tune's search spaces."""
    return isinstance(value, Domain) or (isinstance(value, dict) and "grid_search" in value)
