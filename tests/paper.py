"""Settings with the paper's values and the bundled model, on which most tests build, as they need small runs."""

from collections.abc import Mapping
from typing import Any

from policies.models.model_names import BUNDLED_LM
from policies.settings import settings
from policies.settings.files import read_preset
from policies.settings.settings import Settings

PAPER: dict[str, Any] = {**read_preset("paper"), "task": "imdb", "model": BUNDLED_LM}


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Validates settings; those that are missing have the values of `PAPER`."""
    return settings.make_settings({**PAPER, **values})


def paper_settings(**values: Any) -> Settings:
    """The same with keyword arguments."""
    return make_settings(values)
