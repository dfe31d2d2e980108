"""`sudoku-llama-tiny`: a Llama with a million parameters that solves 6x6 Sudoku and revises its own wrong grids.

The first stage teaches puzzles alone, and puzzles after a grid with random mistakes, usually with feedback. That does
not teach the model to repair its own mistakes, so in the second stage the model regularly writes grids itself, and most
documents show one of them. A document's answer is always the solution. The documents contain no grid of the task.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cory_env.rewards.sudoku import BLANK, CELLS, DIGITS, conflicts, find_conflicts, solved
from cory_env.tasks import make_task
from cory_env.tasks.sudoku import ANSWER, FEEDBACK_PROMPT, OBSERVER_PROMPT, PROMPT, SOLVED_FEEDBACK
from recipes.cards import Figures
from recipes.characters import Document, make_tokenizer, new_model, pretrain
from recipes.puzzles import draw_puzzle, fill_grid, rename_digits
from recipes.staging import save_tokenizer

CHARACTERS = "123456.~=ox"
POSITIONS = 256

Shares = tuple[float, float, float]


@dataclass(frozen=True)
class SudokuRecipe:
    """Settings of the model and its training documents."""

    layers: int = 4
    """transformer blocks"""
    width: int = 128
    """hidden size"""
    heads: int = 4
    """attention heads, with 32 dimensions each"""
    rope_theta: float = 1000.0
    """base of the rotary position embeddings"""
    batch_size: int = 32
    """documents per optimizer step"""
    warmup: int = 100
    """warmup steps of each stage"""
    decay: float = 0.25
    """share of a stage's steps, at its end, in which the learning rate falls to 0"""
    read_documents: int = 32_000
    """documents of the first stage: puzzles alone, and revisions of grids with random mistakes"""
    read_lr: float = 6e-3
    """its learning rate of Muon for the matrices of the blocks; Adam uses a tenth of it for the other parameters"""
    read_blanks: tuple[int, int] = (10, 24)
    """its fewest and most blank cells of a puzzle with an earlier grid"""
    read_shares: Shares = (0.3, 0.1, 0.1)
    """its shares of documents with a wrong grid and feedback, a right grid and feedback, any grid without feedback"""
    mistakes: tuple[int, int] = (1, 6)
    """fewest and most wrong cells of a grid with random mistakes"""
    revise_documents: int = 22_400
    """documents of the second stage: puzzles alone, and revisions of the model's own grids"""
    revise_lr: float = 3e-3
    """its learning rate"""
    revise_shares: Shares = (0.5, 0.2, 0.05)
    """its shares of documents, as above"""
    blanks: tuple[int, int] = (8, 16)
    """fewest and most blank cells of the other puzzles"""
    sample_every: int = 100
    """steps after which there are new grids"""
    samples: int = 1000
    """puzzles for which they are written"""
    seed: int = 1
    """random seed"""


@dataclass(frozen=True)
class Draft:
    """A puzzle and a grid that the model wrote for it."""

    puzzle: str
    solution: str
    grid: str

    @property
    def marks(self) -> str:
        """The feedback."""
        return find_conflicts(self.puzzle, self.grid)


class Puzzles:
    """Draws random puzzles without the task's grids, not even with other digits."""

    def __init__(self, seed: str, blanks: tuple[int, int]) -> None:
        """Draws puzzles with at least `blanks[0]` and at most `blanks[1]` blank cells."""
        self._blanks = blanks
        self.rng = random.Random(seed)
        self._task_grids = {rename_digits(str(query.columns[ANSWER])) for query in make_task("sudoku").all_queries()}

    def draw(self) -> tuple[str, str]:
        """Returns a puzzle and its solution."""
        grid = self.draw_grid()
        return draw_puzzle(grid, self.rng.randint(*self._blanks), self.rng), grid

    def draw_grid(self) -> str:
        """Returns a grid."""
        grid = fill_grid(self.rng)
        while rename_digits(grid) in self._task_grids:
            grid = fill_grid(self.rng)
        return grid


def bare_document(puzzle: str, solution: str) -> Document:
    """Returns a puzzle and its solution."""
    return [(PROMPT.format(query=puzzle), False), (solution, True)]


def revision_document(draft: Draft, with_feedback: bool) -> Document:
    """Returns an earlier grid, with or without its feedback, a puzzle and its solution."""
    template = FEEDBACK_PROMPT if with_feedback else OBSERVER_PROMPT
    prompt = template.format(reference=draft.grid, feedback=draft.marks, query=draft.puzzle)
    return [(prompt, False), (draft.solution, True)]


