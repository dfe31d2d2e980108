"""Setup of Ray's workers (`cory_env.shadowing.WORKER_SETUP`); importing this package imports its siblings too."""


def set_up() -> None:
    """Does nothing: finding this function has imported the packages."""
