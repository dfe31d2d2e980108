"""The final evaluation, `final.json`: the responses of each policy alone, and of the chain, to the test queries."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

import numpy as np

from cory_env.tasks.task import Split
from launch.console.errors import CommandError
from launch.run_folder.records import EvaluatedResponse, MetricValues, to_json
from policies.files import atomic_write

if TYPE_CHECKING:
    from policies.cory import Cory
    from policies.rollout.episodes import Rollout
    from policies.rollout.prompt_sampling import PromptRef
    from policies.rollout.role_mapping import RoleMapping
    from policies.settings.settings import Settings

CHAIN_TOKENS = "chain_tokens"
"""Number of tokens that a chain generated for a query, all responses together."""


class FinalEvaluation(TypedDict):
    """The content of `final.json`.

    `policy`: responses of each policy alone, and with `eval_average` of the policy with the averaged weights. A policy
    whose reward failed on every query is missing (`on_reward_error: skip`).
    `last_response`: the chains' last responses, by the policy ids in order, such as `llm_1,llm_2`, for each order of
    roles. They have `in_chain_kl` and `bare_kl` instead of `kl` and, if chains can stop, also `CHAIN_TOKENS`.
    """

    update: int
    policy: dict[str, list[EvaluatedResponse]]
    last_response: NotRequired[dict[str, list[EvaluatedResponse]]]


def measure_chains(
    algo: "Cory", mapping: "RoleMapping", names: Sequence[str], prompt_refs: "Sequence[PromptRef]", split: Split
) -> list[list[EvaluatedResponse]]:
    """Generates chains of responses to queries, and measures every response.

    Args:
        mapping: roles to policies: all roles, or the first role alone.
        prompt_refs: queries of the split, each with its sample number.

    Returns:
        Each chain's responses, in order. Chains whose reward failed are missing (`on_reward_error: skip`).
    """
    rollout, metrics = algo.evaluator.measure(prompt_refs, mapping, split)
    if algo.settings.env is not None:
        return [_agent_records(rollout, row, metrics, names) for row in range(len(rollout.episodes))]
    chains = []
    for row, (prompt_ref, sample, episode) in enumerate(
        zip(rollout.prompt_refs, rollout.samples, rollout.episodes, strict=True)
    ):
        chain = []
        for name, response in zip(names, sample["responses"], strict=False):  # a stopped chain has fewer responses
            record = EvaluatedResponse(
                policy=name,
                role=response["role"],
                query=prompt_ref.query,
                sample=prompt_ref.sample,
                prompt=sample["query"],
                text=response["text"],
                tokens=[int(token) for token in episode.agent_episodes[response["role"]].actions[0]["tokens"]],
                metrics={key: float(column[row]) for key, column in metrics[response["role"]].items()}
                | {"task_reward": response["task_reward"]},  # at full precision, not as float32
            )
            if "reasoning" in response:
                record["reasoning"] = response["reasoning"]
            chain.append(record)
        chains.append(chain)
    return chains


def _agent_records(
    rollout: "Rollout", row: int, metrics: "Mapping[str, Mapping[str, np.ndarray]]", names: Sequence[str]
) -> list[EvaluatedResponse]:
    """Returns one record per agent of an episode: its texts, its tokens, and metrics over all its turns."""
    prompt_ref, sample, episode = rollout.prompt_refs[row], rollout.samples[row], rollout.episodes[row]
    records = []
    for agent, name in zip(metrics, names, strict=True):
        turns = [response for response in sample["responses"] if response["role"] == agent]
        actions = episode.agent_episodes[agent].actions if turns else ()
        values = {key: float(column[row]) for key, column in metrics[agent].items()}
        records.append(
            EvaluatedResponse(
                policy=name,
                role=agent,
                query=prompt_ref.query,
                sample=prompt_ref.sample,
                prompt=sample["query"],
                text="\n".join(response["text"] for response in turns),
                tokens=[int(token) for action in actions for token in action["tokens"]],
                metrics=values | {"task_reward": sum(response["task_reward"] for response in turns)},
            )
        )
    return records


def evaluate_final(algo: "Cory", count: int) -> FinalEvaluation:
    """Evaluates each policy alone, and the chain, on the same test queries with the same seeds."""
    from policies.models.model_names import AVERAGE_POLICY
    from policies.rollout.prompt_sampling import PromptRef

    prompt_refs = [PromptRef(query) for query in range(min(count, len(algo.task.test)))]
    final = FinalEvaluation(update=algo.updates, policy={})
    for mapping in algo.evaluator.orders():
        policy_ids = tuple(mapping.as_dict().values())
        if chains := measure_chains(algo, mapping, policy_ids, prompt_refs, "test"):
            if policy_ids[0] in algo.settings.policy_ids:
                final["policy"][policy_ids[0]] = [_alone(chain[0]) for chain in chains]
            if len(policy_ids) > 1:
                last = [_last_response(chain, algo.settings) for chain in chains]
                final.setdefault("last_response", {})[",".join(policy_ids)] = last
    if algo.settings.eval_average:
        with algo.evaluator.average() as mapping:
            if chains := measure_chains(algo, mapping, (AVERAGE_POLICY,), prompt_refs, "test"):
                final["policy"][AVERAGE_POLICY] = [response for (response,) in chains]
    return final


def _alone(response: EvaluatedResponse) -> EvaluatedResponse:
    """Returns a pioneer's response without the metric that it has only as the last response of a stopped chain."""
    metrics = {name: value for name, value in response["metrics"].items() if name != "bare_kl"}
    return EvaluatedResponse(**{**response, "metrics": metrics})


def _last_response(chain: Sequence[EvaluatedResponse], settings: "Settings") -> EvaluatedResponse:
    """Returns the last response of a chain, with the metrics of `last_response_metrics`.

    If chains can stop, also with the number of tokens that the chain generated.
    """
    from policies.evaluator import last_response_metrics

    columns = [{name: np.array(value) for name, value in response["metrics"].items()} for response in chain]
    last = last_response_metrics(columns, settings.report_kl_coef)
    metrics: MetricValues = {name: float(value) for name, value in last.items()}
    if settings.stop_when is not None:
        metrics[CHAIN_TOKENS] = float(sum(len(response["tokens"]) for response in chain))
    return EvaluatedResponse(**{**chain[-1], "metrics": metrics})


def write_final(file: Path, final: FinalEvaluation) -> None:
    """Writes `final.json` atomically."""
    atomic_write(file, json.dumps(to_json(final), ensure_ascii=False) + "\n")


def read_final(file: Path) -> FinalEvaluation | None:
    """Reads `final.json`; None if it does not exist."""
    if not file.exists():
        return None
    try:
        final: FinalEvaluation = json.loads(file.read_text(encoding="utf-8"))
        lists = (*final["policy"].values(), *final.get("last_response", {}).values())
        if not all("metrics" in response for responses in lists for response in responses):
            raise ValueError("it does not have one record per response")
        return final
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(f"{file} is damaged: {error}. Remove it; only the final responses are lost.") from error
