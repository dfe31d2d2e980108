"""How a run starts: in a new folder, from another run's policies (`start_from`), or from its latest checkpoint."""

from collections.abc import Callable
from pathlib import Path

from launch.console.errors import CommandError, is_process_loss, root_cause
from launch.run_folder import manifest
from launch.run_folder.final import read_final
from launch.run_folder.layout import POLICIES
from launch.run_folder.run import Run
from launch.run_folder.sources import Sources
from launch.run_folder.stored_run import run_type
from policies.settings.settings import Settings
from policies.settings.start import find_start_checkpoint


def create_run(location: str | None, name: str, settings: Settings, sources: Sources, origin: str) -> Run:
    """Creates and locks a new run's folder, and uploads it so that storage errors show before training starts."""
    run = run_type(location).create(location, name)
    try:
        run.write_settings(settings, origin)
        sources.write(run.path)
        run.upload()
    except (CommandError, OSError):
        run.abort()
        raise
    return run


def starting_policies(settings: Settings) -> Path | None:
    """Returns the valid checkpoint whose policies a run starts from.

    Returns:
        The checkpoint named by `start_from`, or the best or else the latest of the run named by it; None: policies
        start from the model.
    """
    checkpoint = find_start_checkpoint(settings)
    if checkpoint is None or settings.start_from is None:
        return None
    is_of_run = checkpoint != Path(settings.start_from).resolve()
    has_manifest = (checkpoint / manifest.NAME).exists()  # `save_to_path` of an algorithm writes none
    if (is_of_run or has_manifest) and (problem := manifest.verify(checkpoint, POLICIES)) is not None:
        raise CommandError(f"start_from={settings.start_from}: {checkpoint} {problem}. Choose another checkpoint.")
    return checkpoint


def latest_valid_checkpoint(run: Run, warn: Callable[[str], None]) -> int | None:
    """Returns the update of a locked run's latest valid checkpoint, or None."""
    for message in run.checkpoints.quarantine_damaged():
        warn(f"Warning: {message}")
    latest = run.checkpoints.latest()
    return None if latest is None else latest[0]


def lacks_final(run: Run, settings: Settings) -> bool:
    """Returns whether a run has ended, by its last record, but lacks the final evaluation that follows."""
    lines = run.metrics
    if settings.test_queries is None or not lines:
        return False
    update = lines[-1]["update"]
    if update != settings.num_updates:
        return False
    final = read_final(run.final)
    return final is None or final["update"] != update


def is_retryable(error: Exception) -> bool:
    """Returns whether restarting from the checkpoint may help, because processes or machines died.

    Errors in a reward function, wrong settings, non-finite gradients or a full disk would only recur.
    """
    from cory_env.rewarding.worker import RewardKilled
    from policies.generation.generator import GenerationError
    from policies.rllib.learners import LearnerError

    root = root_cause(error)
    return isinstance(root, LearnerError | GenerationError | RewardKilled) or is_process_loss(root)
