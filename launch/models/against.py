"""Two runs in one environment: one agent has a policy of the first, all others have policies of the second.

against.json   the returns, and what they depend on
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table

from cory_env.chain import Chain
from cory_env.tasks.task import Query, Split
from cory_env.text_envs.episode import EnvEpisode
from cory_env.text_envs.pool import EnvPool
from launch.console.errors import CommandError
from launch.display.statistics import Estimate
from launch.display.tables import new_table
from launch.evaluation.batches import open_results, show_progress
from launch.evaluation.figures import BASE, estimate_columns
from launch.models.generators import choose_backend, start_generator
from launch.models.trained import PolicySet
from launch.models.trained_chain import MAX_BATCH_SIZE
from launch.run_folder.records import to_json
from launch.training.preflight import load_task
from policies.files import atomic_write
from policies.generation.generator import Generator
from policies.models.weights import Weights
from policies.rollout.chain_generation import ChainRequest, generate_chains

RESULT = "against.json"
OUTCOMES = ("win", "draw", "loss")
"""Of an agent, if the returns of all agents always add up to 0."""


class Side(NamedTuple):
    """The policies of a run, or their untrained base, as the agents of an environment.

    Attributes:
        label: Its name in the results.
        policies: The run; of the base, the one that it belongs to.
        is_base: Whether they are untrained.
        chain: The environment's agents with the policies' tokenizers.
    """

    label: str
    policies: PolicySet
    is_base: bool
    chain: Chain

    def name(self, position: int) -> str:
        """Returns the name of an agent's policy in the generator."""
        return f"{self.label}/{self.policies.policy_ids[position]}"


def make_side(label: str, policies: PolicySet, *, is_base: bool = False) -> Side:
    """Loads the environment's seeds and the policies' tokenizers."""
    settings = policies.settings
    task, tokenizers = load_task(settings)
    return Side(label, policies, is_base, settings.make_chain(task, tokenizers, policies.policy_ids))


def make_sides(first: PolicySet, second: PolicySet | None) -> tuple[Side, Side]:
    """Returns both sides; without a second run, it is the base of the first.

    Raises:
        CommandError: They cannot be in one environment or one generator.
    """
    for policies in (first, second or first):
        if policies.settings.env is None:
            raise CommandError(f"--against requires runs with an environment, but {policies.location} has a task.")
    if first.settings.num_agents == 1:
        raise CommandError(f"The environment of {first.location} has one agent, so there is nobody to play against.")
    if second is None:
        return make_side(first.name, first), make_side(BASE, first, is_base=True)
    for name in ("env", "weights", "lora_rank", "lora_alpha", "lora_target_modules"):
        values = [getattr(policies.settings, name) for policies in (first, second)]
        if values[0] != values[1]:
            raise CommandError(f"The runs differ in {name}: {values[0]} and {values[1]}. Choose runs with the same.")
    label = second.name if second.name != first.name else f"{second.name} (2)"
    return make_side(first.name, first), make_side(label, second)


def load_sides(sides: Sequence[Side], backend: str) -> Generator:
    """Loads the policies of both sides into one generator."""
    positions = range(sides[0].policies.settings.num_agents)
    ids = {side.name(position): (side, side.policies.policy_ids[position]) for side in sides for position in positions}
    models = {name: side.policies.base_path(policy_id) for name, (side, policy_id) in ids.items()}
    generator = start_generator(sides[0].policies.settings, models, backend, MAX_BATCH_SIZE[backend])
    for name, (side, policy_id) in ids.items():
        settings = side.policies.settings
        if policy_id in settings.frozen_models or (side.is_base and settings.lora is None):
            continue  # the model itself
        weights: Weights = side.policies.checked_weights(policy_id)
        if side.is_base:  # an engine for adapters has one for each name; this one adds nothing
            weights = {key: np.zeros_like(weights[key]) for key in weights}
        generator.load(name, weights, side.policies.update)
    return generator


