"""What Ray's workers do first (`cory_env.shadowing.WORKER_SETUP`); with this package, our others are imported."""

from launch.console.credentials import load_secrets


def set_up() -> None:
    """Adds the secrets of the worker's own node to its environment.

    Raises:
        CommandError: their file cannot be read.
    """
    load_secrets()
