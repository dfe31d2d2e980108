"""The private interfaces of Ray that `policies.compat.ray` uses exist and work as expected."""

import inspect

import pytest
from ray._private import services
from ray._private.node import Node

from policies.compat.ray import node_start_timeout, without_dashboard


def test_ray_starts_its_dashboard_and_autoscaler_by_the_functions_that_lean_start_replaces() -> None:
    assert "self.start_monitor()" in inspect.getsource(Node.start_head_processes)
    assert "services.start_api_server(" in inspect.getsource(Node.start_api_server)
    dashboard, autoscaler = services.start_api_server, Node.start_monitor
    with without_dashboard():
        assert services.start_api_server is not dashboard and Node.start_monitor is not autoscaler
    assert services.start_api_server is dashboard and Node.start_monitor is autoscaler


def test_ray_init_waits_for_a_node_that_has_not_registered_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(Node.__init__)
    assert "services.get_node(" in source and "except RuntimeError" in source and "timed out during startup" in source
    calls = []

    def get_node(*arguments: str) -> str:
        calls.append(arguments)
        if len(calls) < 3:
            raise RuntimeError("not yet")
        return "up"

    monkeypatch.setattr(services, "get_node", get_node)
    with node_start_timeout(60.0):
        assert services.get_node("address", "node") == "up"
    assert calls == [("address", "node")] * 3
    assert services.get_node is get_node
    calls.clear()
    with node_start_timeout(0.0), pytest.raises(RuntimeError, match="not yet"):
        services.get_node("address", "node")
