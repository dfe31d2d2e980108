"""`imdb-classifier-tiny`: a small DistilBERT for sentiment, and its tokenizer; its positive logit is the IMDB reward.

There is no pretraining. Rewarded texts have about 10 to 30 tokens, so most training texts are short too: random crops
of reviews with the review's label, and labelled single sentences. If a crop does not show the label, the model learns
to stay near zero, which keeps the reward smooth.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import BertWordPieceTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

from recipes.cards import Figures
from recipes.corpus import Corpus, Review
from recipes.staging import save_half, save_tokenizer


@dataclass(frozen=True)
class ClassifierRecipe:
    """Settings of the classifier."""

    tokens: int = 16_000_000
    """training tokens, padding included"""
    layers: int = 2
    """transformer blocks"""
    width: int = 128
    """hidden size"""
    heads: int = 4
    """attention heads"""
    vocabulary: int = 8192
    """lower-case WordPiece tokens"""
    positions: int = 320
    """maximum text length in tokens; longer texts are truncated"""
    batch_tokens: int = 8192
    """approximate number of tokens per optimizer step"""
    dropout: float = 0.2
    """dropout in the blocks and before the head"""
    lr: float = 1e-3
    """peak learning rate of AdamW"""
    warmup: float = 0.05
    """share of the tokens for the learning rate's warmup"""
    weight_decay: float = 0.05
    """weight decay of every parameter"""
    seed: int = 1
    """random seed"""


# Shares of the training tokens: full reviews, random crops of 10 to 40 words, labelled single sentences.
SHARES = {"review": 0.5, "crop": 0.42, "sentence": 0.08}
_TYPICAL_TOKENS = {"review": 256, "crop": 48, "sentence": 32}


