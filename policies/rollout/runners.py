"""`Runners`: the driver's calls to its runners, with retries, restarts and weight syncs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from policies.compat.rllib import actor_manager
from policies.generation.generator import GenerationError, LoadedWeights
from policies.models.weights import Weights, checksum
from policies.rllib.learners import Learners
from policies.rllib.token_batch import PROMPT_REF
from policies.rollout.episodes import Rollout, concat_rollouts
from policies.rollout.prompt_sampling import PromptRef
from policies.settings.settings import Settings

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
"""Attempts in a row in which all runners fail on the same queries, or a weight transfer fails."""
_STOP_SECONDS = 20.0
"""Time for runners to stop their engines and reward processes."""
_REWARD_CALLS = 5
"""How long a hanging reward may keep `RewardWorker.score` busy, as a multiple of `reward_timeout`."""


class WeightSyncError(RuntimeError):
    """A runner's weights differ from the ones it was sent."""


class TaskChangedError(RuntimeError):
    """A runner loaded different queries than the algorithm."""


class PendingRollout(NamedTuple):
    """A rollout that remote runners are generating.

    Attributes:
        prompt_refs: All queries, in order.
        shares: The queries of each runner, by runner id; empty if no runner was healthy.
        calls: The call of each runner, by runner id.
        arguments: The other arguments of `ChainRunner.sample`.
    """

    prompt_refs: list[PromptRef]
    shares: dict[int, list[PromptRef]]
    calls: dict[int, Any]
    arguments: dict[str, Any]


