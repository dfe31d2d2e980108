"""`cory report`: one HTML file about any number of runs, or a study."""

from launch.commands.report import main

__all__ = ["main"]
