"""Child processes forked from a server that has imported the modules for training, which saves 8 seconds of CPU each.

Otherwise they behave like new processes. Tests of the imports themselves start a new Python instead.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess

from torch.multiprocessing import start_processes


def fork_context() -> ForkServerContext:
    """Returns the multiprocessing context with one fork server per test process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def run_ranks(rank: Callable[..., None], count: int, *arguments: object) -> None:
    """Calls `rank(index, *arguments)` in `count` processes, and raises the exception of any of them."""
    start_processes(rank, arguments, nprocs=count, start_method=fork_context().get_start_method())


def run_forked(
    call: Callable[..., int | None], *arguments: object, folder: Path, environment: Mapping[str, str], stdin: str = ""
) -> CompletedProcess[str]:
    """Calls a function in a child process, whose exit code is the function's result.

    Args:
        call: the function, defined at module level.
        arguments: of the function.
        folder: the working directory.
        environment: all environment variables.
        stdin: text for standard input.
    """
    with tempfile.TemporaryDirectory() as temporary:
        streams = [Path(temporary, name) for name in ("stdin", "stdout", "stderr")]
        for stream, text in zip(streams, (stdin, "", ""), strict=True):
            stream.write_text(text)
        process = fork_context().Process(target=_run_child, args=(streams, folder, dict(environment), call, arguments))
        process.start()
        process.join(240)
        if process.exitcode is None:
            process.kill()
            process.join()
        _, output, errors = (stream.read_text() for stream in streams)
        assert process.exitcode is not None
        return CompletedProcess(call.__name__, process.exitcode, output, errors)


def _run_child(
    streams: list[Path],
    folder: Path,
    environment: dict[str, str],
    call: Callable[..., int | None],
    arguments: tuple[object, ...],
) -> None:
    for descriptor, stream in enumerate(streams):
        os.dup2(os.open(stream, os.O_RDWR), descriptor)
    sys.stdin = os.fdopen(0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        raise SystemExit(call(*arguments))
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not run them
