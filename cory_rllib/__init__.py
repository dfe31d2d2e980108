"""CORY on RLlib, from Python: train, evaluate, query and export a chain of language models.

    from cory_rllib import CoryConfig, evaluate, export, generate

    algorithm = CoryConfig.from_preset("imdb-tiny", num_updates=10).build_algo()
    while algorithm.updates < 10:
        algorithm.train()
        print(algorithm.report["role"])
    generate(algorithm, "This movie")

Names are imported on first use: importing this package imports neither Ray nor torch nor vLLM. Its sibling packages
(`cory_env`, `policies`, `launch`) are imported at once from the same installation, even if a user's `policies.py` or
folder `launch` comes first on the search path.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cory_rllib.runs import Run as Run
    from cory_rllib.runs import load_run as load_run
    from cory_rllib.runs import start_ray as start_ray
    from cory_rllib.runs import train as train
    from cory_rllib.use import evaluate as evaluate
    from cory_rllib.use import export as export
    from cory_rllib.use import generate as generate
    from cory_rllib.use import probe as probe
    from launch.console.errors import CommandError as CommandError
    from launch.evaluation.figures import PolicyScores as PolicyScores
    from launch.probing.probe import ProbeResult as ProbeResult
    from policies.cory import Cory as Cory
    from policies.cory import CoryConfig as CoryConfig
    from policies.report import Report as Report
    from policies.settings.error import SettingsError as SettingsError
    from policies.settings.files import presets as presets
    from policies.settings.settings import Settings as Settings

_MODULES = {
    "CommandError": "launch.console.errors",
    "Cory": "policies.cory",
    "CoryConfig": "policies.cory",
    "PolicyScores": "launch.evaluation.figures",
    "ProbeResult": "launch.probing.probe",
    "Report": "policies.report",
    "Run": "cory_rllib.runs",
    "Settings": "policies.settings.settings",
    "SettingsError": "policies.settings.error",
    "evaluate": "cory_rllib.use",
    "export": "cory_rllib.use",
    "generate": "cory_rllib.use",
    "load_run": "cory_rllib.runs",
    "presets": "policies.settings.files",
    "probe": "cory_rllib.use",
    "start_ray": "cory_rllib.runs",
    "train": "cory_rllib.runs",
}
"""Public name → module."""
__all__ = [*_MODULES]


def _import_sibling_packages() -> None:
    root = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root))
    try:
        for name in ("cory_env", "policies", "launch"):
            file = import_module(name).__file__ or "a folder"
            if Path(file).resolve().parents[1] != root:
                raise ImportError(
                    f"The module {name}, imported from {file}, conflicts with CORY's package {name}. Rename the module."
                )
    finally:
        sys.path.remove(str(root))


_import_sibling_packages()


def __getattr__(name: str) -> Any:
    """Imports a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    """Lists all names, including those not imported yet."""
    return sorted({*globals(), *__all__})
