"""Recording and comparing a run's sources: queries, models, tokenizers, templates and code."""

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cory_env.tasks import Query
from cory_env.text_envs.task import make_env_task
from launch.console.errors import CommandError
from launch.run_folder.locations import absolute_paths
from launch.run_folder.sources import (
    Sources,
    _model_digest,
    collect_sources,
    find_changes,
    public_task_fields,
    restore_task,
)
from launch.training.preflight import load_task
from launch.training.source_check import check_sources, incomparable_warning
from tests.cory_env.sample_tasks import reviews
from tests.paper import make_settings

ROWS: list[dict[str, object]] = [{"query": f"The film number {number} was", "want": "good"} for number in range(1, 21)]
VALUES = {
    **{"task": "custom", "data": "q.jsonl", "reward": "mine:score", "model": "m", "backend": "transformers"},
    **{"observer_prompt": "{query} {reference} {want}", "eval_queries": 1},
}


def write_rows(rows: list[dict[str, object]], name: str = "q.jsonl") -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path, small_model: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with data, a reward and a model."""
    monkeypatch.chdir(tmp_path)
    write_rows(list(ROWS))
    Path("mine.py").write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    shutil.copytree(small_model, "m")
    return tmp_path


def sources(**changes: object) -> Sources:
    settings = make_settings({**VALUES, **changes})
    return collect_sources(settings, *load_task(settings))


def list_changes(before: Sources, **changes: object) -> list[tuple[str, str]]:
    settings = make_settings({**VALUES, **changes})
    return [(change.part, change.text) for change in find_changes(before, sources(**changes), settings)]


def test_moved_or_reformatted_sources_are_no_change(folder: Path) -> None:
    before = sources()
    assert list_changes(before) == []
    elsewhere = folder / "elsewhere" / "other.csv"
    elsewhere.parent.mkdir()
    with elsewhere.open("w") as file:
        table = csv.DictWriter(file, ["want", "query"])
        table.writeheader()
        table.writerows(ROWS)
    shutil.move("m", "elsewhere/m")
    (folder / "elsewhere" / "m" / "README.md").write_text("Mine.")
    assert list_changes(before, data=str(elsewhere), model="elsewhere/m") == []


def test_a_source_with_a_name_longer_than_a_path_is_no_file() -> None:
    names = "+".join(f"set_{number}" for number in range(100))
    assert not absolute_paths(make_settings({**VALUES, "data": f"reasoning_gym:{names}?size=500"})).keys() - {"m"}


def test_sources_round_trip_and_a_damaged_file_is_reported(folder: Path) -> None:
    recorded = sources()
    recorded.write(folder)
    assert Sources.read(folder) == recorded
    assert recorded.paths == {"q.jsonl": f"{folder}/q.jsonl", "m": f"{folder}/m"}
    assert "film" not in (folder / "sources.json").read_text()  # only checksums
    (folder / "sources.json").write_text('{"queries": {')
    with pytest.raises(CommandError, match=r"sources\.json is damaged"):
        Sources.read(folder)
    (folder / "sources.json").write_text(
        json.dumps({**asdict(recorded), "queries": {"train": "AAAA"}})
    )  # of another version
    with pytest.raises(CommandError, match=r"sources\.json is damaged, or another version .*--allow-changes\.$"):
        Sources.read(folder)
    (folder / "sources.json").unlink()
    assert Sources.read(folder) is None


OTHER: dict[str, object] = {"query": "Another book was", "want": "bad"}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{**ROWS[0], "want": "bad"}, *ROWS[1:]], ["train"]),
        ([*ROWS[:3], ROWS[4], ROWS[3], *ROWS[5:]], ["train"]),
        ([*ROWS[:2], OTHER, *ROWS[3:]], ["validation"]),
        ([*ROWS[:17], OTHER, *ROWS[18:]], ["test"]),
        ([*ROWS, OTHER], ["test"]),
        (ROWS[2:], ["train", "validation", "test"]),
    ],
)
def test_splits_with_different_queries_are_reported(
    folder: Path, rows: list[dict[str, object]], expected: list[str]
) -> None:
    before = sources()
    write_rows(rows)
    assert [part for part, _ in list_changes(before)] == expected


def test_changed_held_out_data_is_reported_with_its_recorded_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(ROWS[:4], "held.jsonl")
    before = sources(eval_data="held.jsonl")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    for name in ("m", "mine.py", "q.jsonl"):
        (folder / "elsewhere" / name).symlink_to(folder / name)
    write_rows([ROWS[0], OTHER, *ROWS[2:4]], "held.jsonl")
    assert list_changes(before, eval_data="held.jsonl") == [
        (
            "test",
            f"held.jsonl has changed since training started with {folder}/held.jsonl: its test queries differ "
            "(3 now, 3 then)",
        )
    ]


def test_objects_without_a_readable_value_do_not_change_a_checksum() -> None:
    first, second = (Query(0, "This movie", {"object": object()}) for _ in range(2))
    assert first.checksum == second.checksum != Query(0, "This movie", {"object": 1}).checksum


def flip(name: str) -> Callable[[], None]:
    """Returns a function that changes a tensor in the model's file."""

    def change() -> None:
        file = Path("m/model.safetensors")
        tensors = load_file(file)
        tensors[name] = tensors[name] + 1
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def change_json(file: str, **values: object) -> Callable[[], None]:
    def change() -> None:
        path = Path("m") / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def drop_a_merge() -> None:
    path = Path("m/tokenizer.json")
    rules = json.loads(path.read_text())
    rules["model"]["merges"].pop()
    path.write_text(json.dumps(rules))


