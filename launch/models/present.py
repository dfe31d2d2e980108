"""The policies of an algorithm, as they are in memory now."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from launch.models.trained import Trained
from launch.run_folder.environment import in_words
from launch.run_folder.records import Update, plain
from policies.models.weights import Weights

if TYPE_CHECKING:
    from policies.cory import Cory


class Present(Trained):
    """What an algorithm has learned by now. Its weights are fetched from the learners each time they are asked for."""

    def __init__(self, algorithm: Cory) -> None:
        self.algorithm = algorithm
        self.settings = algorithm.settings
        self.update = algorithm.updates
        report = {key: value for key, value in algorithm.report.items() if key != "samples"} or {"update": self.update}
        self.lines = [cast(Update, plain(report))]

    @property
    def players(self) -> tuple[str, ...]:
        """The policies in the order in which the chain's next query would be answered."""
        return tuple(self.algorithm.mapping.as_dict().values())

    @property
    def place(self) -> str:
        """What messages call it."""
        return "The algorithm"

    @property
    def name(self) -> str:
        """As it has no folder, its task's name."""
        return self.settings.task

    @property
    def origin(self) -> str:
        """The versions and the machine that made it."""
        return f"an algorithm in Python  # {in_words()}"

    def _weights(self, llm: str) -> Weights:
        return self.algorithm.weights(llm)