class RevisionDocuments:
    """Documents of a stage: puzzles alone, and puzzles after an earlier grid."""

    def __init__(
        self, recipe: SudokuRecipe, shares: Shares, puzzles: Puzzles, write_drafts: Callable[[int], list[Draft]]
    ) -> None:
        """Asks for new drafts every `sample_every` steps.

        Args:
            recipe: The settings.
            shares: The stage's shares of documents with a wrong grid and its feedback, with a right grid and its
                feedback, and with any grid without feedback.
            puzzles: Source of the puzzles without an earlier grid.
            write_drafts: Returns right and wrong grids; called with the step.
        """
        self._recipe, self._shares, self._puzzles, self._write_drafts = recipe, shares, puzzles, write_drafts
        self._drafts: list[Draft] = []
        self._right: list[Draft] = []
        self._wrong: list[Draft] = []

    def draw_batches(self, step: int) -> list[list[Document]]:
        """Returns the documents of a step in batches of equal length."""
        if step % self._recipe.sample_every == 0:
            self._drafts = self._write_drafts(step)
            self._right = [draft for draft in self._drafts if draft.grid == draft.solution]
            self._wrong = [draft for draft in self._drafts if draft.grid != draft.solution]
        batches: dict[int, list[Document]] = {}
        for _ in range(self._recipe.batch_size):
            document = self._draw_document()
            batches.setdefault(len(document[0][0]), []).append(document)
        return list(batches.values())

    def _draw_document(self) -> Document:
        """Returns a document; a puzzle alone also if there is no suitable grid."""
        rng, shares = self._puzzles.rng, self._shares
        pools: tuple[list[Draft], ...] = (self._wrong, self._right, self._drafts, [])
        kind = rng.choices(range(4), (*shares, 1 - sum(shares)))[0]
        if not pools[kind]:
            return bare_document(*self._puzzles.draw())
        return revision_document(rng.choice(pools[kind]), with_feedback=kind < 2)


def make_up_drafts(recipe: SudokuRecipe, puzzles: Puzzles) -> list[Draft]:
    """Returns solutions of new puzzles, three of four with random mistakes in blank cells.

    The puzzles have many blank cells and possibly several solutions, so that the grid is needed to find the right one.
    """
    rng, drafts = puzzles.rng, []
    for number in range(recipe.samples):
        solution = puzzles.draw_grid()
        blanks = rng.sample(range(CELLS), rng.randint(*recipe.read_blanks))
        grid = [*solution]
        for cell in blanks[: rng.randint(*recipe.mistakes) if number % 4 else 0]:
            grid[cell] = rng.choice(DIGITS.replace(solution[cell], ""))
        puzzle = "".join(BLANK if cell in blanks else digit for cell, digit in enumerate(solution))
        drafts.append(Draft(puzzle, solution, "".join(grid)))
    return drafts


def write_drafts(
    recipe: SudokuRecipe, puzzles: Puzzles, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> list[Draft]:
    """Returns grids that the model writes for new puzzles, and its revisions of the wrong ones.

    Grids of another length are left out.
    """

    def write(prompts: Sequence[tuple[str, str, str]]) -> list[Draft]:
        texts = write_grids(model, tokenizer, [prompt for prompt, *_ in prompts])
        drafts = [Draft(puzzle, solution, text) for text, (_, puzzle, solution) in zip(texts, prompts, strict=True)]
        return [draft for draft in drafts if len(draft.grid) == CELLS]

    pairs = [puzzles.draw() for _ in range(recipe.samples)]
    drafts = write([(PROMPT.format(query=puzzle), puzzle, solution) for puzzle, solution in pairs])
    wrong = [draft for draft in drafts if draft.grid != draft.solution]
    return drafts + write(
        [(revision_document(draft, with_feedback=True)[0][0], draft.puzzle, draft.solution) for draft in wrong]
    )


@torch.no_grad()
def write_grids(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], batch_size: int = 500
) -> list[str]:
    """Samples one response per prompt at temperature 1, with torch's global random state."""
    model.eval()
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    texts = [""] * len(prompts)
    for indices in by_length.values():
        for start in range(0, len(indices), batch_size):
            batch = indices[start : start + batch_size]
            tokens = tokenizer([prompts[index] for index in batch], return_tensors="pt")
            output = model.generate(**tokens, do_sample=True, top_k=0, max_new_tokens=CELLS + 1)
            responses = tokenizer.batch_decode(output[:, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
            for index, response in zip(batch, responses, strict=True):
                texts[index] = response
    return texts


def train(recipe: SudokuRecipe, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None]) -> LlamaForCausalLM:
    """Trains a model in two stages.

    Args:
        recipe: The settings.
        tokenizer: The model's tokenizer.
        log: Called with one line of progress.
    """
    model = new_model(
        tokenizer,
        layers=recipe.layers,
        width=recipe.width,
        heads=recipe.heads,
        rope_theta=recipe.rope_theta,
        seed=recipe.seed,
    )
    model.set_attn_implementation("eager")  # faster for short documents
    train_to_read(recipe, model, tokenizer, log)
    train_to_revise(recipe, model, tokenizer, log)
    return model


def train_to_read(
    recipe: SudokuRecipe, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None]
) -> None:
    """The first stage: puzzles alone, and puzzles after a grid with random mistakes."""
    puzzles = Puzzles(f"read {recipe.seed}", recipe.blanks)
    documents = RevisionDocuments(recipe, recipe.read_shares, puzzles, lambda step: make_up_drafts(recipe, puzzles))
    _train_stage(recipe, model, tokenizer, documents, recipe.read_documents, recipe.read_lr, log)


