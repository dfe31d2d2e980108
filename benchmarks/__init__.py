"""Measured claims, each with the command that reproduces it; see README.md."""
