"""Trained policies, read from a checkpoint without Ray or from an algorithm in memory.

Only the policies' weights are read, which are not pickled. Resuming a run, in contrast, unpickles parts of the
checkpoint, which can run arbitrary code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import safetensors

from cory_env.tasks import Task
from launch.console.errors import CommandError
from launch.run_folder.checkpoints import UNTRAINED
from launch.run_folder.environment import describe_environment
from launch.run_folder.layout import CONFIG, POLICIES
from launch.run_folder.locations import locate_files
from launch.run_folder.records import Update
from launch.run_folder.run import Run
from launch.run_folder.sources import Sources, digest_models, find_changes, restore_task
from policies.models.average import concat_lora, concat_lora_config, mean_weights
from policies.models.lora import Lora
from policies.models.model_names import AVERAGE_POLICY
from policies.models.weights import LazyWeights, Weights, weight_shapes
from policies.rollout.role_mapping import make_mapping
from policies.settings.settings import Settings, Tokenizers

if TYPE_CHECKING:
    from policies.cory import Cory


@dataclass(frozen=True)
class PolicySet:
    """The policies of a run after `update` completed updates.

    `metrics` go up to that update, as far as available, and end with it. `policy_ids` are in chain order, as the next
    update would have assigned the roles. `location` is the run's folder, for messages; `name` its short name; `command`
    the commands that started and continued it, one per line. `read_weights` reads a policy other than `AVERAGE_POLICY`.
    `task` may lack its queries, and is None if it is not recorded. `folder` is the checkpoint, None for the policies of
    an algorithm in memory, which has no `sources` and no `run` either.
    """

    settings: Settings
    update: int
    metrics: Sequence[Update]
    policy_ids: tuple[str, ...]
    location: str
    name: str
    command: str
    read_weights: Callable[[str], Weights]
    task: Task | None = None
    sources: Sources | None = None
    run: Run | None = None
    folder: Path | None = None

    @property
    def available_policy_ids(self) -> tuple[str, ...]:
        """All policy ids, including `AVERAGE_POLICY` if there are several LLMs that started from the same model."""
        policy_ids, models = self.settings.policy_ids, self.settings.models
        return (*policy_ids, AVERAGE_POLICY) if len(policy_ids) > 1 and len(set(models.values())) == 1 else policy_ids

    @property
    def available_names(self) -> str:
        """The names of all policies for users, separated by commas."""
        return ", ".join(
            "mean" if policy_id == AVERAGE_POLICY else policy_id for policy_id in self.available_policy_ids
        )

    def resolve_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns the policy ids for users' names; `mean` stands for `AVERAGE_POLICY`."""
        policy_ids = tuple(AVERAGE_POLICY if name.strip() == "mean" else name.strip() for name in names)
        for name, policy_id in zip(names, policy_ids, strict=True):
            if policy_id not in (*self.available_policy_ids, *self.settings.frozen_models):
                raise CommandError(f"Unknown policy `{name.strip()}`. {self.location} has: {self.available_names}.")
        return policy_ids

    def checked_weights(self, policy_id: str) -> Weights:
        """Returns the weights of a policy, and checks that they match its base model, which is not loaded."""
        from policies.models.adapters import add_lora  # imports transformers
        from policies.models.language_model import meta_model

        model, lora = meta_model(self.base_path(policy_id), self.settings.trust_remote_code), self.lora(policy_id)
        parameters = (model if lora is None else add_lora(model, lora)).named_parameters()
        shapes = {name: tuple(tensor.shape) for name, tensor in parameters if lora is None or tensor.requires_grad}
        weights = self.weights(policy_id)
        if weight_shapes(weights) != shapes:
            raise CommandError(
                f"The model {self.base(policy_id)} has changed since {self.location} started: the trained weights have "
                "other names or shapes. Restore the original model."
            )
        return weights

    def weights(self, policy_id: str) -> Weights:
        """Returns the weights of a policy, without its value head, by Hugging Face names. They are read lazily.

        The weights of `AVERAGE_POLICY` are the mean over all policies. With LoRA, the mean of the products B A
        is an adapter of higher rank.
        """
        if policy_id == AVERAGE_POLICY:
            weights = [self.weights(member) for member in self.settings.policy_ids]
            return mean_weights(weights) if self.settings.lora is None else concat_lora(weights)
        return self.read_weights(policy_id)

    def lora(self, policy_id: str) -> Lora | None:
        """Returns the adapter configuration of a policy; None if all weights were trained."""
        lora = self.settings.lora
        return concat_lora_config(lora, len(self.settings.policy_ids)) if lora and policy_id == AVERAGE_POLICY else lora

    @cached_property
    def tokenizers(self) -> Tokenizers:
        """The tokenizers of the policies other than `AVERAGE_POLICY`."""
        return self.settings.make_tokenizers()

    def base(self, policy_id: str) -> str:
        """Returns the name of the base model of a policy."""
        return self.settings.all_models[self.initial_id(policy_id)]

    def base_path(self, policy_id: str) -> str:
        """Returns the path of the base model of a policy, as `policies.models.model_names.model_path` does."""
        return self.settings.model_paths[self.initial_id(policy_id)]

    def initial_id(self, policy_id: str) -> str:
        """Returns the policy itself, or for `AVERAGE_POLICY` one that started from the same model."""
        return self.settings.policy_ids[0] if policy_id == AVERAGE_POLICY else policy_id

    def warnings(self) -> list[str]:
        """Returns sentences for users of the weights: that they are untrained, and what has changed since training.

        Models, their tokenizers and chat templates are compared.
        """
        texts = [UNTRAINED] if self.folder is not None and self.update == 0 else []
        if self.sources is None:
            return texts
        now = replace(self.sources, llms=digest_models(self.settings, self.tokenizers))
        return texts + [f"{change.text}." for change in find_changes(self.sources, now, self.settings)]


