"""The files under `docker/`, read once."""

import re
import sys
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = Path(__file__).parents[2]
DOCKER = CHECKOUT / "docker"
BIN = Path(sys.executable).parent
"""Where the checkers are installed."""


def manifests(name: str) -> list[dict[str, Any]]:
    """Returns the documents of a manifest."""
    return list(yaml.safe_load_all((DOCKER / "kubernetes" / name).read_text()))


def pins(lock: str) -> dict[str, str]:
    """Returns the packages of a lock and their versions."""
    text = (CHECKOUT / "requirements" / lock).read_text()
    return dict(re.findall(r"^([a-z0-9][\w.-]*)==(\S+)", text, re.MULTILINE))
