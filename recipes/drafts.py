"""`drafts-llama-tiny`: a Llama of less than half a million parameters that adds numbers, and has seen drafts of answers.

A document is a prompt of the task `drafts` and what follows it; the loss is that of what follows. Answers are always
right. Drafts are right answers, answers with a wrong digit or two, and workings, some of which have one too, so that a
draft is worth reading, but not worth repeating blindly. No query of the task is among the documents.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cory_env.chain import Chain
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks import drafts
from cory_env.tasks.drafts import OBSERVER_PROMPT, PROMPT
from policies.generation.generator import Response, Sampling
from policies.generation.transformers_generator import TransformersGenerator
from policies.influence import Played, components, play_twice, share_interval
from recipes.cards import Figures

EOS, UNKNOWN, CHARACTERS = "<eos>", "<unk>", "0123456789+~="
POSITIONS = 64
MAX_PROMPT, MAX_RESPONSE = 24, 8  # as in the presets


@dataclass(frozen=True)
class DraftsRecipe:
    """How the model is built."""

    documents: int = 128_000
    """training documents, each seen once"""
    layers: int = 2
    """transformer blocks"""
    width: int = 128
    """hidden size"""
    heads: int = 4
    """attention heads"""
    batch: int = 64
    """documents of one optimizer step"""
    lr: float = 2e-2
    """peak learning rate of Muon, which trains the matrices of the blocks; a tenth of it is Adam's, for the rest"""
    warmup: int = 100
    """steps over which the learning rate rises; it falls to a twentieth by a cosine"""
    seen: float = 0.5
    """share of documents with a draft"""
    working: float = 0.25
    """share of working among what answers a bare query"""
    draft_working: float = 0.4
    """share of working among drafts"""
    wrong_working: float = 0.3
    """share of drafts that are working which have a wrong digit or two"""
    wrong_answer: float = 0.6
    """share of drafts that are answers which have a wrong digit or two"""
    seed: int = 1
    """seed of the initial weights and of every draw"""


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are made orthogonal by five Newton-Schulz iterations (Jordan et al., 2024), in fp32."""

    def __init__(self, matrices: Sequence[torch.nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step of every matrix."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                momentum = state.setdefault("momentum", torch.zeros_like(matrix)).mul_(0.95).add_(matrix.grad)
                update = orthogonal(matrix.grad + 0.95 * momentum)
                rows, columns = update.shape
                matrix.mul_(1 - 0.01 * group["lr"]).add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Returns roughly the nearest matrix `[m, n]` whose singular values are all 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    found = found / (found.norm() + 1e-7)
    for _ in range(5):
        square = found @ found.T
        found = 3.4445 * found + (-4.775 * square + 2.0315 * square @ square) @ found
    return found.T if tall else found


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token per character that the task uses; its EOS is BOS and padding too."""
    vocabulary = {token: number for number, token in enumerate((EOS, UNKNOWN, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def new_model(recipe: DraftsRecipe, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Returns an untrained Llama, its head tied to the embeddings."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        intermediate_size=3 * recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


class Documents:
    """Draws prompts and what follows them."""

    def __init__(self, recipe: DraftsRecipe) -> None:
        """Every draw follows the recipe's seed; the task's own queries are never drawn."""
        self._recipe = recipe
        self._draw = random.Random(recipe.seed)
        self._task = {_same(query.text) for split in drafts.draw_queries() for query in split}

    def draw(self) -> tuple[str, str]:
        """Returns one document: the prompt, and what follows it."""
        draw, recipe = self._draw, self._recipe
        terms = drafts.draw_terms(draw)
        while _same(query := drafts.written(terms)) in self._task:
            terms = drafts.draw_terms(draw)
        answer, working = str(sum(terms)), drafts.working(terms)
        if draw.random() >= recipe.seen:
            return PROMPT.format(query=query), working if draw.random() < recipe.working else answer
        is_working = draw.random() < recipe.draft_working
        draft = working if is_working else answer
        if draw.random() < (recipe.wrong_working if is_working else recipe.wrong_answer):
            draft = spoilt(draft, draw)
        return OBSERVER_PROMPT.format(query=query, reference=draft), answer


def _same(query: str) -> tuple[str, ...]:
    return tuple(sorted(query.split("+")))


def spoilt(text: str, draw: random.Random) -> str:
    """Returns a text with one digit changed, or two of them; most often by one."""
    characters = list(text)
    digits = [place for place, character in enumerate(text) if character.isdigit()]
    for place in draw.sample(digits, 1 if draw.random() < 0.6 else 2):
        by = draw.choice((1, 9)) if draw.random() < 0.6 else draw.randint(1, 9)
        characters[place] = str((int(characters[place]) + by) % 10)
    return "".join(characters)


def batch(
    documents: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and labels of documents, int64 `[B, T]` each; labels are −100 on prompts and padding."""
    prompts = tokenizer([prompt for prompt, _ in documents])["input_ids"]
    wholes = tokenizer([prompt + after + EOS for prompt, after in documents])["input_ids"]
    shape = (len(documents), max(map(len, wholes)))
    tokens, labels = torch.full(shape, tokenizer.eos_token_id), torch.full(shape, -100)
    for row, (prompt, whole) in enumerate(zip(prompts, wholes, strict=True)):
        tokens[row, : len(whole)] = torch.tensor(whole)
        labels[row, len(prompt) : len(whole)] = tokens[row, len(prompt) : len(whole)]
    return tokens, labels


def train(recipe: DraftsRecipe, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None]) -> LlamaForCausalLM:
    """Trains a model on documents.

    Args:
        recipe: Sizes, budget, shares and seed.
        tokenizer: The model's.
        log: Takes one line of progress.
    """
    model = new_model(recipe, tokenizer)
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    rest = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    optimizers = (Muon(matrices, recipe.lr), torch.optim.AdamW(rest, recipe.lr / 10, (0.9, 0.98), weight_decay=0.0))
    steps = max(1, round(recipe.documents / recipe.batch))

    def share(step: int) -> float:
        return min(1.0, (step + 1) / recipe.warmup) * (0.05 + 0.475 * (1 + math.cos(math.pi * (step + 1) / steps)))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, share) for optimizer in optimizers]
    documents = Documents(recipe)
    began, losses = time.monotonic(), []
    for step in range(1, steps + 1):
        tokens, labels = batch([documents.draw() for _ in range(recipe.batch)], tokenizer)
        loss = model(tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*optimizers, *schedules):
            each.step()
        model.zero_grad()
        losses.append(loss.item())
        if step % max(1, steps // 20) == 0 or step == steps:
            log(f"step {step}/{steps}: loss {np.mean(losses[-100:]):.3f}, {time.monotonic() - began:.0f} s")
    return model.eval()


def measure(folder: Path, queries: int) -> Figures:
    """Plays the stored model as pioneer and observer on held-out queries of the task: 2 × 2 responses to each.

    Args:
        folder: The model.
        queries: How many queries.
    """
    task = drafts.make()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    chain = Chain(task, tokenizer, max_prompt=MAX_PROMPT, max_response=MAX_RESPONSE)
    generator = TransformersGenerator(
        str(folder), ["llm"], stop_token_ids=chain.stop_token_ids, dtype="fp32", device=torch.device("cpu")
    )

    def answer(_: int, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Response]:
        return generator.generate(prompts, "llm", Sampling(1.0, MAX_RESPONSE, seeds))

    asked = task.test[:queries]
    with RewardWorker(task.reward) as worker:
        played = play_twice(chain, asked, answer, worker)
    parameters = sum(weight.numel() for weight in generator.models["llm"].parameters())
    return {"parameters": parameters, "vocabulary": len(tokenizer), **figures(played)}


def figures(played: Played) -> Figures:
    """Returns accuracies and the influence, over all drafts and over those that are no working."""
    rewards, right = played.answer_rewards, played.draft_rewards == 1
    works = np.array([["+" in draft for draft in two] for two in played.drafts])
    wrong, answers = ~works & ~right, ~works.any(axis=1)
    repeats = np.array([[np.mean([a == d for a in to]) for d, to in zip(*two, strict=True)] for two in _pairs(played)])
    found: Figures = {
        "queries, held out, 2 x 2 responses each": len(rewards),
        "right, a response to the bare query": float(right.mean()),
        "right, of those that are no working": float(right[~works].mean()),
        "working, share of the responses to a bare query": float(works.mean()),
        "right, the chain's last answer": float(rewards.mean()),
        "right after a right answer": float(rewards[right].mean()),
        "right after a wrong answer": float(rewards[wrong].mean()),
        "right, another bare response where one was a wrong answer": float(right[:, ::-1][wrong].mean()),
        "wrong answers that the observer repeats": float(repeats[wrong].mean()),
        "right after working": float(rewards[works].mean()),
    }
    for name, chosen in (("", rewards), (", both drafts answers", rewards[answers])):
        parts, (low, high) = components(chosen), share_interval(chosen)
        found |= {
            f"influence of the draft{name}": parts.share,
            f"influence of the draft{name}, 95 % interval": f"{low:.3f} to {high:.3f}",
            f"variance of the observer's reward{name}: query, draft, luck": ", ".join(f"{part:.4f}" for part in parts),
        }
    shown = [
        f"{draft} ⟶ {answers[0]} {answers[1]}"
        for drafts_, to in _pairs(played)[:6]
        for draft, answers in zip(drafts_, to, strict=True)
    ]
    return {**found, "drafts, and what two observers answered": shown}


def _pairs(played: Played) -> list[tuple[list[str], list[list[str]]]]:
    return list(zip(played.drafts, played.answers, strict=True))


def build(folder: Path, recipe: DraftsRecipe, log: Callable[[str], None], queries: int = 600) -> Figures:
    """Trains the model, saves it and its tokenizer into `folder`, and returns what is measured."""
    tokenizer = make_tokenizer()
    model = train(recipe, tokenizer, log)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return measure(folder, queries)
