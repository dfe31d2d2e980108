"""The model of the task drafts: its documents, its tokenizer, and the measurements in its card."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cory_env.tasks import make_task
from recipes import command, drafts
from recipes.characters import EOS, learning_rate, make_batch, make_tokenizer, orthogonalize
from recipes.command import main
from recipes.drafts import CHARACTERS, POSITIONS, Documents, DraftsRecipe, corrupt, measure
from recipes.sums import format_working, is_working, parse_query

MODEL = command.ASSETS / command.DRAFTS
FIGURES = json.loads((MODEL / "figures.json").read_text(encoding="utf-8"))


def test_documents_contain_no_query_of_the_task_and_only_right_answers() -> None:
    recipe = DraftsRecipe(
        draft_share=0.5,
        working_share=0.4,
        draft_working_share=0.6,
        wrong_working_share=0.3,
        wrong_answer_share=0.6,
    )
    documents = Documents(recipe)
    task_terms = {tuple(sorted(parse_query(query.text))) for query in make_task("drafts").all_queries()}
    kinds = {"bare": 0, "working": 0, "right draft": 0, "wrong draft": 0}
    for _ in range(2000):
        (prompt, _), *others = documents.draw()
        terms = parse_query(prompt.rstrip("=~"))
        assert tuple(sorted(terms)) not in task_terms
        answer, right = str(sum(terms)), {str(sum(terms)), format_working(terms)}
        if prompt.endswith("="):
            kinds["working" if is_working(others[0][0]) else "bare"] += 1
            assert others[0][0] in right
        else:
            (draft, in_loss), _, last = others
            kinds["right draft" if in_loss else "wrong draft"] += 1
            assert (draft in right) == in_loss and last == (answer, True)
    assert {kind: count / 2000 for kind, count in kinds.items()} == pytest.approx(
        {"bare": 0.3, "working": 0.2, "right draft": 0.29, "wrong draft": 0.21}, abs=0.04
    )


def test_a_corrupted_text_differs_in_one_or_two_digits() -> None:
    rng = random.Random(0)
    changes = [sum(a != b for a, b in zip("109+035", corrupt("109+035", rng), strict=True)) for _ in range(300)]
    assert {*changes} == {1, 2}


def test_the_loss_covers_answers_and_right_drafts() -> None:
    tokenizer = make_tokenizer(CHARACTERS, POSITIONS)
    document = [("1+2~", False), ("4", False), ("=", False), ("3", True)]
    tokens, labels = make_batch([document, [("1+2=", False), ("3", True)]], tokenizer)
    assert tokenizer.batch_decode(tokens) == [f"1+2~4=3{EOS}", f"1+2=3{EOS * 3}"]
    assert [[tokenizer.decode([label]) for label in row if label >= 0] for row in labels.tolist()] == [["3", EOS]] * 2


def test_orthogonal_matrices_have_singular_values_near_one() -> None:
    for shape in ((8, 32), (32, 8)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        singular_values = torch.linalg.svdvals(orthogonalize(matrix))
        assert singular_values.min() > 0.6 and singular_values.max() < 1.3


def test_the_tokenizer_has_one_token_per_character_and_round_trips_prompts() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = "48+61+35~109+035="
    ids = tokenizer(prompt)["input_ids"]
    assert len(ids) == len(prompt) and tokenizer.decode(ids) == prompt
    assert tokenizer.eos_token_id not in ids and tokenizer("x")["input_ids"] == [tokenizer.unk_token_id]


def test_the_learning_rate_warms_up_stays_constant_and_decays() -> None:
    rates = [learning_rate(step, steps=100, warmup=10, decay=0.5) for step in (0, 9, 50, 75, 100)]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.0])


def test_the_model_loads_in_float32_and_matches_its_tokenizer() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert model.dtype == torch.float32 and model.config.head_dim == 32  # a size that vLLM serves on CPUs
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(MODEL))
    assert model.num_parameters() == FIGURES["parameters"]


def test_measured_accuracies_match_the_card() -> None:
    figures = measure(MODEL, 100)
    for name in ("accuracy of pioneer responses", "accuracy of observer responses"):
        assert figures[name] == pytest.approx(FIGURES[name], abs=0.12), name
    drafts_by_use = ("a wrong answer", "a right answer", "right working")
    accuracies = [FIGURES[f"observer accuracy after {draft}"] for draft in drafts_by_use]
    assert accuracies == sorted(accuracies) and FIGURES["influence of the draft"] > 0.3


@pytest.mark.slow
def test_a_trial_build_makes_a_folder_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(DraftsRecipe(), width=32, heads=1, layers=1)
    monkeypatch.setattr(drafts, "DraftsRecipe", lambda **changes: replace(small, **changes))
    assert main(["--only", "drafts", "--out", str(tmp_path), "--documents", "64", "--seed", "3"]) == 0
    folder = tmp_path / MODEL.name
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 32
    assert "python -m recipes --only drafts --documents 64 --seed 3" in (folder / "README.md").read_text("utf-8")
