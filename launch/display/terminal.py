"""Progress output of commands: lines and a progress bar with the time left; for a run, a row per update.

If the output is not a terminal there are no bar, colours or control codes, only the same rows with the time left.
"""

import time
from collections.abc import Sequence
from typing import Self, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from launch.display.rows import RowFormatter
from launch.display.texts import chain_text
from launch.run_folder.records import Sample, Update
from policies.settings.settings import Settings

PLAIN_WIDTH = 120
HEADING_PERIOD = 20
STEP_SECONDS_DECAY = 0.8


class ProgressPrinter:
    """Prints lines and a progress bar, which is shown while this context is entered."""

    def __init__(self, output: TextIO, total: int, *, done: int = 0, quiet: bool = False, bar: bool = True) -> None:
        """Creates the bar without showing it.

        Args:
            quiet: Print only lines marked `always`.
            bar: Show the bar if `output` is a terminal.
        """
        self.console = Console(file=output, force_jupyter=False, highlight=False, soft_wrap=True, emoji=False)
        is_terminal = output.isatty()  # rich also considers FORCE_COLOR, which notebooks set
        if not is_terminal:
            self.console.width = PLAIN_WIDTH
        self.arrow = "→" if self.console.encoding.lower().startswith("utf") else ">"

        self._quiet = quiet
        self._total = total
        self._done = done
        self._seconds: float | None = None
        self._last = time.monotonic()
        self._bar = Progress(
            console=self.console,
            refresh_per_second=2,
            speed_estimate_period=3600,  # steps may take minutes
            transient=True,
            redirect_stdout=False,  # `output` may be another stream
            redirect_stderr=False,
            disable=quiet or not bar or not is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def print(self, text: str | Text | Table = "", always: bool = False) -> None:
        """Prints a line or a table; in quiet mode only if `always` is set."""
        if always or not self._quiet:
            self.console.print(text, markup=False)

    @property
    def has_bar(self) -> bool:
        """Whether the bar is shown; if not, progress is printed as lines."""
        return not self._bar.disable

    def stage(self, text: str) -> None:
        """Shows the current stage of the work, such as "Loading the models"."""
        if self.has_bar:
            self._bar.update(self._task, description=escape(text))
        else:
            self.print(text)

    def start_clock(self) -> None:
        """Starts the clock of the first step."""
        self._last = time.monotonic()

    def rewind(self, done: int) -> None:
        """Resets the count to `done` steps, because later ones will be repeated."""
        self._done = done
        self._bar.update(self._task, completed=done)

    def advance(self, seconds: float | None = None) -> str:
        """Counts a step and returns the time left.

        Args:
            seconds: Duration of the step; None: the time since the last one.
        """
        now = time.monotonic()
        seconds, self._last = now - self._last if seconds is None else seconds, now
        mean = seconds if self._seconds is None else self._seconds
        self._seconds = STEP_SECONDS_DECAY * mean + (1 - STEP_SECONDS_DECAY) * seconds
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        return f"{format_duration(self._seconds * (self._total - self._done))} left"


class Terminal(ProgressPrinter):
    """The progress output of a training run; a step is an update."""

    def __init__(
        self, settings: Settings, output: TextIO, *, done: int = 0, quiet: bool = False, bar: bool = True
    ) -> None:
        """Creates the output of a run; see `ProgressPrinter`."""
        super().__init__(output, settings.num_updates, done=done, quiet=quiet, bar=bar)
        self._settings = settings
        self._rows = RowFormatter(settings, self.arrow)
        self._rows_printed = 0

    def update(self, line: Update) -> None:
        """Prints the row of an update, if it trained, and the rows of its evaluation, if any."""
        if self._rows_printed % HEADING_PERIOD == 0:
            for heading in self._rows.heading():
                self.print(heading)
        self._rows_printed += 1
        if "policy" in line:
            left = self.advance(line["seconds"]["total"])
            row = self._rows.update(line)
            self.print(row if self.has_bar else row.append(f"  {left}"))
        self._event(line.get("averaged"), "LLMs averaged")  # before they were evaluated
        for row in self._rows.evaluation(line) if "evaluation" in line else ():
            self.print(row)
        self._event(line.get("exchanged"), "roles exchanged")

    def _event(self, happened: bool | None, text: str) -> None:
        if happened:
            self.print(Text(f"{'':{self._rows.indent}}{text}", style="cyan"))

    def samples(self, samples: Sequence[Sample]) -> None:
        """Prints a few chains of this update's training queries; only one if chains are long."""
        for sample in samples[: 2 if self._settings.num_agents < 4 else 1]:
            self.print(chain_text(sample, self._rows.indent))


def format_duration(seconds: float) -> str:
    """Returns a duration as `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
