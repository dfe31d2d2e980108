"""Cory: sequential cooperative multi-agent PPO for language models, as an RLlib Algorithm (paper Algorithm 1).

for each update:
    send queries to the runners
    play the chain: pioneer answers the query, observer answers it seeing the pioneer's answer, both are paid
    with `max_lag` 1: begin to play the next update's chains
    every LLM: token-level PPO on its own responses
    every `average_period` updates: all LLMs move to the mean of their weights
    send the new weights to the runners, and check what they hold
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

from policies.compat.rllib import TemporaryLogdir
from policies.config import ChainConfig
from policies.evaluator import Evaluator
from policies.generation.installed import warn_if_vllm_missing
from policies.health import COLLAPSE, Health
from policies.learning.credit import assign_credit, check_scheme
from policies.learning.estimation import Estimation
from policies.learning.metrics import measure
from policies.learning.rows import Rows
from policies.models.weights import Weights
from policies.report import PhaseTimer, Report, log_update, measure_roles, update_report
from policies.rllib.learners import LearnerError, Learners
from policies.rllib.token_batch import rows_of
from policies.role_exchange import exchange_due
from policies.rollout.role_mapping import RoleMapping
from policies.rollout.runners import Runners, WeightSyncError, check_started, shutdown
from policies.rollout.scheduler import RolloutScheduler
from policies.sync_check import SyncCheck
from policies.warm_start import WarmStart

__all__ = ["Cory", "CoryConfig", "LearnerError", "WeightSyncError"]

_COUNTERS = ("updates", "updates_since_exchange", "exchanges", "combined_reward")
"""Attributes of the algorithm that are part of its state as they are."""


class CoryConfig(ChainConfig):
    """Configures `Cory`. Everything is a flat setting; RLlib's own fields follow from them.

        config = CoryConfig.from_preset("imdb-tiny", num_updates=60)  # or the paper's settings: CoryConfig().cory(...)
        algorithm = config.build_algo()

    A setting may be a Tune search space (docs/tune.md):

        config = CoryConfig().cory(exchange_period=tune.grid_search([1, 5, None]))
        tune.Tuner(Cory, param_space=config, tune_config=tune.TuneConfig(metric="combined_reward", mode="max")).fit()
    """

    def __init__(self, algo_class: type | None = None) -> None:
        """Starts from the paper's settings."""
        super().__init__(algo_class=algo_class or Cory)

    def build_algo(self, *args: Any, **kwargs: Any) -> Cory:
        """Builds the algorithm, for which Ray starts on this machine unless it was started or joined before."""
        algorithm: Cory = super().build_algo(*args, **kwargs)
        return algorithm


