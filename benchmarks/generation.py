"""The generation phase of a rollout against bare `vllm.LLM.generate` on the same token prompts, lengths and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm import SamplingParams, TokensPrompt

from benchmarks.alternate import alternate
from benchmarks.models import make_model
from benchmarks.record import Figure, Record, median
from launch.console.configuration import read_preset
from policies.cory import CoryConfig
from policies.generation.generator import sampling_seed
from policies.generation.vllm_generator import VLLMGenerator
from policies.rollout.chain_runner import ChainRunner
from policies.rollout.episodes import Rollout
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import RoleMapping, make_mapping

if TYPE_CHECKING:
    from vllm import LLM

CLAIM = "generation-phase tokens/s ≥ 0.9 of bare vllm.LLM.generate"


class Turn(NamedTuple):
    """The requests of one role to its engine."""

    engine: LLM
    prompts: list[TokensPrompt]
    params: list[SamplingParams]
    tokens: list[list[int]]
    """The responses of our rollout."""

    def generate(self) -> list[list[int]]:
        """The bare call."""
        outputs = self.engine.generate(self.prompts, self.params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def run(folder: Path, quick: bool) -> Record:
    """Measures the bundled model's size and ten times that, one engine per LLM in this process, as in a runner."""
    queries = 8 if quick else 128
    values = read_preset("imdb-tiny-paper") | {
        "queries_per_update": queries,
        "minibatch_size": queries,
        "reward": "benchmarks.no_reward:zero",
    }
    record = Record("generation", CLAIM, values)
    for size, rounds in [("test", 2)] if quick else [("5M", 7), ("50M", 3)]:
        config = CoryConfig().cory(**values | {"model": make_model(size, folder)})
        config.validate()
        runner = ChainRunner(config=config, worker_index=1)
        record.figures += measure(runner, size, rounds, record.detail)
        runner.stop()
    return record


def measure(runner: ChainRunner, size: str, rounds: int, detail: dict[str, Any]) -> list[Figure]:
    """Times one model; `detail` gets the seconds."""
    s = runner.settings
    runner._versions = dict.fromkeys(s.policy_ids, 0)  # the initial weights, loaded by the engines themselves
    mapping = make_mapping(s)
    prompt_refs = [PromptRef(query) for query in range(s.queries_per_update)]
    rollouts: list[Rollout] = []

    def ours() -> None:
        rollouts.append(runner.sample(prompt_refs=prompt_refs, mapping=mapping, version=0))

    ours()
    turns = [bare_turn(runner, rollouts[0], role, prompt_refs, mapping) for role in s.agents]
    for turn in turns:
        if turn.generate() != turn.tokens:
            raise RuntimeError("Bare vLLM generated other tokens than the rollout: the two sides differ in their work.")
    took = alternate({"ours": ours, "bare": lambda: [turn.generate() for turn in turns]}, rounds)
    phase = [rollout.counters["rollout_seconds"] for rollout in rollouts[-rounds:]]
    detail[size] = {"cpu_seconds": took.cpu, "wall_seconds": took.wall, "generation_phase_wall_seconds": phase}
    tokens = rollouts[0].counters["tokens"]
    return [
        median(f"{size}: of bare, all of sample(), CPU time", took.ratios("bare", "ours", "cpu"), "×", at_least=0.9),
        median(
            f"{size}: of bare, generation phase, wall time",
            [bare / ours for bare, ours in zip(took.wall["bare"], phase, strict=True)],
            "×",
            at_least=0.9,
        ),
        Figure(f"{size}: ours", tokens / took.seconds("ours", "cpu"), "tokens/CPU-s"),
    ]


def bare_turn(
    runner: ChainRunner, rollout: Rollout, role: str, prompt_refs: list[PromptRef], mapping: RoleMapping
) -> Turn:
    """The prompts, lengths and seeds of one role in a rollout, ready for vLLM: building them is not timed."""
    s, chain = runner.settings, runner.env
    assert isinstance(runner.generator, VLLMGenerator)
    agents = [episode.agent_episodes[role] for episode in rollout.episodes]
    observations = [agent.observations[0] for agent in agents]
    return Turn(
        engine=runner.generator.engines[mapping(role)],
        prompts=[TokensPrompt(prompt_token_ids=o["tokens"][: o["length"]].tolist()) for o in observations],
        params=[
            SamplingParams(
                temperature=s.temperature,
                max_tokens=s.max_response_tokens,
                seed=sampling_seed(s.seed, 0, prompt_ref.query, chain.agents.index(role)),
                stop_token_ids=list(chain.encoders[chain.agents.index(role)].stop_token_ids),
                detokenize=False,
            )
            for prompt_ref in prompt_refs
        ],
        tokens=[agent.actions[0]["tokens"] for agent in agents],
    )
