"""How the driver talks to its runners: who is alive, which queries each plays, which weights each holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
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
from policies.rollout.episodes import Rollout, join
from policies.rollout.prompt_sampling import PromptRef
from policies.settings.settings import Settings

logger = logging.getLogger(__name__)


_ATTEMPTS = 3  # at the same queries, by all runners
_FAREWELL = 20.0  # seconds that runners have to end their engines and reward processes
_REWARD_CALLS = 5  # as long as a reward that hangs may keep `RewardWorker.score` busy, in its time limits


class WeightSyncError(RuntimeError):
    """A runner does not hold the weights that it was sent."""


class TaskChangedError(RuntimeError):
    """A runner has read other queries than the algorithm."""


class PendingRollout(NamedTuple):
    """Queries that remote runners were asked to play."""

    prompt_refs: list[PromptRef]
    """All of them, in order."""
    shares: dict[int, list[PromptRef]]
    """Those of each runner; empty if there was no runner."""
    calls: dict[int, ray.ObjectRef[Any]]
    """By runner."""
    arguments: dict[str, Any]


class Runners:
    """RLlib's env runners, called with explicit work. With `num_runners=0` the one in the driver does it all.

    A runner that dies, hangs beyond `timeout` or loses its engine costs nothing: its queries are dealt again, RLlib
    restarts it, and it gets the present weights before it plays.
    """

    def __init__(self, group: EnvRunnerGroup, settings: Settings, learners: Learners, task_checksum: int) -> None:
        """Wraps RLlib's group.

        Args:
            group: the algorithm's env runners.
            settings: names the LLMs and the longest waits. Playing may take so much longer than `generation_timeout`
                that a runner whose reward hangs can say so.
            learners: have the present weights. They are fetched when they are sent, one LLM at a time, so that the
                driver keeps no copy; with `weight_transfer` the learners send them.
            task_checksum: of the algorithm's task, which runners that are restarted must have too.
        """
        self.local = group.local_env_runner
        self.group, self.manager = group, actor_manager(group)
        self.learners = learners
        self.task_checksum = task_checksum
        self.timeout = settings.generation_timeout
        batches = max(settings.num_agents - 1, 1) if settings.observed == "best" else 1
        self.play_timeout = self.timeout + batches * _REWARD_CALLS * settings.reward_timeout
        self.policy_ids = settings.policy_ids
        self.transfer = settings.weight_transfer is not None
        self.restarts = 0
        """Of runners, so far."""
        self.version = -1
        self.sent: dict[str, int] = {}
        """By LLM, the checksum of the weights that were sent last."""

    # Playing.

    def play(self, prompt_refs: Sequence[PromptRef], **arguments: Any) -> Rollout:
        """Plays queries on all runners.

        Args:
            prompt_refs: the queries.
            **arguments: the others of `ChainRunner.sample`; the version of the weights is that sent last.

        Returns:
            A rollout that holds every query once, in the order dealt.

        Raises:
            RewardError, QueryTooLong, …: what a runner raised about the work itself.
            GenerationError: no runner came back in time, or all failed again and again.
        """
        if self.local is not None:
            call = {"prompt_refs": prompt_refs, "version": self.version, **arguments}
            rollout: Rollout = self._call_local("sample", "queries are played", **call)
            return rollout
        self.wait_for_healthy()
        return self.wait(self.begin(prompt_refs, **arguments))

    def begin(self, prompt_refs: Sequence[PromptRef], **arguments: Any) -> PendingRollout:
        """Lets the remote runners begin to play queries, and waits for none; the arguments are those of `play`.

        A runner does one thing after another, so whatever it is called for next waits until it has played.
        """
        arguments = {"version": self.version, **arguments}
        runners = self.healthy_ids()
        shares = dict(zip(runners, split(prompt_refs, len(runners)), strict=False))
        calls = self._begin("sample", {runner: {"prompt_refs": share, **arguments} for runner, share in shares.items()})
        return PendingRollout(list(prompt_refs), shares, calls, arguments)

    def wait(self, pending: PendingRollout, *, prefetched: bool = False) -> Rollout:
        """Waits for queries that runners were asked to play; what it returns and raises is as of `play`.

        Args:
            pending: what `begin` returned.
            prefetched: the learner has moved on meanwhile: a runner that comes back cannot get the weights, so queries
                of one that failed are left to the others.
        """
        place = {prompt_ref: number for number, prompt_ref in enumerate(pending.prompt_refs)}
        rollouts: list[Rollout] = []
        failures = 0
        while True:
            answers = self._wait(pending.calls, self.play_timeout)
            failures = 0 if answers else failures + 1
            if failures == _ATTEMPTS:
                raise GenerationError(
                    f"All runners failed {_ATTEMPTS} times in a row on the same queries. Check their logs and memory; "
                    "queries, max_prompt_tokens or num_runners may be too large for this machine."
                )
            rollouts += answers.values()
            played = {prompt_ref for runner in answers for prompt_ref in pending.shares[runner]}
            missing = [prompt_ref for prompt_ref in pending.prompt_refs if prompt_ref not in played]
            if not missing:
                rollout = join(rollouts, parallel=True)
                rollout.episodes.sort(key=lambda episode: place[episode.custom_data[PROMPT_REF]._replace(sibling=0)])
                return rollout
            if not (self.healthy_ids() if prefetched else self.wait_for_healthy()):
                raise GenerationError("All runners died while they played ahead.")
            pending = self.begin(missing, **pending.arguments)

    # Weights.

    def send(self, version: int, policy_ids: Sequence[str] | None = None) -> None:
        """Sends the learners' present weights to all runners; those that come back later get them then.

        Args:
            version: of the weights.
            policy_ids: the LLMs; None: all.

        Raises:
            WeightSyncError: an engine read something else than was sent.
        """
        self.version = version
        self._send_to(self.healthy_ids(), policy_ids)

    def _send_to(self, runners: Sequence[int], policy_ids: Sequence[str] | None = None) -> None:
        for policy_id in self.policy_ids if policy_ids is None else policy_ids:
            if self.transfer:
                self._transfer(policy_id, runners)
                continue
            call: dict[str, Any] = {"policy_id": policy_id, "version": self.version}
            if self.local is not None:
                weights = self.learners.weights(policy_id)
                self.sent[policy_id] = checksum(weights)
                self.check(policy_id, [self._call_local("load_weights", "weights are sent", weights=weights, **call)])
            else:
                packed, self.sent[policy_id] = self.learners.packed(policy_id)
                calls = {runner: {"weights": packed, **call} for runner in self._healthy_of(runners)}
                del packed
                self.check(policy_id, self._call("load_weights", calls).values())

    def load_one(self, policy_id: str, weights: Weights) -> None:
        """Gives one runner other weights of an LLM than the present ones, the way that those go.

        Raises:
            GenerationError: it died or hung.
        """
        if self.transfer:
            self._transfer(policy_id, self.wait_for_healthy()[:1], weights)
        else:
            self.call_one("load_weights", policy_id=policy_id, weights=weights, version=self.version)

    def _transfer(self, policy_id: str, runners: Sequence[int], weights: Weights | None = None) -> None:
        """Lets the learners send an LLM's weights to those of the runners that are left."""
        for _ in range(_ATTEMPTS):
            alive = self._healthy_of(runners)
            if not alive:
                return
            actors = [self.manager.actors()[runner] for runner in alive]
            self.sent[policy_id], loaded = self.learners.transfer(
                policy_id, actors, self.version, self.restarts, weights
            )
            if loaded is not None:
                self.check(policy_id, loaded)
                return
            self._call("ping", {runner: {} for runner in alive})  # so that those are known that are gone
        raise GenerationError(
            f"{policy_id}'s weights did not reach the runners in {_ATTEMPTS} tries. The learners' logs say why; set "
            "weight_transfer=null to send them through Ray."
        )

    def check(self, policy_id: str, answers: Iterable[LoadedWeights]) -> None:
        """Compares what engines read of an LLM's weights with what was sent.

        Raises:
            WeightSyncError: they differ, or an engine has weights that were not sent.
        """
        for loaded in answers:
            if (loaded.version, loaded.checksum) != (self.version, self.sent[policy_id]):
                raise WeightSyncError(
                    f"{policy_id}: version {self.version} with checksum {self.sent[policy_id]} was sent, but the "
                    f"engine read version {loaded.version} with checksum {loaded.checksum}."
                )
            if loaded.stale:
                raise WeightSyncError(
                    f"{policy_id}: {len(loaded.stale)} of the engine's weights are not among those that it was "
                    f"sent, such as {loaded.stale[0]}, so it would sample with old ones. Use backend=transformers, "
                    "or report this with the versions of vllm, torch and the model."
                )

    # Who is there.

    def healthy_ids(self) -> list[int]:
        """Remote runners that can be called, as far as is known."""
        return sorted(self.group.healthy_env_runner_ids())

    def _healthy_of(self, runners: Sequence[int]) -> list[int]:
        return [runner for runner in runners if self.manager.is_actor_healthy(runner)]

    def wait_for_healthy(self) -> list[int]:
        """Remote runners that can be called; while there are none, waits for restarts.

        Raises:
            GenerationError: none came back within twice the timeout.
        """
        deadline = time.monotonic() + 2 * self.timeout
        while not (runners := self.healthy_ids()):
            if time.monotonic() > deadline:
                raise GenerationError("All runners are gone and none came back. Check their logs, memory and devices.")
            time.sleep(1.0)
            check_started(self.group, wait=0.1)
            self.restore_runners()
        return runners

    def restore_runners(self) -> list[int]:
        """Finds runners that were restarted, gives them the present weights, and returns them.

        Raises:
            WeightSyncError: an engine read something else than was sent.
            TaskChangedError: the data changed since training began.
        """
        restored: list[int] = list(self.group.probe_unhealthy_env_runners() or [])
        if restored:
            self.restarts += len(restored)
            for runner, checksum in self._call("task_checksum", {runner: {} for runner in restored}).items():
                if checksum != self.task_checksum:
                    raise TaskChangedError(
                        f"Runner {runner} was restarted and read other queries than training began with: the data "
                        "changed meanwhile. Put it back, then resume."
                    )
            self._send_to(restored)
        return restored

    # Calls.

    def call_one(self, method: str, **arguments: Any) -> Any:
        """Calls a method of one runner.

        Raises:
            GenerationError: it died or hung.
        """
        if self.local is not None:
            return getattr(self.local, method)(**arguments)
        runner = self.wait_for_healthy()[0]
        answers = self._call(method, {runner: arguments})
        if not answers:
            raise GenerationError(f"Runner {runner} failed. Check its log, memory and device.")
        return answers[runner]

    def _call_local(self, method: str, retried: str, **arguments: Any) -> Any:
        """Calls a method of the driver's runner; once more if its engine failed, which was started anew then."""
        try:
            return getattr(self.local, method)(**arguments)
        except GenerationError as error:
            logger.warning("%s The %s again.", error, retried)
            return getattr(self.local, method)(**arguments)

    def _call(self, method: str, calls: Mapping[int, dict[str, Any]]) -> dict[int, Any]:
        """Calls a method of remote runners, each with its own arguments; what `_wait` returns."""
        return self._wait(self._begin(method, calls), self.timeout)

    def _begin(self, method: str, calls: Mapping[int, dict[str, Any]]) -> dict[int, ray.ObjectRef[Any]]:
        actors = self.manager.actors()
        return {runner: getattr(actors[runner], method).remote(**arguments) for runner, arguments in calls.items()}

    def _wait(self, calls: Mapping[int, ray.ObjectRef[Any]], timeout: float) -> dict[int, Any]:
        """Waits so many seconds for what remote runners were called for.

        Returns:
            Answers by runner. Those that died, hung (they are restarted) or lost their engine gave none, and count as
            gone until `restore_runners` finds them and gives them their weights.
        """
        ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout) if calls else ([], [])
        answers: dict[int, Any] = {}
        for runner, call in calls.items():
            try:
                if call in ready:
                    answers[runner] = ray.get(call)
                    continue
                logger.warning("Runner %d gave no answer in %.0f s; it is restarted.", runner, timeout)
                ray.kill(self.manager.actors()[runner], no_restart=False)
            except RayError as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                if isinstance(cause, RayError):  # beside its death: its node's, or the loss of its answer with that
                    logger.warning("Runner %d died; its queries are dealt again.", runner)
                elif isinstance(cause, GenerationError):
                    logger.warning("Runner %d: %s", runner, cause)
                else:
                    self.manager.set_actor_state(runner, healthy=False)
                    raise cause from None
            self.manager.set_actor_state(runner, healthy=False)
        return answers


