"""`drafts-llama-tiny`: a Llama with a quarter of a million parameters that adds numbers, pretrained with drafts.

A document is a prompt of the task `drafts` and its continuation. Answers are always right. Drafts are answers or
workings; some of them have one or two wrong digits, so that a draft is useful, but should not be repeated blindly. The
loss covers all answers and the right drafts. Few documents teach the whole sum in one step, so that a chain can get
ahead of a single agent. The documents contain no query of the task.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cory_env.chain import Chain
from cory_env.rewarding.episodes import RewardedResponse, reward_responses
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks import make_task
from cory_env.tasks.drafts import OBSERVER_PROMPT, PROMPT
from cory_env.tasks.task import Query
from cory_env.tasks.turns import SeenResponse
from policies.generation.generator import EVALUATION_UPDATE, Response, Sampling, sampling_seed
from policies.generation.transformers_generator import TransformersGenerator
from recipes import sums
from recipes.cards import Figures
from recipes.characters import Document, make_tokenizer, new_model, pretrain
from recipes.influence import share_interval, variance_components
from recipes.staging import save_tokenizer

CHARACTERS = "0123456789+~="
POSITIONS = 64
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 24, 10  # as in the presets


@dataclass(frozen=True)
class DraftsRecipe:
    """Settings of the model and its training documents."""

    documents: int = 88_000
    """training documents, each used once"""
    layers: int = 2
    """transformer blocks"""
    width: int = 96
    """hidden size"""
    heads: int = 4
    """attention heads, with 32 dimensions each"""
    rope_theta: float = 100.0
    """base of the rotary position embeddings, low because prompts are short"""
    batch_size: int = 32
    """documents per optimizer step"""
    lr: float = 6e-3
    """learning rate of Muon for the matrices of the blocks; Adam uses a tenth of it for the other parameters"""
    warmup: int = 100
    """warmup steps of the learning rate"""
    decay: float = 0.25
    """share of the steps, at the end, in which the learning rate falls to 0"""
    draft_share: float = 0.62
    """share of documents with a draft"""
    working_share: float = 0.5
    """share of working among the responses in documents without a draft"""
    draft_working_share: float = 0.85
    """share of working among drafts"""
    wrong_working_share: float = 0.1
    """share of working drafts with one or two wrong digits"""
    wrong_answer_share: float = 0.6
    """share of answer drafts with one or two wrong digits"""
    seed: int = 1
    """random seed"""


class Documents:
    """Draws random training documents without the task's queries."""

    def __init__(self, recipe: DraftsRecipe) -> None:
        """Uses the recipe's shares and seed."""
        self._recipe = recipe
        self._rng = random.Random(recipe.seed)
        self._task_terms = {tuple(sorted(sums.parse_query(query.text))) for query in make_task("drafts").all_queries()}

    def draw_terms(self) -> sums.Terms:
        """Returns the numbers of a sum that is not a query of the task."""
        terms = sums.draw_terms(self._rng)
        while tuple(sorted(terms)) in self._task_terms:
            terms = sums.draw_terms(self._rng)
        return terms

    def draw(self) -> Document:
        """Returns one document as pieces of text, each with whether the loss includes it."""
        rng, recipe = self._rng, self._recipe
        terms = self.draw_terms()
        query, answer, working = sums.format_query(terms), str(sum(terms)), sums.format_working(terms)
        if rng.random() >= recipe.draft_share:
            return [
                (PROMPT.format(query=query), False),
                (working if rng.random() < recipe.working_share else answer, True),
            ]
        is_working = rng.random() < recipe.draft_working_share
        draft = working if is_working else answer
        wrong = rng.random() < (recipe.wrong_working_share if is_working else recipe.wrong_answer_share)
        before, after = OBSERVER_PROMPT.format(query=query, reference="\n").split("\n")
        return [(before, False), (corrupt(draft, rng) if wrong else draft, not wrong), (after, False), (answer, True)]


