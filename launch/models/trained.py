"""Trained policies, and those of a run, read from one of its checkpoints: without Ray, and without the rest of it.

Resuming unpickles parts of a checkpoint, which can run any code in it. Here only a policy's weights are read, which are
no pickle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import safetensors

from launch.console.errors import CommandError
from launch.run_folder.environment import in_words
from launch.run_folder.layout import CONFIG, POLICIES
from launch.run_folder.locations import add_module_folders, located
from launch.run_folder.records import Update, plain
from launch.run_folder.run import Run
from launch.run_folder.sources import Sources, compare_llms, llms_of
from launch.run_folder.status import read_run
from policies.models.average import mean_weights, stacked, stacked_lora
from policies.models.lora import Lora
from policies.models.model_names import AVERAGE
from policies.models.weights import LazyWeights, Weights, shapes
from policies.rollout.role_mapping import RoleMapping
from policies.settings.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from policies.cory import Cory


class Trained(ABC):
    """What was learned by some update."""

    settings: Settings
    update: int
    """The updates that had been done."""
    lines: Sequence[Update]
    """The metrics up to that update, as far as they are known; the last line is its own."""
    sources: Sources | None = None
    """What the run was made from; None: not known."""

    @property
    @abstractmethod
    def place(self) -> str:
        """How a user finds whose policies they are."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What they are of, in a word."""

    @property
    @abstractmethod
    def origin(self) -> str:
        """What made them, in lines."""

    @abstractmethod
    def _weights(self, llm: str) -> Weights:
        """The weights of an LLM, as `weights` says."""

    @property
    def players(self) -> tuple[str, ...]:
        """The policies in the order in which the chain's next query would have been answered."""
        line = self.lines[-1]
        mapping = RoleMapping(self.settings.roles, self.settings.modules)
        if "roles" in line:  # else it is before the first update
            mapping = mapping.led_by(line["roles"][self.settings.roles[0]])
            mapping = mapping.rotated() if line["exchanged"] else mapping
        return tuple(mapping.as_dict().values())

    @property
    def policies(self) -> tuple[str, ...]:
        """The names of its policies; with several LLMs that started from one model, also `AVERAGE`, their mean."""
        modules = self.settings.modules
        return (*modules, AVERAGE) if len(modules) > 1 and len(set(self.settings.models.values())) == 1 else modules

    def named(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns policies by the names that users give them; `mean` is `AVERAGE`.

        Raises:
            CommandError: one has no such name; names those that there are.
        """
        found = tuple(AVERAGE if name == "mean" else name for name in names)
        for name in found:
            if name in self.policies:
                continue
            modules = ", ".join(self.settings.modules)
            if name != AVERAGE:
                raise CommandError(f"{self.place} has no policy `{name}`. Its policies are: {modules}.")
            why = (
                "there is one LLM only"
                if len(self.settings.modules) == 1
                else (f"its LLMs start from different models, {self.settings.started_from}")
            )
            raise CommandError(f"{self.place} has no mean of LLMs: {why}. Name one of: {modules}.")
        return found

    def chosen(self, name: str | None, how: str) -> str:
        """Returns the policy of a name that a user gave, or, without one, the only one there is.

        Args:
            name: as of `named`.
            how: a policy is named there, as in `with --policy`.

        Raises:
            CommandError: there is none of that name, or there are several.
        """
        if name is None and len(self.settings.modules) > 1:
            known = ", ".join("mean" if policy == AVERAGE else policy for policy in self.policies)
            raise CommandError(f"Which policy? Name it {how}: {known}.")
        return self.named([self.settings.modules[0] if name is None else name])[0]

    def weights(self, policy: str) -> Weights:
        """The weights of a policy, without its value head, by Hugging Face names; each is read when it is asked for.

        Those of `AVERAGE` are the mean of all; its adapter has the mean of their products, and more rank than they.

        Raises:
            CommandError: the checkpoint is gone, or holds anything but arrays there.
        """
        if policy == AVERAGE:
            each = [self.weights(module) for module in self.settings.modules]
            return mean_weights(each) if self.settings.lora is None else stacked(each)
        return self._weights(policy)

    def lora(self, policy: str) -> Lora | None:
        """What the adapter of a policy is like; None: there is none."""
        lora = self.settings.lora
        return stacked_lora(lora, len(self.settings.modules)) if lora and policy == AVERAGE else lora

    def base(self, policy: str) -> str:
        """The name of the model that a policy started from; that of an `AVERAGE` is everyone's."""
        models = self.settings.models
        return models[self.settings.modules[0] if policy == AVERAGE else policy]

    def changes(self) -> list[str]:
        """Returns a sentence on each model, tokenizer and chat template that is not what the policies learned with.

        Raises:
            CommandError: there is no model, or no tokenizer with it.
        """
        if self.sources is None:
            return []
        try:
            now = llms_of(self.settings, self.settings.make_tokenizers())
        except ValueError as error:
            raise CommandError(" ".join(str(error).split())) from error
        return [f"{change.text}." for change in compare_llms(self.sources, self.settings, now)]

    def check_base(self, policy: str, weights: Weights, parameters: Mapping[str, Tensor]) -> None:
        """Refuses a base model that is not the one that training started from.

        Args:
            policy: one of the run's, or the `AVERAGE` of them.
            weights: its.
            parameters: those that they are for, of the base, or of a new adapter on it.

        Raises:
            CommandError: they have other names or shapes.
        """
        if shapes(weights) != {name: tuple(parameter.shape) for name, parameter in parameters.items()}:
            raise CommandError(
                f"The model {self.base(policy)} is not the one that {self.place} started from: the trained weights "
                "have other names or shapes. Put that model back."
            )


@dataclass(frozen=True)
class Stored(Trained):
    """What a run had learned at one of its checkpoints."""

    run: Run
    settings: Settings
    update: int
    folder: Path
    """The checkpoint."""
    lines: Sequence[Update]
    sources: Sources | None = None

    @property
    def place(self) -> str:
        """The run's folder, or its URI."""
        return self.run.shown(self.run.path)

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.run.path.resolve().name

    @property
    def origin(self) -> str:
        """The commands that made the run, with which its configuration begins."""
        lines = (self.run.path / CONFIG).read_text(encoding="utf-8").splitlines()
        return "\n".join(line.removeprefix("# ") for line in lines if line.startswith("# "))

    def _weights(self, llm: str) -> Weights:
        from policies.learning.stored_policy import read

        folder = self.folder / POLICIES / llm
        try:
            state = read(str(folder))
        except (FileNotFoundError, safetensors.SafetensorError) as error:
            if folder.is_dir():
                raise CommandError(f"{folder} does not hold a policy's weights: {error}. It was not read.") from error
            # It was removed by the run itself, which keeps the last few and the best.
            raise CommandError(f"{self.folder} was removed meanwhile. Try again.") from error
        own = {name.removeprefix("lm."): shape for name, shape in shapes(state).items() if name.startswith("lm.")}
        return LazyWeights(own, lambda name: state[f"lm.{name}"])


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


def open_trained(place: str | Path, wanted: str | None = None) -> Stored:
    """Opens a checkpoint of a run, which may go on training meanwhile.

    Args:
        place: the run's folder, or its URI.
        wanted: `best`, `latest` or an update's number; None: the best, or the latest where none was evaluated.

    Raises:
        CommandError: no such run or checkpoint, one that is damaged, or one that the run's metrics do not know.
        StorageError: storage cannot be read.
        FormatError: another version wrote it in another format.
    """
    run = read_run(place)
    update, folder = run.checkpoints.choose(wanted, POLICIES)
    lines = [line for line in run.updates() if line["update"] <= update]
    if not lines or lines[-1]["update"] != update:
        raise CommandError(
            f"{run.shown(run.metrics.path)} has no line of update {update}, whose checkpoint was asked for."
        )
    sources = Sources.read(run.path)
    settings = run.settings()
    if sources is not None:
        add_module_folders([settings.task] if ":" in settings.task else [], sources.paths)
        settings = located(settings, sources.paths, needed=("model",), settable=())
    return Stored(run, settings, update, folder, lines, sources)
