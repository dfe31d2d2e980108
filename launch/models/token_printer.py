"""How responses are shown while they are written, on a terminal or into a file."""

from typing import TextIO

from rich.console import Console
from rich.text import Text

from launch.display.texts import visible


class TokenPrinter:
    """Prints `role (policy): response`, piece by piece; only a terminal gets colours."""

    def __init__(self, output: TextIO, *, repeat: bool) -> None:
        """Notes where to, and whether to `repeat` the query before the responses."""
        self._console = Console(file=output, highlight=False, soft_wrap=True)
        self._repeat = repeat
        self._begun = False

    def query(self, text: str) -> None:
        """Begins with a query."""
        if self._repeat:
            self.line(text, style="italic")

    def turn(self, role: str, policy: str) -> None:
        """Begins a response."""
        self._print(f"{role} ({policy}): ", style="dim")
        self._begun = False

    def say(self, text: str) -> None:
        """Goes on with the response; spaces that it starts with are left out."""
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        self._print(text)

    def line(self, text: str, style: str = "") -> None:
        """Prints a line, or what ends one."""
        self._print(f"{text}\n", style)

    def _print(self, text: str, style: str = "") -> None:
        # What a model writes must not steer the terminal.
        self._console.print(Text(visible(text), style=style), end="")
