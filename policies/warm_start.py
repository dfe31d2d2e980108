"""The policies that a run starts from instead of its model: those of another run's checkpoint (`start_from`)."""

from __future__ import annotations

from pathlib import Path

from ray.rllib.core import COMPONENT_LEARNER_GROUP

from policies.rllib.learners import Learners
from policies.settings.core_yaml import as_word
from policies.settings.error import SettingsError
from policies.settings.files import read_file
from policies.settings.settings import Settings, kept_settings

POLICIES = "learner_group/learner/rl_module"
"""Where RLlib puts the policies in a checkpoint, each in a folder of its name."""
CONFIG = "config.yaml"
SAME = ("model", "weights", "lora_rank", "lora_alpha", "lora_targets", "critic_inputs")
"""Settings that say what a policy consists of."""


def find_start(settings: Settings) -> Path | None:
    """Returns the checkpoint whose policies `start_from` names.

    Args:
        settings: `start_from` is a run's folder, whose best checkpoint is taken, else its latest, or a checkpoint's.

    Returns:
        Its folder; None: policies start from the model.

    Raises:
        SettingsError: there is none on this machine, or its policies consist of something else.
    """
    if settings.start_from is None:
        return None
    if "://" in settings.start_from:
        raise SettingsError(
            f"start_from={settings.start_from} is a URI, which only `cory train` and `cory study` read. Copy that run "
            "into a folder, and name the folder."
        )
    folder = Path(settings.start_from)
    checkpoint = folder if (folder / POLICIES).is_dir() else _chosen(folder / "checkpoints")
    if checkpoint is None or not (checkpoint / POLICIES).is_dir():
        missing = "holds no checkpoint" if folder.is_dir() else "is no folder on this machine"
        raise SettingsError(
            f"start_from={settings.start_from} {missing}. Name the folder of a run, or of one of its checkpoints."
        )
    checkpoint = checkpoint.resolve()
    config = checkpoint.parent.parent / CONFIG
    if config.is_file():
        refuse_other_policies(settings, kept_settings(read_file(config)))
    return checkpoint


def refuse_other_policies(settings: Settings, theirs: Settings) -> None:
    """Refuses to start from policies that consist of something else than this run's.

    Args:
        settings: this run's.
        theirs: those of the run that it starts from.

    Raises:
        SettingsError: names the settings that differ.
    """
    differing = [name for name in SAME if getattr(theirs, name) != getattr(settings, name)]
    differing += ["num_policies"] if theirs.modules != settings.modules else []
    if settings.critic:
        differing += [] if theirs.critic else ["advantage"]
        agents_differ = settings.critic_inputs == "chain" and theirs.num_agents != settings.num_agents
        differing += ["num_agents"] if agents_differ else []  # of which each has inputs of its own
    if differing:
        shown = ", ".join(f"{name}={as_word(getattr(theirs, name))}" for name in differing if name != "num_policies")
        shown += f"{', ' * bool(shown)}{len(theirs.modules)} policies" if "num_policies" in differing else ""
        raise SettingsError(
            f"start_from={settings.start_from}: that run has {shown}, so its policies do not fit this run's. Use the "
            "same here, or leave start_from out."
        )


def _chosen(checkpoints: Path) -> Path | None:
    """Returns a run's best checkpoint, or else its latest; None: it has none."""
    best = checkpoints / "best"
    if best.is_file():  # as storage has it, copied to a disk
        best = checkpoints / best.read_text(encoding="utf-8").strip()
    saved = sorted(checkpoints.glob("update_*"), key=lambda folder: (len(folder.name), folder.name))
    return best if best.is_dir() else (saved[-1] if saved else None)


class WarmStart:
    """The policies that an algorithm starts from, taken when it is built.

    A checkpoint that is restored replaces them. So if another run is gone by then, that is an error only if training
    starts without a checkpoint.
    """

    def __init__(self, settings: Settings, learners: Learners) -> None:
        """Loads the policies of `start_from`; without it, the model's stay."""
        self._learners = learners
        self.error: SettingsError | None = None
        """Why they could not be loaded."""
        try:
            start = find_start(settings)
        except SettingsError as error:
            self.error = error
            return
        if start is not None:
            self.load(start)

    def load(self, checkpoint: Path) -> None:
        """Takes the policies of a checkpoint, without optimizers and all other state."""
        self._learners.restore_from_path(checkpoint / COMPONENT_LEARNER_GROUP, moments=False)
        self.error = None

    def check(self) -> None:
        """Refuses to train from the model instead of the policies that were asked for.

        Raises:
            SettingsError: as of `find_start`.
        """
        if self.error is not None:
            raise self.error
