"""Resolves `start_from`: the checkpoint of another run whose policies a run starts from instead of its model."""

from __future__ import annotations

from pathlib import Path

from cory_env.home import upload_hint
from policies.settings.error import SettingsError
from policies.settings.files import read_file
from policies.settings.settings import Settings, make_settings
from policies.settings.yaml12 import to_cli

POLICIES = "learner_group/learner/rl_module"
"""Path of the policies in an RLlib checkpoint; each has a folder named after its id."""
CONFIG = "config.yaml"
ARCHITECTURE_SETTINGS = ("model", "weights", "lora_rank", "lora_alpha", "lora_target_modules")
"""Settings that determine the architecture of a policy."""


def find_start_checkpoint(settings: Settings) -> Path | None:
    """Returns the checkpoint that `start_from` names.

    Args:
        settings: `start_from` is the folder of a checkpoint or of a run; a run's best checkpoint is used, or its latest
            if none was evaluated.

    Returns:
        The checkpoint's folder; None if policies start from the model.
    """
    if settings.start_from is None:
        return None
    if "://" in settings.start_from:
        raise SettingsError(
            f"start_from={settings.start_from} is a URI. Mount the bucket, or copy the run to a folder, for example "
            "with `aws s3 sync URI DIR`, and set start_from to the folder."
        )
    folder = Path(settings.start_from)
    checkpoint = folder if (folder / POLICIES).is_dir() else _find_checkpoint(folder / "checkpoints")
    if checkpoint is None or not (checkpoint / POLICIES).is_dir():
        problem = "contains no checkpoint" if folder.is_dir() else "is not a folder on this machine"
        raise SettingsError(
            f"start_from={settings.start_from} {problem}. Set it to the folder of a run or checkpoint."
            f"{upload_hint(settings.start_from)}"
        )
    checkpoint = checkpoint.resolve()
    config = checkpoint.parent.parent / CONFIG
    if config.is_file():
        reject_incompatible_policies(settings, make_settings(read_file(config, recorded=True)))
    return checkpoint


def reject_incompatible_policies(settings: Settings, source: Settings) -> None:
    """Rejects a `start_from` whose policies have another architecture."""
    names = [*ARCHITECTURE_SETTINGS]
    if settings.critic and not source.critic:
        names.append("advantage")
    values = {name: getattr(source, name) for name in names if getattr(source, name) != getattr(settings, name)}
    differences = [f"{name}={to_cli(value)}" for name, value in values.items()]
    if source.policy_ids != settings.policy_ids:
        differences.append(f"num_policies={len(source.policy_ids)}")
    if differences:
        raise SettingsError(
            f"start_from={settings.start_from} conflicts with this run's policies: that run has "
            f"{', '.join(differences)}. Set the same here, or remove start_from."
        )


def _find_checkpoint(checkpoints: Path) -> Path | None:
    """Returns a run's best checkpoint, else its latest; None if it has none."""
    best = checkpoints / "best"
    if best.is_file():  # a text file in storage and its copies, a symbolic link otherwise
        best = checkpoints / best.read_text(encoding="utf-8").strip()
    saved = sorted(checkpoints.glob("update_*"), key=lambda folder: (len(folder.name), folder.name))
    return best if best.is_dir() else (saved[-1] if saved else None)
