"""What a run is made from, recorded and compared: queries, models, tokenizers, templates and code."""

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cory_env.tasks import Query, make_task
from launch.console.errors import CommandError
from launch.run_folder.sources import Sources, _model, compare, sources_of, task_without_queries
from launch.training.comparable import check_sources, consequence
from launch.training.preflight import load_task
from policies.settings.settings import Settings, make_settings
from tests.cory_env.sample_tasks import reviews

ROWS: list[dict[str, object]] = [{"query": f"The film number {number} was", "want": "good"} for number in range(1, 21)]
VALUES = {
    **{"task": "custom", "data": "q.jsonl", "reward": "mine:score", "model": "m", "backend": "transformers"},
    **{"observer_prompt": "{query} {reference} {want}", "eval_queries": 1},
}


def write_rows(rows: list[dict[str, object]], name: str = "q.jsonl") -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path, small_model: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data, a reward and a model, which is the present one."""
    monkeypatch.chdir(tmp_path)
    write_rows(list(ROWS))
    Path("mine.py").write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    shutil.copytree(small_model, "m")
    return tmp_path


def sources(**changes: object) -> Sources:
    settings = make_settings({**VALUES, **changes})
    return sources_of(settings, *load_task(settings))


def differing(before: Sources, **changes: object) -> list[tuple[str, str]]:
    settings = make_settings({**VALUES, **changes})
    task, tokenizers = load_task(settings)
    return [
        (change.part, change.text) for change in compare(before, settings, task, sources_of(settings, task, tokenizers))
    ]


def test_what_is_the_same_elsewhere_or_in_another_form_is_no_change(folder: Path) -> None:
    before = sources()
    assert differing(before) == []
    elsewhere = folder / "elsewhere" / "other.csv"
    elsewhere.parent.mkdir()
    with elsewhere.open("w") as file:
        table = csv.DictWriter(file, ["want", "query"])
        table.writeheader()
        table.writerows(ROWS)
    shutil.move("m", "elsewhere/m")
    (folder / "elsewhere" / "m" / "README.md").write_text("Mine.")
    assert differing(before, data=str(elsewhere), model="elsewhere/m") == []


def test_it_is_written_and_read_again_and_a_damaged_file_is_named(folder: Path) -> None:
    made = sources()
    made.write(folder)
    assert Sources.read(folder) == made
    assert made.paths == {"q.jsonl": f"{folder}/q.jsonl", "m": f"{folder}/m", "mine:score": f"{folder}/mine.py"}
    assert "film" not in (folder / "sources.json").read_text()  # checksums alone
    (folder / "sources.json").write_text('{"queries": {')
    with pytest.raises(CommandError, match=r"sources\.json is damaged"):
        Sources.read(folder)
    (folder / "sources.json").write_text(
        json.dumps({**asdict(made), "queries": {"train": "AAAA"}})
    )  # another version's
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
        ([*ROWS[:9], OTHER, *ROWS[10:]], ["validation"]),
        ([*ROWS[:19], OTHER], ["test"]),
        ([*ROWS, OTHER], ["train"]),
        (ROWS[:-2], ["train", "validation", "test"]),
    ],
)
def test_splits_whose_queries_differ_are_named(
    folder: Path, rows: list[dict[str, object]], expected: list[str]
) -> None:
    before = sources()
    write_rows(rows)
    assert [part for part, _ in differing(before)] == expected


def test_held_out_data_is_named_and_so_is_where_the_run_had_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(ROWS[:4], "held.jsonl")
    before = sources(eval_data="held.jsonl")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    for name in ("m", "mine.py", "q.jsonl"):
        (folder / "elsewhere" / name).symlink_to(folder / name)
    write_rows([ROWS[0], OTHER, *ROWS[2:4]], "held.jsonl")
    assert differing(before, eval_data="held.jsonl") == [
        (
            "test",
            f"held.jsonl is not what training began with, {folder}/held.jsonl: its test queries differ (3 now, 3 then)",
        )
    ]


def test_a_row_of_objects_that_show_no_value_is_no_change() -> None:
    first, second = (Query(0, "This movie", {"object": object()}) for _ in range(2))
    assert first.checksum == second.checksum != Query(0, "This movie", {"object": 1}).checksum


def flip(name: str) -> Callable[[], None]:
    """Writes other numbers into a file of the same size and time."""

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
    ("change", "part", "text"),
    [
        (
            flip("transformer.wpe.weight"),
            "model",
            "The model m is not what training began with",
        ),
        (change_json("config.json", embd_pdrop=0.5), "model", "The model m"),
        (change_json("generation_config.json", eos_token_id=[0, 1]), "model", "The model m"),
        (drop_a_merge, "tokenizer", "The tokenizer of m is not what training began with"),
    ],
)
def test_a_model_or_tokenizer_that_was_replaced_is_named(
    folder: Path, change: Callable[[], None], part: str, text: str
) -> None:
    before = sources()
    change()
    (found,) = differing(before)
    assert found[0] == part and text in found[1]


def test_a_chat_template_counts_where_it_is_used(folder: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    Path("m/chat_template.jinja").write_text(template)
    plain, chat = sources(), sources(chat=True)
    Path("m/chat_template.jinja").write_text(f"{template}!")
    assert differing(plain) == []
    assert differing(chat, chat=True) == [("chat_template", "The chat template of m is not what training began with")]
    assert differing(plain, chat=True) == differing(chat) == []  # an evaluation may use it, or not


def test_one_of_two_models_that_was_replaced_is_named(folder: Path) -> None:
    shutil.copytree("m", "n")
    values = {"model": ["n", "m"], "average_period": None}
    before = sources(**values)
    flip("transformer.wpe.weight")()
    assert differing(before, **values) == [("model", "The model m is not what training began with")]


def test_a_hub_model_whose_commit_moved_is_told_of_and_another_one_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    before = sources()

    def at(name: str, commit: str) -> Sources:
        cached = folder / "hub" / f"models--owner--{name}"
        (cached / "refs").mkdir(parents=True, exist_ok=True)
        (cached / "refs" / "main").write_text(commit)
        shutil.copytree("m", cached / "snapshots" / commit)
        model = f"owner/{name}@{commit}"
        assert _model(f"owner/{name}") == model
        return replace(before, llms={"llm_1": replace(before.llms["llm_1"], model=model)})

    def changes(old: Sources, new: Sources, name: str) -> list[tuple[str, str]]:
        settings = Settings(model=f"owner/{name}", num_agents=1)
        return [
            (change.part, change.text)
            for change in compare(old, settings, make_task("imdb"), new)
            if change.part in ("model", "commit")
        ]

    first, moved, other = at("model", "1" * 40), at("model", "2" * 40), at("other", "1" * 40)
    assert changes(first, first, "model") == []
    assert changes(first, moved, "model") == [
        ("commit", "The model owner/model has moved on the hub from commit 1111111 to 2222222")
    ]
    assert changes(first, other, "other") == [("model", "The model owner/other is not what training began with")]
    assert changes(first, before, "m") == [("model", "The model owner/m is not what training began with")]


def test_code_of_a_reward_a_credit_scheme_and_a_task_is_told_of_and_does_not_stop_a_resume(folder: Path) -> None:
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
    assert differing(before, **values) == []
    for name in ("mine.py", "their_task.py", "their_credit.py"):
        Path(name).write_text(Path(name).read_text() + "# corrected\n")
    assert differing(before, **values) == [
        ("function", f"The code of {name} has changed")
        for name in ("mine:score", "their_credit:pay", "their_task:reviews")
    ]
    settings = make_settings({**VALUES, **values})
    found = check_sources(before, settings, settings.make_task(), sources(**values), "run", allow=False)
    assert next(consequence(change, 5) for change in found) == (
        "Warning: The code of mine:score has changed. The figures up to update 5 are not comparable with later ones."
    )


def test_what_a_setting_of_a_reward_names_belongs_to_its_code(folder: Path) -> None:
    Path("words.txt").write_text("good")
    Path("mine.py").write_text("def score(completions, words):\n    return [0.0 for _ in completions]\n")
    before = sources(reward="mine:score?words=words.txt")
    Path("words.txt").write_text("bad")
    assert differing(before, reward="mine:score?words=words.txt") == [
        ("function", "The code of mine:score?words=words.txt has changed")
    ]


def test_templates_of_the_task_count(folder: Path) -> None:
    before = sources()
    assert before.task is not None
    older = Sources(**{**before.__dict__, "task": {**before.task, "prompt_template": "Q: {query}"}})
    assert differing(older) == [("prompts", "The task's prompt_template changed")]


def test_a_resume_is_refused_with_a_sentence_unless_changes_are_allowed(folder: Path) -> None:
    before = sources()
    write_rows([*ROWS[:9], OTHER, *ROWS[10:18], OTHER, ROWS[19]])
    settings = make_settings(VALUES)
    task, now = settings.make_task(), sources()
    with pytest.raises(CommandError, match=r"^run cannot resume unchanged\. q\.jsonl is not .* --allow-changes\.$"):
        check_sources(before, settings, task, now, "run", allow=False)
    allowed = check_sources(before, settings, task, now, "run", allow=True)
    assert [consequence(change, 5).partition("). ")[2] for change in allowed] == [
        "The training figures up to update 5 are not comparable with later ones.",
        "The held-out figures up to update 5 are not comparable with later ones, and neither is `best`.",
    ]
    later = now.continuing(before, settings, allowed, 5)
    assert differing(later) == []
    assert [(change["update"], change["part"]) for change in later.changes] == [(5, "train"), (5, "validation")]


@pytest.mark.parametrize("task", ["arithmetic", "code", "drafts", "imdb"])
def test_a_task_is_made_again_without_its_queries(task: str) -> None:
    settings = make_settings(
        {"task": task, "backend": "transformers", "max_prompt_tokens": 200, "max_response_tokens": 50}
    )
    whole, tokenizers = load_task(settings)
    kept = Sources(**json.loads(json.dumps(asdict(sources_of(settings, whole, tokenizers)))))
    alone = task_without_queries(kept)
    assert alone is not None and type(alone) is type(whole) and not list(alone.all_queries())
    query = whole.train[0]
    assert alone.prompt(query) == whole.prompt(query)
    assert alone.observer_prompt(query, [" one\ntwo ", " three"]) == whole.observer_prompt(
        query, [" one\ntwo ", " three"]
    )


def test_a_task_that_cannot_be_made_again_is_none(folder: Path) -> None:
    made = sources()
    assert made.task is not None
    gone = Sources(**{**made.__dict__, "task": {**made.task, "class": "gone.module:Task"}})
    assert task_without_queries(gone) is None and task_without_queries(None) is None