def train_tokenizer(texts: Sequence[str], recipe: ClassifierRecipe) -> PreTrainedTokenizerFast:
    """Trains a lower-case WordPiece tokenizer that encodes a text as `[CLS] text [SEP]`."""
    wordpiece = BertWordPieceTokenizer(lowercase=True)
    wordpiece.train_from_iterator(texts, vocab_size=recipe.vocabulary, show_progress=False)
    special = [(token, wordpiece.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=wordpiece._tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=recipe.positions,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return tokenizer


def crop(text: str, words: int, rng: random.Random) -> str:
    """Returns `words` consecutive words from a random position of `text`, or the whole text if it is shorter."""
    parts = text.split(" ")
    start = rng.randrange(max(1, len(parts) - words + 1))
    return " ".join(parts[start : start + words])


class Batches:
    """Draws random batches of labelled texts, each of one kind."""

    def __init__(self, corpus: Corpus, recipe: ClassifierRecipe) -> None:
        """Uses the training part of `corpus` and the recipe's seed."""
        self._corpus = corpus
        self._batch_tokens = recipe.batch_tokens
        self._rng = random.Random(recipe.seed)

    def draw(self) -> tuple[list[str], list[int]]:
        """Returns texts and labels of one batch."""
        # The shares refer to tokens. All batches have about the same number of tokens, so shares are probabilities.
        kind = self._rng.choices(list(SHARES), list(SHARES.values()))[0]
        source = self._corpus.train_sentences if kind == "sentence" else self._corpus.train
        reviews = self._rng.choices(source, k=max(2, self._batch_tokens // _TYPICAL_TOKENS[kind]))
        texts = [review.text for review in reviews]
        if kind == "crop":
            texts = [crop(text, self._rng.randint(10, 40), self._rng) for text in texts]
        return texts, [review.label for review in reviews]


def new_model(recipe: ClassifierRecipe, tokenizer: PreTrainedTokenizerBase) -> DistilBertForSequenceClassification:
    """Returns an untrained DistilBERT with two labels."""
    torch.manual_seed(recipe.seed)
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=recipe.positions,
        dim=recipe.width,
        hidden_dim=4 * recipe.width,
        n_layers=recipe.layers,
        n_heads=recipe.heads,
        dropout=recipe.dropout,
        attention_dropout=0.0,
        seq_classif_dropout=recipe.dropout,
        pad_token_id=tokenizer.pad_token_id,
        id2label={0: "NEGATIVE", 1: "POSITIVE"},
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
    )
    return DistilBertForSequenceClassification(config)


def train(
    recipe: ClassifierRecipe,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    report: Callable[[DistilBertForSequenceClassification], str],
    log: Callable[[str], None],
) -> DistilBertForSequenceClassification:
    """Trains a classifier on full reviews, crops and sentences.

    Args:
        recipe: Sizes, budget, learning rate and seed.
        tokenizer: The classifier's tokenizer.
        corpus: The corpus; only its training parts are used.
        report: Returns held-out metrics as text; called at each tenth of the budget.
        log: Called with one line of progress.
    """
    model = new_model(recipe, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)
    steps = max(1, round(recipe.tokens / recipe.batch_tokens))
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(recipe.warmup * steps), steps)
    report_every = max(1, steps // 10)
    batches = Batches(corpus, recipe)
    started = time.monotonic()
    for step in range(1, steps + 1):
        model.train()
        texts, labels = batches.draw()
        tokens = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(**tokens).logits  # (B, 2)
        loss = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(labels))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % report_every == 0 or step == steps:
            log(f"step {step}/{steps}: loss {loss.item():.3f}, {report(model)}, {time.monotonic() - started:.0f} s")
    center_logits(model)
    return model.eval()


@torch.no_grad()
def center_logits(model: DistilBertForSequenceClassification) -> None:
    """Shifts both logits by the same value so that they sum to zero: the positive logit is then half the log-odds."""
    head = model.classifier
    head.weight -= head.weight.mean(dim=0)
    head.bias -= head.bias.mean()


@torch.no_grad()
def positive_logits(
    model: DistilBertForSequenceClassification, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], rows: int = 50
) -> torch.Tensor:
    """Returns the raw positive logit of each text, float32 [N]."""
    model.eval()
    parts = []
    for first in range(0, len(texts), rows):
        batch = list(texts[first : first + rows])
        parts.append(model(**tokenizer(batch, truncation=True, padding=True, return_tensors="pt")).logits[:, 1].float())
    return torch.cat(parts)


def short_texts(reviews: Sequence[Review], words: int, openings: bool) -> list[Review]:
    """Returns `words` words of each review, from its beginning or a random position, with the review's label."""
    rng = random.Random("short texts")
    return [
        Review(" ".join(review.text.split(" ")[:words]) if openings else crop(review.text, words, rng), review.label)
        for review in reviews
    ]


def accuracy_and_loss(logits: torch.Tensor, reviews: Sequence[Review]) -> tuple[float, float]:
    """Returns accuracy and mean negative log-likelihood (nats) of positive logits [N], which are half the log-odds."""
    labels = torch.tensor([float(review.label) for review in reviews])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(2 * logits, labels)
    return ((logits > 0) == labels.bool()).float().mean().item(), loss.item()


def calibration_error(logits: torch.Tensor, reviews: Sequence[Review], bins: int = 10) -> float:
    """Returns the expected calibration error: mean |predicted − observed| share of positives in bins of equal size."""
    order = logits.argsort()
    labels = torch.tensor([float(review.label) for review in reviews])
    groups = order.chunk(bins)
    errors = [(torch.sigmoid(2 * logits[group]).mean() - labels[group].mean()).abs() * len(group) for group in groups]
    return float(sum(errors) / len(order))


def measure(model: DistilBertForSequenceClassification, tokenizer: PreTrainedTokenizerBase, corpus: Corpus) -> Figures:
    """Measures accuracy, loss, calibration and logits on held-out texts of several lengths."""
    figures: Figures = {"parameters": model.num_parameters(), "vocabulary": len(tokenizer)}
    for name, reviews in {
        "whole reviews": corpus.held_out,
        "20-word openings": short_texts(corpus.held_out, 20, openings=True),
        "random 20-word crops": short_texts(corpus.held_out, 20, openings=False),
        "single sentences": corpus.held_out_sentences,
    }.items():
        logits = positive_logits(model, tokenizer, [review.text for review in reviews])
        figures[f"held-out accuracy, {name}"], figures[f"held-out loss (nats), {name}"] = accuracy_and_loss(
            logits, reviews
        )
        figures[f"held-out calibration error, {name}"] = calibration_error(logits, reviews)
        quantiles = torch.quantile(logits, torch.tensor([0.01, 0.25, 0.5, 0.75, 0.99])).tolist()
        figures[f"positive logit at 1, 25, 50, 75, 99 %, {name}"] = ", ".join(f"{value:.2f}" for value in quantiles)
    return figures


def build(folder: Path, recipe: ClassifierRecipe, corpus: Corpus, log: Callable[[str], None]) -> Figures:
    """Trains tokenizer and classifier, saves both in `folder` in Hugging Face format, and returns the measured figures.

    Weights are stored in float16; because of the config, they are loaded as float32.
    """
    texts = [review.text for review in (*corpus.train, *corpus.train_sentences)]
    log(f"training a tokenizer of {recipe.vocabulary} tokens on {len(texts):,} texts")
    tokenizer = train_tokenizer(texts, recipe)
    full_reviews = corpus.held_out[:300]
    crops = short_texts(corpus.held_out[:1000], 20, openings=False)

    def report(model: DistilBertForSequenceClassification) -> str:
        accuracies = [
            accuracy_and_loss(positive_logits(model, tokenizer, [review.text for review in reviews]), reviews)[0]
            for reviews in (full_reviews, crops)
        ]
        return "held-out accuracy {:.3f} full reviews, {:.3f} 20-word crops".format(*accuracies)

    model = train(recipe, tokenizer, corpus, report, log)
    save_tokenizer(tokenizer, folder)
    save_half(model, folder)
    stored = DistilBertForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return measure(stored.eval(), tokenizer, corpus)
