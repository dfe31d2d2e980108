"""Setup of Ray's workers (`cory_env.shadowing.WORKER_SETUP`); importing this package imports its siblings too."""

from launch.console.credentials import load_secrets


def set_up() -> None:
    """Adds the secrets stored on the worker's node to its environment.

    Raises:
        CommandError: the file of secrets cannot be read.
    """
    load_secrets()
