"""Rewards batches with a user's reward function, gives feedback on them, and finds the sample that causes a failure.

A failure of the function (an exception, a hang, an exit, a wrong number of values, a value that is not a finite number)
never becomes a silent 0. With `stop`, a `RewardError` names the function and the sample. With `skip`, the sample's
reward is None (its feedback `SKIPPED`) and is counted, so that the caller can drop its query. A sample has failed if it
fails alone: if a batch fails as a whole, the values of the samples that succeed alone are used, with a warning.

If the system kills the process, as it does when memory runs out, neither function nor data need be at fault: the batch
is retried.
"""

import logging
import re
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, Self

from cory_env.functions import parse_spec
from cory_env.message import MESSAGES_RULE
from cory_env.pickled import display_name
from cory_env.rewarding.child_process import Reply
from cory_env.rewarding.process import FEEDBACK, REWARD, Batch, RewardProcess, SampleError, role_reward
from cory_env.rewarding.spec import parse_sum
from cory_env.tasks.turns import SKIPPED, Feedback, NoFeedback

logger = logging.getLogger(__name__)

OnError = Literal["stop", "skip"]

REWARD_TIMEOUT = 300.0
"""Seconds that one call of a reward or feedback function may take by default."""
MAX_ATTEMPTS = 3  # at a batch if the system kills the process


class RewardError(RuntimeError):
    """A reward or feedback function could not be loaded, or failed on a sample."""


class RewardKilled(RewardError):
    """The system killed the reward process at every attempt; a later attempt may succeed."""