class Cory(TemporaryLogdir, Algorithm):
    """Trains the LLMs of a chain. `train()["cory"]` reports one update.

    The update counter, the role mapping and the exchange counter are state: k updates, checkpoint, restore, k
    updates equal 2k updates (with `max_lag` 0). Query order and sampling seeds follow from (seed, update).
    """

    config: CoryConfig

    @classmethod
    def get_default_config(cls) -> CoryConfig:
        """The paper's settings."""
        return CoryConfig()

    def setup(self, config: Any) -> None:
        """Builds learners and runners, sends the first weights, and proves that weights reach the engines."""
        s = self.settings = self.config.settings
        check_scheme(s.credit_assignment, s.num_agents)
        self.mapping = RoleMapping(s.roles, s.policy_ids)
        self.updates = self.updates_since_exchange = self.exchanges = 0
        self.combined_reward = float("nan")  # held out, by `select_by`, at the last evaluation
        self.health = Health(s)
        self.estimations = {name: Estimation(s.hyperparameters) for name in s.policy_ids}
        self._report: dict[str, Any] = {}
        self.task = s.make_task()
        warn_if_vllm_missing(s.backend)
        try:
            super().setup(config)
        except IndexError:  # RLlib looks for spaces at the first runner, which did not start
            if self.env_runner_group is not None:
                check_started(self.env_runner_group)
            raise
        check_started(self.env_runner_group)
        self.learners: Learners = self.learner_group
        self.runners = Runners(self.env_runner_group, s, self.learners, self.task.checksum)
        self.start = WarmStart(s, self.learners)
        self.runners.send(self.updates)
        self.scheduler = RolloutScheduler(s, self.runners, len(self.task.train))
        self.sync_check = SyncCheck(s, self.task, self.runners, self.learners)
        self.evaluator = Evaluator(s, self.task, self.runners, self.learners, self.sync_check)

    @property
    def report(self) -> Report:
        """What the last update showed; also `train()["cory"]`. Empty before the first one."""
        return cast(Report, self._report)

    # One update.

    def step(self) -> dict[str, Any]:
        """RLlib's iteration; the result holds this update's report under `cory`, and `done` when it was the last.

        For Tune, `updates` and the held-out `combined_reward` (by `select_by`) lie beside it. The latter is of
        the last
        evaluation (NaN before the first), so schedulers should decide where `updates` is a multiple of
        `eval_every`.
        """
        self.start.check()
        result: dict[str, Any] = super().step()
        result.update(cory=self._report, updates=self.updates, combined_reward=self.combined_reward, done=self._ended())
        return result

    def _ended(self) -> bool:
        """All updates are done, or a collapse ends the run."""
        collapse: bool = self.settings.stop_on_collapse and self._report["collapsed"]
        return collapse or self.updates == self.settings.num_updates

    def training_step(self) -> None:
        """One update.

        Raises:
            RewardError: as of `RolloutScheduler.generate`; such an update does not count.
            NonFiniteUpdate: a gradient was NaN or infinite.
            LearnerError: a learner's process died, or stands still.
        """
        timer = PhaseTimer()
        update, mapping, s = self.updates, self.mapping, self.settings

        # 1. The chain answers: pioneer, then observer.
        with timer.phase("rollout"):
            rollout = self.scheduler.generate(update, mapping)
        rows = rows_of(rollout.episodes)

        if s.max_lag and update + 1 < s.num_updates:  # the runners go on with the next update
            due = exchange_due(s, self.updates_since_exchange + 1)
            self.scheduler.prefetch(update + 1, mapping.rotated() if due else mapping)

        with timer.phase("learn"):
            # 2. Every LLM scores its own responses.
            for name, scores in self.learners.score(rows, keep=True).items():
                rows[name] |= scores

            # 3. Each response is paid for what it brought about, and compared with what was to be expected.
            figures = {name: measure(each, s.report_kl_coef) for name, each in rows.items()}
            self.sync_check.check_update(rows, rollout, update)
            columns: dict[str, Rows] = {}
            for name, rewards in assign_credit(rows, s.credit_assignment, self.estimations).items():
                columns[name], estimated = self.estimations[name].estimate(rows[name] | {"rewards": rewards})
                columns[name]["rewards"] = rewards
                rows[name] |= columns[name]
                figures[name] |= estimated
            of_role = measure_roles(rows, mapping, s.report_kl_coef)

            # 4. Every LLM learns from its own responses, which its learners have kept.
            coefs = {name: estimation.kl_coef for name, estimation in self.estimations.items()}
            results = self.learners.learn(columns, update, coefs)
            for name, estimation in self.estimations.items():
                estimation.adapt(rows[name]["kl"])
        log_update(self.metrics, rollout, figures, results, s)
        self.updates += 1
        self.updates_since_exchange += 1

        # 5. All LLMs move to their mean, when its time has come. It follows from the counter, so needs no state.
        averaged = s.average_period is not None and self.updates % s.average_period == 0
        with timer.phase("sync"):
            if averaged:
                self.learners.average(s.average_tau)

        # 6. The runners get the new weights.
        with timer.phase("rollout"):
            self.scheduler.wait()
        with timer.phase("sync"):
            self.runners.send(self.updates)
            self.sync_check.check_learned()

        # 7. What happened. Roles are exchanged after this, by `RoleExchange`.
        self._report = {
            "update": self.updates,
            "exchanges": self.exchanges,
            "exchanged": False,
            "averaged": averaged,
            **update_report(rollout, update, mapping, figures, of_role),
        }
        self._report["health"] = self.health.observe(self._report)
        self._report["collapsed"] = any(warning["signature"] in COLLAPSE for warning in self._report["health"])
        if self.updates % s.eval_every == 0 or self._ended():
            with timer.phase("evaluate"):
                self._report |= self.evaluator.held_out()
            self.combined_reward = s.selection_score(self._report)
        self._report["seconds"] = timer.seconds(rollout.counters)

    def exchange_roles(self) -> None:
        """Rotates the roles (paper: role exchange). No weights move; but for `reset_on_exchange`, all else stays."""
        self.mapping = self.mapping.rotated()
        self.exchanges += 1
        self.updates_since_exchange = 0
        if self.settings.reset_on_exchange:
            self.learners.forget()
            for estimation in self.estimations.values():
                estimation.forget()

    # Rollouts and weights.

    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Finds runners that came back, and gives them the present weights."""
        return self.runners.restore_runners()

    def weights(self, policy_id: str) -> Weights:
        """An LLM's present weights, without its value head, by Hugging Face names."""
        return self.learners.weights(policy_id)

    # State, and the end.

    def cleanup(self) -> None:
        """Stops runners and learners, and removes the folder that RLlib makes for each algorithm, if it is empty."""
        if self.env_runner_group is not None:
            shutdown(self.env_runner_group)
        super().cleanup()
        with suppress(OSError):
            os.rmdir(self.logdir)

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """RLlib's state, the update counter, and who plays which role."""
        state: dict[str, Any] = super().get_state(*args, **kwargs)
        state["cory"] = {name: getattr(self, name) for name in _COUNTERS} | {
            "rotation": self.mapping.rotation,
            "skipped_batches": self.scheduler.skipped_batches,
            "health": self.health.state,
            "estimations": {name: estimation.state() for name, estimation in self.estimations.items()},
        }
        return state

    def save_to_path(self, path: Any = None, *, state: dict[str, Any] | None = None, **kwargs: Any) -> str:
        """Writes a checkpoint; learners write what they have themselves, so it is not gathered."""
        if state is None:
            state = {**self.get_state(not_components=[COMPONENT_LEARNER_GROUP]), COMPONENT_LEARNER_GROUP: {}}
        return str(super().save_to_path(path, state=state, **kwargs))

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        super().set_state(state)
        if kept := state.get("cory"):
            for name in _COUNTERS:
                setattr(self, name, kept[name])
            self.health.state = kept["health"]
            self.scheduler.skipped_batches = kept["skipped_batches"]
            self.mapping = RoleMapping(self.settings.roles, self.settings.policy_ids, kept["rotation"])
            for name, estimation in kept["estimations"].items():
                self.estimations[name].load(estimation)

    def load_policies(self, checkpoint: Path, update: int) -> None:
        """Takes the LLMs of a checkpoint, without optimizers and all other state: enough to play with them.

        Args:
            checkpoint: its folder.
            update: the updates that it holds, which become the version of the weights.
        """
        self.updates = update
        self.start.load(checkpoint.resolve())
        self.runners.send(update)

    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Restores a checkpoint, an older one into a running algorithm too: all runners get its weights at once.

        What was played ahead is forgotten, so the next update is played with these.

        Raises:
            WeightSyncError: an engine read something else than was sent.
        """
        super().restore_from_path(path, *args, **kwargs)
        self.start.error = None
        self.scheduler.discard_prefetched()
        self.runners.send(self.updates)
