"""How the driver talks to its runners: who is alive, which queries each plays, which weights each holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from policies.generation.generator import GenerationError, Loaded
from policies.models.weights import Weights
from policies.rollout.chain_runner import Rollout
from policies.rollout.dealing import Deal
from policies.settings.settings import Settings

logger = logging.getLogger(__name__)


_ATTEMPTS = 3  # at the same queries, by all runners
_FAREWELL = 20.0  # seconds that runners have to end their engines and reward processes
_REWARD_CALLS = 5  # as long as a reward that hangs may keep `RewardWorker.score` busy, in its time limits


class WeightSyncError(RuntimeError):
    """A runner does not hold the weights that it was sent."""


class TaskChangedError(RuntimeError):
    """A runner has read other queries than the algorithm."""


class Begun(NamedTuple):
    """Queries that remote runners were asked to play."""

    shares: list[tuple[int, list[Deal]]]
    """Per runner, with the place of the first one."""
    unsent: list[tuple[int, list[Deal]]]
    """Those for which there was no runner."""
    runners: list[int]
    calls: list[ray.ObjectRef[Any]]
    arguments: dict[str, Any]


Packed: TypeAlias = "tuple[dict[str, Weights] | ray.ObjectRef[dict[str, Weights]], int]"
"""An LLM's weights, or where Ray has them, as `load_weights` takes them, and their checksum."""
Transfer = Callable[[str, Sequence[Any], int, int, Weights | None], tuple[int, list[Loaded] | None]]
"""Sends an LLM's weights to actors, of that version, after so many restarts; see `WeightSender.send`."""