class RewardWorker:
    """A reward in a child process, which starts on the first call and then stays; a context manager.

    Attributes:
        skipped: Number of samples so far on which a function failed.
    """

    def __init__(
        self,
        spec: str | None,
        *,
        feedback: str | None = None,
        role_rewards: Mapping[str, str] = MappingProxyType({}),
        timeout: float = REWARD_TIMEOUT,
        on_error: OnError = "stop",
    ) -> None:
        """Makes the worker without starting the child process.

        Args:
            spec: `module:function`, `module:function?setting=value`, or a weighted sum (`cory_env.rewarding.spec`).
                None: no reward, only feedback.
            feedback: The feedback function as `module:function`; it runs in the same process.
            role_rewards: The reward functions of single roles, by role; they run in the same process.
            timeout: Seconds that one call may take, and that importing the module may take. Loading a model in the
                first call counts as part of that call.
            on_error: How to handle a failure: `stop` raises, `skip` returns None for the affected samples.
        """
        for reward in (spec, *role_rewards.values()):
            if reward is not None:
                parse_sum(reward)
        if feedback is not None:
            parse_spec(feedback, FEEDBACK)
        if not timeout > 0:
            raise ValueError(f"reward_timeout is {timeout} s, but must be greater than 0.")
        self.timeout = timeout
        self.on_error = on_error
        self.skipped = 0
        functions = {REWARD: spec, FEEDBACK: feedback}
        functions |= {role_reward(role): own_spec for role, own_spec in role_rewards.items()}
        self._specs = {name: function for name, function in functions.items() if function is not None}
        self._names = {function: f"{function} {display_name(name)}" for function, name in self._specs.items()}
        self._process: RewardProcess | None = None
        self._needs: tuple[str, ...] | None = None  # None until the process has loaded the functions

    def rewards(
        self,
        prompts: Sequence[object],
        completions: Sequence[object],
        columns: Mapping[str, Sequence[object]],
        function: str = REWARD,
    ) -> list[float | None]:
        """Returns one task reward per sample, from one call of the function.

        Args:
            prompts: The queries: texts, or lists of messages for conversations.
            completions: The decoded responses, one per query, in the same form.
            columns: Further arguments, each a list of the same length; the function gets those that it accepts.
            function: The reward; see `role_reward`.

        Returns:
            One finite number per sample (a `Reward` if there are several functions); None only with `skip`.
        """
        values = self._values(Batch({**columns, "prompts": prompts, "completions": completions}, function))
        return [value if isinstance(value, float) else None for value in values]

    def feedback(
        self, prompts: Sequence[object], completions: Sequence[object], columns: Mapping[str, Sequence[object]]
    ) -> list[Feedback]:
        """Returns feedback on each sample, from one call of the feedback function; arguments and errors as `rewards`.

        Returns:
            Per sample a text, or None if nothing is to be corrected; `SKIPPED` only with `skip`.
        """
        values = self._values(Batch({**columns, "prompts": prompts, "completions": completions}, FEEDBACK))
        return [value if value is None or isinstance(value, str) else SKIPPED for value in values]

    def _values(self, batch: Batch) -> Sequence[float | str | NoFeedback | None]:
        """Returns the values of a batch's function; `SKIPPED` for samples on which it failed, with `skip`."""
        lengths = {name: len(values) for name, values in batch.columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"The lists to reward differ in length: {lengths}.")
        if not len(batch):
            return []
        reply = self._call(batch)
        for _ in range(MAX_ATTEMPTS - 1):
            if not reply.killed:
                break
            logger.warning("The %s %s; retrying its %d samples.", self._names[batch.function], reply.error, len(batch))
            reply = self._call(batch)
        values = self._call_singly(batch, reply.error) if reply.error else reply.values
        faults = {index: value for index, value in enumerate(values) if isinstance(value, SampleError)}
        if not reply.error and not faults:
            return values
        killed = reply.killed and set(faults.values()) <= {reply.error}
        message = self._message(batch, reply.error, faults, killed)
        if self.on_error == "stop" or (killed and len(faults) == len(batch)):
            raise (RewardKilled if killed else RewardError)(message)
        logger.warning("%s", message)
        self.skipped += len(faults)
        return [SKIPPED if isinstance(value, SampleError) else value for value in values]

    def start(self) -> tuple[str, ...]:
        """Starts the child process, so that a function that cannot be loaded fails before the first call.

        Returns:
            The functions' arguments without a default; every query must have a value for them.
        """
        reply = self._load()
        if reply.killed:
            raise self._unloadable(reply)
        return reply.needs

    def prepare(self) -> RewardProcess:
        """Starts the child process, which calls the function's `prepare`; does not wait for that.

        Raises nothing: an error here occurs again in the first call, which reports it.
        """
        if self._process is None or self._process.closed:
            self._process, self._needs = RewardProcess(self._specs, self.timeout), None
        return self._process

    def close(self) -> None:
        """Ends the child process; a later call starts another."""
        if self._process is not None:
            self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, object]:
        """Lets copies start their own child, because the pipe to this child cannot be shared."""
        return {**vars(self), "_process": None}

    def _load(self) -> Reply:
        """Starts the child process if necessary, and waits until it has loaded the functions.

        Raises an error unless the system killed the process: then a later attempt may succeed.
        """
        process = self.prepare()
        if self._needs is None:
            reply = process.receive("took to load")
            if reply.error:
                self.close()
                if not reply.killed:
                    raise self._unloadable(reply)
                return reply
            self._needs = reply.needs
        return Reply(needs=self._needs)

    def _unloadable(self, reply: Reply) -> RewardError:
        return _unusable(reply, " and the ".join(self._names.values()))

    def _call(self, batch: Batch) -> Reply:
        reply = self._load()
        if reply.killed:
            return reply
        reply = self.prepare().call(batch)
        if reply.fatal:
            raise _unusable(reply, self._names[batch.function])
        return reply

    def _call_singly(self, batch: Batch, error: str) -> list[float | str | None]:
        """Calls the function on each sample separately after the whole call failed, for at most twice the time limit.

        Returns:
            Per sample, its value or its error; with `stop`, only up to the first error.
        """
        if len(batch) == 1:
            return [SampleError(error)]
        values: list[float | str | None] = []
        deadline = time.monotonic() + 2 * self.timeout
        for index in range(len(batch)):
            if time.monotonic() > deadline:
                if self.on_error == "skip":
                    late = SampleError("could not run, because other samples used up the time")
                    values += [late] * (len(batch) - index)
                break
            reply = self._call(batch.pick(index))
            values.append(SampleError(reply.error) if reply.error else reply.values[0])
            if self.on_error == "stop" and isinstance(values[-1], SampleError):
                break
        return values

    def _message(self, batch: Batch, error: str, faults: dict[int, SampleError], killed: bool) -> str:
        index = min(faults, default=0)
        reason = faults.get(index, error)
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            location = f"sample {index} of {len(batch)}{more}, {_describe_sample(batch, index)}"
        else:
            location = f"a batch of {len(batch)}, none of whose samples failed alone"
        if killed:
            attempts = f" at {MAX_ATTEMPTS} attempts"
            advice = "The system probably ran out of memory: free some, or make the reward use less."
        else:
            attempts = ""
            advice = "Correct the function or the data, or set on_reward_error=skip to drop such queries."
            is_messages = isinstance(batch.columns["completions"][index], list)
            if is_messages and re.search(r"\blist\b", reason.partition("\n")[0]):
                advice = f"{MESSAGES_RULE} {advice}"
        if self.on_error == "skip" and not faults:
            advice = "The values of the single calls are used."
        end = "\n" if "\n" in reason else ". "  # a traceback ends with its own line
        return f"The {self._names[batch.function]} failed{attempts} on {location}: it {reason}{end}{advice}"


def _unusable(reply: Reply, name: str) -> RewardError:
    return (RewardKilled if reply.killed else RewardError)(f"The {name} cannot be used: {reply.error}")


def _describe_sample(batch: Batch, index: int) -> str:
    sample = {name: values[index] for name, values in batch.columns.items()}
    role = f"role {sample['role']}, " if "role" in sample else ""
    return f"{role}prompt {sample['prompts']!r:.100}, completion {sample['completions']!r:.100}"
