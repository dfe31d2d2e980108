"""`sudoku-llama-tiny`: a Llama with a million parameters that solves 6x6 Sudoku and revises its own wrong grids.

The first stage teaches puzzles alone. In the second, the model regularly writes grids itself, and most documents show
such a grid, usually with feedback, before the puzzle. A document's answer is always the solution, so the model learns
to repair the mistakes that it makes and to repeat a right grid. Made-up mistakes do not teach that: after training on
grids with random wrong cells, a model hardly repaired its own. The documents contain no grid of the task.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cory_env.rewards.sudoku import BLANK, CELLS, conflicts, find_conflicts, solved
from cory_env.tasks.sudoku import (
    FEEDBACK_PROMPT,
    OBSERVER_PROMPT,
    PROMPT,
    SOLVED_FEEDBACK,
    draw_grids,
    draw_puzzle,
    draw_queries,
    fill_grid,
    rename_digits,
)
from recipes.cards import Figures
from recipes.characters import Document, make_tokenizer, new_model, pretrain
from recipes.staging import save_tokenizer

CHARACTERS = "123456.~=ox"
POSITIONS = 256


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
    solve_documents: int = 128_000
    """documents of the first stage: puzzles alone"""
    solve_blanks: tuple[int, int] = (8, 20)
    """its fewest and most blank cells of a puzzle"""
    solve_lr: float = 6e-3
    """its learning rate of Muon for the matrices of the blocks; Adam uses a tenth of it for the other parameters"""
    revise_documents: int = 80_000
    """documents of the second stage: puzzles, and revisions of the model's own grids"""
    revise_blanks: tuple[int, int] = (12, 22)
    """its fewest and most blank cells of a puzzle"""
    revise_lr: float = 4e-3
    """its learning rate"""
    sample_every: int = 100
    """steps of the second stage after which the model writes new grids"""
    samples: int = 1500
    """puzzles for which it writes grids"""
    repair_share: float = 0.45
    """share of documents with a wrong grid and its feedback"""
    repeat_share: float = 0.2
    """share of documents with a right grid and its feedback"""
    no_feedback_share: float = 0.1
    """share of documents with any grid, without feedback"""
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
        self._task_grids = {rename_digits(grid) for grid in draw_grids()}

    def draw(self) -> tuple[str, str]:
        """Returns a puzzle and its solution."""
        grid = fill_grid(self.rng)
        while rename_digits(grid) in self._task_grids:
            grid = fill_grid(self.rng)
        return draw_puzzle(grid, self.rng.randint(*self._blanks), self.rng), grid


def bare_document(puzzle: str, solution: str) -> Document:
    """Returns a puzzle and its solution."""
    return [(PROMPT.format(query=puzzle), False), (solution, True)]


def revision_document(draft: Draft, with_feedback: bool) -> Document:
    """Returns an earlier grid, with or without its feedback, a puzzle and its solution."""
    template = FEEDBACK_PROMPT if with_feedback else OBSERVER_PROMPT
    prompt = template.format(reference=draft.grid, feedback=draft.marks, query=draft.puzzle)
    return [(prompt, False), (draft.solution, True)]


class OwnDrafts:
    """Documents of the second stage, with grids that the model wrote most recently."""

    def __init__(self, recipe: SudokuRecipe, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
        """Uses the model as it is at each step."""
        self._recipe, self._model, self._tokenizer = recipe, model, tokenizer
        self._puzzles = Puzzles(f"revise {recipe.seed}", recipe.revise_blanks)
        self._drafts: list[Draft] = []
        self._right: list[Draft] = []
        self._wrong: list[Draft] = []

    def draw_batches(self, step: int) -> list[list[Document]]:
        """Returns the documents of a step in batches of equal length."""
        if step % self._recipe.sample_every == 0:
            self._write_drafts(step)
        batches: dict[int, list[Document]] = {}
        for _ in range(self._recipe.batch_size):
            document = self._draw_document()
            batches.setdefault(len(document[0][0]), []).append(document)
        return list(batches.values())

    def _draw_document(self) -> Document:
        """Returns a document; a puzzle alone also if the model has not yet written a suitable grid."""
        recipe, rng = self._recipe, self._puzzles.rng
        shares = (recipe.repair_share, recipe.repeat_share, recipe.no_feedback_share)
        pools: tuple[list[Draft], ...] = (self._wrong, self._right, self._drafts, [])
        kind = rng.choices(range(4), (*shares, 1 - sum(shares)))[0]
        if not pools[kind]:
            return bare_document(*self._puzzles.draw())
        return revision_document(rng.choice(pools[kind]), with_feedback=kind < 2)

    def _write_drafts(self, step: int) -> None:
        """Lets the model write grids for new puzzles, and once revise the wrong ones."""
        torch.manual_seed(100_000 * self._recipe.seed + step)
        puzzles = [self._puzzles.draw() for _ in range(self._recipe.samples)]
        drafts = list(self._write([(PROMPT.format(query=puzzle), puzzle, grid) for puzzle, grid in puzzles]))
        wrong = [draft for draft in drafts if draft.grid != draft.solution]
        drafts += self._write(
            [(revision_document(draft, with_feedback=True)[0][0], draft.puzzle, draft.solution) for draft in wrong]
        )
        self._drafts = drafts
        self._right = [draft for draft in drafts if draft.grid == draft.solution]
        self._wrong = [draft for draft in drafts if draft.grid != draft.solution]

    def _write(self, prompts: Sequence[tuple[str, str, str]]) -> Iterator[Draft]:
        """Yields grids for (prompt, puzzle, solution), without grids of another length."""
        texts = write_grids(self._model, self._tokenizer, [prompt for prompt, *_ in prompts])
        for text, (_, puzzle, solution) in zip(texts, prompts, strict=True):
            if len(text) == CELLS:
                yield Draft(puzzle, solution, text)


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
    train_to_solve(recipe, model, tokenizer, log)
    train_to_revise(recipe, model, tokenizer, log)
    return model


def train_to_solve(
    recipe: SudokuRecipe, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None]
) -> None:
    """The first stage: puzzles alone."""
    puzzles = Puzzles(f"solve {recipe.seed}", recipe.solve_blanks)
    pretrain(
        model,
        tokenizer,
        lambda step: [[bare_document(*puzzles.draw()) for _ in range(recipe.batch_size)]],
        steps=max(1, recipe.solve_documents // recipe.batch_size),
        lr=recipe.solve_lr,
        warmup=recipe.warmup,
        decay=recipe.decay,
        log=log,
        autocast=True,
    )


def train_to_revise(
    recipe: SudokuRecipe, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None]
) -> None:
    """The second stage: puzzles alone, and puzzles after a grid that the model wrote."""
    pretrain(
        model,
        tokenizer,
        OwnDrafts(recipe, model, tokenizer).draw_batches,
        steps=max(1, recipe.revise_documents // recipe.batch_size),
        lr=recipe.revise_lr,
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
    puzzles = [query.text for query in draw_queries()[1][:queries]]

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
