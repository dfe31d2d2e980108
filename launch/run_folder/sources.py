"""What a run is made from: `sources.json` in its folder, and what is no longer the same.

paths            by names in the settings, such as `questions.jsonl`: where the file or folder lay
task             the class of the task, and its templates; without the queries
queries          by split, a checksum of each query with its columns, in order
llms             by LLM, digests of its model's files, or the commit of a hub model; of its tokenizer; of its chat
                 template, if `chat` is set
functions        name and digest of the code of the reward (each of several), a credit scheme and a task of the user's
changes          what differed at a resume that allowed it, and after which update

What it does not see: files that a reward's code reads or imports, and what `policies.models.fingerprint` names.
"""

import base64
import hashlib
import importlib
import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypedDict

from cory_env.named import parse_spec, search_working_folder
from cory_env.pickled import is_pickled, shown
from cory_env.rewarding.spec import parse_sum
from cory_env.tasks import Task
from cory_env.tasks.task import Split
from cory_env.tokenizer import fingerprint
from launch.console.errors import CommandError
from launch.run_folder.journal import replace_text
from launch.run_folder.layout import SOURCES
from launch.run_folder.locations import absolute_paths, module_file, path_in
from policies.models.fingerprint import COMMIT, HUB, model_files
from policies.settings.settings import Settings, Tokenizers

SPLITS: dict[Split, str] = {"train": "training", "validation": "validation", "test": "test"}
"""What messages call the queries of a split."""
LONGEST_TEXT = 60
"""Characters of a query that messages show."""


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


class LLM(TypedDict):
    """What an LLM starts from."""

    files: dict[str, str]
    """As of `model_files`."""
    tokenizer: str
    chat_template: str | None
    """None without `chat`."""


