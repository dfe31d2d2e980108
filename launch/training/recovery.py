"""Going on after a failure: which failures may pass, and where a run can go on from."""

from collections.abc import Callable

from launch.cluster.session import RayletDied
from launch.console.errors import cause, is_loss
from launch.run_folder.directory import RunDirectory


def may_pass(error: Exception) -> bool:
    """Tells whether a run may get past this failure when it goes on from its checkpoint: processes or machines died.

    Not so an error of a reward itself, wrong settings, a gradient that is not finite or a full disk: they would only
    come again.
    """
    from cory_env.rewarding.worker import RewardKilled
    from policies.generation.generator import GenerationError
    from policies.rllib.learners import LearnerError

    found = cause(error)
    return isinstance(found, LearnerError | GenerationError | RayletDied | RewardKilled) or is_loss(found)


def last_whole(run: RunDirectory, tell: Callable[[str], None]) -> int | None:
    """Finds the update of a locked run's latest whole checkpoint, if there is one.

    Args:
        run: the run.
        tell: is told of each damaged checkpoint, which gets another name.

    Raises:
        FormatError: the latest checkpoint was written by another version.
    """
    for sentence in run.checkpoints.set_damaged_aside():
        tell(f"Warning: {sentence}")
    latest = run.checkpoints.latest()
    return None if latest is None else latest[0]
