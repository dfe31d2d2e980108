"""`drafts-llama-tiny`: a Llama of under half a million parameters that adds numbers, and has seen drafts before that.

A document is a prompt of the task `drafts` and what follows it. Answers are always right. Drafts are right answers,
answers with a wrong digit or two, and workings, some of which have such too, so that a draft is worth reading, but not
worth repeating blindly. The loss is that of answers, and of drafts that are right. No query of the task is among the
documents.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
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
MAX_PROMPT, MAX_RESPONSE = 24, 10  # as in the presets


@dataclass(frozen=True)
class DraftsRecipe:
    """How the model is built."""

    documents: int = 128_000
    """the most training documents, each seen once"""
    enough: float = 0.25
    """share of right responses to bare queries at which the first part ends, looked at after every 100 steps"""
    finish: int = 500
    """steps of the second part, with a learning rate that falls to 0"""
    finish_seen: float = 0.8
    """share of documents with a draft in the second part"""
    layers: int = 2
    """transformer blocks"""
    width: int = 128
    """hidden size"""
    heads: int = 4
    """attention heads"""
    batch: int = 32
    """documents of one optimizer step"""
    lr: float = 2e-2
    """learning rate of Muon, which trains the matrices of the blocks; a tenth of it is Adam's, for the rest"""
    warmup: int = 100
    """steps over which the learning rate rises; what is kept is a moving average of the weights, instead of a decay"""
    average: float = 0.98
    """what a step leaves of the moving average"""
    seen: float = 0.5
    """share of documents with a draft in the first part"""
    working: float = 0.4
    """share of working among what answers a bare query"""
    draft_working: float = 0.6
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
        self._task = {frozenset(map(int, query.text.split("+"))) for split in drafts.draw_queries() for query in split}

    def draw_terms(self) -> tuple[int, int]:
        """Returns the numbers of a sum that is none of the task's."""
        terms = drafts.draw_terms(self._draw)
        while frozenset(terms) in self._task:
            terms = drafts.draw_terms(self._draw)
        return terms

    def draw(self) -> list[tuple[str, bool]]:
        """Returns one document as pieces of text, each with whether it is learned from."""
        draw, recipe = self._draw, self._recipe
        terms = self.draw_terms()
        query, answer, working = "{}+{}".format(*terms), str(sum(terms)), drafts.working(terms)
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
    tokens, labels = torch.full((len(rows), length), tokenizer.eos_token_id), torch.full((len(rows), length), -100)
    for number, row in enumerate(rows):
        at = 0
        for text, learned in row:
            piece = torch.tensor(tokenizer(text)["input_ids"])
            tokens[number, at : at + len(piece)] = piece
            if learned:
                labels[number, at : at + len(piece)] = piece
            at += len(piece)
    return tokens, labels


def train(recipe: DraftsRecipe, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None]) -> LlamaForCausalLM:
    """Trains a model on documents.

    First until enough bare queries are answered, then a little more, mostly with drafts.

    Args:
        recipe: Sizes, budget, shares and seed.
        tokenizer: The model's.
        log: Takes one line of progress.
    """
    return finish(begin(recipe, tokenizer, log), recipe, tokenizer, log)


def make_optimizers(model: LlamaForCausalLM, lr: float) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Returns Muon for the matrices of the blocks, and Adam for the rest."""
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    rest = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    return Muon(matrices, lr), torch.optim.AdamW(rest, lr / 10, (0.9, 0.98), weight_decay=0.0)


def learn(
    model: LlamaForCausalLM,
    documents: Sequence[Sequence[tuple[str, bool]]],
    tokenizer: PreTrainedTokenizerBase,
    optimizers: Sequence[torch.optim.Optimizer],
    schedules: Sequence[LambdaLR],
) -> float:
    """Takes one step, and returns the loss before it."""
    tokens, labels = batch(documents, tokenizer)
    loss = model(tokens, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, schedule in zip(optimizers, schedules, strict=True):
        optimizer.step()
        schedule.step()
    model.zero_grad()
    return float(loss.detach())


def finish(
    model: LlamaForCausalLM, recipe: DraftsRecipe, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None]
) -> LlamaForCausalLM:
    """The second part: few steps, mostly with drafts, at a falling learning rate."""
    optimizers = make_optimizers(model, recipe.lr)
    schedules = [LambdaLR(each, lambda step: max(0.0, 1 - step / max(recipe.finish, 1))) for each in optimizers]
    documents = Documents(replace(recipe, seen=recipe.finish_seen, seed=recipe.seed + 1))
    losses = []
    for step in range(1, recipe.finish + 1):
        drawn = [documents.draw() for _ in range(recipe.batch)]
        losses.append(learn(model, drawn, tokenizer, optimizers, schedules))
        if step % 100 == 0:
            right = share_right(model, tokenizer, documents)
            log(f"second part, step {step}: loss {np.mean(losses[-100:]):.3f}, right {right:.3f}")
    return model.eval()


def begin(recipe: DraftsRecipe, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None]) -> LlamaForCausalLM:
    """The first part: until enough bare queries are answered; a moving average of the weights is kept."""
    model = new_model(recipe, tokenizer)
    optimizers = make_optimizers(model, recipe.lr)
    schedules = [LambdaLR(each, lambda step: min(1.0, (step + 1) / recipe.warmup)) for each in optimizers]
    kept = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.average))
    documents = Documents(recipe)
    began, losses = time.monotonic(), []
    for step in range(1, max(1, round(recipe.documents / recipe.batch)) + 1):
        drawn = [documents.draw() for _ in range(recipe.batch)]
        losses.append(learn(model, drawn, tokenizer, optimizers, schedules))
        kept.update_parameters(model)
        if step % 100 == 0:
            right = share_right(kept.module, tokenizer, documents)
            log(f"step {step}: loss {np.mean(losses[-100:]):.3f}, right {right:.3f}, {time.monotonic() - began:.0f} s")
            if right >= recipe.enough:
                break
    found: LlamaForCausalLM = kept.module.eval()
    return found


@torch.no_grad()
def share_right(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, documents: Documents, count: int = 400
) -> float:
    """Returns how many of the responses sampled to bare queries are right, of sums that training does not see."""
    sums = [documents.draw_terms() for _ in range(count)]
    prompts = tokenizer([PROMPT.format(query="{}+{}".format(*terms)) for terms in sums], return_tensors="pt")
    responses = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=MAX_RESPONSE)
    texts = tokenizer.batch_decode(responses[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == str(sum(terms)) for text, terms in zip(texts, sums, strict=True)) / count


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
        {"llm": str(folder)}, stop_token_ids=chain.stop_token_ids, dtype="fp32", device=torch.device("cpu")
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
    works = np.array([[drafts.is_working(draft) for draft in two] for two in played.drafts])
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
        "right after working": _mean(rewards[works]),
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
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return measure(folder, queries)
