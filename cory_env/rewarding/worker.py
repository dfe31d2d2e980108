"""Scores batches with a user's reward function and finds out which sample a failure belongs to.

Whatever the function does wrong (an exception, a hang, an exit, a wrong number of values, a value that is no finite
number), the answer is never a silent 0: with `stop` a `RewardError` names the function and the sample, with `skip` the
sample's reward is None and is counted, so that the caller can drop its query.

A process that the system kills, as it does where memory runs out, says nothing about function or data: its batch is
tried again.
"""

import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, Self

from cory_env.pickled import display_name
from cory_env.rewarding.process import Batch, Reply, RewardProcess
from cory_env.rewarding.spec import parse_sum

logger = logging.getLogger(__name__)

OnError = Literal["stop", "skip"]

ATTEMPTS = 3  # at a batch during which the system kills the process


class RewardError(RuntimeError):
    """A reward function could not be loaded, or failed on a sample."""


class RewardKilled(RewardError):
    """The system killed a reward's process again and again; another time it may not."""


class RewardWorker:
    """One reward, a function or several, in one child process, started on the first call and kept; a context manager.

    Attributes:
        skipped: How many samples have got None so far.
    """

    def __init__(self, spec: str, *, timeout: float = 60.0, on_error: OnError = "stop") -> None:
        """Names the function; nothing is started yet.

        Args:
            spec: `module:function`, or `module:function?setting=value`, or the weighted sum of several (`spec`).
            timeout: Seconds that one call may take; also those for importing the module. A model that the function
                loads on its first call counts in that call.
            on_error: What a failure does: `stop` raises, `skip` gives None to the samples concerned.

        Raises:
            ValueError: The name is not of this form, or a setting is out of range.
        """
        parse_sum(spec)
        if not timeout > 0:
            raise ValueError(f"The reward's time limit is {timeout} s, but must be more than 0. Set reward_timeout.")
        self.name = display_name(spec)
        self.timeout = timeout
        self.on_error = on_error
        self.skipped = 0
        self._process = RewardProcess(spec, timeout)

    def rewards(
        self, prompts: Sequence[object], completions: Sequence[object], columns: dict[str, list[object]]
    ) -> list[float | None]:
        """Returns one task reward per sample, from one call of the function.

        Args:
            prompts: The bare queries: text, or lists of messages where they are conversations.
            completions: The decoded responses, as many, in the same form.
            columns: Further arguments, each a list as long; the function gets those that it accepts.

        Returns:
            One finite number per sample, of several functions a `Reward`; None only with `skip`.

        Raises:
            RewardError: The function failed (with `stop`), or can never be called (always).
            RewardKilled: The system killed its process at all attempts (with `skip`: and no sample stands out by that).
            ValueError: The lists differ in length.
        """
        lengths = {"prompts": len(prompts), "completions": len(completions)} | {k: len(v) for k, v in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"The lists to reward must have one length, but these came: {lengths}.")
        batch = Batch(prompts, completions, columns)
        if not len(batch):
            return []
        reply = self._call(batch)
        for _ in range(ATTEMPTS - 1):
            if not reply.killed:
                break
            logger.warning("The reward %s %s; its %d samples are tried again.", self.name, reply.error, len(batch))
            reply = self._call(batch)
        values = self._call_singly(batch, reply.error) if reply.error else reply.values
        faults = {index: value for index, value in enumerate(values) if isinstance(value, str)}
        if not reply.error and not faults:
            return [value for value in values if isinstance(value, float)]
        killed = reply.killed and set(faults.values()) <= {reply.error}
        message = self._message(batch, reply.error, faults, killed)
        if killed and (self.on_error == "stop" or len(faults) in (0, len(batch))):
            raise RewardKilled(message)
        if self.on_error == "stop":
            raise RewardError(message)
        logger.warning("%s", message)
        # If only the whole batch fails, nothing says which of its values can be trusted.
        rewards = [value if isinstance(value, float) and faults else None for value in values]
        self.skipped += rewards.count(None)
        return rewards

    def start(self) -> tuple[str, ...]:
        """Starts the child process now, so that a function that cannot be loaded is noticed before the first call.

        Returns:
            The arguments that the function has no default for, so that every query must have a value for them.

        Raises:
            RewardError: it cannot be loaded.
        """
        reply = self._process.start()
        if reply.error:
            raise self._unusable(reply)
        return self._process.needs

    def prepare(self) -> None:
        """Starts the child process, which loads what the function's `prepare` does, and does not wait for that.

        Nothing is raised: what fails now fails again in the first call, which tells of it.
        """
        self._process.prepare()

    def close(self) -> None:
        """Ends the child process; a later call starts another."""
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, batch: Batch) -> Reply:
        reply = self._process.call(batch)
        if reply.fatal:
            raise self._unusable(reply)
        return reply

    def _unusable(self, reply: Reply) -> RewardError:
        kind = RewardKilled if reply.killed else RewardError
        return kind(f"The reward {self.name} cannot be used: {reply.error}")

    def _call_singly(self, batch: Batch, error: str) -> list[float | str]:
        """Scores each sample by itself after a call that failed as a whole, for at most twice the time limit.

        Returns:
            Per sample, its reward or why it has none; with `stop` no further than to the first that fails.
        """
        if len(batch) == 1:
            return [error]
        values: list[float | str] = []
        deadline = time.monotonic() + 2 * self.timeout
        for index in range(len(batch)):
            if time.monotonic() > deadline:
                if self.on_error == "skip":
                    values += ["got no reward, because other samples used up the time"] * (len(batch) - index)
                break
            reply = self._call(batch.pick([index]))
            values.append(reply.error or reply.values[0])
            if self.on_error == "stop" and isinstance(values[-1], str):
                break
        return values

    def _message(self, batch: Batch, error: str, faults: dict[int, str], killed: bool) -> str:
        """Says which function failed, on which sample, how, and what to do."""
        index = min(faults, default=0)
        reason = faults.get(index, error)
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            where = f"sample {index} of {len(batch)}{more}, {_sample(batch, index)}"
        else:
            where = f"a batch of {len(batch)}, no sample of which was found to fail alone"
        if killed:
            attempts = f" at {ATTEMPTS} attempts"
            advice = "The system does that where memory runs out: leave it more, or let the reward take less."
        else:
            attempts = ""
            advice = "Correct the function or the data; set on_reward_error to skip to go on without such queries."
        end = "\n" if "\n" in reason else ". "  # a traceback ends with its own line
        return f"The reward {self.name} failed{attempts} on {where}: it {reason}{end}{advice}"


def _sample(batch: Batch, index: int) -> str:
    role = f"role {batch.columns['role'][index]}, " if "role" in batch.columns else ""
    return f"{role}prompt {batch.prompts[index]!r:.100}, completion {batch.completions[index]!r:.100}"
