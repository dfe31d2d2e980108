"""The child process of rewards and a feedback function: what it is asked for and replies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cory_env.rewarding.child_process import ChildProcess, Reply
from cory_env.rewards.prepared import TIMEOUT_VARIABLE

REWARD, FEEDBACK = "reward", "feedback"
"""Functions of a child process; the others are the rewards of single roles, by `role_reward`."""


def role_reward(role: str) -> str:
    """Returns the name of the function that rewards only the responses of a role."""
    return f"reward of {role}"


@dataclass(frozen=True)
class Batch:
    """Samples for a function.

    Attributes:
        columns: The function's possible arguments, lists of the same length: `prompts` (the queries) and `completions`,
            both texts or lists of messages, and the columns of the data.
        function: The name of the function to call.
    """

    columns: dict[str, Sequence[object]]
    function: str = REWARD

    def __len__(self) -> int:
        return len(self.columns["completions"])

    def pick(self, index: int) -> "Batch":
        """Returns a batch of one sample."""
        return Batch({name: [values[index]] for name, values in self.columns.items()}, self.function)


class SampleError(str):
    """Why a function failed on a sample, as the predicate of a sentence."""

    __slots__ = ()


class Reward(float):
    """A task reward that is the weighted sum of several functions.

    Attributes:
        parts: Each function's value, by the function's short name.
    """

    parts: Mapping[str, float] = MappingProxyType({})


class RewardProcess(ChildProcess):
    """A child process of a reward. It loads the functions, reports that, prepares them, and answers batches."""

    def __init__(self, specs: Mapping[str, str], timeout: float) -> None:
        """Starts the process without waiting for it.

        Args:
            specs: The specs of the functions by name (`Batch.function`).
            timeout: Seconds that each call, and loading the functions, may take.
        """
        super().__init__("cory_env.rewarding.child", specs, timeout, {TIMEOUT_VARIABLE: str(timeout)})

    def call(self, batch: Batch) -> Reply:
        """Returns the function's reply for `batch`; errors of the function are in the reply, not raised.

        Its values are one per sample: a finite number (a `Reward` if there are several functions), feedback (a text or
        None), or a `SampleError`.
        """
        try:
            self.send(batch)
            return self.receive("ran")
        except BaseException:  # interrupted: the reply to this call must not be taken for the reply to the next
            self.close()
            raise
