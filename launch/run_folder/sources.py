"""What a run is made from: `sources.json` in its folder, and what is no longer the same.

paths            by names in the settings, such as `questions.jsonl`: where the file or folder lay
task             the class of the task, and its templates; without the queries
queries          by split, how many there are, and a digest of them with their columns, in order
llms             by LLM, a digest of its model's files, or the id and commit of a hub model; digests of its tokenizer
                 and, if `chat` is set, of its chat template
functions        name and digest of the code of the reward (each of several), a credit scheme and a task of the user's
changes          what differed at a resume that allowed it, and after which update

What it does not see: files that a reward's code reads or imports, and what `policies.models.fingerprint` names.
"""

import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import TypeAdapter, ValidationError

from cory_env.functions import parse_spec, search_working_folder
from cory_env.pickled import display_name, is_pickled
from cory_env.rewarding.spec import parse_sum
from cory_env.tasks import Task
from cory_env.tasks.task import Split
from cory_env.tokenizer import fingerprint
from launch.console.errors import CommandError
from launch.run_folder.journal import atomic_write
from launch.run_folder.layout import SOURCES
from launch.run_folder.locations import absolute_paths, module_file, path_in
from policies.models.fingerprint import COMMIT, HUB, model_files
from policies.settings.settings import Settings, Tokenizers

SPLITS: dict[Split, str] = {"train": "training", "validation": "validation", "test": "test"}
"""What messages call the queries of a split."""


class Change(NamedTuple):
    """A part of what a run is made from that is no longer the same."""

    part: str
    """`train`, `validation` or `test` of the queries; `prompts`, `model`, `tokenizer`, `chat_template`, `function` or
    `commit`."""
    text: str
    """A sentence without its full stop."""

    @property
    def is_refused(self) -> bool:
        """Whether training resumes only if the user allows it. Rewards may be corrected between two resumes."""
        return self.part not in ("function", "commit")

    @property
    def is_of_task(self) -> bool:
        """Whether it is of what is asked and rewarded, not of who answers."""
        return self.part in (*SPLITS, "prompts", "function")

    @property
    def figures(self) -> str:
        """The figures that do not compare across the change."""
        if self.part == "train":
            return "training figures"
        return "held-out figures" if self.part in SPLITS else "figures"


@dataclass(frozen=True)
class Queries:
    """The queries of a split."""

    count: int
    digest: str


@dataclass(frozen=True)
class LLM:
    """What an LLM starts from."""

    model: str
    """A digest of its files, or `ID@COMMIT` on the hub."""
    tokenizer: str
    chat_template: str | None
    """None without `chat`."""


