"""`cory report`: one HTML file about any number of runs, or a study."""

from launch.report.command import main

__all__ = ["main"]