def evaluate_against(
    sides: tuple[Side, Side],
    path: Path,
    command: str,
    split: Split,
    queries: int | None,
    samples: int,
    *,
    quiet: bool,
    debug: bool,
) -> dict[str, dict[str, Estimate]]:
    """Plays episodes and writes the results.

    Args:
        queries: Number of seeds; None: all of the split.

    Returns:
        By agent that the first side has, the mean return of that agent and of all others together, per seed; and if
        these always add up to 0, the shares of wins, draws and losses.
    """
    settings = sides[0].policies.settings
    seeds = sides[0].chain.task.queries(split)[:queries]
    backend = choose_backend(None, settings)
    size = MAX_BATCH_SIZE[backend]
    prompt_refs = [(query, sample) for query in seeds for sample in range(samples)]
    batches = [
        (position, prompt_refs[start : start + size])
        for position in range(settings.num_agents)
        for start in range(0, len(prompt_refs), size)
    ]
    returns: dict[int, list[Mapping[str, float]]] = {position: [] for position in range(settings.num_agents)}
    with open_results(path, "evaluation", len(batches), quiet=quiet, debug=debug) as (progress, _):
        progress.stage("Loading the models")
        generator = load_sides(sides, backend)
        progress.start_clock()
        assert settings.env is not None
        pool = EnvPool(
            settings.env,
            agents=settings.agents,
            num_processes=settings.env_processes,
            timeout=settings.reward_timeout,
        )
        with pool:
            for _ in show_progress(_play(sides, generator, pool, batches, returns), len(batches), progress):
                pass
        result = {
            settings.agents[position]: _estimate(
                [(value[settings.agents[position]], sum(value.values())) for value in values], samples, settings.seed
            )
            for position, values in returns.items()
        }
        record = {
            "command": command,
            "sides": [side.label for side in sides],
            **{"split": split, "queries": len(seeds), "samples": samples},
            "figures": {
                agent: {name: estimate._asdict() for name, estimate in figures.items()}
                for agent, figures in result.items()
            },
            "returns": {settings.agents[position]: values for position, values in returns.items()},
        }
        atomic_write(path / RESULT, json.dumps(to_json(record), indent=1, ensure_ascii=False) + "\n")
    return result


def _play(
    sides: tuple[Side, Side],
    generator: Generator,
    pool: EnvPool,
    batches: Sequence[tuple[int, Sequence[tuple[Query, int]]]],
    returns: Mapping[int, list[Mapping[str, float]]],
) -> Iterator[int]:
    """Plays the batches, and adds the returns of their episodes."""
    first, second = sides
    settings = first.policies.settings
    for position, refs in batches:
        own = [first if k == position else second for k in range(settings.num_agents)]
        chain = first.chain.with_encoders([side.chain.encoders[k] for k, side in enumerate(own)])
        names = [side.name(k) for k, side in enumerate(own)]
        episodes = [EnvEpisode(chain, query) for query, _ in refs]
        requests = [
            ChainRequest(episode, names, chain.response_limits, settings.temperature, settings.seed, sample)
            for episode, (_, sample) in zip(episodes, refs, strict=True)
        ]
        generate_chains(generator, requests, pool)
        returns[position].extend(episode.returns() for episode in episodes)
        yield position


def _estimate(returns: Sequence[tuple[float, float]], samples: int, seed: int) -> dict[str, Estimate]:
    """Returns the means over seeds of an agent's return, of all others', and of wins, draws and losses.

    Args:
        returns: Of each episode, the agent's and the sum of all agents'; the samples of a seed side by side.
    """
    own, total = np.array(returns, dtype=np.float64).T
    columns = {"return": own, "others' return": total - own}
    if np.allclose(total, 0.0, atol=1e-9):
        columns |= dict(zip(OUTCOMES, (own > 0, own == 0, own < 0), strict=True))
    values = np.stack([column.astype(np.float64).reshape(-1, samples).mean(1) for column in columns.values()], axis=1)
    return dict(zip(columns, estimate_columns(values, [*columns], seed), strict=True))


def against_table(result: Mapping[str, Mapping[str, Estimate]], sides: tuple[Side, Side]) -> Table:
    """Returns a table with a row per figure and a column per agent that the first side has."""
    table = new_table([f"{sides[0].label} against {sides[1].label}"], [f"as {agent}" for agent in result])
    for name in next(iter(result.values())):
        pattern = "{:+.2f}" if "return" in name else "{:.2f}"
        table.add_row(name, *(figures[name].format(pattern) for figures in result.values()))
    return table
