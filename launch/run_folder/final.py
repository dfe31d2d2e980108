"""The last look at a run's policies: every response of each one, alone, to the first held-out queries, `final.json`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from launch.console.errors import CommandError
from launch.run_folder.journal import replace_text
from launch.run_folder.records import plain

if TYPE_CHECKING:
    from policies.cory import Cory

OF_RESPONSE = ("task_reward", "kl", "combined_reward", "response_length", "eos_rate", "repetition")
"""What is measured of a response; `eos_rate` is 1 where it ended by itself, else 0."""


class Responses(TypedDict):
    """One policy's responses, an entry of each list per query."""

    query: list[int]
    """Numbers of held-out queries."""
    prompt: list[str]
    text: list[str]
    figures: dict[str, list[float | None]]
    """By the names in `OF_RESPONSE`."""


class Final(TypedDict):
    """What `final.json` holds."""

    update: int
    policy: dict[str, Responses]
    """A policy whose reward failed on every query is absent (`on_reward_error: skip`). With `evaluate_average` the LLM
    whose weights are the mean of the others' is one more."""


def final_responses(algo: "Cory", count: int) -> Final:
    """Lets each policy answer held-out queries alone, always the same ones with the same seeds.

    Args:
        algo: holds the policies.
        count: the first so many held-out queries, or all if there are fewer.
    """
    from policies.models.model_names import AVERAGE

    found = {module: _responses(algo, module, count) for module in algo.settings.modules}
    if algo.settings.evaluate_average:
        with algo.evaluator.average():
            found[AVERAGE] = _responses(algo, algo.evaluator.player(AVERAGE), count)
    return Final(update=algo.updates, policy={name: each for name, each in found.items() if each is not None})


def _responses(algo: "Cory", module: str, count: int) -> Responses | None:
    from policies.rollout.dealing import Deal
    from policies.rollout.role_mapping import RoleMapping

    deals = [Deal(query) for query in range(min(count, len(algo.task.test)))]
    rollouts, figures = algo.evaluator.measure(deals, RoleMapping(("pioneer",), (module,)), "test")
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    if not samples:
        return None
    return Responses(
        query=[deal.query for rollout in rollouts for deal in rollout.deals],
        prompt=[sample["query"] for sample in samples],
        text=[sample["responses"][0]["text"] for sample in samples],
        figures={name: figures["pioneer"][name].tolist() for name in OF_RESPONSE},
    )


def write(file: Path, final: Final) -> None:
    """Writes `final.json`, in one step."""
    replace_text(file, json.dumps(plain(final), ensure_ascii=False) + "\n")


def read(file: Path) -> Final | None:
    """Reads `final.json`, if there is one.

    Raises:
        CommandError: it is damaged.
    """
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Final(update=found["update"], policy=dict(found["policy"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"{file} is damaged: {error}. Remove it: all but the last responses is elsewhere."
        ) from error
