"""Fingerprints of a run's inputs (`sources.json`: data, models, code), and how they have changed.

paths            absolute paths of files and folders, by their names in the settings, such as `questions.jsonl`
task             class and templates of the task, without the queries
queries          by split: the number of queries, and a digest of them with their columns, in order
llms             by policy id: a digest of the model's files, or the id and commit of a hub model; digests of the
                 tokenizer and, if `chat` is set, of the chat template
functions        name and digest of the code of each reward, of a custom credit scheme and task, and of the feedback
changes          differences that were allowed at a resume, and the update after which it resumed

Changes in files that a reward's code reads or imports are not detected, nor those listed in
`policies.models.fingerprint`.
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import TypeAdapter, ValidationError

from cory_env.functions import TRL, parse_spec, search_working_folder
from cory_env.pickled import display_name, is_pickled
from cory_env.rewarding.spec import parse_sum
from cory_env.tasks import Task
from cory_env.tasks.task import Split
from cory_env.tokenizer import fingerprint
from launch.console.errors import CommandError
from launch.run_folder.layout import SOURCES
from launch.run_folder.locations import absolute_paths, path_part
from policies.files import atomic_write
from policies.models.fingerprint import COMMIT_KEY, HUB_KEY, model_files
from policies.settings.settings import Settings, Tokenizers

SPLITS: dict[Split, str] = {"train": "training", "validation": "validation", "test": "test"}
"""How messages name the queries of each split."""


class Change(NamedTuple):
    """An input of a run that has changed.

    `part` is `train`, `validation` or `test` (the queries); `prompts`, `model`, `commit` (of a hub model),
    `tokenizer`, `chat_template` or `function`. `text` is a sentence without its full stop.
    """

    part: str
    text: str


@dataclass(frozen=True)
class Queries:
    """The queries of a split."""

    count: int
    digest: str


@dataclass(frozen=True)
class ModelDigests:
    """The initial model of a policy.

    `model` is a digest of its files, or `ID@COMMIT` on the hub; `chat_template` is None without `chat`.
    """

    model: str
    tokenizer: str
    chat_template: str | None


@dataclass(frozen=True)
class Sources:
    """The inputs of a run. The module's docstring describes the fields."""

    paths: dict[str, str]
    task: dict[str, Any] | None
    queries: dict[str, Queries]
    llms: dict[str, ModelDigests]
    functions: list[list[str | None]]
    changes: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Reads `sources.json` from a folder; None if it does not exist."""
        file = folder / SOURCES
        if not file.is_file():
            return None
        try:
            return TypeAdapter(cls).validate_json(file.read_bytes())
        except ValidationError as error:
            raise CommandError(
                f"{file} is damaged, or another version of cory-rllib wrote it. Restore it, or remove it and resume "
                "with --allow-changes."
            ) from error

    def write(self, folder: Path) -> None:
        """Writes `sources.json` atomically."""
        atomic_write(folder / SOURCES, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    def after_resume(self, before: Self, changes: Sequence[Change], update: int) -> Self:
        """Returns the sources of a resumed run, including its allowed changes."""
        records = [{"update": update, **change._asdict()} for change in changes]
        return replace(self, paths={**before.paths, **self.paths}, changes=[*before.changes, *records])


def collect_sources(settings: Settings, task: Task, tokenizers: Tokenizers) -> Sources:
    """Computes the current fingerprints of a run's inputs; without tokenizers, there are no models among them."""
    return Sources(
        paths=absolute_paths(settings),
        task=_task_fields(task),
        queries=digest_queries(task),
        llms=digest_models(settings, tokenizers) if tokenizers else {},
        functions=[[display_name(name), _digest_function(name)] for name in _function_names(settings, task)],
        changes=[],
    )


def digest_queries(task: Task) -> dict[str, Queries]:
    """Returns the number and digest of each split's queries, in order."""
    checksums = {split: [query.checksum for query in task.queries(split)] for split in task.splits}
    return {split: Queries(count=len(sums), digest=_digest(repr(sums))) for split, sums in checksums.items()}


def digest_models(settings: Settings, tokenizers: Tokenizers) -> dict[str, ModelDigests]:
    """Returns the digests of each policy's initial model, by policy id."""
    models = {path: _model_digest(path) for path in dict.fromkeys(settings.model_paths.values())}
    distinct = {id(tokenizer): tokenizer for tokenizer in tokenizers.values()}  # policies may share one
    digests = {key: fingerprint(tokenizer) for key, tokenizer in distinct.items()}
    return {
        policy_id: ModelDigests(
            model=models[path],
            tokenizer=digests[id(tokenizers[policy_id])],
            chat_template=_digest(repr(tokenizers[policy_id].chat_template)) if settings.chat else None,
        )
        for policy_id, path in settings.model_paths.items()
    }


