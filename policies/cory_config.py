"""The configuration of Cory: flat settings in, RLlib's own settings derived from them."""

from __future__ import annotations

from typing import Any, Self

from ray import tune
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module import MultiRLModuleSpec, RLModuleSpec
from ray.rllib.env.wrappers.pettingzoo_env import PettingZooEnv
from ray.tune.search.sample import Domain

from cory_env import cory_v0
from policies.causal_lm_module import CausalLMModule, module_config
from policies.chain_runner import ChainRunner
from policies.placement import named_resources
from policies.role_exchange import RoleExchange, RoleMapping
from policies.settings import Settings, SettingsError, make_settings, nearest_key
from policies.token_batch import TokenBatch
from policies.token_ppo_learner import TokenPPOLearner

ENV = "cory_v0"

tune.register_env(ENV, lambda settings: PettingZooEnv(cory_v0.env(**settings)))


class CoryConfig(PPOConfig):
    """Configures `Cory`. Everything is a flat setting; RLlib's own fields follow from them.

        config = CoryConfig().cory(task="imdb", updates=60, exchange_period=5)
        algorithm = config.build_algo()

    A setting may be a Tune search space (docs/tune.md):

        config = CoryConfig().cory(exchange_period=tune.grid_search([1, 5, None]))
        tune.Tuner(Cory, param_space=config, tune_config=tune.TuneConfig(metric="combined_reward", mode="max")).fit()
    """

    def __init__(self, algo_class: type | None = None) -> None:
        """Starts from the paper's settings."""
        from policies.cory import Cory

        super().__init__(algo_class=algo_class or Cory)
        self.cory_settings: dict[str, Any] = {}

    def cory(self, **settings: Any) -> Self:
        """Sets any of `Settings`' keys; those not named keep their value.

        A search over `kl_coef` leaves `eval_kl_coef`, unless that is set, at the `kl_coef` from before: else each
        trial would be measured by another combined reward.

        Raises:
            SettingsError: a key is unknown; values are checked when the algorithm is built.
        """
        known = list(Settings.model_fields)
        for key in settings:
            if key not in known:
                raise SettingsError(f"Unknown setting `{key}`.{nearest_key(key, known)}")
        before = self.cory_settings
        self.cory_settings = {**before, **settings}
        if is_search_space(self.cory_settings.get("kl_coef")) and self.cory_settings.get("eval_kl_coef") is None:
            self.cory_settings["eval_kl_coef"] = before.get("kl_coef", Settings.model_fields["kl_coef"].default)
        return self

    @property
    def settings(self) -> Settings:
        """The validated settings.

        Raises:
            SettingsError: a value is wrong, contradicts another, or is a search space.
        """
        for key, value in self.cory_settings.items():
            if is_search_space(value):
                raise SettingsError(f"`{key}` is a search space, so only tune.Tuner(Cory, param_space=...) can run it.")
        return make_settings(self.cory_settings)

    def validate(self) -> None:
        """Checks the settings and derives RLlib's fields from them.

        Raises:
            SettingsError: a value is wrong or contradicts another.
        """
        if not self._is_frozen:
            self._derive(self.settings)
        super().validate()

    def _derive(self, s: Settings) -> None:
        learners = max(s.num_learners, 1)
        self.environment(ENV, env_config=s.env_settings())
        self.framework("torch")
        self.debugging(seed=s.seed)
        self.multi_agent(policies=set(s.modules), policy_mapping_fn=RoleMapping(s.roles, s.modules))
        self.rl_module(
            rl_module_spec=MultiRLModuleSpec(
                rl_module_specs={
                    module_id: RLModuleSpec(module_class=CausalLMModule, model_config=module_config(s))
                    for module_id in s.modules
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
        self._dont_auto_sync_env_runner_states = True  # weights go through ChainRunner.load_weights, and are checked
        self.learners(
            learner_class=TokenPPOLearner,
            num_learners=s.num_learners,
            num_gpus_per_learner=s.gpus_per_learner,
            custom_resources_per_learner=named_resources("learner_resources", s.learner_resources),
            learner_connector=lambda *spaces: TokenBatch(),
            add_default_connectors_to_learner_pipeline=False,
        )
        self.training(
            lr=s.lr,
            gamma=s.gamma,
            lambda_=s.lam,
            clip_param=s.clip,
            vf_loss_coeff=s.value_coef,
            use_kl_loss=False,
            num_epochs=s.epochs,
            train_batch_size_per_learner=s.responses * s.num_agents // learners,
            minibatch_size=s.minibatch // learners,
        )
        self.fault_tolerance(restart_failed_env_runners=True, ignore_env_runner_failures=False)
        self.callbacks(RoleExchange)


def is_search_space(value: Any) -> bool:
    """Tells whether a setting is one of Tune's search spaces, which it gives a value in each trial."""
    return isinstance(value, Domain) or (isinstance(value, dict) and "grid_search" in value)
