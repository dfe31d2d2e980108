"""The exception for invalid settings."""


class SettingsError(ValueError):
    """A setting is unknown, invalid, or conflicts with another; the message names a fix."""