def find_changes(before: Sources, now: Sources, settings: Settings) -> list[Change]:
    """Returns the inputs that differ, once per model. Only of policies in both, as a chain may have fewer agents.

    Args:
        settings: the current ones, whose names of files and models the sentences have.
    """

    def describe(name: str) -> str:
        path = path_part(name)
        recorded = before.paths.get(path)
        is_elsewhere = recorded is not None and Path(path).exists() and os.path.abspath(path) != recorded
        return f"{name} has changed since training started{f' with {recorded}' if is_elsewhere else ''}"

    changes = []
    for split, kind in SPLITS.items():
        old, new = (sources.queries.get(split, Queries(0, "")) for sources in (before, now))
        if old != new:
            data = (settings.eval_data if split != "train" else None) or settings.data
            text = describe(data or f"The data of task {settings.task}")
            changes.append(Change(split, f"{text}: its {kind} queries differ ({new.count} now, {old.count} then)"))
    task, missing = now.task or {}, object()
    names = [name for name, value in (before.task or {}).items() if task.get(name, missing) != value]
    if names:
        changes.append(Change("prompts", f"The task's {', '.join(names)} changed since training started"))
    for policy_id, name in settings.all_models.items():
        if policy_id not in before.llms or policy_id not in now.llms:
            continue
        old_model, new_model = before.llms[policy_id], now.llms[policy_id]
        (hub, at, commit), (new_hub, _, new_commit) = old_model.model.partition("@"), new_model.model.partition("@")
        if at and hub == new_hub and commit != new_commit:
            text = f"The model {name} has moved on the hub from commit {commit:.7} to {new_commit:.7}"
            changes.append(Change("commit", text))
        elif old_model.model != new_model.model:
            changes.append(Change("model", f"The model {describe(name)}"))
        if old_model.tokenizer != new_model.tokenizer:
            changes.append(Change("tokenizer", f"The tokenizer of {describe(name)}"))
        templates = {old_model.chat_template, new_model.chat_template}
        if None not in templates and len(templates) > 1:  # an evaluation may or may not use it
            changes.append(Change("chat_template", f"The chat template of {describe(name)}"))
    for function in before.functions:
        if function not in now.functions:
            changes.append(Change("function", f"The code of {function[0]} changed since training started"))
    return list(dict.fromkeys(changes))


def restore_task(sources: Sources | None) -> Task | None:
    """Returns a run's task without its queries, sufficient for other queries; None if the task is unknown."""
    if sources is None or sources.task is None:
        return None
    values = dict(sources.task)
    module, _, name = values.pop("class").partition(":")
    search_working_folder()
    try:
        task = getattr(importlib.import_module(module), name)(**values, train=(), test=(), reward="")
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    return task if isinstance(task, Task) else None


def _function_names(settings: Settings, task: Task) -> Iterator[str]:
    """Yields the names of the functions that a run calls: rewards, the user's credit and task, and the feedback."""
    role_rewards = [role.own_reward for role in settings.roles or ()]
    for spec in filter(None, (task.reward, *role_rewards)):
        yield from (name for name, _ in parse_sum(spec))
    names = (settings.credit, settings.task, settings.env, task.feedback)
    yield from (name for name in names if name is not None and ":" in name)


def _digest_function(name: str) -> str | None:
    """Returns a digest of a function's module and of the files that its settings name; None if unknown."""
    if is_pickled(name):
        return _digest(name)
    name = name.removeprefix(TRL)
    if (file := _module_file(parse_spec(name)[0])) is None:
        return None
    paths = [Path(value) for value in parse_spec(name)[2].values()]
    contents = [_model_digest(str(path)) if path.is_dir() else path.read_bytes() for path in paths if path.exists()]
    return _digest(repr((file.read_bytes(), contents)))


def _module_file(module: str) -> Path | None:
    """Returns a module's file; None if it has none, or it is not found."""
    file = Path(*module.split(".")).with_suffix(".py")  # rewards are first imported from the working directory
    if file.is_file():
        return file
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    file = Path((spec and spec.origin) or "")
    return file if file.is_file() else None


def _model_digest(path: str) -> str:
    files = model_files(path)
    return f"{files[HUB_KEY]}@{files[COMMIT_KEY]}" if HUB_KEY in files else _digest(repr(files))


def _task_fields(task: Task) -> dict[str, Any] | None:
    """Returns a task's fields without its queries and reward, as JSON; None if they cannot be stored as JSON."""
    kind, excluded = type(task), ["train", "test", "validation", "reward"]
    if task.feedback is None:  # as in earlier versions
        excluded += ["feedback", "solved_feedback"]
    values = {field.name: getattr(task, field.name) for field in fields(task) if field.name not in excluded}
    is_json = all(isinstance(value, str | int | float | None) for value in values.values())
    if not is_json or "." in kind.__qualname__ or kind.__module__ == "__main__":
        return None
    return {"class": f"{kind.__module__}:{kind.__qualname__}", **values}


def public_task_fields(task: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the recorded fields of a task, with the feedback function's name instead of its code."""
    return task and {name: display_name(value) if name == "feedback" else value for name, value in task.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