def current_policies(algorithm: Cory) -> PolicySet:
    """Returns the current policies of an algorithm. Weights are fetched from the learners lazily."""
    return PolicySet(
        settings=algorithm.settings,
        update=algorithm.updates,
        metrics=[cast(Update, algorithm.report or {"update": algorithm.updates})],
        policy_ids=tuple(map(algorithm.mapping, algorithm.settings.agents)),
        location="The algorithm",
        name=algorithm.settings.task,
        command=f"an algorithm in Python  # {describe_environment()}",
        read_weights=algorithm.weights,
        task=algorithm.task,
    )


def open_trained(source: Run | str | Path, checkpoint: str | int | None = None) -> PolicySet:
    """Opens a checkpoint of a run. The run may still be training.

    Args:
        source: the run, or its folder.
        checkpoint: `best`, `latest` or the number of an update; None for the best, or the latest if none was evaluated.
    """
    run = source if isinstance(source, Run) else Run.open(source)
    update, folder = run.checkpoints.choose(checkpoint, POLICIES)
    metrics = [line for line in run.metrics if line["update"] <= update]
    if not metrics or metrics[-1]["update"] != update:
        raise CommandError(f"{run.metrics_file.path} has no entry for update {update} of the requested checkpoint.")
    sources = Sources.read(run.path)
    settings = run.settings if sources is None else locate_files(run.settings, sources.paths, needed=("model",))
    commands = (run.path / CONFIG).read_text(encoding="utf-8").splitlines()
    return PolicySet(
        settings=settings,
        update=update,
        metrics=metrics,
        policy_ids=_next_policy_ids(settings, metrics[-1]),
        location=str(run.path),
        name=run.path.resolve().name,
        command="\n".join(line.removeprefix("# ") for line in commands if line.startswith("# ")),
        read_weights=lambda policy_id: _read_weights(folder, policy_id),
        task=restore_task(sources),
        sources=sources,
        run=run,
        folder=folder,
    )


def _next_policy_ids(settings: Settings, line: Update) -> tuple[str, ...]:
    mapping = make_mapping(settings)
    if "roles" in line:  # not before the first update
        role = next(role for role, policy_id in mapping.as_dict().items() if policy_id in settings.policy_ids)
        mapping = mapping.with_policy(role, line["roles"][role])
        mapping = mapping.rotated() if line["exchanged"] else mapping
    return tuple(mapping.as_dict().values())


def _read_weights(checkpoint: Path, policy_id: str) -> Weights:
    from policies.learning.stored_policy import open_weights

    folder = checkpoint / POLICIES / policy_id
    try:
        state = open_weights(str(folder))
    except (FileNotFoundError, safetensors.SafetensorError) as error:
        # The run itself removes old checkpoints; it keeps the last few and the best.
        problem = f"does not contain valid weights: {error}" if folder.is_dir() else "was removed by the run. Try again"
        raise CommandError(f"{folder} {problem}.") from error
    shapes = {name.removeprefix("lm."): shape for name, shape in weight_shapes(state).items() if name.startswith("lm.")}
    return LazyWeights(shapes, lambda name: state[f"lm.{name}"])
