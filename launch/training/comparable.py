"""What a run, a search or a study is made from must be the same when it resumes, or its figures do not compare.

A search or study has several kinds of trainings: `sources.json` in its folder holds what each was made from
(`launch.run_folder.sources`).
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from cory_env.tasks import Task
from launch.console.errors import IN_JOB, CommandError, describe_error, is_defect
from launch.run_folder.journal import atomic_write
from launch.run_folder.layout import SOURCES
from launch.run_folder.locations import add_module_folders, located
from launch.run_folder.sources import Change, Sources, compare, function_names, sources_of
from policies.settings.settings import BY_CONTENT, Settings, Tokenizers, settings_in

SOURCE_SETTINGS = sorted(settings_in("task") | {*BY_CONTENT, "chat", "trust_remote_code"})
"""Settings that decide what a training is made from."""
PrepareTask = Callable[[Settings], tuple[Task, Tokenizers]]


def check_sources(
    before: Sources, settings: Settings, task: Task, now: Sources, where: str, allow: bool
) -> list[Change]:
    """Refuses to resume with other queries, models, tokenizers or templates, unless the user allows it.

    Args:
        before: what the run, or search, was made from.
        settings: of the resume, with the names that messages are to use.
        task: of these settings.
        now: what it would be made from.
        where: what messages call the run.
        allow: the user allows it.

    Returns:
        What differs, for `consequence`.

    Raises:
        CommandError: something differs that needs to be allowed.
    """
    changes = compare(before, settings, task, now)
    refused = [change for change in changes if change.is_refused]
    if refused and not allow:
        raise CommandError(
            f"{where} cannot resume as it was. {refused[0].text}. Put that back, or resume with --allow-changes."
        )
    return changes


def consequence(change: Change, update: int) -> str:
    """Returns a warning: what has changed since a run began, and which figures no longer compare.

    Args:
        change: that was found at a resume.
        update: after which the run resumes.
    """
    best = ", nor does `best`" if change.part in ("validation", "test") else ""
    return f"Warning: {change.text}. The {change.figures} up to update {update} do not compare with later ones{best}."


def check_comparable(
    folder: Path | None,
    asked: Iterable[tuple[str, Settings]],
    prepare: PrepareTask,
    tell: Callable[[str], None],
    allow: bool,
) -> dict[str, Sources]:
    """Refuses trainings that would not compare with those that were done before, unless the user allows it.

    Args:
        folder: of the search or study; None: it has none yet.
        asked: trainings: what messages call them, and their settings.
        prepare: makes the task and the tokenizers of settings.
        tell: is told what the user allows.
        allow: the user allows it.

    Returns:
        What each kind is made from, for `write_comparable`.

    Raises:
        CommandError: something differs that needs to be allowed, or a training cannot be prepared.
    """
    before = {} if folder is None else read_comparable(folder)
    present: dict[str, Sources] = dict(before)
    kinds = {json.dumps([getattr(each, name) for name in SOURCE_SETTINGS]): (who, each) for who, each in asked}
    for kind, (who, settings) in kinds.items():
        recorded = before.get(kind)
        actual = settings
        if recorded is not None:
            add_module_folders(function_names(settings, settings.reward_spec), recorded.paths)
            actual = located(settings, recorded.paths, settable=())
        try:
            prepared = prepare(actual)
        except Exception as error:
            if is_defect(error):
                raise
            raise CommandError(f"{who}: {describe_error(error)}") from error
        sources = present[kind] = sources_of(actual, *prepared)
        if recorded is None:
            continue
        changes = check_sources(recorded, settings, prepared[0], sources, str(folder), allow)
        for change in changes:
            tell(f"Warning: {change.text}. Trainings from before and after this do not compare.")
        present[kind] = sources.continuing(recorded, settings, changes, 0)
    return present


def placed_settings(settings: Settings, sources: Iterable[Sources]) -> Settings:
    """Returns settings with absolute paths, for trials that go on from another folder. Not so in a Ray job, whose
    relative paths are those of its working directory, which lies elsewhere on each node.
    """
    if IN_JOB in os.environ:
        return settings
    paths = {name: path for each in sources for name, path in each.paths.items()}
    return located(settings, paths, needed=(), absolute=True)


def read_comparable(folder: Path) -> dict[str, Sources]:
    """Reads what `write_comparable` wrote; empty where there is nothing.

    Raises:
        CommandError: it is damaged, or has another form.
    """
    file = folder / SOURCES
    if not file.is_file():
        return {}
    try:
        return TypeAdapter(dict[str, Sources]).validate_json(file.read_bytes())
    except ValidationError as error:
        raise CommandError(
            f"{file} is damaged, or another version of cory-rllib wrote it. Restore it, or remove it to go on "
            "unchecked."
        ) from error


def write_comparable(folder: Path, sources: dict[str, Sources]) -> None:
    """Writes what each kind of training is made from, in one step."""
    values = {kind: asdict(each) for kind, each in sources.items()}
    atomic_write(folder / SOURCES, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
