"""Cory: sequential cooperative multi-agent PPO for language models, as an RLlib Algorithm (paper Algorithm 1).

for each update:
    deal queries to the runners
    play the chain: pioneer answers the query, observer answers it seeing the pioneer's answer, both are paid
    every LLM: token-level PPO on its own responses
    send the new weights to the runners, and check what they hold
    every `exchange_period` updates: exchange roles (`RoleExchange`)
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_LEARNER_GROUP, COMPONENT_RL_MODULE
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
)
from ray.tune.search.sample import Domain

from cory_env.rewards import RewardError
from cory_env.tasks import Split
from policies.generation.generator import EVALUATION_STREAM, Response, Weights
from policies.health import COLLAPSE, Health
from policies.learning.rows import Rows
from policies.rllib.learners import LearnerError, Learners
from policies.rllib.token_batch import SharedEpisodes
from policies.rllib.token_ppo_learner import UPDATE, TokenPPOLearner
from policies.rllib_settings import derive
from policies.rollout.chain_runner import Rollout
from policies.rollout.dealing import Deal, deal
from policies.rollout.role_mapping import RoleMapping
from policies.rollout.runners import Runners, WeightSyncError, end
from policies.self_test import Probe, self_test
from policies.settings.settings import Settings, SettingsError, make_settings, nearest_key

__all__ = ["Cory", "CoryConfig", "LearnerError", "WeightSyncError"]

logger = logging.getLogger(__name__)

SAMPLES_SHOWN = 4
_MEASURED = ("task_reward", "kl", "combined_reward", "response_length", "eos_rate", "repetition")
_LEARNED = (
    "task_reward_std",
    "policy_loss",
    "clip_fraction",
    "entropy",
    "kl_coef",
    "grad_norm",
    "score_mean",
    "sampler_gap_mean",
    "sampler_gap_max",
)
_OF_CRITIC = ("value_loss", "explained_variance")


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
            derive(self, self.settings)
        super().validate()


def is_search_space(value: Any) -> bool:
    """Tells whether a setting is one of Tune's search spaces, which it gives a value in each trial."""
    return isinstance(value, Domain) or (isinstance(value, dict) and "grid_search" in value)


