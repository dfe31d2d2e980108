"""A Ray that starts slowly, as on a busy machine."""

import subprocess
import sys

import pytest
from ray._private import services

from launch import session
from tests.launch.conftest import ENVIRONMENT

LATE = """
import time
from ray._private import services

look, began = services.get_node, time.monotonic()

def late(*arguments):
    if time.monotonic() < began + 60:
        raise RuntimeError("not yet")
    return look(*arguments)

services.get_node = late
from launch.session import ray_session
from policies.placement import processes
from policies.settings import Settings

with ray_session(processes(Settings()), debug=False):
    import ray
    print(len(ray.nodes()), "node")
"""


def test_a_node_that_has_not_registered_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def look(*arguments: str) -> str:
        asked.append(arguments)
        if len(asked) < 3:
            raise RuntimeError("not yet")
        return "up"

    monkeypatch.setattr(services, "get_node", look)
    with session._slow_start():
        assert services.get_node("address", "node") == "up"
    assert asked == [("address", "node")] * 3
    assert services.get_node is look
    asked.clear()
    monkeypatch.setattr(session, "STARTED", 0.0)
    with session._slow_start(), pytest.raises(RuntimeError, match="not yet"):
        services.get_node("address", "node")


@pytest.mark.slow
def test_ray_has_longer_than_its_own_half_minute_to_start() -> None:
    found = subprocess.run(
        [sys.executable, "-c", LATE], env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (found.returncode, found.stdout) == (0, "1 node\n"), found.stderr
