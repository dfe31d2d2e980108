"""`CoryConfig` by the name that it had before: users' code and older checkpoints have it."""

from policies.cory import CoryConfig

__all__ = ["CoryConfig"]
