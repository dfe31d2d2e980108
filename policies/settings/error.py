"""What is wrong with settings."""


class SettingsError(ValueError):
    """A setting is unknown, of the wrong type, or contradicts another; the message says which and what would work."""
