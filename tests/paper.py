"""Settings with the paper's values and the bundled model, on which most tests build, as they need small runs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from policies.learning.hyperparameters import Credit, Hyperparameters
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


def paper_hyperparameters(**values: Any) -> Hyperparameters:
    """The paper's hyperparameters of a learner, without importance sampling; one mini-batch per epoch."""
    settings = paper_settings(importance_sampling_clip_max=None)
    return replace(settings.hyperparameters, **{"steps": 1, **values})


def paper_credit(credit: str = "sum", **values: Any) -> Credit:
    """The paper's credit assignment, without drafts."""
    return paper_settings().credit_assignment._replace(**{"credit": credit, "stages": (), **values})
