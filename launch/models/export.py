"""Writes a trained policy as a folder that others load, all of it or nothing."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from cory_env.tokenizer import load_tokenizer
from launch.console.errors import CommandError
from launch.models.export_files import generation_config, save_adapter, whole_model, write_weights
from launch.models.model_card import model_card
from launch.models.trained import Trained
from launch.run_folder.storage import check_place
from policies.models.model_names import model_path
from policies.models.whole_folder import whole_folder

_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def health_warnings(trained: Trained, policy: str) -> list[str]:
    """Returns the health warnings that stood for a policy at the checkpoint."""
    return [warning["text"] for warning in trained.lines[-1].get("health", []) if warning["of"] == policy]


def export_warnings(trained: Trained, policy: str) -> list[str]:
    """Returns what whoever exports a policy should know: health warnings, and what has changed since it was trained.

    Raises:
        CommandError: the model or its tokenizer is gone.
    """
    health = [f"At update {trained.update}, {text}" for text in health_warnings(trained, policy)]
    return health + trained.changes()


def write(trained: Trained, policy: str, place: Path, dtype: str, merge: bool, step: float = 1.0) -> None:
    """Writes a policy, all of it or nothing.

    Args:
        trained: where it is read from.
        policy: one of the run's, or the `AVERAGE` of them.
        place: a folder that does not exist or is empty.
        dtype: `fp32` or `bf16`.
        merge: an adapter into its base; else it is written as it is.
        step: of the way from the base to the policy; 1 is the policy.

    Raises:
        CommandError: there is no adapter to merge, the step is not above 0, the checkpoint is damaged, the base model
            or its tokenizer is not what it was, or there can be no such folder.
        ModelError: there is no base model any more.
        OSError: the folder could not be written.
    """
    settings = trained.settings
    if not 0 < step < math.inf:
        raise CommandError(f"The step scale {step:g} is not a number above 0.")
    if merge and settings.lora is None:
        raise CommandError(f"{trained.place} trained all weights, so there is no adapter to merge. Leave out merge.")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"The folder {place} cannot be made: {error.strerror}.") from error
    try:
        tokenizer = load_tokenizer(model_path(trained.base(policy)), settings.trust_remote_code)
        tokenizers = settings.make_tokenizers()
    except ValueError as error:
        raise CommandError(" ".join(str(error).split())) from error
    sampling = generation_config(settings, tokenizers, policy if policy in tokenizers else settings.modules[0])
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    whole = whole_model(trained, policy, step) if merge or settings.lora is None else None
    card = model_card(trained, policy, health_warnings(trained, policy), adapter=whole is None, step=step)
    with whole_folder(place) as folder, rust_errors_told(place):
        if whole is None:
            save_adapter(trained, policy, folder, types[dtype], step)
        else:
            model, weights = whole
            model.to(types[dtype]).generation_config = sampling  # else the base's is checked, and may not pass
            model.save_pretrained(folder, state_dict={})
            write_weights(model, weights, folder)
        sampling.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
        for file in folder.glob("*.safetensors"):
            file.chmod(0o644)  # they are made so that only their owner can read them


@contextlib.contextmanager
def rust_errors_told(place: Path) -> Iterator[None]:
    """Turns what safetensors and tokenizers, which are written in Rust, raise on a full disk into an OSError."""
    try:
        yield
    except Exception as error:
        found = _OS_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(place)) from error


def free_folder(out: str | Path) -> Path:
    """Returns the folder to write.

    Raises:
        CommandError: there is something in its place, it would be gone with a job, or it is a URI.
    """
    check_place(str(out), "model")
    place = Path(out).resolve()
    if place.exists() and not place.is_dir():
        raise CommandError(f"{out} is a file: name a folder with --out.")
    if place.is_mount():  # nothing can be renamed to it
        raise CommandError(f"{out} is where a disk is mounted: name a folder in it with --out.")
    if place.is_dir() and any(place.iterdir()):
        raise CommandError(f"{out} is not empty: name another folder with --out.")
    return place