class Runners:
    """RLlib's env runners, called with explicit work. With `num_runners=0` the one in the driver does it all.

    A runner that dies, hangs beyond `timeout` or loses its engine costs nothing: its queries are dealt again, RLlib
    restarts it, and it gets the present weights before it plays.
    """

    def __init__(
        self,
        group: EnvRunnerGroup,
        settings: Settings,
        fetch: Callable[[str], Packed],
        transfer: Transfer | None = None,
    ) -> None:
        """Wraps RLlib's group.

        Args:
            group: the algorithm's env runners.
            settings: names the LLMs and the longest waits. Playing may take so much longer than `generation_timeout`
                that a runner whose reward hangs can say so.
            fetch: an LLM's present weights and their checksum. They are fetched when they are sent, one LLM at a time,
                so that the driver keeps no copy.
            transfer: lets the learners send them, where settings name a `weight_transfer`.
        """
        self.group = group
        self.timeout = settings.generation_timeout
        batches = max(settings.num_agents - 1, 1) if settings.observed == "best" else 1
        self.play_timeout = self.timeout + batches * _REWARD_CALLS * settings.reward_timeout
        self.modules = settings.modules
        self.fetch = fetch
        self.transfer = None if settings.weight_transfer is None else transfer
        self.restarts = 0
        """Of runners, so far."""
        self.task_checksum: int | None = None
        """Of the algorithm's task, which runners that are restarted must have too; None: it is not checked."""
        self.version = -1
        self.sent: dict[str, int] = {}
        """By LLM, the checksum of the weights that were sent last."""

    def play(self, deals: Sequence[Deal], **arguments: Any) -> list[Rollout]:
        """Plays queries on all runners.

        Args:
            deals: the queries.
            **arguments: the others of `ChainRunner.sample`; the version of the weights is that sent last.

        Returns:
            Rollouts that hold every query once, in the order dealt.

        Raises:
            RewardError, QueryTooLong, …: what a runner raised about the work itself.
            GenerationError: no runner came back in time, or all failed again and again.
        """
        arguments["version"] = self.version
        local = self.group.local_env_runner
        if local is not None:
            try:
                return [local.sample(deals=deals, **arguments)]
            except GenerationError as error:  # its engine was started anew
                logger.warning("%s The queries are played again.", error)
                return [local.sample(deals=deals, **arguments)]
        return self.finish(self._deal([(0, list(deals))], self.alive(), arguments), self.alive)

    def begin(self, deals: Sequence[Deal], **arguments: Any) -> Begun:
        """Lets the remote runners begin to play queries, and waits for none; the arguments are those of `play`.

        A runner does one thing after another, so whatever it is called for next waits until it has played.
        """
        runners = sorted(self.group.healthy_worker_ids())
        return self._deal([(0, list(deals))], runners, {**arguments, "version": self.version})

    def finish(self, begun: Begun, alive: Callable[[], list[int]]) -> list[Rollout]:
        """Waits for queries that runners were asked to play; what it returns and raises is as of `play`.

        Args:
            begun: what `begin` returned.
            alive: tells the runners to which the queries of those that failed are dealt again.
        """
        done: dict[int, Rollout] = {}  # by the place of the first query
        failures = 0
        while True:
            answers = self._answers(begun.calls, begun.runners, self.play_timeout)
            failures = 0 if any(answer is not None for answer in answers) else failures + 1
            if failures == _ATTEMPTS:
                raise GenerationError(
                    f"All runners failed {_ATTEMPTS} times in a row on the same queries. Check their logs and memory; "
                    "queries, max_prompt or num_runners may be too large for this machine."
                )
            answered = list(zip(begun.shares, answers, strict=True))
            done |= {place: answer for (place, _), answer in answered if answer is not None}
            pending = [share for share, answer in answered if answer is None] + begun.unsent
            if not pending:
                return [done[place] for place in sorted(done)]
            begun = self._deal(pending, alive(), begun.arguments)

    def _deal(
        self, pending: Sequence[tuple[int, list[Deal]]], runners: Sequence[int], arguments: dict[str, Any]
    ) -> Begun:
        shares = list(split(pending, len(runners)))
        asked = list(runners[: len(shares)])
        calls = self._begin("sample", [{"deals": share, **arguments} for _, share in shares], asked)
        return Begun(shares, list(pending[len(shares) :]), asked, calls, arguments)

    def check_started(self, wait: float | None = None) -> None:
        """Raises what kept a runner from starting: RLlib goes on without such a runner, and without a word.

        Args:
            wait: for runners that are being restarted, in seconds; None waits until they are up.

        Raises:
            RewardError, EngineStartError, …: as the runner's constructor raised it.
        """
        actors = self.group._worker_manager.actors()
        calls = [actors[runner].ping.remote() for runner in set(actors) - set(self.group.healthy_worker_ids())]
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=wait) if calls else ([], [])
        for call in ready:
            try:
                ray.get(call)
            except RayError as error:  # else it is still being restarted
                if isinstance(error, RayActorError) and error.actor_init_failed:
                    raise error.args[0].cause from error

    def send(self, version: int) -> None:
        """Sends the learner's present weights to all runners; those that come back later get them then.

        Args:
            version: of the weights.

        Raises:
            WeightSyncError: an engine read something else than was sent.
        """
        self.version = version
        self._send_to(sorted(self.group.healthy_worker_ids()))

    def send_again(self, module_id: str) -> None:
        """Sends the present weights of one LLM, which are others than before, under the present version.

        Raises:
            WeightSyncError: an engine read something else than was sent.
        """
        self._send_to(sorted(self.group.healthy_worker_ids()), [module_id])

    def _send_to(self, runners: Sequence[int], modules: Sequence[str] | None = None) -> None:
        local = self.group.local_env_runner
        for module_id in self.modules if modules is None else modules:
            if self.transfer is not None:
                self._transfer(module_id, runners)
                continue
            weights, self.sent[module_id] = self.fetch(module_id)
            if local is not None:
                weights = ray.get(weights) if isinstance(weights, ray.ObjectRef) else weights
                try:
                    loaded = local.load_weights(weights, self.version)
                except GenerationError as error:  # its engine was started anew
                    logger.warning("%s The weights are sent again.", error)
                    loaded = local.load_weights(weights, self.version)
                self.check([loaded])
            else:
                packed = weights if isinstance(weights, ray.ObjectRef) else ray.put(weights)
                call = {"weights": packed, "version": self.version}
                del weights
                alive = [runner for runner in runners if self.group._worker_manager.is_actor_healthy(runner)]
                self.check(self._call("load_weights", [call] * len(alive), alive))

    def load_one(self, module_id: str, weights: Weights) -> None:
        """Gives one runner other weights of an LLM than the present ones, the way that those go.

        Raises:
            GenerationError: it died or hung.
        """
        if self.transfer is not None:
            self._transfer(module_id, self.alive()[:1], weights)
        else:
            self.call_one("load_weights", weights={module_id: weights}, version=self.version)

    def _transfer(self, module_id: str, runners: Sequence[int], weights: Weights | None = None) -> None:
        """Lets the learners send an LLM's weights to those of the runners that are left."""
        assert self.transfer is not None
        manager = self.group._worker_manager
        for _ in range(_ATTEMPTS):
            alive = [runner for runner in runners if manager.is_actor_healthy(runner)]
            if not alive:
                return
            actors = [manager.actors()[runner] for runner in alive]
            self.sent[module_id], loaded = self.transfer(module_id, actors, self.version, self.restarts, weights)
            if loaded is not None:
                self.check([{module_id: each} for each in loaded])
                return
            self._call("ping", [{}] * len(alive), alive)  # so that those are known that are gone
        raise GenerationError(
            f"{module_id}'s weights did not reach the runners in {_ATTEMPTS} tries. The learners' logs say why; set "
            "weight_transfer=null to send them through Ray."
        )

    def check(self, answers: Sequence[Mapping[str, Loaded] | None]) -> None:
        """Compares what engines read with what was sent; None stands for a runner that is gone.

        Raises:
            WeightSyncError: they differ, or an engine has weights that were not sent.
        """
        for answer in answers:
            for module_id, loaded in (answer or {}).items():
                if (loaded.version, loaded.checksum) != (self.version, self.sent[module_id]):
                    raise WeightSyncError(
                        f"{module_id}: version {self.version} with checksum {self.sent[module_id]} was sent, but the "
                        f"engine read version {loaded.version} with checksum {loaded.checksum}."
                    )
                if loaded.stale:
                    raise WeightSyncError(
                        f"{module_id}: {len(loaded.stale)} of the engine's weights are not among those that it was "
                        f"sent, such as {loaded.stale[0]}, so it would sample with old ones. Use backend=transformers, "
                        "or report this with the versions of vllm, torch and the model."
                    )

    def call_one(self, method: str, **arguments: Any) -> Any:
        """Calls a method of one runner.

        Raises:
            GenerationError: it died or hung.
        """
        local = self.group.local_env_runner
        if local is not None:
            return getattr(local, method)(**arguments)
        runner = self.alive()[0]
        answer = self._call(method, [arguments], [runner])[0]
        if answer is None:
            raise GenerationError(f"Runner {runner} failed. Check its log, memory and device.")
        return answer

    def alive(self) -> list[int]:
        """Remote runners that can be called; while there are none, waits for restarts.

        Raises:
            GenerationError: none came back within twice the timeout.
        """
        deadline = time.monotonic() + 2 * self.timeout
        while not (runners := sorted(self.group.healthy_worker_ids())):
            if time.monotonic() > deadline:
                raise GenerationError("All runners are gone and none came back. Check their logs, memory and devices.")
            time.sleep(1.0)
            self.check_started(wait=0.1)
            self.welcome_back()
        return runners

    def left(self) -> list[int]:
        """Remote runners that have been there since weights were last sent. While the learner moves on from these, a
        runner that comes back cannot get them.

        Raises:
            GenerationError: there are none.
        """
        if runners := sorted(self.group.healthy_worker_ids()):
            return runners
        raise GenerationError("All runners died while they played ahead.")

    def welcome_back(self) -> list[int]:
        """Finds runners that were restarted, gives them the present weights, and returns them.

        Raises:
            WeightSyncError: an engine read something else than was sent.
            TaskChangedError: the data changed since training began.
        """
        restored: list[int] = list(self.group.probe_unhealthy_env_runners() or [])
        if restored:
            self.restarts += len(restored)
            self._check_task(restored)
            self._send_to(restored)
        return restored

    def _check_task(self, runners: Sequence[int]) -> None:
        """Refuses runners, just restarted, that read the task's data anew and found something else."""
        if self.task_checksum is None:
            return
        for runner, checksum in zip(runners, self._call("task_checksum", [{}] * len(runners), runners), strict=True):
            if checksum not in (None, self.task_checksum):
                raise TaskChangedError(
                    f"Runner {runner} was restarted and read other queries than training began with: the data changed "
                    "meanwhile. Put it back, then resume."
                )

    def _call(self, method: str, calls: Sequence[dict[str, Any]], runners: Sequence[int]) -> list[Any]:
        """Calls a method of remote runners, each with its own arguments; what `_answers` returns."""
        return self._answers(self._begin(method, calls, runners), runners, self.timeout)

    def _begin(self, method: str, calls: Sequence[dict[str, Any]], runners: Sequence[int]) -> list[ray.ObjectRef[Any]]:
        manager = self.group._worker_manager
        return manager._call_actors(method, kwargs=list(calls), remote_actor_ids=list(runners))

    def _answers(self, calls: Sequence[ray.ObjectRef[Any]], runners: Sequence[int], timeout: float) -> list[Any]:
        """Waits so many seconds for what remote runners were called for.

        Returns:
            Per runner its answer, or None where it died, hung (it is restarted then) or lost its engine. The manager
            then counts it out until `welcome_back` finds it and gives it its weights.
        """
        manager = self.group._worker_manager
        _, answers = manager._fetch_result(
            remote_actor_ids=list(runners),
            remote_calls=list(calls),
            tags=[None] * len(calls),
            timeout_seconds=timeout,
        )
        found: dict[int, Any] = {}
        for answer in answers:
            error = None if answer.ok else answer.get()
            found[answer.actor_id] = answer.get() if error is None else None
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, RayError):  # beside its death: its node's, or the loss of its answer with that
                logger.warning("Runner %d died; its queries are dealt again.", answer.actor_id)
            elif isinstance(cause, GenerationError):
                logger.warning("Runner %d: %s", answer.actor_id, cause)
            elif cause is not None:
                raise cause
        for runner in runners:
            if runner not in found:
                logger.warning("Runner %d gave no answer in %.0f s; it is restarted.", runner, timeout)
                ray.kill(manager.actors()[runner], no_restart=False)
                manager.set_actor_state(runner, healthy=False)
        return [found.get(runner) for runner in runners]


def end(group: EnvRunnerGroup) -> None:
    """Ends all remote runners by their own `stop`, and those that do not answer all the same; RLlib would wait."""
    manager = group._worker_manager
    manager.foreach_actor("stop", timeout_seconds=_FAREWELL)
    manager.clear()


def split(pending: Sequence[tuple[int, list[Deal]]], runners: int) -> Iterator[tuple[int, list[Deal]]]:
    """Splits pending runs of queries, each with the place of its first one, into at most `runners` shares."""
    parts = max(runners // len(pending), 1)
    for place, deals in pending[:runners]:
        for part in np.array_split(np.arange(len(deals)), min(parts, len(deals))):
            yield place + int(part[0]), [deals[i] for i in part]
