"""Learning on episodes of several turns, each turn a row, against one pass over their final length.

An agent with eight turns has eight rows, whose prompts contain the rows before. Their shared beginning is computed
once, so an update should take hardly longer than one on rows that are only as long as the last one. Those predict the
last response alone, so the comparison is strict: the turns' rows also compute the logits of the other seven.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.alternate import alternate
from benchmarks.learner import learn
from benchmarks.models import make_model
from benchmarks.record import Figure, Record, median
from benchmarks.shared_prefix import count_tokens, make_learner
from policies.learning.rows import MAX_TURNS, Rows, make_rows
from policies.settings.files import read_preset
from policies.settings.settings import Settings, make_settings

CLAIM = "learning on 8 turns of 4,000 tokens takes ≤ 1.2 × as long as one pass over the final length (CPU time)"
TURNS = 8


def run(folder: Path, quick: bool) -> Record:
    """Measures both, and plain rows once."""
    observation, response, episodes = (16, 16, 4) if quick else (250, 250, 4)
    s = settings(folder, 2 * TURNS * observation, episodes, quick)
    rows, last = make_turns(observation, response, episodes)
    sides = {"turns": (make_learner(s, True), rows), "last turn": (make_learner(s, True), last)}
    work = {name: partial(learn, {"llm_1": learner}, {"llm_1": part}, s, 0) for name, (learner, part) in sides.items()}
    turns = alternate(work, 1 if quick else 2)
    nodes = {name: count_tokens(learner, part) for name, (learner, part) in sides.items()}
    plain = count_tokens(make_learner(s, False), rows)
    record = Record("turns", CLAIM, s.model_dump())
    record.figures += [
        median("an update, of one pass", turns.ratios("turns", "last turn", "cpu"), "×", at_most=1.2),
        Figure("tokens, of one pass", nodes["turns"] / nodes["last turn"], "×"),
        Figure("tokens of plain rows, of one pass", plain / nodes["last turn"], "×"),
    ]
    record.detail["all"] = {"tokens": nodes | {"plain": plain}, "cpu_seconds": turns.cpu, "wall_seconds": turns.wall}
    return record


def settings(folder: Path, max_tokens: int, episodes: int, quick: bool) -> Settings:
    """One agent that learns by RLOO, in two mini-batches and one epoch."""
    values: dict[str, Any] = {
        **read_preset("paper"),
        **{"env": "cory_env.text_envs.sudoku:repair", "roles": [{"name": "solver"}], "num_agents": 1},
        **{"model": make_model("test" if quick else "5M-4k", folder), "dtype": "fp32", "max_lag": 0},
        **{"advantage": "rloo", "num_generations": 2, "queries_per_update": episodes // 2, "partner_reward": 0.0},
        **{"minibatch_size": episodes // 2, "num_epochs": 1, "lr": 1e-6, "kl_coef": 0.0},
        **{"max_prompt_tokens": max_tokens, "max_response_tokens": max_tokens // TURNS},
    }
    return make_settings(values)


def make_turns(observation: int, response: int, episodes: int) -> tuple[Rows, Rows]:
    """Random rows of all turns, and of the last ones."""
    random = np.random.default_rng(0)
    prompts, responses, keys = [], [], []
    for episode in range(episodes):
        tokens: list[int] = []
        for turn in range(TURNS):
            tokens = [*tokens, *random.integers(1, 4096, observation).tolist()]
            prompts.append(tokens)
            responses.append(random.integers(1, 4096, response).tolist())
            tokens = [*tokens, *responses[-1]]
            keys.append((episode, turn))
    rows = make_rows(
        prompts,
        responses,
        [[-8.0] * response for _ in keys],
        random.normal(size=len(keys)).tolist(),
        [True] * len(keys),
        groups=[episode // 2 * MAX_TURNS + turn for episode, turn in keys],
        chains=[episode for episode, _ in keys],
        turns=[turn for _, turn in keys],
        partner_rewards=[0.0] * len(keys),
    )
    assert rows.turns is not None
    return rows, rows.select(rows.turns == TURNS - 1)
