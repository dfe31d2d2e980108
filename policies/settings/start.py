"""Where `start_from` leads: the checkpoint of another run whose policies a run starts from instead of its model."""

from __future__ import annotations

from pathlib import Path

from policies.settings.error import SettingsError
from policies.settings.files import read_file
from policies.settings.settings import Settings, make_settings
from policies.settings.yaml12 import to_cli

POLICIES = "learner_group/learner/rl_module"
"""Where RLlib puts the policies in a checkpoint, each in a folder of its name."""
CONFIG = "config.yaml"
SAME = ("model", "weights", "lora_rank", "lora_alpha", "lora_target_modules", "critic_inputs")
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
        reject_other_policies(settings, make_settings(read_file(config)))
    return checkpoint


def reject_other_policies(settings: Settings, theirs: Settings) -> None:
    """Refuses to start from policies that consist of something else than this run's.

    Args:
        settings: this run's.
        theirs: those of the run that it starts from.

    Raises:
        SettingsError: names the settings that differ.
    """
    names = [*SAME]
    if settings.critic and not theirs.critic:
        names.append("advantage")
    if settings.critic_inputs == "chain":  # such a critic has inputs for each agent
        names.append("num_agents")
    other = {name: getattr(theirs, name) for name in names if getattr(theirs, name) != getattr(settings, name)}
    differing = [f"{name}={to_cli(value)}" for name, value in other.items()]
    if theirs.policy_ids != settings.policy_ids:
        differing.append(f"num_policies={len(theirs.policy_ids)}")
    if differing:
        raise SettingsError(
            f"start_from={settings.start_from}: that run has {', '.join(differing)}, so its policies do not fit this "
            "run's. Use the same here, or leave start_from out."
        )


def _chosen(checkpoints: Path) -> Path | None:
    """Returns a run's best checkpoint, or else its latest; None: it has none."""
    best = checkpoints / "best"
    if best.is_file():  # as storage has it, copied to a disk
        best = checkpoints / best.read_text(encoding="utf-8").strip()
    saved = sorted(checkpoints.glob("update_*"), key=lambda folder: (len(folder.name), folder.name))
    return best if best.is_dir() else (saved[-1] if saved else None)
