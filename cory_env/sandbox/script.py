"""Runs a program as a script, each time in a process of its own, as if Python itself had started it."""

import ast
import builtins
import contextlib
import importlib
import json
import os
import sys
import types

from cory_env.sandbox.confinement import forbid_processes, kill_with_parent
from cory_env.sandbox.failures import ENDED
from cory_env.sandbox.protocol import MAX_MESSAGE_BYTES, Channel, ChannelClosed, UnsupportedValue, error_message

STDIN, STDOUT = ".stdin", ".stdout"  # files in the temporary folder; /dev/stdin and /dev/stdout are links to them


class Program:
    """A program's source code, in a file of the temporary folder."""

    def __init__(self, source: str) -> None:
        self.source = source.encode("utf-8", "surrogatepass")
        self.path = os.path.join(os.getcwd(), "solution.py")
        with open(self.path, "wb") as file:
            file.write(self.source)

    def run(self, name: str) -> types.ModuleType:
        """Runs the program as the module `name`, which may be `__main__`."""
        module = types.ModuleType(name)
        module.__file__ = self.path
        vars(module)["__builtins__"] = builtins
        sys.modules[name] = module
        exec(compile(self.source, self.path, "exec", dont_inherit=True), vars(module))
        return module

    def describe(self, error: BaseException) -> tuple[str, str, int | None]:
        """Returns an exception's type, its message, and the line of the program that raised it.

        The line is None if the program did not raise it, for example if it does not define a name.
        """
        name = type(error).__name__
        if isinstance(error, SyntaxError) and error.filename == self.path:
            return name, str(error.msg)[:1000], error.lineno
        line, entry = None, error.__traceback__
        while entry:
            if entry.tb_frame.f_code.co_filename == self.path:
                line = entry.tb_lineno
            entry = entry.tb_next
        return name, error_message(error), line


class ScriptError(Exception):
    """A script ended with an exception, or with an exit code other than 0: its type, message and line."""


class Script:
    """The process of a script."""

    def __init__(self, program: Program, stdout: int, details: int) -> None:
        self._program, self._details = program, details
        stdin = os.open(STDIN, os.O_RDONLY)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.close(stdin)
        os.close(stdout)

    def run(self) -> None:
        """Runs the script, and then returns or raises its exception, either of which ends the process."""
        forbid_processes()
        sys.argv = [self._program.path]
        sys.path.insert(0, os.path.dirname(self._program.path))
        try:
            self._program.run("__main__")
        except BaseException as error:
            os.write(self._details, json.dumps(self._program.describe(error)).encode())
            raise
        finally:
            os.close(self._details)


def start_scripts(program: Program) -> Channel | Script:
    """Starts a process that runs the program as a script once for each text that it receives.

    Returns:
        The channel to that process; or, in the process of a script, the script to run.
    """
    (from_server, to_client), (from_client, to_server) = os.pipe(), os.pipe()
    if os.fork():
        os.close(to_client)
        os.close(from_client)
        return Channel(os.fdopen(from_server, "rb"), os.fdopen(to_server, "wb"))
    kill_with_parent()
    for number in (0, 1, from_server, to_server):
        os.close(number)
    for _ in range(2):
        os.open(os.devnull, os.O_RDWR)  # standard input and output
    channel = Channel(os.fdopen(from_client, "rb"), os.fdopen(to_client, "wb"))
    _import_packages(program.source)
    with contextlib.suppress(ChannelClosed):
        while True:
            if script := _serve(program, channel):
                return script
    os._exit(0)


def _serve(program: Program, channel: Channel) -> Script | None:
    """Runs a script; replies with its output, or with details of its exception. Returns in its process, too."""
    text = str(channel.receive())
    with open(STDIN, "wb") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    with open(STDOUT, "w+b") as stdout:
        details_in, details_out = os.pipe()
        if (child := os.fork()) == 0:
            kill_with_parent()
            channel.close()
            os.close(details_in)
            return Script(program, os.dup(stdout.fileno()), details_out)
        os.close(details_out)
        with os.fdopen(details_in, "rb") as stream:
            _, status = os.waitpid(child, 0)
            details = stream.read()
        stdout.seek(0)
        output = stdout.read(MAX_MESSAGE_BYTES).decode(errors="replace")
    try:
        channel.send([output, None] if status == 0 else [None, json.loads(details or f'["{ENDED}", "", null]')])
    except (UnsupportedValue, ValueError) as error:
        channel.send([None, [ENDED, str(error), None]])
    return None


def _import_packages(source: bytes) -> None:
    """Imports the installed packages that a program imports, so that this is not repeated for each input."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.walk(ast.parse(source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                if name.partition(".")[0] not in sys.stdlib_module_names:
                    with contextlib.suppress(Exception):
                        importlib.import_module(name)
