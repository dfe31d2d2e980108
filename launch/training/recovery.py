"""Going on after a failure: which failures may pass, where a run can go on from, and whether it is still the same."""

from collections.abc import Callable

from cory_env.tasks import Task
from launch.console.errors import CommandError, cause, is_loss
from launch.run_folder.directory import RunDirectory
from launch.run_folder.sources import Change, Sources, compare
from policies.settings.settings import Settings


def may_pass(error: Exception) -> bool:
    """Tells whether a run may get past this failure when it goes on from its checkpoint: processes or machines died.

    Not so an error of a reward itself, wrong settings, a gradient that is not finite or a full disk: they would only
    come again.
    """
    from cory_env.rewarding.worker import RewardKilled
    from policies.generation.generator import GenerationError
    from policies.rllib.learners import LearnerError

    found = cause(error)
    return isinstance(found, LearnerError | GenerationError | RewardKilled) or is_loss(found)


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


def check_sources(
    before: Sources, settings: Settings, task: Task, now: Sources, where: str, allow: bool
) -> list[Change]:
    """Refuses to resume with other queries, models, tokenizers or templates, unless the user allows it.

    Args:
        before: what the run, or search, was made from.
        settings: of the resume, with the names that messages are to use.
        task: of these settings.
        now: what it would be made from.
        where: what messages call the run.
        allow: the user allows it.

    Returns:
        What differs, for `consequence`.

    Raises:
        CommandError: something differs that needs to be allowed.
    """
    changes = compare(before, settings, task, now)
    refused = [change for change in changes if change.is_refused]
    if refused and not allow:
        raise CommandError(
            f"{where} cannot resume as it was. {refused[0].text}. Put that back, or resume with --allow-changes."
        )
    return changes


def consequence(change: Change, update: int) -> str:
    """Returns a warning: what has changed since a run began, and which figures no longer compare.

    Args:
        change: that was found at a resume.
        update: after which the run resumes.
    """
    best = ", nor does `best`" if change.part in ("validation", "test") else ""
    return f"Warning: {change.text}. The {change.figures} up to update {update} do not compare with later ones{best}."