class Runners:
    """RLlib's env runners, called with explicit queries. With `num_runners=0` the driver's own runner does everything.

    Runner failures lose no work: if a runner dies, exceeds its timeout or loses its engine, its queries are assigned
    again, RLlib restarts it, and it gets the current weights before it generates again.

    Attributes:
        restarts: Number of runner restarts so far.
        version: Version of the weights that were sent last.
        sent_checksums: By policy id, the checksum of the weights that were sent last.
    """

    def __init__(self, group: EnvRunnerGroup, settings: Settings, learners: Learners, task_checksum: int) -> None:
        """Wraps RLlib's group.

        Args:
            settings: names the policies and the timeouts. A rollout's timeout is longer than `generation_timeout`, so
                that a runner with a hanging reward can still report it.
            learners: hold the current weights. The driver fetches them for each sync, one policy at a time, and keeps
                no copy. With `weight_transfer` the learners send them directly.
            task_checksum: of the algorithm's task. Restarted runners must have the same.
        """
        self.local = group.local_env_runner
        self.group, self.manager = group, actor_manager(group)
        self.learners = learners
        self.task_checksum = task_checksum
        self.timeout = settings.generation_timeout
        reward_batches = 1 if settings.feedback is None else settings.num_agents  # feedback before each later position
        if settings.env is not None:
            reward_batches = settings.max_turns * settings.num_agents  # a step after each turn
        self.rollout_timeout = self.timeout + reward_batches * _REWARD_CALLS * settings.reward_timeout
        self.policy_ids = settings.policy_ids
        self.uses_weight_transfer = settings.weight_transfer is not None
        self.restarts = 0
        self.version = -1
        self.sent_checksums: dict[str, int] = {}

    # Generation.

    def generate(self, prompt_refs: Sequence[PromptRef], **arguments: Any) -> Rollout:
        """Generates chains for queries on all runners. Returns a rollout with every query once, in order.

        Args:
            **arguments: the other arguments of `ChainRunner.sample`. The version is the last one sent.
        """
        self.wait_for_healthy()
        return self.wait(self.start(prompt_refs, **arguments))

    def start(self, prompt_refs: Sequence[PromptRef], **arguments: Any) -> PendingRollout:
        """Starts a rollout on remote runners without waiting for it; arguments as for `generate`.

        A runner executes its calls one after another, so later calls wait until its part of the rollout is finished.
        """
        arguments = {"version": self.version, **arguments}
        runners = self.healthy_ids()
        shares = dict(zip(runners, split_prompts(prompt_refs, len(runners)), strict=False))
        calls = self._start_calls(
            "sample", {runner: {"prompt_refs": share, **arguments} for runner, share in shares.items()}
        )
        return PendingRollout(list(prompt_refs), shares, calls, arguments)

    def wait(self, pending: PendingRollout, *, prefetched: bool = False) -> Rollout:
        """Waits for a started rollout. Returns and raises as `generate` does.

        Args:
            pending: from `start`.
            prefetched: whether the learners have updated the weights meanwhile. Restarted runners cannot get the
                rollout's weights then, so the remaining runners take over the queries of failed ones.
        """
        index_of = {prompt_ref: index for index, prompt_ref in enumerate(pending.prompt_refs)}
        rollouts: list[Rollout] = []
        failures = 0
        while True:
            results = self._wait(pending.calls, self.rollout_timeout)
            failures = 0 if results else failures + 1
            if failures == _MAX_ATTEMPTS:
                raise GenerationError(
                    f"All runners failed {_MAX_ATTEMPTS} times in a row on the same queries. Check their logs and "
                    "memory; queries_per_update, max_prompt_tokens or num_runners may be too large for this machine."
                )
            rollouts += results.values()
            finished = {prompt_ref for runner in results for prompt_ref in pending.shares[runner]}
            missing = [prompt_ref for prompt_ref in pending.prompt_refs if prompt_ref not in finished]
            if not missing:
                rollout = concat_rollouts(rollouts, parallel=True)
                rollout.episodes.sort(key=lambda episode: index_of[episode.custom_data[PROMPT_REF]])
                return rollout
            if not (self.healthy_ids() if prefetched else self.wait_for_healthy()):
                raise GenerationError("All runners died while prefetching the next update.")
            pending = self.start(missing, **pending.arguments)

    # Weights.

    def sync_weights(self, version: int, policy_ids: Sequence[str] | None = None) -> None:
        """Sends the learners' current weights to all runners. Runners that restart later get them then.

        Args:
            policy_ids: the policies to send; None sends all.
        """
        self.version = version
        self._send_to(self.healthy_ids(), policy_ids)

    def _send_to(self, runners: Sequence[int], policy_ids: Sequence[str] | None = None) -> None:
        for policy_id in self.policy_ids if policy_ids is None else policy_ids:
            if self.uses_weight_transfer:
                self._transfer(policy_id, runners)
                continue
            call: dict[str, Any] = {"policy_id": policy_id, "version": self.version}
            if self.local is not None:
                call["weights"] = self.learners.weights(policy_id)
                self.sent_checksums[policy_id] = checksum(call["weights"])
            else:
                call["weights"], self.sent_checksums[policy_id] = self.learners.put_weights(policy_id)
            calls = dict.fromkeys(self._filter_healthy(runners), call)
            self.check_loaded(policy_id, self._call("load_weights", calls).values())

    def load_on_one_runner(self, policy_id: str, weights: Weights) -> None:
        """Sends given weights of a policy to one runner, the same way as the current ones are sent."""
        if self.uses_weight_transfer:
            self._transfer(policy_id, self.wait_for_healthy()[:1], weights)
        else:
            self.call_one("load_weights", policy_id=policy_id, weights=weights, version=self.version)

    def _transfer(self, policy_id: str, runners: Sequence[int], weights: Weights | None = None) -> None:
        """Makes the learners send a policy's weights directly to those of the runners that are healthy."""
        for _ in range(_MAX_ATTEMPTS):
            healthy = self._filter_healthy(runners)
            if not healthy:
                return
            actors = [self.manager.actors()[runner] for runner in healthy]
            self.sent_checksums[policy_id], loaded = self.learners.transfer(
                policy_id, actors, self.version, self.restarts, weights
            )
            if loaded is not None:
                self.check_loaded(policy_id, loaded)
                return
            self._call("ping", {runner: {} for runner in healthy})  # marks the runners that died
        raise GenerationError(
            f"The weights of {policy_id} did not reach the runners in {_MAX_ATTEMPTS} attempts. See the learners' "
            "logs, or set weight_transfer=null to send weights through Ray."
        )

    def check_loaded(self, policy_id: str, loaded_weights: Iterable[LoadedWeights]) -> None:
        """Compares the weights that engines loaded with the ones that were sent."""
        sent_checksum = self.sent_checksums[policy_id]
        for loaded in loaded_weights:
            if (loaded.version, loaded.checksum) != (self.version, sent_checksum):
                raise WeightSyncError(
                    f"{policy_id}: version {self.version} with checksum {sent_checksum} was sent, but the engine "
                    f"loaded version {loaded.version} with checksum {loaded.checksum}."
                )
            if loaded.stale:
                raise WeightSyncError(
                    f"{policy_id}: {len(loaded.stale)} of the engine's weights were not updated, such as "
                    f"{loaded.stale[0]}, so it would sample with stale weights. Use backend=transformers, or report "
                    "this with the versions of vllm, torch and the model."
                )

    # Health.

    def healthy_ids(self) -> list[int]:
        """Returns the ids of the runners that are not known to have failed; 0 is the driver's."""
        return [0] if self.local is not None else sorted(self.group.healthy_env_runner_ids())

    def _filter_healthy(self, runners: Sequence[int]) -> list[int]:
        return [runner for runner in runners if self.local is not None or self.manager.is_actor_healthy(runner)]

    def wait_for_healthy(self) -> list[int]:
        """Returns the ids of healthy runners. Waits for a restart if there are none."""
        deadline = time.monotonic() + 2 * self.timeout
        while not (runners := self.healthy_ids()):
            if time.monotonic() > deadline:
                raise GenerationError("All runners died and none restarted. Check their logs, memory and devices.")
            time.sleep(1.0)
            check_started(self.group, wait=0.1)
            self.restore_runners()
        return runners

    def restore_runners(self) -> list[int]:
        """Finds restarted runners and sends them the current weights. Returns their ids."""
        restored: list[int] = list(self.group.probe_unhealthy_env_runners() or [])
        if restored:
            self.restarts += len(restored)
            for runner, checksum in self._call("task_checksum", {runner: {} for runner in restored}).items():
                if checksum != self.task_checksum:
                    raise TaskChangedError(
                        f"Runner {runner} restarted and loaded different queries: the data changed during training. "
                        "Restore the data, then resume."
                    )
            self._send_to(restored)
        return restored

    # Calls.

    def call_one(self, method: str, **arguments: Any) -> Any:
        """Calls a method of one runner."""
        runner = self.wait_for_healthy()[0]
        results = self._call(method, {runner: arguments})
        if not results:
            raise GenerationError(f"Runner {runner} failed. Check its log, memory and device.")
        return results[runner]

    def _call(self, method: str, calls: Mapping[int, dict[str, Any]]) -> dict[int, Any]:
        """Calls a method of runners with arguments by runner id; returns as `_wait` does."""
        return self._wait(self._start_calls(method, calls), self.timeout)

    def _start_calls(self, method: str, calls: Mapping[int, dict[str, Any]]) -> dict[int, Any]:
        """Starts calls of remote runners. `_wait` calls the driver's runner."""
        if self.local is not None:
            return {runner: partial(getattr(self.local, method), **arguments) for runner, arguments in calls.items()}
        actors = self.manager.actors()
        return {runner: getattr(actors[runner], method).remote(**arguments) for runner, arguments in calls.items()}

    def _wait(self, calls: Mapping[int, Any], timeout: float) -> dict[int, Any]:
        """Waits at most `timeout` seconds for remote calls.

        Returns:
            Results by runner id. Runners that died, timed out (these are restarted) or lost their engine have none.
            They count as failed until `restore_runners` finds them again and sends them weights.
        """
        if self.local is not None:
            return {runner: _call_twice(call) for runner, call in calls.items()}
        ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout) if calls else ([], [])
        results: dict[int, Any] = {}
        for runner, call in calls.items():
            try:
                if call in ready:
                    results[runner] = ray.get(call)
                    continue
                logger.warning("Runner %d did not respond within %.0f s. Restarting it.", runner, timeout)
                ray.kill(self.manager.actors()[runner], no_restart=False)
            except RayError as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                if isinstance(cause, RayError):  # the runner or its node died, or its result was lost with the node
                    logger.warning("Runner %d died. Its queries are assigned again.", runner)
                elif isinstance(cause, GenerationError):
                    logger.warning("Runner %d: %s", runner, cause)
                else:
                    self.manager.set_actor_state(runner, healthy=False)
                    raise cause from None
            self.manager.set_actor_state(runner, healthy=False)
        return results


