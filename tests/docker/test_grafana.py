"""The Grafana dashboard asks for the metrics that a run exports, by the labels that they have."""

import json
import re

from launch.training.tracking import GROUPS, MEASURED, RUN_WIDE
from tests.launch.conftest import CHECKOUT

LABELS = {"cory_update": {"run"}, "cory_plays": {"run", "policy", "role"}}
LABELS |= {f"cory_{name}": {"run"} for name in RUN_WIDE}
LABELS |= {
    f"cory_{called}_{name}": {"run", "role" if group == "role" else "policy"}
    for group, (called, _) in GROUPS.items()
    for name in MEASURED
}
"""What launch/tracking.py declares; tests/launch/test_tracking.py reads these off a real endpoint."""


def test_the_dashboard_asks_for_what_there_is() -> None:
    dashboard = json.loads((CHECKOUT / "docker" / "grafana.json").read_text())
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    shown = set()
    for panel in dashboard["panels"]:
        (target,) = panel["targets"]
        name, selector = re.fullmatch(r"ray_(\w+)\{(.*)\}", target["expr"]).groups()  # type: ignore[union-attr]
        asked = set(re.findall(r"(\w+)=", selector)) | set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert asked <= LABELS[name] and set(re.findall(r"\$(\w+)", selector)) <= variables
        shown.add(name)
    assert {name for name in LABELS if "policy_" not in name} <= shown
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in dashboard["panels"]]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
