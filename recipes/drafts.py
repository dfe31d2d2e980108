"""`drafts-llama-tiny`: a Llama of a quarter of a million parameters that adds numbers, and has seen drafts before that.

A document is a prompt of the task `drafts` and what follows it. Answers are always right. Drafts are right answers,
answers with a wrong digit or two, and workings, some of which have such too, so that a draft is worth reading, but not
worth repeating blindly. The loss is that of answers, and of drafts that are right. Few documents teach the whole sum in
one step, so that a chain can get ahead of a single agent. No query of the task is among the documents.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cory_env.chain import Chain
from cory_env.rewarding.episodes import RewardedResponse, reward_responses
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks import drafts, make_task
from cory_env.tasks.drafts import OBSERVER_PROMPT, PROMPT
from cory_env.tasks.task import Query
from policies.generation.generator import EVALUATION_STREAM, Response, Sampling, sampling_seed
from policies.generation.transformers_generator import TransformersGenerator
from policies.influence import components, share_interval
from recipes.cards import Figures
from recipes.staging import save_tokenizer

EOS, UNKNOWN, CHARACTERS = "<eos>", "<unk>", "0123456789+~="
POSITIONS = 64
MAX_PROMPT, MAX_RESPONSE = 24, 10  # as in the presets


@dataclass(frozen=True)
class DraftsRecipe:
    """How the model is built."""

    documents: int = 88_000
    """training documents, each seen once"""
    layers: int = 2
    """transformer blocks"""
    width: int = 96
    """hidden size"""
    heads: int = 4
    """attention heads, of 32 dimensions each"""
    rope_theta: float = 100.0
    """base of the rotary positions, low since prompts are short"""
    batch: int = 32
    """documents of one optimizer step"""
    lr: float = 6e-3
    """learning rate of Muon, which trains the matrices of the blocks; a tenth of it is Adam's, for the rest"""
    warmup: int = 100
    """steps over which the learning rate rises"""
    decay: float = 0.25
    """last part of the steps, over which the learning rate falls to 0"""
    seen: float = 0.62
    """share of documents with a draft"""
    working: float = 0.5
    """share of working among what answers a bare query"""
    draft_working: float = 0.85
    """share of working among drafts"""
    wrong_working: float = 0.1
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
        head_dim=32,  # a size that vLLM serves on CPUs
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
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
        self._task = {tuple(sorted(drafts.read(query.text))) for split in drafts.draw_queries() for query in split}

    def draw_terms(self) -> drafts.Terms:
        """Returns the numbers of a sum that is none of the task's."""
        terms = drafts.draw_terms(self._draw)
        while tuple(sorted(terms)) in self._task:
            terms = drafts.draw_terms(self._draw)
        return terms

    def draw(self) -> list[tuple[str, bool]]:
        """Returns one document as pieces of text, each with whether it is learned from."""
        draw, recipe = self._draw, self._recipe
        terms = self.draw_terms()
        query, answer, working = drafts.write(terms), str(sum(terms)), drafts.working(terms)
        if draw.random() >= recipe.seen:
            return [(PROMPT.format(query=query), False), (working if draw.random() < recipe.working else answer, True)]
        is_working = draw.random() < recipe.draft_working
        draft = working if is_working else answer
        wrong = draw.random() < (recipe.wrong_working if is_working else recipe.wrong_answer)
        before, after = OBSERVER_PROMPT.format(query=query, reference="\n").split("\n")
        return [(before, False), (spoilt(draft, draw) if wrong else draft, not wrong), (after, False), (answer, True)]


def spoilt(text: str, draw: random.Random) -> str:
    """Returns a text with one digit changed, or two of them; most often by one."""
    characters = list(text)
    digits = [place for place, character in enumerate(text) if character.isdigit()]
    for place in draw.sample(digits, 1 if draw.random() < 0.6 else 2):
        by = draw.choice((1, 9)) if draw.random() < 0.6 else draw.randint(1, 9)
        characters[place] = str((int(characters[place]) + by) % 10)
    return "".join(characters)


