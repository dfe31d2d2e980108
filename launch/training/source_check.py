"""Checks that a resumed run, search or study uses the same sources, so that its results stay comparable.

Sources are checksums of queries, models, tokenizers and templates (`launch.run_folder.sources`). A search or study has
trainings with different sources: `sources.json` in its folder records each of them.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from cory_env.home import IN_JOB
from cory_env.tasks import Task
from launch.console.errors import CommandError, describe_error, is_bug
from launch.run_folder.layout import SOURCES
from launch.run_folder.locations import locate_files
from launch.run_folder.sources import Change, Sources, collect_sources, find_changes
from policies.files import atomic_write
from policies.settings.settings import BY_CONTENT, Settings, Tokenizers, settings_in_categories

SOURCE_SETTINGS = sorted(settings_in_categories("task") | {*BY_CONTENT, "chat", "trust_remote_code"})
PrepareTask = Callable[[Settings], tuple[Task, Tokenizers]]


def check_sources(before: Sources, now: Sources, settings: Settings, name: str, allow: bool) -> list[Change]:
    """Rejects a resume with changed queries, models, tokenizers or templates, unless the user allows it.

    Returns:
        The changes, for `incomparable_warning`.
    """
    changes = find_changes(before, now, settings)
    # Rewards may be corrected between two resumes, and a new commit on the hub need not concern the weights.
    rejected = [change for change in changes if change.part not in ("function", "commit")]
    if rejected and not allow:
        raise CommandError(
            f"{name} cannot resume unchanged. {rejected[0].text}. Undo this change, or resume with --allow-changes."
        )
    return changes


def incomparable_warning(change: Change, update: int) -> str:
    """Returns a warning about a changed source and the metrics that are no longer comparable."""
    return f"Warning: {change.text}. Metrics up to update {update} are not comparable with later ones."


def check_all_sources(
    folder: Path | None,
    trainings: Iterable[tuple[str, Settings]],
    prepare: PrepareTask,
    warn: Callable[[str], None],
    allow: bool,
    skip: Callable[[str, str], None] | None = None,
) -> dict[str, Sources]:
    """Rejects trainings that are not comparable with earlier ones, unless the user allows it.

    Args:
        folder: The folder of the search or study; None: it does not exist yet.
        skip: Called with the `training_kind` and the error of trainings that cannot be prepared; None: they are
            rejected.

    Returns:
        The sources by kind of training, for `write_all_sources`.
    """
    before = {} if folder is None else read_all_sources(folder)
    all_sources: dict[str, Sources] = dict(before)
    kinds = {training_kind(settings): (name, settings) for name, settings in trainings}
    for kind, (name, settings) in kinds.items():
        recorded = before.get(kind)
        located_settings = settings if recorded is None else locate_files(settings, recorded.paths)
        try:
            task, tokenizers = prepare(located_settings)
        except Exception as error:
            if is_bug(error):
                raise
            if skip is not None:
                skip(kind, describe_error(error))
                continue
            raise CommandError(f"{name}: {describe_error(error)}") from error
        sources = all_sources[kind] = collect_sources(located_settings, task, tokenizers)
        if recorded is None:
            continue
        changes = check_sources(recorded, sources, located_settings, str(folder), allow)
        for change in changes:
            warn(f"Warning: {change.text}. Trainings before and after this change are not comparable.")
        all_sources[kind] = sources.after_resume(recorded, changes, 0)
    return all_sources


def training_kind(settings: Settings) -> str:
    """Returns a key for trainings with the same sources."""
    return json.dumps([getattr(settings, key) for key in SOURCE_SETTINGS])


def absolute_settings(settings: Settings, sources: Iterable[Sources]) -> Settings:
    """Makes paths in settings absolute, for trials that run in another folder.

    Paths in a Ray job stay relative to its working directory, which differs between nodes.
    """
    if IN_JOB in os.environ:
        return settings
    paths = {name: path for training_sources in sources for name, path in training_sources.paths.items()}
    return locate_files(settings, paths, needed=(), absolute=True)


def read_all_sources(folder: Path) -> dict[str, Sources]:
    """Reads the file of `write_all_sources`; empty if there is none."""
    file = folder / SOURCES
    if not file.is_file():
        return {}
    try:
        return TypeAdapter(dict[str, Sources]).validate_json(file.read_bytes())
    except ValidationError as error:
        raise CommandError(
            f"{file} is damaged or was written by another version of cory-rllib. Restore it, or delete it to continue "
            "without this check."
        ) from error


def write_all_sources(folder: Path, sources: dict[str, Sources]) -> None:
    """Writes the sources of each kind of training atomically."""
    values = {kind: asdict(training_sources) for kind, training_sources in sources.items()}
    atomic_write(folder / SOURCES, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