@pytest.mark.parametrize(
    ("change", "part", "name"),
    [
        (flip("transformer.wpe.weight"), "model", "model m"),
        (change_json("config.json", embd_pdrop=0.5), "model", "model m"),
        (change_json("generation_config.json", eos_token_id=[0, 1]), "model", "model m"),
        (drop_a_merge, "tokenizer", "tokenizer of m"),
    ],
)
def test_a_replaced_model_or_tokenizer_is_reported(
    folder: Path, change: Callable[[], None], part: str, name: str
) -> None:
    before = sources()
    change()
    assert list_changes(before) == [(part, f"The {name} has changed since training started")]  # once for two policies


def test_a_chat_template_is_compared_only_if_used(folder: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    Path("m/chat_template.jinja").write_text(template)
    plain, chat = sources(), sources(chat=True)
    Path("m/chat_template.jinja").write_text(f"{template}!")
    assert list_changes(plain) == []
    assert list_changes(chat, chat=True) == [
        ("chat_template", "The chat template of m has changed since training started")
    ]
    assert list_changes(plain, chat=True) == list_changes(chat) == []  # an evaluation may or may not use it


def test_only_the_replaced_one_of_two_models_is_reported(folder: Path) -> None:
    shutil.copytree("m", "n")
    values = {"model": ["n", "m"], "average_period": None}
    before = sources(**values)
    flip("transformer.wpe.weight")()
    assert list_changes(before, **values) == [("model", "The model m has changed since training started")]


def test_a_new_commit_of_a_hub_model_is_reported_as_a_commit_and_another_model_as_a_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    before = sources(num_agents=1)

    def hub_sources(name: str, commit: str) -> Sources:
        cached = folder / "hub" / f"models--owner--{name}"
        (cached / "refs").mkdir(parents=True, exist_ok=True)
        (cached / "refs" / "main").write_text(commit)
        shutil.copytree("m", cached / "snapshots" / commit)
        model = _model_digest(f"owner/{name}")
        assert model == f"owner/{name}@{commit}"
        return replace(before, llms={"llm_1": replace(before.llms["llm_1"], model=model)})

    first = hub_sources("model", "1" * 40)
    moved, other = hub_sources("model", "2" * 40), hub_sources("other", "1" * 40)
    settings = make_settings({**VALUES, "num_agents": 1}).model_copy(update={"model": "owner/model"})
    assert find_changes(first, first, settings) == []
    assert find_changes(first, moved, settings) == [
        ("commit", "The model owner/model has moved on the hub from commit 1111111 to 2222222")
    ]
    for old, new in ((first, other), (first, before)):
        assert find_changes(old, new, settings) == [
            ("model", "The model owner/model has changed since training started")
        ]


def test_changed_code_of_rewards_credit_and_task_is_reported_without_blocking_a_resume(folder: Path) -> None:
    task = f"from {reviews.__module__} import reviews\n"
    scheme = "def pay(rewards, values):\n    return rewards\n"
    for name, text in {"their_task.py": task, "their_credit.py": scheme}.items():
        Path(name).write_text(text)
    values: dict[str, object] = {
        "task": "their_task:reviews",
        "data": None,
        "observer_prompt": None,
        "credit": "their_credit:pay",
    }
    values["reward"] = ["mine:score", "cory_env.rewards.answer:last_is_right"]
    before = sources(**values)
    assert list_changes(before, **values) == []
    for name in ("mine.py", "their_task.py", "their_credit.py"):
        Path(name).write_text(Path(name).read_text() + "# corrected\n")
    assert list_changes(before, **values) == [
        ("function", f"The code of {name} changed since training started")
        for name in ("mine:score", "their_credit:pay", "their_task:reviews")
    ]
    changes = check_sources(before, sources(**values), make_settings({**VALUES, **values}), "run", allow=False)
    assert incomparable_warning(changes[0], 5) == (
        "Warning: The code of mine:score changed since training started. Metrics up to update 5 are not comparable "
        "with later ones."
    )


def test_files_in_a_reward_s_settings_belong_to_its_code(folder: Path) -> None:
    Path("words.txt").write_text("good")
    Path("mine.py").write_text("def score(completions, words):\n    return [0.0 for _ in completions]\n")
    before = sources(reward="mine:score?words=words.txt")
    Path("words.txt").write_text("bad")
    assert list_changes(before, reward="mine:score?words=words.txt") == [
        ("function", "The code of mine:score?words=words.txt changed since training started")
    ]


def test_changed_templates_of_the_task_are_reported(folder: Path) -> None:
    before = sources()
    assert before.task is not None
    older = Sources(**{**before.__dict__, "task": {**before.task, "prompt_template": "Q: {query}"}})
    assert list_changes(older) == [("prompts", "The task's prompt_template changed since training started")]


@pytest.mark.parametrize(("then", "now"), [(None, 1.0), (1.0, None)])
def test_a_change_to_or_from_none_is_reported(folder: Path, then: float | None, now: float | None) -> None:
    recorded, settings = sources(), make_settings(VALUES)
    assert recorded.task is not None
    before, after = (replace(recorded, task={**recorded.task, "solved_at": value}) for value in (then, now))
    changes = [("prompts", "The task's solved_at changed since training started")]
    assert find_changes(before, after, settings) == changes


def test_a_task_that_can_no_longer_be_recorded_and_unreadable_code_are_reported(folder: Path) -> None:
    before, settings = sources(), make_settings(VALUES)
    changes = find_changes(before, replace(before, task=None, functions=[["mine:score", None]]), settings)
    assert [part for part, _ in changes] == ["prompts", "function"]


def test_a_resume_is_rejected_unless_changes_are_allowed(folder: Path) -> None:
    before = sources()
    write_rows([*ROWS[:2], OTHER, *ROWS[3:18], OTHER, ROWS[19]])
    now, settings = sources(), make_settings(VALUES)
    with pytest.raises(
        CommandError, match=r"^run cannot resume unchanged\. q\.jsonl has changed .* --allow-changes\.$"
    ):
        check_sources(before, now, settings, "run", allow=False)
    allowed = check_sources(before, now, settings, "run", allow=True)
    later = now.after_resume(before, allowed, 5)
    assert list_changes(later) == []
    assert [(change["update"], change["part"]) for change in later.changes] == [(5, "train"), (5, "validation")]


@pytest.mark.parametrize("task", ["arithmetic", "code", "drafts", "imdb"])
def test_a_task_is_restored_without_its_queries(task: str) -> None:
    settings = make_settings(
        {"task": task, "backend": "transformers", "max_prompt_tokens": 200, "max_response_tokens": 50}
    )
    original, tokenizers = load_task(settings)
    stored = Sources(**json.loads(json.dumps(asdict(collect_sources(settings, original, tokenizers)))))
    restored = restore_task(stored)
    assert restored is not None and type(restored) is type(original) and not list(restored.all_queries())
    query = original.train[0]
    assert restored.prompt(query) == original.prompt(query)
    assert restored.observer_prompt(query, [" one\ntwo ", " three"]) == original.observer_prompt(
        query, [" one\ntwo ", " three"]
    )


def test_a_task_that_cannot_be_restored_is_none(folder: Path) -> None:
    recorded = sources()
    assert recorded.task is not None
    missing = Sources(**{**recorded.__dict__, "task": {**recorded.task, "class": "gone.module:Task"}})
    assert restore_task(missing) is None and restore_task(None) is None


def test_feedback_is_recorded_with_its_code_and_absent_otherwise(folder: Path) -> None:
    Path("hints.py").write_text("def hint(completions):\n    return [None for _ in completions]\n")
    plain, before = sources(), sources(feedback="hints:hint")
    assert plain.task is not None and before.task is not None
    assert before.task.items() - plain.task.items() == {
        ("feedback", "hints:hint"),
        ("solved_feedback", "Nothing to correct."),
    }
    assert [name for name, _ in before.functions] == ["mine:score", "hints:hint"]
    task = restore_task(before)
    assert task is not None and task.feedback == "hints:hint"
    Path("hints.py").write_text("def hint(completions):\n    return ['no' for _ in completions]\n")
    (change,) = list_changes(before, feedback="hints:hint")
    assert change == ("function", "The code of hints:hint changed since training started")


@pytest.mark.parametrize("env", ["games:Game", "trl:games:Game?agents=a,b"])
def test_the_code_of_an_environment_is_recorded(env: str, folder: Path) -> None:
    settings = make_settings({"task": "custom", "env": env, "backend": "transformers"})
    task = make_env_task(env, 4)
    records = []
    for total in (1, 2):
        Path("games.py").write_text(f"class Game:\n    total = {total}\n")
        records.append(collect_sources(settings, task, {}).functions)
    assert [name for name, _ in records[0]] == [env] and records[0] != records[1]


def test_the_recorded_code_of_a_feedback_function_from_python_is_not_published(folder: Path) -> None:
    def hint(completions: list[str]) -> list[str | None]:
        return [None] * len(completions)

    fields = public_task_fields(sources(feedback=hint).task)
    assert fields is not None and len(fields["feedback"]) < 60 and "hint" in fields["feedback"]
    assert public_task_fields(None) is None