def batch(
    documents: Sequence[Sequence[tuple[str, bool]]], tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and labels of documents, int64 `[B, T]` each; labels are −100 on what is not learned from."""
    rows = [[*document, (EOS, True)] for document in documents]
    length = max(sum(len(text) if text != EOS else 1 for text, _ in row) for row in rows)
    tokens, labels = np.full((len(rows), length), tokenizer.eos_token_id), np.full((len(rows), length), -100)
    vocabulary = tokenizer.get_vocab()
    for number, row in enumerate(rows):
        at = 0
        for text, learned in row:
            piece = [vocabulary[character] for character in ([text] if text == EOS else text)]
            tokens[number, at : at + len(piece)] = piece
            if learned:
                labels[number, at : at + len(piece)] = piece
            at += len(piece)
    return torch.from_numpy(tokens), torch.from_numpy(labels)


def train(recipe: DraftsRecipe, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None]) -> LlamaForCausalLM:
    """Trains a model on documents.

    Args:
        recipe: Sizes, budget, shares and seed.
        tokenizer: The model's.
        log: Takes one line of progress.
    """
    model = new_model(recipe, tokenizer)
    steps = max(1, round(recipe.documents / recipe.batch))
    optimizers = make_optimizers(model, recipe.lr)
    schedules = [LambdaLR(each, lambda step: learning_rate(recipe, step, steps)) for each in optimizers]
    documents = Documents(recipe)
    began, losses = time.monotonic(), []
    for step in range(1, steps + 1):
        drawn = [documents.draw() for _ in range(recipe.batch)]
        tokens, labels = batch(drawn, tokenizer)
        loss = model(tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        losses.append(float(loss.detach()))
        if step % 100 == 0 or step == steps:
            log(f"step {step}/{steps}: loss {np.mean(losses[-100:]):.3f}, {time.monotonic() - began:.0f} s")
    return model.eval()


def make_optimizers(model: LlamaForCausalLM, lr: float) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Returns Muon for the matrices of the blocks, and Adam for the rest."""
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    rest = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    return Muon(matrices, lr), torch.optim.AdamW(rest, lr / 10, (0.9, 0.98), weight_decay=0.0)


def learning_rate(recipe: DraftsRecipe, step: int, steps: int) -> float:
    """Returns the share of the learning rate in a step: it rises, stays, and falls."""
    return min(1.0, (step + 1) / recipe.warmup) * min(1.0, (steps - step) / (recipe.decay * steps))


def measure(folder: Path, queries: int) -> Figures:
    """Plays the stored model as pioneer and observer on held-out queries of the task: 2 × 2 responses to each.

    Args:
        folder: The model.
        queries: How many queries.
    """
    task = make_task("drafts")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    chain = Chain(task, tokenizer, max_prompt_tokens=MAX_PROMPT, max_response_tokens=MAX_RESPONSE)
    generator = TransformersGenerator({"llm": str(folder)}, dtype="fp32", device=torch.device("cpu"))

    def answer(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Response]:
        return generator.generate(prompts, "llm", Sampling(1.0, MAX_RESPONSE, seeds, chain.stop_token_ids))

    asked = task.test[:queries]
    with RewardWorker(task.reward) as worker:
        played = play_twice(chain, asked, answer, worker)
    parameters = sum(weight.numel() for weight in generator.models["llm"].parameters())
    return {"parameters": parameters, "vocabulary": len(tokenizer), **figures(played, asked)}


Answer = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[Response]]
"""Prompts and a sampling seed for each → a response for each."""


@dataclass(frozen=True)
class Played:
    """What pioneers and observers wrote and got. Skipped rewards are NaN."""

    drafts: list[list[str]]
    """`[queries][pioneer's responses]`"""
    answers: list[list[list[str]]]
    """`[queries][pioneer's responses][observer's responses]`"""
    draft_rewards: NDArray[np.float64]
    """`[queries, pioneer's responses]`"""
    answer_rewards: NDArray[np.float64]
    """`[queries, pioneer's responses, observer's responses]`"""