def check_started(group: EnvRunnerGroup, wait: float | None = None) -> None:
    """Raises what kept a runner from starting: RLlib goes on without such a runner, and without a word.

    Args:
        group: the runners.
        wait: for runners that are being restarted, in seconds; None waits until they are up.

    Raises:
        RewardError, EngineStartError, …: as the runner's constructor raised it.
    """
    actors = actor_manager(group).actors()
    calls = [actors[runner].ping.remote() for runner in set(actors) - set(group.healthy_env_runner_ids())]
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=wait) if calls else ([], [])
    for call in ready:
        try:
            ray.get(call)
        except RayError as error:  # else it is still being restarted
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise error.args[0].cause from error


def shutdown(group: EnvRunnerGroup) -> None:
    """Ends all remote runners by their own `stop`, and those that do not answer all the same; RLlib would wait."""
    manager = actor_manager(group)
    manager.foreach_actor("stop", timeout_seconds=_FAREWELL)
    manager.clear()


def split(prompt_refs: Sequence[PromptRef], runners: int) -> list[list[PromptRef]]:
    """Splits queries into as many shares as there are runners, or into single ones."""
    parts = min(runners, len(prompt_refs))
    return (
        [[prompt_refs[place] for place in part] for part in np.array_split(np.arange(len(prompt_refs)), parts)]
        if parts
        else []
    )