def corrupt(text: str, rng: random.Random) -> str:
    """Returns a text with one or two digits changed, mostly by one."""
    characters = list(text)
    digits = [index for index, character in enumerate(text) if character.isdigit()]
    for index in rng.sample(digits, 1 if rng.random() < 0.6 else 2):
        offset = rng.choice((1, 9)) if rng.random() < 0.6 else rng.randint(1, 9)
        characters[index] = str((int(characters[index]) + offset) % 10)
    return "".join(characters)


def train(recipe: DraftsRecipe, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None]) -> LlamaForCausalLM:
    """Trains a model on documents.

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
    documents = Documents(recipe)
    pretrain(
        model,
        tokenizer,
        lambda step: [[documents.draw() for _ in range(recipe.batch_size)]],
        steps=max(1, round(recipe.documents / recipe.batch_size)),
        lr=recipe.lr,
        warmup=recipe.warmup,
        decay=recipe.decay,
        log=log,
    )
    return model


def measure(folder: Path, queries: int) -> Figures:
    """Measures the saved model as pioneer and observer on held-out queries, with 2 × 2 responses per query.

    Args:
        folder: The model's folder.
        queries: Number of queries.
    """
    task = make_task("drafts")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    chain = Chain(task, tokenizer, max_prompt_tokens=MAX_PROMPT_TOKENS, max_response_tokens=MAX_RESPONSE_TOKENS)
    stop_token_ids = chain.encoders[0].stop_token_ids
    generator = TransformersGenerator({"llm": str(folder)}, dtype="fp32", device=torch.device("cpu"))

    def generate(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Response]:
        return generator.generate(prompts, "llm", Sampling(1.0, MAX_RESPONSE_TOKENS, seeds, stop_token_ids))

    test_queries = task.test[:queries]
    with RewardWorker(task.reward) as worker:
        responses = sample_forks(chain, test_queries, generate, worker)
    parameters = sum(weight.numel() for weight in generator.models["llm"].parameters())
    return {"parameters": parameters, "vocabulary": len(tokenizer), **compute_figures(responses, test_queries)}


GenerateFunction = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[Response]]
"""Maps prompts and one sampling seed per prompt to one response per prompt."""


@dataclass(frozen=True)
class ForkedResponses:
    """Responses and rewards of pioneers and observers. Skipped rewards are NaN."""

    drafts: list[list[str]]
    """`[queries][pioneer responses]`"""
    answers: list[list[list[str]]]
    """`[queries][pioneer responses][observer responses]`"""
    draft_rewards: NDArray[np.float64]
    """`[queries, pioneer responses]`"""
    answer_rewards: NDArray[np.float64]
    """`[queries, pioneer responses, observer responses]`"""


def sample_forks(
    chain: Chain, queries: Sequence[Query], generate: GenerateFunction, worker: RewardWorker
) -> ForkedResponses:
    """Samples two pioneer responses per query, and two observer responses per pioneer response."""
    first_turns = [(query, first) for query in queries for first in (0, 1)]
    later_turns = [(query, first, second) for query, first in first_turns for second in (0, 1)]
    encoder = chain.encoders[0]
    first_prompts = [encoder.build_prompt(query).tokens for query, _ in first_turns]
    seeds = [sampling_seed(0, EVALUATION_UPDATE, query.id, 0, first) for query, first in first_turns]
    first_responses = [encoder.truncate_response(response.tokens)[0] for response in generate(first_prompts, seeds)]
    references = [tokens for tokens in first_responses for _ in (0, 1)]
    later_prompts = [
        encoder.build_prompt(query, [SeenResponse.decoded(encoder.decode, tokens)]).tokens
        for (query, *_), tokens in zip(later_turns, references, strict=True)
    ]
    seeds = [
        sampling_seed(0, EVALUATION_UPDATE, query.id, 1, 2 * first + second) for query, first, second in later_turns
    ]
    later_responses = [encoder.truncate_response(response.tokens)[0] for response in generate(later_prompts, seeds)]

    def compute_rewards(
        turn_queries: Sequence[Query], role: str, responses: Sequence[list[int]]
    ) -> tuple[list[str], list[float]]:
        texts = [encoder.decode(tokens) for tokens in responses]
        roles = [role] * len(turn_queries)
        samples = [RewardedResponse(*sample) for sample in zip(turn_queries, roles, texts, responses, strict=True)]
        rewards = reward_responses(worker, samples)
        return texts, [float("nan") if reward is None else reward for reward in rewards]

    draft_texts, draft_rewards = compute_rewards([query for query, _ in first_turns], chain.agents[0], first_responses)
    texts, rewards = compute_rewards([query for query, *_ in later_turns], chain.agents[1], later_responses)
    return ForkedResponses(
        drafts=[draft_texts[i : i + 2] for i in range(0, len(draft_texts), 2)],
        answers=[[texts[i : i + 2], texts[i + 2 : i + 4]] for i in range(0, len(texts), 4)],
        draft_rewards=np.array(draft_rewards).reshape(len(queries), 2),
        answer_rewards=np.array(rewards).reshape(len(queries), 2, 2),
    )


def compute_figures(responses: ForkedResponses, queries: Sequence[Query]) -> Figures:
    """Returns accuracies, and the draft's influence over all drafts and over drafts that are answers."""
    rewards, right = responses.answer_rewards, responses.draft_rewards == 1
    working = np.array([[sums.is_working(draft) for draft in pair] for pair in responses.drafts])
    right_working = np.array(
        [
            [draft == sums.format_working(sums.parse_query(query.text)) for draft in pair]
            for query, pair in zip(queries, responses.drafts, strict=True)
        ]
    )
    wrong, both_answers = ~working & ~right, ~working.any(axis=1)
    repeats = np.array(
        [
            [np.mean([answer == draft for answer in answers]) for draft, answers in zip(*query, strict=True)]
            for query in _by_query(responses)
        ]
    )
    figures: Figures = {
        "queries, held out, 2 x 2 responses each": len(rewards),
        "accuracy of pioneer responses": _mean(right),
        "accuracy of pioneer responses other than working": _mean(right[~working]),
        "share of working among pioneer responses": _mean(working),
        "accuracy of observer responses": _mean(rewards),
        "observer accuracy after a right answer": _mean(rewards[right]),
        "observer accuracy after a wrong answer": _mean(rewards[wrong]),
        "accuracy of the other pioneer response if one was a wrong answer": _mean(right[:, ::-1][wrong]),
        "share of wrong answers that the observer repeats": _mean(repeats[wrong]),
        "accuracy of working": _mean(right_working[working]),
        "observer accuracy after right working": _mean(rewards[right_working]),
        "observer accuracy after wrong working": _mean(rewards[working & ~right_working]),
    }
    for name, values in (("", rewards), (", both drafts answers", rewards[both_answers])):
        if len(values) < 2:
            continue
        parts, (low, high) = variance_components(values), share_interval(values)
        figures |= {
            f"influence of the draft{name}": parts.share,
            f"influence of the draft{name}, 95 % interval": f"{low:.3f} to {high:.3f}",
            f"variance of the observer's reward{name}: query, draft, noise": ", ".join(f"{part:.4f}" for part in parts),
        }
    examples = [
        f"{draft} ⟶ {answers[0]} {answers[1]}"
        for pair, pair_answers in _by_query(responses)[:6]
        for draft, answers in zip(pair, pair_answers, strict=True)
    ]
    return {**figures, "drafts and two observer responses": examples}


def _mean(values: NDArray[np.generic]) -> float:
    return float(values.mean()) if values.size else float("nan")


def _by_query(responses: ForkedResponses) -> list[tuple[list[str], list[list[str]]]]:
    return list(zip(responses.drafts, responses.answers, strict=True))


def build(folder: Path, recipe: DraftsRecipe, log: Callable[[str], None], queries: int = 600) -> Figures:
    """Trains the model, saves it and its tokenizer in `folder`, and returns the measured figures."""
    tokenizer = make_tokenizer(CHARACTERS, POSITIONS)
    model = train(recipe, tokenizer, log)
    save_tokenizer(tokenizer, folder)
    model.save_pretrained(folder)
    return measure(folder, queries)
