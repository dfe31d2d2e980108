"""The learner's update against a bare PyTorch loop on the same rows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from benchmarks.alternate import alternate
from benchmarks.bare_ppo import BarePPO, Sample
from benchmarks.models import make_model
from benchmarks.record import Figure, Record, median
from cory_env.episode import ChainEpisode
from launch.console.configuration import read_preset
from policies.cory import CoryConfig
from policies.generation.generator import Response
from policies.learning.credit import assign_credit
from policies.learning.estimation import AdvantageEstimator
from policies.learning.metrics import compute_metrics as measure_rows
from policies.learning.policy_learner import PolicyLearner
from policies.learning.policy_model import PolicyModel
from policies.learning.rows import Rows
from policies.models.language_model import compute_dtype
from policies.models.model_names import model_path
from policies.rllib.causal_lm_module import module_config
from policies.rllib.token_batch import rows_from_episodes
from policies.rollout.episodes import to_rllib_episode
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import RoleMapping
from policies.settings.settings import Settings

CLAIM = "learner tokens/s ≥ 0.9 of a bare PyTorch loop doing the same arithmetic (CPU time)"


def run(folder: Path, quick: bool) -> Record:
    """Measures each model size and compute type."""
    record = Record("learner", CLAIM, settings(folder, "test" if quick else "5M", "fp32", quick).model_dump())
    for size, dtype, rounds in (
        [("test", "fp32", 2)] if quick else [("5M", "bf16", 5), ("5M", "fp32", 3), ("50M", "bf16", 1)]
    ):
        s = settings(folder, size, dtype, quick)
        turns, tokens, work = measure(s, rounds)
        for name, bare, target in (
            ("bare loop", "bare", 0.9),
            ("bare loop without entropy and full KL", "lean", None),
        ):
            ratios = turns.ratios(bare, "ours", "cpu")
            record.figures.append(median(f"{size} {dtype}: of a {name}", ratios, "×", at_least=target))
        seconds = turns.seconds("ours", "cpu")
        products = product_speed(s)
        record.figures.append(Figure(f"{size} {dtype}: bare matrix products", products, "GFLOP/CPU-s"))
        record.figures.append(Figure(f"{size} {dtype}: of their speed", work / seconds / products, "×"))
        record.figures.append(Figure(f"{size} {dtype}: ours", tokens / seconds, "tokens/CPU-s"))
        record.detail[f"{size} {dtype}"] = {"tokens": tokens, "cpu_seconds": turns.cpu, "wall_seconds": turns.wall}
    return record


def settings(folder: Path, size: str, dtype: str, quick: bool) -> Settings:
    """The preset imdb-tiny-paper's, on a random model."""
    values: dict[str, Any] = read_preset("imdb-tiny-paper") | {
        "model": make_model(size, folder),
        "dtype": dtype,
        "lr": 1e-6,
    }
    values["importance_sampling_clip_max"] = None  # no engine drew the responses
    if quick:
        values |= {"queries_per_update": 8, "minibatch_size": 4, "micro_batch_size": 4}
    return CoryConfig().cory(**values).settings


def measure(s: Settings, rounds: int) -> tuple[Any, int, float]:
    """Times updates on one batch of responses.

    Returns:
        The turns of `ours`, `bare` and `lean`; response tokens, and matrix products in GFLOP, of an update.
    """
    learners = build(s)
    rows_by_policy, samples = play(s)
    reference = learners[s.policy_ids[0]].model.reference()
    bare = {policy_id: BarePPO(s, reference) for policy_id in s.policy_ids}
    updates = iter(range(1_000_000))

    def plain(reported: bool) -> None:
        for policy_id, policy in bare.items():
            policy.update(samples[policy_id], reported)

    turns = alternate(
        {
            "ours": lambda: learn(learners, rows_by_policy, s, next(updates)),
            "bare": lambda: plain(True),
            "lean": lambda: plain(False),
        },
        rounds,
    )
    flat = [sample for policy_samples in samples.values() for sample in policy_samples]
    responses = sum(len(sample.response) for sample in flat)
    tokens = responses + sum(len(sample.prompt) for sample in flat)
    body = reference.num_parameters(exclude_embeddings=True)
    head = reference.config.vocab_size * reference.config.hidden_size
    passes = (
        2 + 3 * s.num_epochs
    )  # policy and reference score once; each epoch goes forward and, twice as dear, backward
    return turns, responses, 2e-9 * passes * (body * tokens + head * responses)


