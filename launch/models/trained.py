"""Trained policies: of a run, read from one of its checkpoints without Ray, or of an algorithm in memory.

Resuming unpickles parts of a checkpoint, which can run any code in it. Here only a policy's weights are read, which are
no pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import safetensors

from launch.console.errors import CommandError
from launch.run_folder.environment import in_words
from launch.run_folder.layout import CONFIG, POLICIES
from launch.run_folder.locations import add_module_folders, located
from launch.run_folder.records import Update, to_json
from launch.run_folder.run import Run
from launch.run_folder.sources import Sources, compare_llms, llms_of
from launch.run_folder.status import read_run
from policies.models.average import concat_lora, concat_lora_config, mean_weights
from policies.models.lora import Lora
from policies.models.model_names import AVERAGE, model_path
from policies.models.weights import LazyWeights, Weights, shapes
from policies.rollout.role_mapping import RoleMapping
from policies.settings.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from policies.cory import Cory


@dataclass(frozen=True)
class PolicySet:
    """What was learned by some update."""

    settings: Settings
    update: int
    """The updates that had been done."""
    lines: Sequence[Update]
    """The metrics up to that update, as far as they are known; the last line is its own."""
    policy_ids: tuple[str, ...]
    """The policies in the order in which the chain's next query would have been answered."""
    place: str
    """How a user finds whose policies they are: a run's folder or URI."""
    name: str
    """What they are of, in a word."""
    origin: str
    """What made them, in lines."""
    read: Callable[[str], Weights]
    """Reads the weights of an LLM, as `weights` says."""
    sources: Sources | None = None
    """What the run was made from; None: not known."""
    run: Run | None = None
    folder: Path | None = None
    """The checkpoint; None: they are an algorithm's."""

    @property
    def policies(self) -> tuple[str, ...]:
        """The names of its policies; with several LLMs that started from one model, also `AVERAGE`, their mean."""
        modules = self.settings.policy_ids
        return (*modules, AVERAGE) if len(modules) > 1 and len(set(self.settings.models.values())) == 1 else modules

    @property
    def names(self) -> str:
        """The names of its policies, as users give them."""
        return ", ".join("mean" if policy == AVERAGE else policy for policy in self.policies)

    def named(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns policies by the names that users give them; `mean` is `AVERAGE`.

        Raises:
            CommandError: one has no such name; names those that there are.
        """
        policies = tuple(AVERAGE if name.strip() == "mean" else name.strip() for name in names)
        for name, policy in zip(names, policies, strict=True):
            if policy not in self.policies:
                raise CommandError(f"{self.place} has no policy `{name.strip()}`. Its policies are: {self.names}.")
        return policies

    def weights(self, policy: str) -> Weights:
        """The weights of a policy, without its value head, by Hugging Face names; each is read when it is asked for.

        Those of `AVERAGE` are the mean of all; its adapter has the mean of their products, and more rank than they.

        Raises:
            CommandError: the checkpoint is gone, or holds anything but arrays there.
        """
        if policy == AVERAGE:
            weights = [self.weights(module) for module in self.settings.policy_ids]
            return mean_weights(weights) if self.settings.lora is None else concat_lora(weights)
        return self.read(policy)

    def lora(self, policy: str) -> Lora | None:
        """What the adapter of a policy is like; None: there is none."""
        lora = self.settings.lora
        return concat_lora_config(lora, len(self.settings.policy_ids)) if lora and policy == AVERAGE else lora

    def base(self, policy: str) -> str:
        """The name of the model that a policy started from; that of an `AVERAGE` is everyone's."""
        models = self.settings.models
        return models[self.settings.policy_ids[0] if policy == AVERAGE else policy]

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

    def meta_model(self, policy: str) -> PreTrainedModel:
        """Returns the model of a policy, with its adapter, without the memory for weights.

        Raises:
            ModelError: there is no base model any more.
        """
        from policies.models.adapters import add_lora  # brings transformers along
        from policies.models.language_model import meta_model

        model = meta_model(model_path(self.base(policy)), self.settings.trust_remote_code)
        lora = self.lora(policy)
        return cast("PreTrainedModel", model.requires_grad_(True)) if lora is None else add_lora(model, lora)

    def check_base(self, policy: str, weights: Weights, parameters: Mapping[str, Tensor]) -> None:
        """Refuses a base model that is not the one that training started from.

        Args:
            policy: one of the run's, or the `AVERAGE` of them.
            weights: its.
            parameters: those that they are for, of the base, or of a new adapter on it (`trainable`).

        Raises:
            CommandError: they have other names or shapes.
        """
        if shapes(weights) != {name: tuple(parameter.shape) for name, parameter in parameters.items()}:
            raise CommandError(
                f"The model {self.base(policy)} is not the one that {self.place} started from: the trained weights "
                "have other names or shapes. Put that model back."
            )


def trainable(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the parameters that training changes, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def policies_of(algorithm: Cory) -> PolicySet:
    """Returns what an algorithm has learned by now; weights are fetched from the learners when they are asked for."""
    report = {key: value for key, value in algorithm.report.items() if key != "samples"}
    return PolicySet(
        settings=algorithm.settings,
        update=algorithm.updates,
        lines=[cast(Update, to_json(report or {"update": algorithm.updates}))],
        policy_ids=tuple(algorithm.mapping.as_dict().values()),
        place="The algorithm",
        name=algorithm.settings.task,
        origin=f"an algorithm in Python  # {in_words()}",
        read=algorithm.weights,
    )


def open_trained(place: str | Path, wanted: str | None = None) -> PolicySet:
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
    commands = (run.path / CONFIG).read_text(encoding="utf-8").splitlines()
    return PolicySet(
        settings=settings,
        update=update,
        lines=lines,
        policy_ids=_next_policy_ids(settings, lines[-1]),
        place=run.shown(run.path),
        name=run.path.resolve().name,
        origin="\n".join(line.removeprefix("# ") for line in commands if line.startswith("# ")),
        read=lambda llm: _read_weights(folder, llm),
        sources=sources,
        run=run,
        folder=folder,
    )


def _next_policy_ids(settings: Settings, line: Update) -> tuple[str, ...]:
    mapping = RoleMapping(settings.roles, settings.policy_ids)
    if "roles" in line:  # else it is before the first update
        mapping = mapping.with_pioneer(line["roles"][settings.roles[0]])
        mapping = mapping.rotated() if line["exchanged"] else mapping
    return tuple(mapping.as_dict().values())


def _read_weights(checkpoint: Path, llm: str) -> Weights:
    from policies.learning.stored_policy import read

    folder = checkpoint / POLICIES / llm
    try:
        state = read(str(folder))
    except (FileNotFoundError, safetensors.SafetensorError) as error:
        if folder.is_dir():
            raise CommandError(f"{folder} does not hold a policy's weights: {error}. It was not read.") from error
        # It was removed by the run itself, which keeps the last few and the best.
        raise CommandError(f"{checkpoint} was removed meanwhile. Try again.") from error
    names = {name.removeprefix("lm."): shape for name, shape in shapes(state).items() if name.startswith("lm.")}
    return LazyWeights(names, lambda name: state[f"lm.{name}"])
