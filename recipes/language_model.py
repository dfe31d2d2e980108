"""`imdb-gpt2-tiny`: a GPT-2 with 4 million parameters pretrained on movie reviews, and its tokenizer.

There are no checkpoints, no gradient accumulation and no parallel devices. The budget is in tokens, not in minutes, so
that the model does not depend on the speed of the machine.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

from recipes.cards import Figures
from recipes.corpus import Corpus, Review
from recipes.staging import save_half, save_tokenizer
from recipes.windows import OBSERVER_SHARE, Windows

EOS = "<|endoftext|>"
POSITIONS = 256
WINDOW_SHARES = {64: 0.7, 128: 0.22, 256: 0.08}  # shares of tokens by window length; all positions are trained
SAMPLE_PROMPTS = (
    "This movie",
    "I saw this",
    "The acting",
    'I can make this sentence "This movie was so dull that I left after ten minutes" more positive: This movie',
    'I can make this sentence "I saw this film and hated every second" more positive: I saw this',
)


@dataclass(frozen=True)
class LanguageModelRecipe:
    """Settings of the language model."""

    tokens: int = 8_000_000
    """training tokens"""
    layers: int = 4
    """transformer blocks"""
    width: int = 256
    """hidden size"""
    heads: int = 4
    """attention heads"""
    vocabulary: int = 4096
    """byte-level BPE tokens, including EOS"""
    batch_tokens: int = 2048
    """tokens per optimizer step"""
    lr: float = 2e-3
    """peak learning rate of AdamW"""
    warmup: float = 0.03
    """share of the steps for the learning rate's warmup"""
    weight_decay: float = 0.05
    """weight decay of all matrices except the embeddings"""
    seed: int = 1
    """random seed"""


DOUBLE = LanguageModelRecipe(layers=6, width=320, heads=5)  # twice the parameters of the default


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer whose EOS, BOS and padding token is `<|endoftext|>`, like GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def new_model(recipe: LanguageModelRecipe, tokenizer: PreTrainedTokenizerBase) -> GPT2LMHeadModel:
    """Returns an untrained GPT-2 without dropout, with tied embeddings."""
    torch.manual_seed(recipe.seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=POSITIONS,
        n_embd=recipe.width,
        n_layer=recipe.layers,
        n_head=recipe.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        activation_function="gelu_pytorch_tanh",  # same as gelu_new, but one kernel
        summary_first_dropout=0.0,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    return GPT2LMHeadModel(config)


def token_loss(model: GPT2LMHeadModel, windows: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy per predicted token (nats) of windows [B, T]."""
    with torch.autocast(windows.device.type, dtype=torch.bfloat16):
        logits = model(windows, attention_mask=torch.ones_like(windows), use_cache=False).logits[:, :-1]  # (B, T-1, V)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: GPT2LMHeadModel, windows: torch.Tensor, rows: int = 64) -> float:
    """Returns the mean cross-entropy per token over windows [N, T], without gradients."""
    model.eval()
    losses = [token_loss(model, batch).item() * len(batch) for batch in windows.split(rows)]
    model.train()
    return sum(losses) / len(windows)


def batch_lengths(recipe: LanguageModelRecipe) -> list[int]:
    """Returns the window length of every step, random with probabilities `WINDOW_SHARES`."""
    steps = max(1, round(recipe.tokens / recipe.batch_tokens))
    return random.Random(recipe.seed).choices(list(WINDOW_SHARES), list(WINDOW_SHARES.values()), k=steps)


def train(
    recipe: LanguageModelRecipe,
    tokenizer: PreTrainedTokenizerBase,
    reviews: list[Review],
    validate: Callable[[GPT2LMHeadModel], float],
    log: Callable[[str], None],
) -> GPT2LMHeadModel:
    """Trains a language model on windows of `reviews`.

    Args:
        recipe: Sizes, budget, learning rate and seed.
        tokenizer: The tokenizer of the windows.
        reviews: Training reviews.
        validate: Returns the held-out loss for the log; called at each twentieth of the budget.
        log: Called with one line of progress.
    """
    model = new_model(recipe, tokenizer)
    model.set_attn_implementation("eager")  # faster on short windows
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "wte" not in n and "wpe" not in n]
    matrix_ids = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in matrix_ids]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=recipe.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    lengths = batch_lengths(recipe)
    report_every = max(1, len(lengths) // 20)
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(recipe.warmup * len(lengths)), len(lengths))
    windows = Windows(reviews, tokenizer, recipe.seed)
    model.train()
    started = time.monotonic()
    for step, length in enumerate(lengths, start=1):
        rows = max(2, recipe.batch_tokens // length)
        observers = round(rows * OBSERVER_SHARE * 1.5) if length < POSITIONS else 0
        loss = token_loss(model, windows.draw(rows, length, observers))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % report_every == 0 or step == len(lengths):
            held_out, speed = validate(model), step * recipe.batch_tokens / (time.monotonic() - started)
            log(f"step {step}/{len(lengths)}: loss {loss.item():.3f}, held-out {held_out:.3f}, {speed:,.0f} tokens/s")
    return model.eval()


@torch.no_grad()
def sample(
    model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerBase, prompt: str, seed: int, new_tokens: int = 32
) -> str:
    """Returns a continuation of `prompt` sampled at temperature 1, without top-k or top-p."""
    torch.manual_seed(seed)
    tokens = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**tokens, do_sample=True, top_k=0, max_new_tokens=new_tokens)
    return str(tokenizer.decode(output[0, tokens["input_ids"].shape[1] :]))


def measure(
    model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerBase, held_out: list[Review], windows: int
) -> Figures:
    """Measures the held-out loss on several kinds of windows, and generates the card's samples."""
    held_out_windows = Windows(held_out, tokenizer, seed=0)
    return {
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "held-out loss per token (nats), 64-token windows": mean_loss(model, held_out_windows.draw(windows, 64)),
        "held-out loss per token (nats), 128-token windows": mean_loss(model, held_out_windows.draw(windows // 2, 128)),
        "held-out loss per token (nats), 256-token windows": mean_loss(
            model, held_out_windows.draw(windows // 4, 256), rows=32
        ),
        "held-out loss per token (nats), observer prompts, 64-token windows": mean_loss(
            model, held_out_windows.draw(windows // 2, 64, observers=windows // 2)
        ),
        "held-out windows of 64 tokens": windows,
        "samples": [
            f"{prompt} ⟶{sample(model, tokenizer, prompt, seed)}" for seed, prompt in enumerate(SAMPLE_PROMPTS, start=1)
        ],
    }


def build(folder: Path, recipe: LanguageModelRecipe, corpus: Corpus, log: Callable[[str], None]) -> Figures:
    """Trains tokenizer and model, saves both in `folder` in Hugging Face format, and returns the measured figures.

    Weights are stored in float16; because of the config, they are loaded as float32.
    """
    log(f"training a tokenizer of {recipe.vocabulary} tokens on {len(corpus.train):,} reviews")
    tokenizer = train_tokenizer((review.text for review in corpus.train), recipe.vocabulary)
    validation = Windows(corpus.held_out, tokenizer, seed=0).draw(min(256, 4 * len(corpus.held_out)), 64)
    model = train(recipe, tokenizer, corpus.train, lambda trained: mean_loss(trained, validation), log)
    save_tokenizer(tokenizer, folder)
    save_half(model, folder)
    stored = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    return measure(stored, tokenizer, corpus.held_out, min(2048, 16 * len(corpus.held_out)))
