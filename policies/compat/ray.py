"""Uses of Ray's (2.60) private interfaces: starting it on this machine, and listing the files it uploads.

This module imports Ray lazily, so that `cory submit` starts faster.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def without_dashboard() -> Iterator[None]:
    """Makes `ray.init` start neither dashboard nor autoscaler, which a single machine does not need.

    The public `include_dashboard=False` still starts both processes and waits for them. On two cores that costs 1.6 s
    at start, 1.2 s at shutdown, 1.0 s of CPU time and 210 MB.
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
def node_start_timeout(seconds: float) -> Iterator[None]:
    """Sets how many seconds `ray.init` waits for its node. Ray's fixed 30 s are too few on a busy machine."""
    from ray._private import services

    get_node = services.get_node

    def retry_get_node(*arguments: Any) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # the node has not registered yet
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.5)

    services.get_node = retry_get_node
    try:
        yield
    finally:
        services.get_node = get_node


def uploaded_files(folder: Path, gitignore: bool) -> list[Path]:
    """Returns the files that Ray would upload from a folder, by Ray's own ignore rules and defaults.

    Args:
        folder: an absolute path.
        gitignore: whether to apply .gitignore in addition to .rayignore.
    """
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    paths: list[Path] = []
    excludes = [_get_excludes(folder, get_runtime_env_default_excludes())]
    _dir_travel(folder, excludes, paths.append, gitignore, logging.getLogger(__name__))
    return [path for path in paths if path.is_file()]