class Cory(PPO):
    """Trains the LLMs of a chain. `train()["cory"]` reports one update.

    The update counter, the role mapping and the exchange counter are state: k updates, checkpoint, restore, k
    updates equal 2k updates. Query order and sampling seeds follow from (seed, update).
    """

    config: CoryConfig

    @classmethod
    def get_default_config(cls) -> CoryConfig:
        """The paper's settings."""
        return CoryConfig()

    def setup(self, config: Any) -> None:
        """Builds learners and runners, sends the first weights, and proves that weights reach the engines."""
        self.settings: Settings = self.config.settings
        self.mapping = RoleMapping(self.settings.roles, self.settings.modules)
        self.updates = 0
        self.updates_since_exchange = 0
        self.exchanges = 0
        self.combined_reward = float("nan")  # held out, mean of the policies, at the last evaluation
        self.health = Health(self.settings)
        self._report: dict[str, Any] = {}
        self._seconds: dict[str, float] = {}
        self.task = self.settings.make_task()
        try:
            super().setup(config)
        except IndexError:  # RLlib looks for spaces at the first runner, which did not start
            if self.env_runner_group is not None:
                Runners(self.env_runner_group, self.settings, self.weights).check_started()
            raise
        Learners.watch(self.learner_group, self.settings.learner_timeout)
        self.runners = Runners(self.env_runner_group, self.settings, self.weights)
        self.runners.check_started()
        self.runners.send(self.updates)
        self.probes = self._self_test() if self.settings.self_test else {}

    # One update.

    def step(self) -> dict[str, Any]:
        """RLlib's iteration; the result holds this update's report under `cory`, and `done` when it was the last.

        For Tune, `updates` and the mean held-out `combined_reward` lie beside it. The latter is of the last evaluation
        (NaN before the first one), so schedulers should decide where `updates` is a multiple of `eval_every`.
        """
        result: dict[str, Any] = super().step()
        result.update(cory=self._report, updates=self.updates, combined_reward=self.combined_reward, done=self._ended())
        return result

    def _ended(self) -> bool:
        """All updates are done, or a collapse ends the run."""
        collapse: bool = self.settings.stop_on_collapse and self._report["collapsed"]
        return collapse or self.updates == self.settings.updates

    def training_step(self) -> None:
        """One update.

        Raises:
            RewardError: not one query's reward could be computed; such an update does not count.
            NonFiniteUpdate: a gradient was NaN or infinite.
            LearnerError: a learner's process died, or stands still.
        """
        started, self._seconds = time.perf_counter(), {}
        update, mapping = self.updates, self.mapping

        # 1. The chain answers: pioneer, then observer; both are paid.
        s = self.settings
        deals = deal(s.seed, update, s.queries, len(self.task.train), s.num_generations)
        with self._timed("rollout"):
            rollouts = self._play(deals, update, mapping, "train")
        episodes = [episode for rollout in rollouts for episode in rollout.episodes]
        if not episodes:
            raise RewardError(
                f"The reward failed on every query of update {update + 1}, so there is nothing to learn from. Correct "
                "the reward, or what it depends on."
            )

        # 2. Every LLM learns from its own responses.
        with self._timed("learn"):
            results = self.learner_group.update(
                training_data=SharedEpisodes(episodes=episodes), timesteps={UPDATE: update}
            )
        self.metrics.aggregate(results, key=LEARNER_RESULTS)
        self.updates += 1
        self.updates_since_exchange += 1

        # 3. The runners get the new weights.
        with self._timed("sync"):
            self.runners.send(self.updates)

        # 4. What happened. Roles are exchanged after this, by `RoleExchange`.
        returns = float(np.mean([episode.get_return() for episode in episodes]))
        self.metrics.log_value((ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN), returns, window=1)
        steps = len(episodes) * self.settings.num_agents
        self.metrics.log_value((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), steps, reduce="lifetime_sum")
        self._report = self._make_report(rollouts, mapping)
        self._report["health"] = self._watch()
        self._report["collapsed"] = any(warning["signature"] in COLLAPSE for warning in self._report["health"])
        if self.updates % self.settings.eval_every == 0 or self._ended():
            with self._timed("evaluate"):
                self._report["evaluation"] = self.evaluate_policies()
            self.combined_reward = self._report["evaluation"]["mean"]["combined_reward"]
        self._report["seconds"] = {**self._seconds, "total": time.perf_counter() - started}

    def exchange_roles(self) -> None:
        """Rotates the roles (paper: role exchange). No weights move; but for `reset_on_exchange`, all else stays."""
        self.mapping = self.mapping.rotated()
        self.exchanges += 1
        self.updates_since_exchange = 0
        if self.settings.reset_on_exchange:
            self._on_learner(TokenPPOLearner.start_afresh)

    def _watch(self) -> list[dict[str, Any]]:
        """The health warnings that stand after this update; new ones are logged."""
        warnings = self.health.observe(self._report)
        for warning in warnings:
            if self.health.is_new(warning):
                logger.warning("Update %d: %s", self.updates, warning["text"])
        return warnings

    # Rollouts and weights.

    def _play(self, deals: Sequence[Deal], stream: int, mapping: RoleMapping, split: Split) -> list[Rollout]:
        return self.runners.play(deals, stream=stream, mapping=mapping, version=self.updates, split=split)

    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Finds runners that came back, and gives them the present weights."""
        return self.runners.welcome_back()

    def weights(self, module_id: str) -> Weights:
        """The learner's present weights of an LLM, without its value head, by Hugging Face names."""
        path = f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}/{module_id}"
        state = self.learner_group.get_state(components=path, inference_only=True)
        weights = state[COMPONENT_LEARNER][COMPONENT_RL_MODULE][module_id]
        return {name.removeprefix("lm."): array for name, array in weights.items()}

    def _self_test(self) -> dict[str, Probe]:
        """Runs the self-test of every LLM on one runner (all runners run the same code on the same versions)."""
        chain = self.settings.make_chain(self.task, self.settings.make_tokenizer())
        prompts = [chain.build_prompt(query, [])[0] for query in chain.task.train[:16]]
        longest = [token for prompt in prompts * chain.max_prompt for token in prompt][: chain.max_prompt]
        return {
            module_id: self_test(
                self.weights(module_id),
                [*prompts, longest],
                partial(self._load_one, module_id),
                partial(self._probe, module_id),
                partial(self._score_rows, module_id),
                module_id,
            )
            for module_id in self.settings.modules
        }

    def _load_one(self, module_id: str, weights: Weights) -> None:
        self.runners.call_one("load_weights", weights={module_id: weights}, version=self.updates)

    def _probe(self, module_id: str, prompts: Sequence[Sequence[int]]) -> list[Response]:
        return self.runners.call_one("probe", module_id=module_id, prompts=prompts, seeds=range(len(prompts)))

    def _score_rows(self, module_id: str, weights: Weights, rows: Rows) -> Any:
        return self._on_learner(partial(TokenPPOLearner.score_under, module_id=module_id, weights=weights, rows=rows))

    def _on_learner(self, function: Callable[[TokenPPOLearner], Any]) -> Any:
        """Calls a function on every learner, and returns the first one's answer."""
        return self.learner_group.foreach_learner(function).result_or_errors[0].get()

    # Evaluation and report.

    def evaluate_policies(self) -> dict[str, dict[str, float]]:
        """Held-out evaluation: each policy alone on the bare query, always the same queries and seeds.

        Returns:
            `{llm: {task_reward, kl, combined_reward, response_length, eos_rate, repetition}}`, and their `mean`; NaN
            where the reward failed on every query (`on_reward_error: skip`).

        Raises:
            RewardError, GenerationError, LearnerError: as in an update.
        """
        count = min(self.settings.eval_queries, len(self.task.test))
        deals = [Deal(query) for query in range(count)]
        out: dict[str, dict[str, float]] = {}
        for module_id in self.settings.modules:
            alone = RoleMapping(("pioneer",), (module_id,))
            _, figures = self.measure(deals, alone, "test")
            if module_id not in figures:
                logger.warning("The reward failed on all %d held-out queries of %s: not evaluated.", count, module_id)
                out[module_id] = dict.fromkeys(_MEASURED, float("nan"))
                continue
            out[module_id] = {name: float(figures[module_id][name].mean()) for name in _MEASURED}
        out["mean"] = {name: float(np.mean([out[m][name] for m in self.settings.modules])) for name in _MEASURED}
        return out

    def measure(
        self, deals: Sequence[Deal], mapping: RoleMapping, split: Split
    ) -> tuple[list[Rollout], dict[str, dict[str, np.ndarray]]]:
        """Plays queries with the present weights and measures every response; nothing is learned from them.

        Args:
            deals: the queries. Sampling seeds follow from them and the settings' seed alone.
            mapping: all roles, or the first one alone, and who plays them.
            split: `train` or `test`.

        Returns:
            The rollouts, and what `TokenPPOLearner.measure_episodes` gives for their episodes.

        Raises:
            RewardError, GenerationError, LearnerError: as in an update.
        """
        rollouts = self._play(deals, EVALUATION_STREAM, mapping, split)
        episodes = [episode for rollout in rollouts for episode in rollout.episodes]
        return rollouts, self._on_learner(partial(TokenPPOLearner.measure_episodes, episodes=episodes))

    def held_out_samples(self, count: int) -> list[dict[str, Any]]:
        """The chain on the first `count` held-out queries, as text, with evaluation's seeds and the present roles."""
        deals = [Deal(query) for query in range(min(count, len(self.task.test)))]
        return [
            sample
            for rollout in self._play(deals, EVALUATION_STREAM, self.mapping, "test")
            for sample in rollout.samples
        ]

    def _make_report(self, rollouts: Sequence[Rollout], mapping: RoleMapping) -> dict[str, Any]:
        """What one update shows, per policy and per role."""
        shown = _MEASURED + _LEARNED + (_OF_CRITIC if self.settings.critic else ())
        policy = {
            module_id: {name: float(self.metrics.peek((LEARNER_RESULTS, module_id, name))) for name in shown}
            for module_id in self.settings.modules
        }
        self._seconds["reward"] = max(rollout.reward_seconds for rollout in rollouts)  # runners work side by side
        self._seconds["rollout"] -= self._seconds["reward"]
        tokens = sum(rollout.tokens for rollout in rollouts)
        return {
            "update": self.updates,
            "roles": mapping.as_dict(),
            "exchanges": self.exchanges,
            "exchanged": False,
            "policy": policy,
            "role": {
                role: {name: policy[mapping(role)][name] for name in (*_MEASURED, "task_reward_std")}
                for role in mapping.roles
            },
            "sampler_gap_mean": float(np.mean([values["sampler_gap_mean"] for values in policy.values()])),
            "sampler_gap_max": max(values["sampler_gap_max"] for values in policy.values()),
            "weight_version_lag": self.updates - 1 - min(rollout.version for rollout in rollouts),
            "tokens": tokens,
            "tokens_per_second": tokens / self._seconds["rollout"],
            "truncated_prompts": sum(rollout.truncated_prompts for rollout in rollouts),
            "reward_errors": sum(rollout.reward_errors for rollout in rollouts),
            "samples": [
                sample
                for rollout in rollouts
                for dealt, sample in zip(rollout.deals, rollout.samples, strict=True)
                if dealt.sample == 0
            ][:SAMPLES_SHOWN],
        }

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[phase] = time.perf_counter() - started

    # State, and the end.

    def cleanup(self) -> None:
        """Stops runners and learners, and removes the folder that RLlib makes for each algorithm, if it is empty."""
        if self.env_runner_group is not None:
            end(self.env_runner_group)
        super().cleanup()
        with suppress(OSError):
            os.rmdir(self.logdir)

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """RLlib's state, the update counter, and who plays which role."""
        state: dict[str, Any] = super().get_state(*args, **kwargs)
        state["cory"] = {
            "updates": self.updates,
            "updates_since_exchange": self.updates_since_exchange,
            "exchanges": self.exchanges,
            "rotation": self.mapping.rotation,
            "combined_reward": self.combined_reward,
            "health": self.health.state,
        }
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        super().set_state(state)
        if "cory" in state:
            kept = state["cory"]
            self.updates = kept["updates"]
            self.updates_since_exchange = kept["updates_since_exchange"]
            self.exchanges = kept["exchanges"]
            self.health.state = kept["health"]
            self.combined_reward = kept.get("combined_reward", float("nan"))  # earlier versions did not keep it
            self.mapping = RoleMapping(self.settings.roles, self.settings.modules, kept["rotation"])

    def load_policies(self, checkpoint: Path, update: int) -> None:
        """Takes the LLMs of a checkpoint, without optimizers and all other state: enough to play with them.

        Args:
            checkpoint: its folder.
            update: the updates that it holds, which become the version of the weights.
        """
        self.updates = update
        modules = f"{COMPONENT_LEARNER_GROUP}/{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}"
        self.restore_from_path(str(checkpoint.resolve() / modules), component=modules)

    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Restores a checkpoint, an older one into a running algorithm too: all runners get its weights at once.

        Raises:
            WeightSyncError: an engine read something else than was sent.
        """
        super().restore_from_path(path, *args, **kwargs)
        self.runners.send(self.updates)
