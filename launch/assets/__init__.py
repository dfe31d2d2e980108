"""The bundled offline assets and how to rebuild them: a language model, a sentiment classifier, review openings."""

from launch.assets.command import main

__all__ = ["main"]
