"""CORY on RLlib, from Python: train a chain of language models, measure it, ask it, export it.

    from cory_rllib import CoryConfig, evaluate, export, generate

    algorithm = CoryConfig.from_preset("imdb-tiny", updates=10).build_algo()
    while algorithm.updates < 10:
        algorithm.train()
        print(algorithm.report["role"])
    generate(algorithm, "This movie")

A name's module is imported when the name is first used: importing this package imports neither Ray nor torch nor vLLM.
It imports our other packages, which are empty, from beside itself: a user's own `policies.py` or folder `launch` may
come first on the search path.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cory_rllib.runs import Run, load_run, start_ray, train
    from cory_rllib.use import PolicyScores, evaluate, export, generate
    from launch.console.errors import CommandError
    from policies.cory import Cory, CoryConfig
    from policies.report import Report
    from policies.settings.error import SettingsError
    from policies.settings.files import presets
    from policies.settings.settings import Settings

__all__ = [
    "CommandError",
    "Cory",
    "CoryConfig",
    "PolicyScores",
    "Report",
    "Run",
    "Settings",
    "SettingsError",
    "evaluate",
    "export",
    "generate",
    "load_run",
    "presets",
    "start_ray",
    "train",
]

_FROM = {
    "CommandError": "launch.console.errors",
    "Cory": "policies.cory",
    "CoryConfig": "policies.cory",
    "Report": "policies.report",
    "Run": "cory_rllib.runs",
    "Settings": "policies.settings.settings",
    "SettingsError": "policies.settings.error",
    "PolicyScores": "cory_rllib.use",
    "evaluate": "cory_rllib.use",
    "export": "cory_rllib.use",
    "generate": "cory_rllib.use",
    "load_run": "cory_rllib.runs",
    "presets": "policies.settings.files",
    "start_ray": "cory_rllib.runs",
    "train": "cory_rllib.runs",
}
"""The module of each name."""


def _import_own_packages() -> None:
    root = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root))
    try:
        for name in ("cory_env", "policies", "launch"):
            file = import_module(name).__file__ or "a folder"
            if Path(file).resolve().parents[1] != root:
                raise ImportError(
                    f"{name} was imported from {file} before, but is also a package of CORY. Rename that module."
                )
    finally:
        sys.path.remove(str(root))


_import_own_packages()


def __getattr__(name: str) -> Any:
    """Imports what is asked for."""
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_FROM[name]), name)
    return found


def __dir__() -> list[str]:
    """Names what there is, imported or not."""
    return sorted({*globals(), *__all__})