@dataclass(frozen=True)
class Sources:
    """What a run is made from; the module says what each field holds."""

    paths: dict[str, str]
    task: dict[str, Any] | None
    queries: dict[str, Queries]
    llms: dict[str, LLM]
    functions: list[list[str | None]]
    changes: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Reads `sources.json` in a folder; None if there is none.

        Raises:
            CommandError: it is damaged, or has another form.
        """
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

    def continuing(self, before: Self, settings: Settings, changes: Sequence[Change], update: int) -> Self:
        """Returns what a run is made from that resumes after an update.

        Args:
            before: what it was made from.
            settings: as they are written down.
            changes: what the user has allowed to differ.
            update: the updates that are done.
        """
        paths = absolute_paths(settings, function_names(settings, settings.reward_spec))
        noted = [{"update": update, "part": change.part, "text": change.text} for change in changes]
        return replace(self, paths={**before.paths, **paths}, changes=[*before.changes, *noted])


def sources_of(settings: Settings, task: Task, tokenizers: Tokenizers) -> Sources:
    """Returns what a run is made from, as it is now.

    Args:
        settings: whose files and folders are there (`launch.run_folder.locations.located`).
        task: of these settings.
        tokenizers: of these settings.

    Raises:
        OSError: a model's file cannot be read.
    """
    names = list(function_names(settings, task.reward))
    return Sources(
        paths=absolute_paths(settings, names),
        task=_prompts(task),
        queries=queries_of(task),
        llms=llms_of(settings, tokenizers),
        functions=[[display_name(name), function_digest(name)] for name in names],
        changes=[],
    )


def queries_of(task: Task) -> dict[str, Queries]:
    """Returns what identifies the queries of each split, in their order."""
    sums = {split: [query.checksum for query in task.queries(split)] for split in task.splits}
    return {split: Queries(count=len(each), digest=_digest(repr(each))) for split, each in sums.items()}


def llms_of(settings: Settings, tokenizers: Tokenizers) -> dict[str, LLM]:
    """Returns what each LLM starts from, as of `sources_of`."""
    models = {path: _model(path) for path in dict.fromkeys(settings.model_paths.values())}
    rules = {key: fingerprint(each) for key, each in {id(each): each for each in tokenizers.values()}.items()}
    return {
        llm: LLM(
            model=models[path],
            tokenizer=rules[id(tokenizers[llm])],
            chat_template=_digest(repr(tokenizers[llm].chat_template)) if settings.chat else None,
        )
        for llm, path in settings.model_paths.items()
    }


def compare(before: Sources, settings: Settings, task: Task, now: Sources) -> list[Change]:
    """Returns what differs from what a run was made from.

    Args:
        before: as the run's folder has it.
        settings: with the names that messages are to use.
        task: of these settings.
        now: what they are made from now.
    """
    changes = []
    for split, kind in SPLITS.items():
        old, new = before.queries.get(split), now.queries.get(split)
        if old != new:
            data = (settings.eval_data if split != "train" else None) or settings.data
            counts = f"{new.count if new else 0} now, {old.count if old else 0} then"
            source = _changed(data or f"The data of task {task.name}", before)
            changes.append(Change(split, f"{source}: its {kind} queries differ ({counts})"))
    templates = [name for name, text in (before.task or {}).items() if text != (now.task or {}).get(name)]
    if templates:
        changes.append(Change("prompts", f"The task's {', '.join(templates)} changed"))
    changes += compare_llms(before, settings, now.llms)
    for (name, digest), (_, other) in zip(before.functions, now.functions, strict=False):
        if digest != other:
            changes.append(Change("function", f"The code of {name} has changed"))
    return changes


def compare_llms(before: Sources, settings: Settings, now: Mapping[str, LLM]) -> list[Change]:
    """Returns what differs of the LLMs' models, tokenizers and chat templates, as of `compare`; of each model once."""
    changes: dict[Change, None] = {}
    for llm, name in settings.models.items():
        if llm not in before.llms:  # of a longer chain than the run's
            continue
        old, new = before.llms[llm], now[llm]
        (hub, at, commit), (new_hub, _, new_commit) = old.model.partition("@"), new.model.partition("@")
        if at and hub == new_hub and commit != new_commit:
            text = f"The model {name} has moved on the hub from commit {commit:.7} to {new_commit:.7}"
            changes[Change("commit", text)] = None
        elif old.model != new.model:
            changes[Change("model", f"The model {_changed(name, before)}")] = None
        if old.tokenizer != new.tokenizer:
            changes[Change("tokenizer", f"The tokenizer of {_changed(name, before)}")] = None
        templates = {old.chat_template, new.chat_template}
        if None not in templates and len(templates) > 1:
            changes[Change("chat_template", f"The chat template of {_changed(name, before)}")] = None
    return list(changes)


def task_without_queries(sources: Sources | None) -> Task | None:
    """Returns a run's task without any queries, which is what answering others needs; None where it is not known."""
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


def function_names(settings: Settings, reward: str | None) -> Iterator[str]:
    """Yields the names of the functions that a run calls: those of its reward, if there is one, then others of the
    user's own.
    """
    yield from (name for name, _ in parse_sum(reward)) if reward else ()
    yield from (name for name in (settings.credit, settings.task) if ":" in name)


def function_digest(name: str) -> str | None:
    """Returns a digest of a function's code: of its module's file, and of what its settings name; None: not known."""
    if is_pickled(name):
        return _digest(name)
    file = module_file(name)
    if file is None:
        return None
    named = [Path(value) for value in parse_spec(name)[2].values()]
    beside = [_model(str(path)) if path.is_dir() else path.read_bytes() for path in named if path.exists()]
    return _digest(repr((file.read_bytes(), beside)))


def _model(path: str) -> str:
    files = model_files(path)
    return f"{files[HUB]}@{files[COMMIT]}" if HUB in files else _digest(repr(files))


def _prompts(task: Task) -> dict[str, Any] | None:
    """Returns what makes a task beside its queries and reward, as JSON; None where that cannot be."""
    kind, left_out = type(task), ("train", "test", "validation", "reward")
    values = {field.name: getattr(task, field.name) for field in fields(task) if field.name not in left_out}
    plain = all(isinstance(value, str | int | float | None) for value in values.values())
    if not plain or "." in kind.__qualname__ or kind.__module__ == "__main__":
        return None
    return {"class": f"{kind.__module__}:{kind.__qualname__}", **values}


def _changed(name: str, before: Sources) -> str:
    """Returns the beginning of a sentence on data or a model that differs from what a run began with."""
    path = path_in(name)
    recorded = before.paths.get(path)
    is_elsewhere = recorded is not None and Path(path).exists() and os.path.abspath(path) != recorded
    return f"{name} is not what training began with{f', {recorded}' if is_elsewhere else ''}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
