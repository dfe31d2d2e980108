"""The last look at a run's policies, `final.json`: every response of each one, alone, to the first held-out queries,
and the chain's last answer to them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from cory_env.tasks.task import Split
from launch.console.errors import CommandError
from launch.run_folder.journal import atomic_write
from launch.run_folder.records import Evaluation, to_json

if TYPE_CHECKING:
    from policies.cory import Cory
    from policies.rollout.prompt_sampling import PromptRef
    from policies.rollout.role_mapping import RoleMapping

PROBED = 200
"""Held-out queries, at most, on which the influence is measured: two responses of the pioneer to each, two to each of
these."""


class FinalInfluence(TypedDict):
    """How much of the variance of the second agent's reward the pioneer's response explains (`policies.influence`)."""

    share: float | None
    """None where no reward varies."""
    low: float | None
    high: float | None
    """Ends of its 95 % interval."""
    queries: int


class Final(TypedDict):
    """What `final.json` holds."""

    update: int
    policy: dict[str, list[Evaluation]]
    """Of each policy alone. One whose reward failed on every query is absent (`on_reward_error: skip`). With
    `eval_average` the LLM whose weights are the mean of the others' is one more."""
    last_response: NotRequired[dict[str, list[Evaluation]]]
    """Of the chain, by who plays it, such as `llm_1,llm_2`, in every order that role exchange brings."""
    influence: NotRequired[FinalInfluence]
    """Of a chain whose agents see the earlier responses, on the first `PROBED` of these queries at most."""


def measure_chains(
    algo: "Cory", mapping: "RoleMapping", names: Sequence[str], prompt_refs: "Sequence[PromptRef]", split: Split
) -> list[list[Evaluation]]:
    """Lets policies answer held-out queries in turn, and measures every response.

    Args:
        algo: holds the policies.
        mapping: who plays: all roles, or the first one alone.
        names: what the policy_ids are called, by position.
        prompt_refs: queries of the split, and which sample of their responses each is.
        split: of the task.

    Returns:
        Each chain's responses, in order. Chains whose reward failed are left out (`on_reward_error: skip`).
    """
    rollout, metrics = algo.evaluator.measure(prompt_refs, mapping, split)
    played = zip(rollout.prompt_refs, rollout.samples, rollout.episodes, strict=True)
    return [
        [
            Evaluation(
                policy=name,
                role=response["role"],
                query=prompt_ref.query,
                sample=prompt_ref.sample,
                prompt=sample["query"],
                text=response["text"],
                tokens=[int(token) for token in episode.agent_episodes[response["role"]].actions[0]["tokens"]],
                metrics={key: float(column[row]) for key, column in metrics[response["role"]].items()}
                | {"task_reward": response["task_reward"]},  # not rounded to 32 bits
            )
            for name, response in zip(names, sample["responses"], strict=True)
        ]
        for row, (prompt_ref, sample, episode) in enumerate(played)
    ]


def final_responses(algo: "Cory", count: int) -> Final:
    """Lets each policy answer held-out queries alone, and the chain, always the same ones with the same seeds.

    Args:
        algo: holds the policies.
        count: the first so many held-out queries, or all if there are fewer.
    """
    from policies.models.model_names import AVERAGE
    from policies.rollout.prompt_sampling import PromptRef

    prompt_refs = [PromptRef(query) for query in range(min(count, len(algo.task.test)))]
    final = Final(update=algo.updates, policy={})
    for module in algo.settings.policy_ids:
        mapping = algo.evaluator.with_pioneer(module)
        policy_ids = tuple(mapping.as_dict().values())
        if chains := measure_chains(algo, mapping, policy_ids, prompt_refs, "test"):
            final["policy"][module] = [chain[0] for chain in chains]
            if len(policy_ids) > 1:
                final.setdefault("last_response", {})[",".join(policy_ids)] = [chain[-1] for chain in chains]
    if algo.settings.eval_average:
        with algo.evaluator.average() as alone:
            if chains := measure_chains(algo, alone, (AVERAGE,), prompt_refs, "test"):
                final["policy"][AVERAGE] = [response for (response,) in chains]
    if "last_response" in final:
        final["influence"] = _influence(algo, min(count, PROBED))
    return final


def _influence(algo: "Cory", queries: int) -> FinalInfluence:
    from policies.influence import components, measure_influence, share_interval

    _, rewards = measure_influence(algo, queries)
    if len(rewards) < 2:
        return FinalInfluence(share=None, low=None, high=None, queries=len(rewards))
    low, high = share_interval(rewards)
    return FinalInfluence(share=components(rewards).share, low=low, high=high, queries=len(rewards))


def write(file: Path, final: Final) -> None:
    """Writes `final.json`, in one step."""
    atomic_write(file, json.dumps(to_json(final), ensure_ascii=False) + "\n")


def read(file: Path) -> Final | None:
    """Reads `final.json`, if there is one.

    Raises:
        CommandError: it is damaged.
    """
    if not file.exists():
        return None
    try:
        final: Final = json.loads(file.read_text(encoding="utf-8"))
        lists = (*final["policy"].values(), *final.get("last_response", {}).values())
        if not all("metrics" in response for responses in lists for response in responses):
            raise ValueError("it does not hold one record per response")
        return final
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(
            f"{file} is damaged: {error}. Remove it: all but the last responses is elsewhere."
        ) from error
