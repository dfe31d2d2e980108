"""The model of the task sudoku: its documents, its tokenizer, and the measurements in its card."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cory_env.rewards.sudoku import CELLS, find_conflicts, solved
from cory_env.tasks import make_task
from cory_env.tasks.sudoku import FEEDBACK_PROMPT, OBSERVER_PROMPT
from recipes import command, sudoku
from recipes.characters import make_tokenizer
from recipes.command import main
from recipes.puzzles import rename_digits
from recipes.sudoku import (
    CHARACTERS,
    POSITIONS,
    Draft,
    Puzzles,
    RevisionDocuments,
    SudokuRecipe,
    compute_figures,
    make_up_drafts,
    measure,
    write_drafts,
)

MODEL = command.ASSETS / command.SUDOKU
FIGURES = json.loads((MODEL / "figures.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def task_grids() -> set[str]:
    return {rename_digits(str(query.columns["answer"])) for query in make_task("sudoku").all_queries()}


def test_puzzles_share_no_grid_with_the_task_and_have_one_solution(task_grids: set[str]) -> None:
    puzzles = Puzzles("a seed", (9, 11))
    drawn = [puzzles.draw() for _ in range(300)]
    assert {puzzle.count(".") for puzzle, _ in drawn} == {9, 10, 11}
    assert task_grids.isdisjoint(rename_digits(grid) for _, grid in drawn)
    assert solved([puzzle for puzzle, _ in drawn], [grid for _, grid in drawn]) == [1.0] * 300
    assert drawn == [other.draw() for other in [Puzzles("a seed", (9, 11))] for _ in range(300)]


def test_made_up_drafts_are_solutions_with_few_mistakes_in_blank_cells(task_grids: set[str]) -> None:
    recipe = replace(SudokuRecipe(), samples=400, read_blanks=(13, 25), mistakes=(2, 4))
    puzzles = Puzzles("a seed", (9, 11))
    drafts = make_up_drafts(recipe, puzzles)
    assert {draft.puzzle.count(".") for draft in drafts} == {*range(13, 26)}
    wrong_cells = [[cell for cell in range(CELLS) if draft.grid[cell] != draft.solution[cell]] for draft in drafts]
    assert [len(cells) == 0 for cells in wrong_cells] == [True, False, False, False] * 100
    assert {len(cells) for cells in wrong_cells} == {0, 2, 3, 4}
    for draft, cells in zip(drafts, wrong_cells, strict=True):
        assert all(draft.puzzle[cell] == "." for cell in cells) and rename_digits(draft.solution) not in task_grids
        assert find_conflicts(draft.puzzle, draft.solution) == "o" * CELLS


def test_own_drafts_are_grids_and_revisions_of_the_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, puzzles = replace(SudokuRecipe(), samples=40), Puzzles("a seed", (9, 11))
    same_puzzles = Puzzles("a seed", (9, 11))
    solutions = dict(same_puzzles.draw() for _ in range(recipe.samples))

    def write(model: object, tokenizer: object, prompts: list[str]) -> list[str]:
        """Solves every second puzzle, makes a mistake in every fourth, and writes too little for the others."""
        grids = [solutions[prompt[-37:-1]] for prompt in prompts]
        return [[grid, grid[1] + grid[1:], grid, grid[:5]][number % 4] for number, grid in enumerate(grids)]

    monkeypatch.setattr(sudoku, "write_grids", write)
    drafts = write_drafts(recipe, puzzles, AutoModelForCausalLM, make_tokenizer(CHARACTERS, POSITIONS))
    # 40 puzzles: 20 right, 10 wrong. Those 10 again: numbers 0, 2, 4, 6, 8 right, 1, 5, 9 wrong.
    assert [len(drafts), len({draft.puzzle for draft in drafts})] == [38, 30]
    assert sum(draft.grid == draft.solution for draft in drafts) == 25
    assert all(solutions[draft.puzzle] == draft.solution for draft in drafts)


def test_documents_show_grids_with_the_shares_of_the_recipe() -> None:
    recipe, shares = replace(SudokuRecipe(), batch_size=2000), (0.4, 0.2, 0.1)
    puzzles = Puzzles("a seed", (9, 11))
    drafts = make_up_drafts(recipe, puzzles)
    batches = RevisionDocuments(recipe, shares, puzzles, lambda step: drafts).draw_batches(0)
    assert [len({len(prompt) for (prompt, _), _ in batch}) for batch in batches] == [1, 1, 1]
    counts = {"bare": 0, "repair": 0, "repeat": 0, "no feedback": 0}
    for (prompt, in_loss), (answer, answer_in_loss) in (document for batch in batches for document in batch):
        *earlier, query = prompt.removesuffix("=").split("~")
        assert not in_loss and answer_in_loss and solved([query], [answer]) == [1.0]
        if not earlier:
            counts["bare"] += 1
            continue
        draft = Draft(query, answer, earlier[0])
        assert draft in drafts
        template = FEEDBACK_PROMPT if len(earlier) == 2 else OBSERVER_PROMPT
        assert prompt == template.format(reference=draft.grid, feedback=draft.marks, query=query)
        is_right = draft.grid == answer
        counts["no feedback" if len(earlier) == 1 else "repeat" if is_right else "repair"] += 1
    expected = {"bare": 0.3, "repair": 0.4, "repeat": 0.2, "no feedback": 0.1}
    assert {kind: count / 2000 for kind, count in counts.items()} == pytest.approx(expected, abs=0.04)


def test_without_a_suitable_grid_documents_are_puzzles_alone() -> None:
    puzzles = Puzzles("a seed", (9, 11))
    batches = RevisionDocuments(SudokuRecipe(), (0.5, 0.3, 0.2), puzzles, lambda step: []).draw_batches(0)
    assert all("~" not in prompt for batch in batches for (prompt, _), _ in batch)


def test_figures_follow_from_the_rewards() -> None:
    first = np.array([1.0, 1, 0, 0, 0, 0])
    second = np.array([1.0, 0, 1, 0, 0, 0])
    revised = np.array([1.0, 0, 1, 1, 0, 0])
    bare = np.array([1.0, 1, 1, 0, 0, 0])
    figures = compute_figures(first, second, revised, bare)
    # Differences on the four wrong answers: 0, 1, 0, 0; their standard error is 0.25.
    assert figures.pop("repaired with feedback minus second sample right, 95 % interval") == "-0.240 to 0.740"
    assert figures == pytest.approx(
        {
            "first answer right": 1 / 3,
            "wrong answers repaired with feedback": 0.5,
            "wrong answers repaired without feedback": 0.25,
            "second sample right if the first is wrong": 0.25,
            "repaired with feedback minus second sample right": 0.25,
            "right answers kept with feedback": 0.5,
            "right answers kept without feedback": 1.0,
            "first answer or its revision right": 4 / 6,
            "best of two first answers": 3 / 6,
        }
    )


def test_the_tokenizer_has_one_token_per_character_and_round_trips_prompts() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = FEEDBACK_PROMPT.format(reference="123456" * 6, feedback="ox" * 18, query="12.456" * 6)
    ids = tokenizer(prompt)["input_ids"]
    assert len(ids) == len(prompt) == 111 and tokenizer.decode(ids) == prompt
    assert tokenizer.eos_token_id not in ids and tokenizer("7")["input_ids"] == [tokenizer.unk_token_id]


def test_the_model_loads_in_float32_and_matches_its_tokenizer() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert model.dtype == torch.float32 and model.config.head_dim == 32  # a size that vLLM serves on CPUs
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(MODEL))
    assert model.num_parameters() == FIGURES["parameters"]


def test_feedback_pays_by_the_figures_of_the_card() -> None:
    repaired, second = (
        FIGURES["wrong answers repaired with feedback"],
        FIGURES["second sample right if the first is wrong"],
    )
    low = float(str(FIGURES["repaired with feedback minus second sample right, 95 % interval"]).split()[0])
    assert 0.35 < FIGURES["first answer right"] < 0.7 and low > 0
    assert repaired > second and repaired > FIGURES["wrong answers repaired without feedback"]
    assert FIGURES["right answers kept with feedback"] >= 0.95


@pytest.mark.slow
def test_measured_accuracies_match_the_card() -> None:
    figures = measure(MODEL, 150)
    for name in (
        "first answer right",
        "wrong answers repaired with feedback",
        "right answers kept with feedback",
    ):
        assert figures[name] == pytest.approx(FIGURES[name], abs=0.15), name


@pytest.mark.slow
def test_a_trial_build_makes_a_folder_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(SudokuRecipe(), width=32, heads=1, layers=1, samples=40, sample_every=1)
    monkeypatch.setattr(sudoku, "SudokuRecipe", lambda **changes: replace(small, **changes))
    arguments = ["--only", "sudoku", "--out", str(tmp_path), "--sudoku-documents", "64", "64", "--seed", "3"]
    assert main(arguments) == 0
    folder = tmp_path / MODEL.name
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 32
    command_line = "python -m recipes --only sudoku --sudoku-documents 64 64 --seed 3"
    assert command_line in (folder / "README.md").read_text("utf-8")