def _call_twice(call: Callable[[], Any]) -> Any:
    """Calls a method of the driver's runner, and calls it again if its engine failed and was restarted."""
    try:
        return call()
    except GenerationError as error:
        logger.warning("%s Trying again.", error)
        return call()


def check_started(group: EnvRunnerGroup, wait: float | None = None) -> None:
    """Raises the error that kept a runner from starting. RLlib silently continues without such a runner.

    Args:
        wait: seconds to wait for runners that are restarting; None waits until they are up.
    """
    actors = actor_manager(group).actors()
    calls = [actors[runner].ping.remote() for runner in set(actors) - set(group.healthy_env_runner_ids())]
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=wait) if calls else ([], [])
    for call in ready:
        try:
            ray.get(call)
        except RayError as error:  # other errors: it is still restarting
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise error.args[0].cause from error


def shutdown(group: EnvRunnerGroup) -> None:
    """Stops all remote runners, and kills those that do not respond. RLlib would wait for them."""
    manager = actor_manager(group)
    manager.foreach_actor("stop", timeout_seconds=_STOP_SECONDS)
    manager.clear()


def split_prompts(prompt_refs: Sequence[PromptRef], runners: int) -> list[list[PromptRef]]:
    """Splits queries into at most `runners` non-empty shares of nearly equal size."""
    num_shares = min(runners, len(prompt_refs))
    return (
        [[prompt_refs[index] for index in share] for share in np.array_split(np.arange(len(prompt_refs)), num_shares)]
        if num_shares
        else []
    )
