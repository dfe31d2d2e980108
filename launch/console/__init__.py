"""Shared by all commands: arguments, settings, errors, signals, output."""
