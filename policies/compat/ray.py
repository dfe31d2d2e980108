"""Ray (2.60) beside its public interface: how it starts on this machine, and what it uploads of a folder.

Importing this imports nothing of Ray: `cory submit` answers sooner.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def lean_start() -> Iterator[None]:
    """Has `ray.init` start neither the dashboard nor the autoscaler, for which a cluster of one machine has no use.

    The public `include_dashboard=False` still starts both, and waits for them. On two cores that takes 1.6 s more to
    start, 1.2 s more to end, 1.0 s of CPU and 210 MB.
    """
    from ray._private import services
    from ray._private.node import Node

    dashboard, autoscaler = services.start_api_server, Node.start_monitor
    services.start_api_server, Node.start_monitor = lambda *_, **__: (None, None), lambda _: None
    try:
        yield
    finally:
        services.start_api_server, Node.start_monitor = dashboard, autoscaler


@contextlib.contextmanager
def patient_start(seconds: float) -> Iterator[None]:
    """Gives a node that `ray.init` starts so many seconds; its own 30 are fixed, and too few on a busy machine."""
    from ray._private import services

    get_node = services.get_node

    def wait(*arguments: Any) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # it has not registered yet
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.5)

    services.get_node = wait
    try:
        yield
    finally:
        services.get_node = get_node


def uploaded_files(folder: Path, gitignore: bool) -> list[Path]:
    """Returns the files that Ray uploads of a folder; only its own walk knows ignore files in it, and its defaults.

    Args:
        folder: an absolute path.
        gitignore: heed .gitignore beside .rayignore.
    """
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    paths: list[Path] = []
    excludes = [_get_excludes(folder, get_runtime_env_default_excludes())]
    _dir_travel(folder, excludes, paths.append, gitignore, logging.getLogger(__name__))
    return [path for path in paths if path.is_file()]