def play_twice(chain: Chain, queries: Sequence[Query], answer: Answer, worker: RewardWorker) -> Played:
    """Lets a pioneer answer each query twice, and an observer each of these responses twice."""
    asked = [(query, first) for query in queries for first in (0, 1)]
    later = [(query, first, second) for query, first in asked for second in (0, 1)]
    first_prompts = [chain.build_prompt(query, [])[0] for query, _ in asked]
    seeds = [sampling_seed(0, EVALUATION_STREAM, query.id, 0, first) for query, first in asked]
    wrote = [chain.cut(response.tokens)[0] for response in answer(first_prompts, seeds)]
    seen = [tokens for tokens in wrote for _ in (0, 1)]
    later_prompts = [chain.build_prompt(query, [tokens])[0] for (query, *_), tokens in zip(later, seen, strict=True)]
    seeds = [sampling_seed(0, EVALUATION_STREAM, query.id, 1, 2 * first + second) for query, first, second in later]
    answered = [chain.cut(response.tokens)[0] for response in answer(later_prompts, seeds)]

    def rewarded(of: Sequence[Query], role: str, responses: Sequence[list[int]]) -> tuple[list[str], list[float]]:
        texts = [chain.decode(tokens) for tokens in responses]
        given = [RewardedResponse(*each) for each in zip(of, [role] * len(of), texts, responses, strict=True)]
        found = reward_responses(worker, given)
        return texts, [float("nan") if reward is None else reward for reward in found]

    draft_texts, draft_rewards = rewarded([query for query, _ in asked], chain.roles[0], wrote)
    texts, rewards = rewarded([query for query, *_ in later], chain.roles[1], answered)
    return Played(
        drafts=[draft_texts[at : at + 2] for at in range(0, len(draft_texts), 2)],
        answers=[[texts[at : at + 2], texts[at + 2 : at + 4]] for at in range(0, len(texts), 4)],
        draft_rewards=np.array(draft_rewards).reshape(len(queries), 2),
        answer_rewards=np.array(rewards).reshape(len(queries), 2, 2),
    )


def figures(played: Played, asked: Sequence[Query]) -> Figures:
    """Returns accuracies and the influence, over all drafts and over those that are no working."""
    rewards, right = played.answer_rewards, played.draft_rewards == 1
    works = np.array([[drafts.is_working(draft) for draft in two] for two in played.drafts])
    right_working = np.array(
        [
            [draft == drafts.working(drafts.read(query.text)) for draft in two]
            for query, two in zip(asked, played.drafts, strict=True)
        ]
    )
    wrong, answers = ~works & ~right, ~works.any(axis=1)
    repeats = np.array([[np.mean([a == d for a in to]) for d, to in zip(*two, strict=True)] for two in _pairs(played)])
    found: Figures = {
        "queries, held out, 2 x 2 responses each": len(rewards),
        "right, a response to the bare query": _mean(right),
        "right, of those that are no working": _mean(right[~works]),
        "working, share of the responses to a bare query": _mean(works),
        "right, the chain's last answer": _mean(rewards),
        "right after a right answer": _mean(rewards[right]),
        "right after a wrong answer": _mean(rewards[wrong]),
        "right, another bare response where one was a wrong answer": _mean(right[:, ::-1][wrong]),
        "wrong answers that the observer repeats": _mean(repeats[wrong]),
        "right working, of the working": _mean(right_working[works]),
        "right after right working": _mean(rewards[right_working]),
        "right after wrong working": _mean(rewards[works & ~right_working]),
    }
    for name, chosen in (("", rewards), (", both drafts answers", rewards[answers])):
        if len(chosen) < 2:
            continue
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


def _mean(values: NDArray[np.generic]) -> float:
    return float(values.mean()) if values.size else float("nan")


def _pairs(played: Played) -> list[tuple[list[str], list[list[str]]]]:
    return list(zip(played.drafts, played.answers, strict=True))


def build(folder: Path, recipe: DraftsRecipe, log: Callable[[str], None], queries: int = 600) -> Figures:
    """Trains the model, saves it and its tokenizer into `folder`, and returns what is measured."""
    tokenizer = make_tokenizer()
    model = train(recipe, tokenizer, log)
    save_tokenizer(tokenizer, folder)
    model.save_pretrained(folder)
    return measure(folder, queries)