def train_to_revise(
    recipe: SudokuRecipe, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None]
) -> None:
    """The second stage: puzzles alone, and puzzles after a grid that the model wrote."""
    puzzles = Puzzles(f"revise {recipe.seed}", recipe.blanks)

    def write(step: int) -> list[Draft]:
        torch.manual_seed(100_000 * recipe.seed + step)
        return write_drafts(recipe, puzzles, model, tokenizer)

    documents = RevisionDocuments(recipe, recipe.revise_shares, puzzles, write)
    _train_stage(recipe, model, tokenizer, documents, recipe.revise_documents, recipe.revise_lr, log)


def _train_stage(
    recipe: SudokuRecipe,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    documents: RevisionDocuments,
    num_documents: int,
    lr: float,
    log: Callable[[str], None],
) -> None:
    pretrain(
        model,
        tokenizer,
        documents.draw_batches,
        steps=max(1, num_documents // recipe.batch_size),
        lr=lr,
        warmup=recipe.warmup,
        decay=recipe.decay,
        log=log,
        autocast=True,
    )


def measure(folder: Path, queries: int) -> Figures:
    """Measures the saved model on held-out queries of the task at temperature 1.

    Every query gets two independent first answers. The first of them is revised with feedback and, separately, without.

    Args:
        folder: The model's folder.
        queries: Number of queries.
    """
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    puzzles = [query.text for query in make_task("sudoku").test[:queries]]

    def answer(prompts: list[str]) -> tuple[list[str], NDArray[np.float64]]:
        grids = write_grids(model, tokenizer, prompts)
        return grids, np.array(solved(puzzles, grids))

    bare = [PROMPT.format(query=puzzle) for puzzle in puzzles]
    (grids, first), (_, second) = answer(bare), answer(bare)
    marks = [mark or SOLVED_FEEDBACK for mark in conflicts(puzzles, grids)]
    values = [
        {"query": puzzle, "reference": grid, "feedback": mark}
        for puzzle, grid, mark in zip(puzzles, grids, marks, strict=True)
    ]
    revisions, with_feedback = answer([FEEDBACK_PROMPT.format(**value) for value in values])
    _, without_feedback = answer([OBSERVER_PROMPT.format(**value) for value in values])
    blanks = np.array([puzzle.count(BLANK) for puzzle in puzzles])
    figures: Figures = {
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "queries, held out": len(puzzles),
        **compute_figures(first, second, with_feedback, without_feedback),
    }
    for count in sorted({*blanks.tolist()}):
        figures[f"first answer right, {count} blank cells"] = float(first[blanks == count].mean())
    wrong = np.flatnonzero(first == 0)[:2]
    figures["wrong grids, feedback, puzzle and revision"] = [
        FEEDBACK_PROMPT.format(**values[index]) + " ⟶ " + revisions[index] for index in wrong
    ]
    return figures


def compute_figures(
    first: NDArray[np.float64],
    second: NDArray[np.float64],
    with_feedback: NDArray[np.float64],
    without_feedback: NDArray[np.float64],
) -> Figures:
    """Returns accuracies, and what the chain scores beside a second sample.

    Args:
        first: Rewards of the first answers, `[queries]`.
        second: Rewards of the second, independent first answers, `[queries]`.
        with_feedback: Rewards of the revisions of `first` with feedback, `[queries]`.
        without_feedback: Rewards of the revisions of `first` without feedback, `[queries]`.
    """
    wrong, right = first == 0, first == 1
    gains = (with_feedback - second)[wrong]
    gain = _mean(gains)
    margin = 1.96 * float(gains.std(ddof=1)) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
    return {
        "first answer right": _mean(np.concatenate([first, second])),
        "wrong answers repaired with feedback": _mean(with_feedback[wrong]),
        "wrong answers repaired without feedback": _mean(without_feedback[wrong]),
        "second sample right if the first is wrong": _mean(second[wrong]),
        "repaired with feedback minus second sample right": gain,
        "repaired with feedback minus second sample right, 95 % interval": (
            f"{gain - margin:.3f} to {gain + margin:.3f}"
        ),
        "right answers kept with feedback": _mean(with_feedback[right]),
        "right answers kept without feedback": _mean(without_feedback[right]),
        "first answer or its revision right": _mean(np.maximum(first, with_feedback)),
        "best of two first answers": _mean(np.maximum(first, second)),
    }


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else float("nan")


def build(folder: Path, recipe: SudokuRecipe, log: Callable[[str], None], queries: int = 1000) -> Figures:
    """Trains the model, saves it and its tokenizer in `folder`, and returns the measured figures."""
    tokenizer = make_tokenizer(CHARACTERS, POSITIONS)
    model = train(recipe, tokenizer, log)
    save_tokenizer(tokenizer, folder)
    model.save_pretrained(folder)
    return measure(folder, queries)
