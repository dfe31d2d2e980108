"""The model of the task drafts: its documents, its tokenizer, and that it does what its card says."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cory_env.tasks.drafts import draw_queries, is_working, read, working
from recipes import command, drafts
from recipes.command import main
from recipes.drafts import (
    EOS,
    Documents,
    DraftsRecipe,
    batch,
    learning_rate,
    make_tokenizer,
    measure,
    orthogonal,
    spoilt,
)

MODEL = command.BUNDLED / command.DRAFTS
FIGURES = json.loads((MODEL / "figures.json").read_text(encoding="utf-8"))


def test_no_query_of_the_task_is_among_the_documents_and_every_answer_is_right() -> None:
    documents = Documents(DraftsRecipe(seen=0.5, working=0.4, draft_working=0.6, wrong_working=0.3, wrong_answer=0.6))
    task = {tuple(sorted(read(query.text))) for split in draw_queries() for query in split}
    kinds = {"bare": 0, "working": 0, "right draft": 0, "wrong draft": 0}
    for _ in range(2000):
        (before, _), *others = documents.draw()
        terms = read(before.rstrip("=~"))
        assert tuple(sorted(terms)) not in task
        answer, right = str(sum(terms)), {str(sum(terms)), working(terms)}
        if before.endswith("="):
            kinds["working" if is_working(others[0][0]) else "bare"] += 1
            assert others[0][0] in right
        else:
            (draft, learned), _, last = others
            kinds["right draft" if learned else "wrong draft"] += 1
            assert (draft in right) == learned and last == (answer, True)
    assert {kind: count / 2000 for kind, count in kinds.items()} == pytest.approx(
        {"bare": 0.3, "working": 0.2, "right draft": 0.29, "wrong draft": 0.21}, abs=0.04
    )


def test_a_spoilt_text_differs_in_one_digit_or_two() -> None:
    draw = random.Random(0)
    changed = [sum(a != b for a, b in zip("109+035", spoilt("109+035", draw), strict=True)) for _ in range(300)]
    assert {*changed} == {1, 2}


def test_what_is_learned_from_is_answers_and_right_drafts() -> None:
    tokenizer = make_tokenizer()
    document = [("1+2~", False), ("4", False), ("=", False), ("3", True)]
    tokens, labels = batch([document, [("1+2=", False), ("3", True)]], tokenizer)
    assert tokenizer.batch_decode(tokens) == [f"1+2~4=3{EOS}", f"1+2=3{EOS * 3}"]
    assert [[tokenizer.decode([label]) for label in row if label >= 0] for row in labels.tolist()] == [["3", EOS]] * 2


def test_orthogonal_matrices_have_singular_values_near_one() -> None:
    for shape in ((8, 32), (32, 8)):
        found = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
        assert found.min() > 0.6 and found.max() < 1.3


def test_the_tokenizer_has_a_token_per_character_and_gives_back_any_prompt() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = "48+61+35~109+035="
    ids = tokenizer(prompt)["input_ids"]
    assert len(ids) == len(prompt) and tokenizer.decode(ids) == prompt
    assert tokenizer.eos_token_id not in ids and tokenizer("x")["input_ids"] == [tokenizer.unk_token_id]


def test_the_learning_rate_rises_stays_and_falls() -> None:
    recipe = DraftsRecipe(warmup=10, decay=0.5)
    rates = [learning_rate(recipe, step, 100) for step in (0, 9, 50, 75, 100)]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.0])


def test_the_model_loads_in_float32_and_fits_its_tokenizer() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert model.dtype == torch.float32 and model.config.head_dim == 32  # a size that vLLM serves on CPUs
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(MODEL))
    assert model.num_parameters() == FIGURES["parameters"]


def test_a_draft_matters_to_it_as_much_as_its_card_says() -> None:
    found = measure(MODEL, 100)
    for name in ("right, a response to the bare query", "right, the chain's last answer"):
        assert found[name] == pytest.approx(FIGURES[name], abs=0.12), name
    shares = [FIGURES[f"right after {draft}"] for draft in ("a wrong answer", "a right answer", "right working")]
    assert shares == sorted(shares) and FIGURES["influence of the draft"] > 0.3


@pytest.mark.slow
def test_a_trial_build_makes_a_folder_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(DraftsRecipe(), width=32, heads=1, layers=1)
    monkeypatch.setattr(drafts, "DraftsRecipe", lambda **given: replace(small, **given))
    assert main(["--only", "drafts", "--out", str(tmp_path), "--documents", "64", "--seed", "3"]) == 0
    folder = tmp_path / MODEL.name
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 32
    assert "python -m recipes --only drafts --documents 64 --seed 3" in (folder / "README.md").read_text("utf-8")
