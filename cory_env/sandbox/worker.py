"""The process that runs a program and replies to the tester's requests.

It need not be protected from the program: it only computes values, and knows neither the tests nor the right results.
"""

import contextlib
import io
import site
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from cory_env.sandbox.confinement import forbid_processes, read_and_confine
from cory_env.sandbox.peer import Peer
from cory_env.sandbox.protocol import Channel, ChannelClosed, take_standard_streams
from cory_env.sandbox.script import Program, Script, ScriptError, start_scripts

MAX_PRINTED = 2**20  # bytes that functions may print per request; the rest is lost


class ProgramWorker(Peer):
    """A program, and the values that the tester uses."""

    def __init__(self, program: Program, scripts: Channel | None) -> None:
        """Stores the program without running it."""
        super().__init__(*take_standard_streams(), first=0, trusting=True)
        self._program, self._scripts = program, scripts
        self._printed = _Printed()
        printed: Any = self._printed
        sys.stdout = self._stdout = io.TextIOWrapper(printed, "utf-8", "replace", write_through=True)
        self._error: BaseException | None = None

    def execute(self, operation: str, target: Any, *arguments: Any) -> object:
        """Executes what the tester requests."""
        if operation == "run":
            return self._run(target)
        if operation == "compile":
            compile(self._program.source, self._program.path, "exec", dont_inherit=True)
            return None
        if operation == "get":
            names = self._names
            return (target in names, names.get(target))
        return super().execute(operation, target, *arguments)

    @cached_property
    def _names(self) -> dict[str, Any]:
        """The program's global names; runs the program, once."""
        if self._error is not None:
            raise self._error
        forbid_processes()
        try:
            return vars(self._program.run("solution"))
        except BaseException as error:
            self._error = error
            raise

    def _run(self, text: str) -> object:
        assert self._scripts is not None
        self._scripts.send(text)
        reply: Any = self._scripts.receive()
        output, details = reply
        if details:
            raise ScriptError(*details)
        return output

    def describe(self, error: BaseException) -> tuple[str, str, int | None]:
        """Returns an exception's type, its message, and the line of the program that raised it."""
        details: Any = error.args
        return details if isinstance(error, ScriptError) else self._program.describe(error)

    def printed(self) -> str:
        """Returns what the program printed since the last call."""
        with contextlib.suppress(ValueError):  # the program may have closed it
            self._stdout.flush()
        return self._printed.take().decode(errors="replace")


class _Printed(io.BufferedIOBase):
    """Keeps the first bytes that are written."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._bytes += bytes(data)[: MAX_PRINTED - len(self._bytes)]
        return len(data)

    def take(self) -> bytes:
        taken, self._bytes = bytes(self._bytes), bytearray()
        return taken


def main(files: Sequence[int], *limits: Any) -> None:
    """Limits this process, then serves.

    Args:
        files: File descriptor of the program and whether tests run it as a script, as JSON.
        limits: The other arguments of `read_and_confine`.
    """
    source, runs_as_script = read_and_confine(files[0], *limits)
    site.setquit()  # Python itself imports `site`, from whose folders this process must not import
    site.setcopyright()
    site.sethelper()
    program = Program(source)
    scripts = start_scripts(program) if runs_as_script else None
    if isinstance(scripts, Script):
        scripts.run()
    else:
        with contextlib.suppress(ChannelClosed):
            ProgramWorker(program, scripts).serve()
