"""Finds the sets of reasoning-gym in which a second answer of SmolLM2-135M may help.

python -m benchmarks.suite --out runs/suite   # does what is missing in the folder, and prints the table

Screens the sets with short questions by one answer per query, and probes those in which 5 to 80 % of the answers are
right, as `cory probe` does, but by set.
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.suite.analysis import FEEDBACK, REWARD, SOLVED_AT, choose_sets, summarise, table
from benchmarks.suite.sets import (
    MAX_QUESTION_TOKENS,
    PROBE_SEED,
    SCREEN_SEED,
    all_names,
    longest_questions,
    read_sets,
    set_name,
)
from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import reward_episodes
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks.task import Query
from launch.evaluation.batches import RESPONSES, open_results, write_lines
from launch.evaluation.evaluation import plan_evaluation
from launch.evaluation.target import target_settings
from launch.models.generators import start_generator
from launch.probing.plan import CPU_BATCH_SIZE, MIN_SAMPLES, plan_probe
from launch.probing.probe import record_samples
from launch.probing.sampler import sample_answers
from policies.rollout.chain_generation import ChainRequest, generate_chains

MODEL, TEMPERATURE = "smollm2", 0.7
INSTRUCTION = "Reply with only the answer."
SETTINGS: dict[str, Any] = {
    **{"task": "reasoning_gym", "data": "reasoning_gym:gcd?size=2", "reward": REWARD},
    **{"prompt": "{query}\n\n" + INSTRUCTION, "stop": "\n", "dtype": "fp32"},
    **{"max_prompt_tokens": 320, "max_response_tokens": 40},
}
OBSERVER = "{query}\n\nAn answer that may be wrong: {reference}\n\n" + INSTRUCTION
FEEDBACK_OBSERVER = "{query}\n\nAn answer: {reference}\n{feedback}\n\n" + INSTRUCTION
LENGTHS, SCREENED, QUERIES = "lengths.json", "screened.jsonl", "queries.jsonl"
MEASURED = 16
"""Questions per set whose lengths are measured."""


def screen(queries: Sequence[Query]) -> list[dict[str, Any]]:
    """Returns one answer to each query, with its score."""
    plan = plan_evaluation(target_settings(MODEL, None, SETTINGS, 1), None, None, "test", None, 1, print)
    s = plan.settings
    chain = s.make_chain(plan.task, s.make_tokenizers(), s.policy_ids)
    episodes = [ChainEpisode(chain, query) for query in queries]
    requests = [ChainRequest(episode, s.policy_ids, chain.response_limits, TEMPERATURE, 0) for episode in episodes]
    with RewardWorker(plan.task.reward, timeout=3600.0) as worker:
        worker.prepare()
        with closing(start_generator(s, s.model_paths, s.backend, CPU_BATCH_SIZE)) as generator:
            generate_chains(generator, requests)
        rewards = reward_episodes(worker, episodes)
    return [
        {"set": set_name(query), "text": episode.completions[0], "answer": query.columns["answer"], "score": reward}
        for query, episode, (reward,) in zip(queries, episodes, rewards, strict=True)
    ]


def probe(queries: Sequence[Query], samples: int, path: Path) -> None:
    """Samples answers to the queries as `cory probe` does."""
    sampling: dict[str, Any] = {"split": "test", "queries": None, "samples": samples, "temperatures": [TEMPERATURE]}
    plain = plan_probe(MODEL, SETTINGS | {"observer_prompt": OBSERVER}, print, **sampling, solved_at=SOLVED_AT).plain
    values = SETTINGS | {"observer_prompt": FEEDBACK_OBSERVER, "feedback": FEEDBACK}
    plan = plan_probe(MODEL, values, print, **sampling, solved_at=SOLVED_AT)
    plan = plan._replace(task=replace(plan.task, test=queries), plain=plain, queries=len(queries))
    batches = len(plan.batches())
    with open_results(path, "probe", batches, quiet=False, debug=False) as (progress, _):
        record_samples(sample_answers(plan, progress), batches, progress, path)


def main() -> None:
    """Does what is missing in the folder, and prints the table."""
    options = _options()
    screened, folder = options.out / SCREENED, options.out / "probe"
    options.out.mkdir(parents=True, exist_ok=True)
    lengths = options.out / LENGTHS
    if not lengths.exists():
        tokenizer = target_settings(MODEL, None, SETTINGS, 1).make_tokenizers()["llm_1"]
        longest = longest_questions(read_sets(all_names(), MEASURED, SCREEN_SEED), tokenizer)
        lengths.write_text(json.dumps(longest, indent=1), encoding="utf-8")
    longest = json.loads(lengths.read_text(encoding="utf-8"))
    if not screened.exists():
        short = [name for name, tokens in longest.items() if tokens <= MAX_QUESTION_TOKENS]
        write_lines(screened, screen(read_sets(short, options.screened, SCREEN_SEED)))
    answers = _read_lines(screened)
    names = choose_sets(answers)
    _show_screening(longest, answers, names)
    if options.screen_only:
        return
    if not (folder / RESPONSES).exists():
        queries = read_sets(names, options.queries, PROBE_SEED)
        rows = [{"set": set_name(query), "query": query.text, "answer": query.columns["answer"]} for query in queries]
        write_lines(options.out / QUERIES, rows)
        probe(queries, options.samples, folder)
    print(*table(summarise(_read_lines(folder / RESPONSES), _read_lines(options.out / QUERIES))), sep="\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--screened", type=int, default=10, metavar="N", help="queries per screened set")
    parser.add_argument("--queries", type=int, default=16, metavar="N", help="queries per probed set")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="first answers per query")
    parser.add_argument("--screen-only", action="store_true", help="end before the probe")
    options = parser.parse_args()
    if options.queries < 2 or options.samples < MIN_SAMPLES:
        parser.error(f"--queries must be at least 2, and --samples at least {MIN_SAMPLES}")
    return options


def _show_screening(longest: Mapping[str, int], answers: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Prints the sets that are too long, those outside the bounds, and the chosen ones, with their right answers."""
    right: Counter[str] = Counter()
    total = Counter(answer["set"] for answer in answers)
    for answer in answers:
        right[answer["set"]] += answer["score"] >= SOLVED_AT
    shares = {name: f"{name} {right[name]}/{total[name]}" for name in sorted(total)}
    print("Too long:", "; ".join(sorted(longest.keys() - total.keys())))
    print("Not probed:", "; ".join(share for name, share in shares.items() if name not in names))
    print("Probed:", "; ".join(shares[name] for name in names))


def _read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