@dataclass(frozen=True)
class Sources:
    """What a run is made from; the module says what each field holds."""

    paths: dict[str, str]
    task: dict[str, Any] | None
    queries: dict[str, list[int]]
    llms: dict[str, LLM]
    functions: list[list[str | None]]
    changes: tuple[dict[str, Any], ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Reads `sources.json` in a folder; None where an earlier version made the run.

        Raises:
            CommandError: it is damaged.
        """
        file = folder / SOURCES
        if not file.is_file():
            return None
        try:
            return cls.from_json(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise CommandError(
                f"{file} is damaged ({error}). Restore it, or remove it and resume with --allow-changes."
            ) from error

    def write(self, folder: Path) -> None:
        """Writes `sources.json`, in one step."""
        replace_text(folder / SOURCES, json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Makes it of what `to_json` gave."""
        queries = {split: list(array("I", base64.b64decode(text))) for split, text in values["queries"].items()}
        return cls(**{**values, "queries": queries, "changes": tuple(values["changes"])})

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON can hold it: checksums of queries as 32-bit numbers in base64."""
        queries = {split: base64.b64encode(array("I", sums)).decode() for split, sums in self.queries.items()}
        return {**asdict(self), "queries": queries, "changes": list(self.changes)}

    def continuing(self, before: Self, settings: Settings, changes: Sequence[Change], update: int) -> Self:
        """Returns what a run is made from that resumes after an update.

        Args:
            before: what it was made from.
            settings: as they are written down.
            changes: what the user has allowed to differ.
            update: the updates that are done.
        """
        paths = absolute_paths(settings, function_names(settings, settings.whole_reward))
        noted = [{"update": update, "part": change.part, "text": change.text} for change in changes]
        return replace(self, paths={**before.paths, **paths}, changes=(*before.changes, *noted))


def sources_of(settings: Settings, task: Task, tokenizers: Tokenizers) -> Sources:
    """Returns what a run is made from, as it is now.

    Args:
        settings: whose files and folders are there (`launch.run_folder.locations.located`).
        task: of these settings.
        tokenizers: of these settings.

    Raises:
        OSError: a model's file cannot be read.
    """
    return Sources(
        paths=absolute_paths(settings, function_names(settings, task.reward)),
        task=_prompts(task),
        queries=queries_of(task),
        llms=llms_of(settings, tokenizers),
        functions=[[shown(name), function_digest(name)] for name in function_names(settings, task.reward)],
    )


def queries_of(task: Task) -> dict[str, list[int]]:
    """Returns the checksums of the queries of each split, in their order."""
    return {split: [query.checksum for query in task.queries(split)] for split in task.splits}


def llms_of(settings: Settings, tokenizers: Tokenizers) -> dict[str, LLM]:
    """Returns what each LLM starts from, as of `sources_of`."""
    files = {path: model_files(path) for path in dict.fromkeys(settings.model_paths.values())}
    rules = {key: fingerprint(each) for key, each in {id(each): each for each in tokenizers.values()}.items()}
    return {
        llm: LLM(
            files=files[path],
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
    return [
        *_of_queries(before, settings, task, now),
        *_of_prompts(before, now),
        *compare_llms(before, settings, now.llms),
        *(
            Change("function", f"The code of {name} has changed")
            for (name, digest), (_, other) in zip(before.functions, now.functions, strict=False)
            if digest != other
        ),
    ]


def compare_llms(before: Sources, settings: Settings, now: Mapping[str, LLM]) -> list[Change]:
    """Returns what differs of the LLMs' models, tokenizers and chat templates, as of `compare`; of each model once."""
    changes: dict[Change, None] = {}
    for llm, name in settings.models.items():
        if llm not in before.llms:  # of a longer chain than the run's
            continue
        old, new = before.llms[llm], now[llm]
        files, new_files = old["files"], new["files"]
        if files == new_files:
            pass
        elif HUB in files and files[HUB] == new_files.get(HUB):
            text = f"The model {name} has moved on the hub from commit {files[COMMIT]:.7} to {new_files[COMMIT]:.7}"
            changes[Change("commit", text)] = None
        else:
            names = files.keys() | new_files.keys()
            differing = sorted(file for file in names if files.get(file) != new_files.get(file))
            verb = "differ" if len(differing) > 1 else "differs"
            which = "" if HUB in names else f": its {', '.join(differing[:3])} {verb}"
            changes[Change("model", f"The model {_named(name, before)}{which}")] = None
        if old["tokenizer"] != new["tokenizer"]:
            changes[Change("tokenizer", f"The tokenizer of {_named(name, before)}")] = None
        if None not in (templates := (old["chat_template"], new["chat_template"])) and templates[0] != templates[1]:
            changes[Change("chat_template", f"The chat template of {_named(name, before)}")] = None
    return list(changes)


def task_alone(sources: Sources | None) -> Task | None:
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
    beside = [model_files(str(path)) if path.is_dir() else path.read_bytes() for path in named if path.exists()]
    return _digest(repr((file.read_bytes(), beside)))


def _prompts(task: Task) -> dict[str, Any] | None:
    """Returns what makes a task beside its queries and reward, as JSON; None where that cannot be."""
    kind, left_out = type(task), ("train", "test", "validation", "reward")
    values = {field.name: getattr(task, field.name) for field in fields(task) if field.name not in left_out}
    plain = all(isinstance(value, str | int | float | None) for value in values.values())
    if not plain or "." in kind.__qualname__ or kind.__module__ == "__main__":
        return None
    return {"class": f"{kind.__module__}:{kind.__qualname__}", **values}


def _of_queries(before: Sources, settings: Settings, task: Task, now: Sources) -> Iterator[Change]:
    """Yields the first query of each split that differs."""
    for split in SPLITS:
        old, new = before.queries.get(split, []), now.queries.get(split, [])
        if old == new:
            continue
        data = (settings.eval_data if split != "train" else None) or settings.data
        source = _named(data or f"The data of task {task.name}", before)
        at = next((at for at, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
        if at is None and len(new) < len(old):
            yield Change(split, f"{source}: {len(new)} {SPLITS[split]} queries, not {len(old)}")
            continue
        at = len(old) if at is None else at
        text = " ".join(task.queries(split)[at].text.split())
        text = text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."
        what = "is new" if at == len(old) else "differs"
        yield Change(split, f"{source}: {SPLITS[split]} query {at + 1}, {text!r}, {what}")


def _of_prompts(before: Sources, now: Sources) -> Iterator[Change]:
    old, new = before.task or {}, now.task or {}
    names = [name for name in old if old[name] != new.get(name)]
    if names:
        yield Change("prompts", f"The task's {', '.join(names)} changed")


def _named(name: str, before: Sources) -> str:
    """Returns the beginning of a sentence on data or a model that differs from what a run began with."""
    path = path_in(name)
    recorded = before.paths.get(path)
    elsewhere = recorded is not None and Path(path).exists() and os.path.abspath(path) != recorded
    return f"{name} is not what training began with{f', {recorded}' if elsewhere else ''}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
