"""Our settings as a configuration of RLlib, whose own fields follow from them."""

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
from policies.compat.rllib import keep_runner_states
from policies.rllib.causal_lm_module import CausalLMModule, module_config
from policies.rllib.learners import Learners
from policies.rllib.token_ppo_learner import TokenPPOLearner
from policies.role_exchange import RoleExchange
from policies.rollout.chain_runner import ChainRunner
from policies.rollout.role_mapping import RoleMapping
from policies.settings.files import DEFAULT_PRESET, read_preset
from policies.settings.gpus import GPU_SETTINGS
from policies.settings.overrides import apply_overrides
from policies.settings.processes import named_resources, processes
from policies.settings.settings import Settings, SettingsError, make_settings, reject_unknown_settings
from policies.settings.start import find_start
from policies.worker_setup import check_workers

ENV = "cory_v0"

tune.register_env(ENV, lambda settings: PettingZooEnv(cory_v0.env(**settings)))


class ChainConfig(AlgorithmConfig):
    """A configuration of RLlib that consists of our settings."""

    def __init__(self, algo_class: type | None = None) -> None:
        """Starts from the paper's settings."""
        super().__init__(algo_class=algo_class)
        self.cory_settings: dict[str, Any] = {}

    @classmethod
    def from_preset(cls, name: str = DEFAULT_PRESET, **settings: Any) -> Self:
        """Starts from a preset, with settings of one's own over it, as `cory train NAME key=value ...` does.

        Raises:
            SettingsError: there is no such preset, or a key is unknown.
        """
        return cls().cory(**apply_overrides(read_preset(name), settings))

    def cory(self, **settings: Any) -> Self:
        """Sets any of `Settings`' keys; those not named keep their value. A `reward` may be a function itself.

        Raises:
            SettingsError: a key is unknown; values are checked when the algorithm is built.
        """
        reject_unknown_settings(settings)
        self.cory_settings = pin_eval_kl_coef(self.cory_settings, settings)
        return self

    def build_algo(self, *args: Any, **kwargs: Any) -> Algorithm:
        """Builds the algorithm after checks that need no process.

        Raises:
            SettingsError: a setting is wrong; nothing is at `start_from`; Ray's workers would import a module of the
                user's in the place of our package.
        """
        find_start(self.settings)
        if self.settings.num_runners or self.settings.num_learners:
            check_workers()
        return super().build_algo(*args, **kwargs)

    @property
    def settings(self) -> Settings:
        """The validated settings.

        Raises:
            SettingsError: a value is wrong, contradicts another, or is a search space.
        """
        reject_search_spaces(self.cory_settings)
        return make_settings(self.cory_settings)

    def training(self, **settings: Any) -> Self:
        """RLlib's training settings, which `cory` has under other names.

        Raises:
            SettingsError: one of these is set.
        """
        # RLlib itself sets the latter when it reads a configuration from a dictionary, as in a trial of Tune.
        if unused := sorted(settings.keys() - {"model", "optimizer", "replay_buffer_config"}):
            raise SettingsError(f"RLlib's `{unused[0]}` does nothing here. Set ours: .cory(NAME=value).")
        return super().training(**settings)

    def build_learner_group(self, *, rl_module_spec: MultiRLModuleSpec | None = None, **kwargs: Any) -> Learners:
        """RLlib's word for what learns."""
        spec = rl_module_spec or self.get_multi_rl_module_spec(env=kwargs.get("env"), spaces=kwargs.get("spaces"))
        return Learners(config=self.copy(), module_spec=spec, placement_group=kwargs.get("placement_group"))

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """RLlib's word for what an LLM is."""
        return RLModuleSpec(module_class=CausalLMModule)

    def validate(self) -> None:
        """Checks the settings and derives RLlib's fields from them.

        Raises:
            SettingsError: a value is wrong or contradicts another.
        """
        if not self._is_frozen:
            self.cory(chat_date=self.settings.with_chat_date().chat_date)  # one date everywhere
            self._derive(self.settings)
        super().validate()

    def _derive(self, s: Settings) -> None:
        """Sets RLlib's fields."""
        # Every process makes settings of these anew, and would else choose by the GPUs that it sees itself.
        self.cory_settings = {**self.cory_settings, **{name: getattr(s, name) for name in GPU_SETTINGS}}
        # Else RLlib warns that its new stack is in use, and advises the old one, on which nothing of this runs.
        log_once(f"{self.algo_class.__name__}_on_new_api_stack")
        learners = max(s.num_learners, 1)
        self.environment(ENV, env_config=s.env_settings())
        self.framework("torch")
        self.debugging(seed=s.seed)
        self.multi_agent(policies=set(s.policy_ids), policy_mapping_fn=RoleMapping(s.roles, s.policy_ids))
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
            custom_resources_per_env_runner=named_resources("runner_resources", s.runner_resources),
            batch_mode="complete_episodes",
            sample_timeout_s=None,
            add_default_connectors_to_env_to_module_pipeline=False,
            add_default_connectors_to_module_to_env_pipeline=False,
            merge_env_runner_states=False,
            broadcast_env_runner_states=True,
        )
        keep_runner_states(self)
        # RLlib asks for no GPU for a driver that generates.
        self.resources(custom_resources_for_main_process={"GPU": processes(s)[0].gpus})
        self.learners(
            learner_class=TokenPPOLearner,
            num_learners=s.num_learners,
            num_gpus_per_learner=s.gpus_per_learner,
            custom_resources_per_learner=named_resources("learner_resources", s.learner_resources),
            add_default_connectors_to_learner_pipeline=False,
        )
        self.train_batch_size_per_learner = s.chains * s.num_agents // learners  # of RLlib's own reports
        self.fault_tolerance(restart_failed_env_runners=True, ignore_env_runner_failures=False)
        self.callbacks(RoleExchange)


def pin_eval_kl_coef(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Puts changes over settings, so that all trials of a search are measured alike.

    A search over `kl_coef` leaves `eval_kl_coef`, unless that is set, at the `kl_coef` from before: else each trial
    would be measured by another combined reward.
    """
    found = {**values, **changes}
    if is_search_space(found.get("kl_coef")) and found.get("eval_kl_coef") is None:
        found["eval_kl_coef"] = values.get("kl_coef", Settings.model_fields["kl_coef"].default)
    return found


def reject_search_spaces(values: Mapping[str, Any]) -> None:
    """Refuses settings of which Tune has yet to choose a value.

    Raises:
        SettingsError: names the first one.
    """
    for key, value in values.items():
        if is_search_space(value):
            raise SettingsError(f"`{key}` is a search space, so only tune.Tuner(Cory, param_space=...) can run it.")


def is_search_space(value: Any) -> bool:
    """Tells whether a setting is one of Tune's search spaces, which it gives a value in each trial."""
    return isinstance(value, Domain) or (isinstance(value, dict) and "grid_search" in value)
