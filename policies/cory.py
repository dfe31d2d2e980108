"""Cory: sequential cooperative multi-agent PPO for language models, as an RLlib Algorithm (paper Algorithm 1).

for each update:
    roll out chains: the pioneer answers the query, the observer answers it given the pioneer's response
    with `max_lag` 1: start the next update's rollout (prefetch)
    score the responses, assign credit, estimate advantages
    update every LLM by token-level PPO on its own responses
    every `average_period` updates: average the LLMs' weights
    sync the new weights to the runners, and verify their checksums
    every `exchange_period` updates: exchange roles (`RoleExchange`)
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import COMPONENT_LEARNER_GROUP
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from policies.compat.rllib import TemporaryLogdir, ray_if_needed
from policies.config import ChainConfig
from policies.evaluator import Evaluator
from policies.generation.installed import warn_if_vllm_missing
from policies.health import COLLAPSE, Health
from policies.learning.credit import assign_credit, assign_part_credit, check_custom_credit
from policies.learning.estimation import AdvantageEstimator
from policies.learning.metrics import compute_metrics
from policies.learning.rows import Estimates
from policies.models.weights import Weights
from policies.report import PhaseTimer, Report, log_update, measure_roles, update_report
from policies.rllib.learners import LearnerError, Learners
from policies.rllib.token_batch import rows_from_episodes
from policies.role_exchange import exchange_due
from policies.rollout.role_mapping import make_mapping
from policies.rollout.runners import Runners, WeightSyncError, check_started, shutdown
from policies.rollout.scheduler import RolloutScheduler
from policies.settings.processes import needs_ray, processes
from policies.sync_check import SyncCheck
from policies.warm_start import WarmStart

__all__ = ["Cory", "CoryConfig", "LearnerError", "WeightSyncError"]

_COUNTERS = ("updates", "updates_since_exchange", "exchanges", "combined_reward")
"""Attributes that checkpoints store unchanged."""


class CoryConfig(ChainConfig):
    """Configuration of `Cory`: flat settings, from which RLlib's own fields are derived.

        config = CoryConfig.from_preset("imdb-tiny", num_updates=60)  # or the defaults: CoryConfig().cory(...)
        algorithm = config.build_algo()

    A setting may be a Tune search space (docs/tune.md):

        config = CoryConfig().cory(exchange_period=tune.grid_search([1, 5, None]))
        tune.Tuner(Cory, param_space=config, tune_config=tune.TuneConfig(metric="combined_reward", mode="max")).fit()
    """

    def __init__(self, algo_class: type | None = None) -> None:
        """Initializes all settings to their defaults."""
        super().__init__(algo_class=algo_class or Cory)

    def build_algo(self, *args: Any, **kwargs: Any) -> Cory:
        """Builds the algorithm. Starts Ray if it needs other processes or GPUs, unless Ray is running or connected."""
        algorithm: Cory = super().build_algo(*args, **kwargs)
        return algorithm


class Cory(TemporaryLogdir, Algorithm):
    """Trains the LLMs of a chain. `train()["cory"]` reports one update.

    With `max_lag` 0, resuming is exact: k updates, save, restore, and k more updates equal 2k updates. Query order and
    sampling seeds depend only on the seed, the update, and counters that checkpoints store.
    """

    config: CoryConfig

    @classmethod
    def get_default_config(cls) -> CoryConfig:
        """Returns a configuration with the default settings."""
        return CoryConfig()

    def setup(self, config: Any) -> None:
        """Builds learners and runners, syncs the initial weights, and runs the weight-sync check."""
        s = self.settings = self.config.settings
        check_custom_credit(s.credit_assignment, [p.role.has_reward for p in s.positions], s.stop_in_training)
        self.mapping = make_mapping(s)
        self.updates = self.updates_since_exchange = self.exchanges = 0
        self.combined_reward = float("nan")  # on held-out queries, by `select_by`, at the last evaluation
        self.estimators = {name: AdvantageEstimator(s.hyperparameters) for name in s.policy_ids}
        self._report: dict[str, Any] = {}
        self.task = s.make_task()
        self.health = Health(s, has_conversations=any(query.history is not None for query in self.task.train))
        warn_if_vllm_missing(s.backend)
        try:
            with ray_if_needed(needs_ray(processes(s))):
                super().setup(config)
        except IndexError:  # RLlib asks the first runner for its spaces, and that runner did not start
            if self.env_runner_group is not None:
                check_started(self.env_runner_group)
            raise
        check_started(self.env_runner_group)
        self.learners: Learners = self.learner_group
        self.runners = Runners(self.env_runner_group, s, self.learners, self.task.checksum)
        self.warm_start = WarmStart(s, self.learners)
        self.runners.sync_weights(self.updates)
        self.scheduler = RolloutScheduler(s, self.runners, len(self.task.train))
        self.sync_check = SyncCheck(s, self.task, self.runners, self.learners)
        self.evaluator = Evaluator(s, self.task, self.runners, self.learners, self.sync_check)

    @property
    def report(self) -> Report:
        """The last update's report, also `train()["cory"]`. Empty before the first update."""
        return cast(Report, self._report)

    # One update.

    def step(self) -> dict[str, Any]:
        """Runs one RLlib iteration, which is one update.

        Returns:
            RLlib's result with this update's report under `cory`, and `done` after the last update. For Tune, it also
            has `updates` and the held-out `combined_reward` (by `select_by`) of the last evaluation, NaN before the
            first. Schedulers should therefore decide when `updates` is a multiple of `eval_every`.
        """
        self.warm_start.check()
        result: dict[str, Any] = super().step()
        done = self._is_done()
        result.update(cory=self._report, updates=self.updates, combined_reward=self.combined_reward, done=done)
        return result

    def _is_done(self) -> bool:
        return self.updates == self.settings.num_updates

    def training_step(self) -> None:
        """Runs one update.

        Raises:
            RewardError: see `RolloutScheduler.generate`. The update is not counted.
            NonFiniteUpdate: a gradient is NaN or infinite.
            LearnerError: a learner process died or hung.
        """
        timer = PhaseTimer()
        update, mapping, s = self.updates, self.mapping, self.settings

        # 1. Generate responses: pioneer first, then observer.
        with timer.phase("rollout"):
            rollout = self.scheduler.generate(update, mapping)
        rows = rows_from_episodes(rollout.episodes)

        if s.max_lag and update + 1 < s.num_updates:  # runners generate the next update while learners train
            exchange_next = exchange_due(s, self.updates_since_exchange + 1)
            self.scheduler.prefetch(update + 1, mapping.rotated() if exchange_next else mapping)

        with timer.phase("learn"):
            # 2. Score: every LLM computes log-probabilities of its own responses, unless those of the sampler or of
            # the training pass serve as well, and with a KL the reference's.
            scores_policy = s.hyperparameters.scores_policy
            scores = self.learners.score(rows, keep=True, reference=s.trains_with_reference, policy=scores_policy)
            scored = {policy_id: part.with_scores(scores[policy_id]) for policy_id, part in rows.items()}

            # 3. Assign credit, then estimate advantages.
            trained = [policy_id for policy_id in rows if policy_id in self.estimators]
            if scores_policy:
                self.sync_check.check_update(scored, rollout, update)
            credit, weights = s.credit_assignment, s.gdpo_weights
            rewards = assign_credit(scored, credit, self.estimators)
            parts = assign_part_credit(scored, credit, self.estimators, weights) if weights else {}
            estimates: dict[str, Estimates] = {}
            policy_metrics: dict[str, dict[str, float]] = {}
            for policy_id in trained:
                estimates[policy_id], estimator_metrics = self.estimators[policy_id].estimate(
                    scored[policy_id], rewards[policy_id], parts.get(policy_id)
                )
                scored[policy_id] = scored[policy_id].with_estimates(estimates[policy_id])
                policy_metrics[policy_id] = compute_metrics(scored[policy_id], s.report_kl_coef) | estimator_metrics
            role_metrics = measure_roles(scored, mapping, s.report_kl_coef)

            # 4. Train: every LLM learns from its own responses. Its learners kept their tokens after scoring.
            kl_coefs = {policy_id: estimator.kl_coef for policy_id, estimator in self.estimators.items()}
            results = self.learners.learn(estimates, update, kl_coefs)
            for policy_id in trained:
                self.estimators[policy_id].update_kl_coef(estimates[policy_id].kl)
        log_update(self.metrics, rollout, policy_metrics, results, s)
        if not scores_policy:
            self.sync_check.check_training(policy_metrics, rollout, update)
        self.updates += 1
        self.updates_since_exchange += 1

        # 5. Average weights every `average_period` updates. This depends only on the counter, so it needs no state.
        averaged = s.average_period is not None and self.updates % s.average_period == 0
        with timer.phase("sync"):
            if averaged:
                self.learners.average(s.average_tau)

        # 6. Sync the new weights to the runners, after any prefetched rollout has finished.
        with timer.phase("rollout"):
            self.scheduler.wait()
        with timer.phase("sync"):
            self.runners.sync_weights(self.updates)
            self.sync_check.check_trained_weights()

        # 7. Report. `RoleExchange` exchanges roles after this step.
        self._report = {
            "update": self.updates,
            "exchanges": self.exchanges,
            "exchanged": False,
            "averaged": averaged,
            **update_report(rollout, update, mapping, policy_metrics, role_metrics),
        }
        responses = {policy_id: len(rows[policy_id]) for policy_id in trained}
        self._report["health"] = self.health.observe(self._report, responses)
        self._report["collapsed"] = any(warning["signature"] in COLLAPSE for warning in self._report["health"])
        if self.updates % s.eval_every == 0 or self._is_done():
            with timer.phase("evaluate"):
                self._report |= self.evaluator.evaluate()
            self.combined_reward = s.selection_score(self._report)
        self._report["seconds"] = timer.seconds(rollout.counters)

    def exchange_roles(self) -> None:
        """Rotates the roles (paper: role exchange). Only the mapping changes, no weights are moved.

        `reset_on_exchange` also resets the optimizers and the estimators.
        """
        self.mapping = self.mapping.rotated()
        self.exchanges += 1
        self.updates_since_exchange = 0
        if self.settings.reset_on_exchange:
            self.learners.reset_optimizers()
            for estimator in self.estimators.values():
                estimator.reset()

    # Rollouts and weights.

    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Finds restarted runners, and gives them the current weights."""
        return self.runners.restore_runners()

    def weights(self, policy_id: str) -> Weights:
        """Returns the current weights of a policy by Hugging Face name, without its value head."""
        return self.learners.weights(policy_id)

    # Checkpoints and shutdown.

    def cleanup(self) -> None:
        """Stops runners and learners, and removes the log folder that RLlib creates, if it is empty."""
        if self.env_runner_group is not None:
            shutdown(self.env_runner_group)
        super().cleanup()
        with suppress(OSError):
            os.rmdir(self.logdir)

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns RLlib's state, and under `cory` that of counters, roles, health, weight-sync check and estimators."""
        state: dict[str, Any] = super().get_state(*args, **kwargs)
        state["cory"] = {name: getattr(self, name) for name in _COUNTERS} | {
            "rotation": self.mapping.rotation,
            "skipped_batches": self.scheduler.skipped_batches,
            "used_queries": self.scheduler.used_queries,
            "health": self.health.state,
            "logprob_diffs_at_start": self.sync_check.state,
            "estimations": {policy_id: estimator.state() for policy_id, estimator in self.estimators.items()},
        }
        return state

    def save_to_path(self, path: Any = None, *, state: dict[str, Any] | None = None, **kwargs: Any) -> str:
        """Writes a checkpoint. Learners write their own state, so the driver does not gather it."""
        if state is None:
            state = {**self.get_state(not_components=[COMPONENT_LEARNER_GROUP]), COMPONENT_LEARNER_GROUP: {}}
        return str(super().save_to_path(path, state=state, **kwargs))

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the state that `get_state` returned."""
        super().set_state(state)
        if cory_state := state.get("cory"):
            for name in _COUNTERS:
                setattr(self, name, cory_state[name])
            self.health.state = cory_state["health"]
            self.sync_check.load(cory_state.get("logprob_diffs_at_start", {}))  # absent in older checkpoints
            self.scheduler.skipped_batches = cory_state["skipped_batches"]
            self.scheduler.used_queries = cory_state.get("used_queries", 0)  # absent in older checkpoints
            self.mapping = make_mapping(self.settings, cory_state["rotation"])
            for policy_id, estimator_state in cory_state["estimations"].items():
                self.estimators[policy_id].load(estimator_state)

    def load_policies(self, checkpoint: Path, update: int) -> None:
        """Loads only the policies' weights of a checkpoint: enough to generate and evaluate, not to resume training.

        Args:
            checkpoint: its folder.
            update: number of updates the checkpoint was written after. It becomes the version of the weights.
        """
        self.updates = update
        self.warm_start.load(checkpoint.resolve())
        self.runners.sync_weights(update)

    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Restores a checkpoint, also an older one into a running algorithm. Syncs its weights to all runners.

        Prefetched rollouts are discarded, so the next update is generated with the restored weights.

        Raises:
            WeightSyncError: an engine's weights differ from the ones sent.
        """
        with ray_if_needed(needs_ray(processes(self.settings))):
            super().restore_from_path(path, *args, **kwargs)
        self.warm_start.error = None
        self.scheduler.discard_prefetched()
        self.runners.sync_weights(self.updates)
