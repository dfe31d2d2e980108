"""Trackio, a tracker of this machine: its numbers are in a database, which `trackio show` draws in a browser."""

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.run_folder.layout import TRACKIO_ID
from launch.run_folder.records import Sample
from launch.training.services import COLUMNS, Tracker, rows
from policies.settings.settings import Settings


class Trackio(Tracker):
    """One Trackio run, continued under its name when training is resumed.

    Its own variables say where numbers go: TRACKIO_DIR, or TRACKIO_SPACE_ID and TRACKIO_SERVER_URL for a dashboard
    elsewhere; TRACKIO_PROJECT the project, else `cory`.
    """

    name = "Trackio"

    def __init__(self, folder: Path, settings: Settings, group: str | None = None) -> None:
        """Opens the run; its name is kept in the run's folder.

        Args:
            folder: the run's.
            settings: of the run.
            group: what it is a part of.
        """
        import trackio

        remembered = folder / TRACKIO_ID
        known = remembered.exists()
        with contextlib.redirect_stdout(io.StringIO()):  # its greeting
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT") or "cory",
                name=remembered.read_text(encoding="utf-8") if known else folder.name,
                group=group,
                config=settings.told(),
                resume="allow" if known else "never",
                embed=False,
            )
        remembered.write_text(self._run.name, encoding="utf-8")
        self._next = self._run._next_step  # after what it holds already

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Records the numbers of one update, unless it was done before the run went back to a checkpoint."""
        if update >= self._next:
            self._run.log(dict(figures), step=update)

    def show(self, update: int, samples: Sequence[Sample], held_out: bool) -> None:
        """Records sample texts of one update, as a table."""
        import trackio

        if update >= self._next:
            name = "samples/held_out" if held_out else "samples/training"
            table = trackio.Table(columns=list(COLUMNS), data=rows(update, samples))
            self._run.log({name: table}, step=update)

    def close(self, failed: bool) -> None:
        """Waits until all numbers are written."""
        from trackio import context_vars

        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
        if context_vars.current_run.get() is self._run:  # which Trackio finishes when Python ends
            context_vars.current_run.set(None)