def product_speed(s: Settings) -> float:
    """GFLOP per CPU second of the largest matrix products in the model's layers, in its compute type."""
    width = AutoConfig.from_pretrained(s.model_paths["llm_1"]).hidden_size
    dtype = compute_dtype(s.dtype, torch.device("cpu"))
    left, right = torch.randn(2048, width).to(dtype), torch.randn(width, 4 * width).to(dtype)
    products, started = 0, time.process_time()
    while time.process_time() - started < 2.0:
        left @ right
        products += 1
    return 2e-9 * products * 2048 * width * 4 * width / (time.process_time() - started)


def build(s: Settings) -> dict[str, PolicyLearner]:
    """Each LLM's learner as an algorithm builds it, with one intra-op thread pool as pinned by OMP_NUM_THREADS."""
    model_config = module_config(s, "llm_1")
    path = model_path(model_config.pop("model"))
    learners = {
        name: PolicyLearner(PolicyModel(path, **model_config), s.hyperparameters, name=name, policy_index=index)
        for index, name in enumerate(s.policy_ids)
    }
    for learner in learners.values():
        learner.check_forward()
    return learners


def learn(learners: Mapping[str, PolicyLearner], rows_by_policy: Mapping[str, Rows], s: Settings, update: int) -> None:
    """One update, in the three steps of `Cory.training_step`."""
    scored = {name: rows.with_scores(learners[name].score(rows)) for name, rows in rows_by_policy.items()}
    estimations = {name: AdvantageEstimator(s.hyperparameters) for name in scored}
    for name, rewards in assign_credit(scored, s.credit_assignment, estimations).items():
        measure_rows(scored[name], s.report_kl_coef)
        estimates, _ = estimations[name].estimate(scored[name], rewards)
        learners[name].update(scored[name].with_estimates(estimates), update, s.kl_coef)


def play(s: Settings) -> tuple[dict[str, Rows], dict[str, list[Sample]]]:
    """One update's responses by LLM, as a learner takes them and as plain lists; random ones, of which a quarter ends
    early, at a random length.
    """
    chain = s.make_chain(s.make_task(), s.make_tokenizers())
    mapping = RoleMapping(chain.agents, s.policy_ids)
    random = np.random.default_rng(0)
    episodes = []
    for query in range(s.queries_per_update):
        episode, responses = ChainEpisode(chain, chain.task.train[query % len(chain.task.train)]), []
        for _ in chain.agents:
            length = (
                int(random.integers(1, s.max_response_tokens + 1)) if random.random() < 0.25 else s.max_response_tokens
            )
            tokens = random.integers(1, chain.vocab_size, length).tolist()
            episode.respond({"tokens": tokens, "length": length})
            responses.append(Response(tokens, [-8.0] * length))
        episodes.append(
            to_rllib_episode(
                PromptRef(episode.query.id, query),
                episode,
                responses,
                random.normal(size=len(chain.agents)).tolist(),
                mapping,
            )
        )
    samples: dict[str, list[Sample]] = {}
    for episode in episodes:
        for agent in episode.agent_episodes.values():
            observation, response = agent.observations[0], agent.actions[0]
            prompt = observation["tokens"][: observation["length"]].tolist()
            samples.setdefault(agent.module_id, []).append(Sample(prompt, response["tokens"], agent.rewards[0]))
    return rows_from_episodes(episodes), samples
