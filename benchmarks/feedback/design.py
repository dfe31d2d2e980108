"""The design of the study: arms, seeds, learning rates and contrasts, written down before the main runs.

Pilot   two single agents (RLOO, PPO), then two trained chains (own rewards, last rewarded) with the better estimator;
        each with three learning rates and one pilot seed, and the two best of each with two more, measured on
        validation queries.
Main    the better single agent, the better trained chain, and the untrained chain, with ten other seeds, on test
        queries. All at the temperatures that were best for them in the pilot.
Others  variations of the trained chain, with three seeds and the learning rate of the trained chain.

All trained arms generate the same number of responses in training, which here all have nearly the same length.
"""

from collections.abc import Container, Mapping
from typing import Any, Literal, NamedTuple

from cory_env.rewards.sudoku import CELLS
from cory_env.tasks.sudoku import FEEDBACK_PROMPT, OBSERVER_PROMPT, PROMPT
from cory_env.tasks.task import Split
from policies.settings.fields import Fields

PRESET = "sudoku-tiny"
RESPONSES = 256
"""Responses per update, over all agents."""
FIRST_WRONG = 0.42
"""Share of first answers at temperature 1 that are wrong, about halfway through training."""
NUM_DRAFTS = 2
"""Drafts that one observer reads, in the arm `two-drafts`; the model's prompts have no room for three."""
GROUP_SIZE = 4
"""Responses per query and role with RLOO."""
SHARED: dict[str, Any] = {
    "model": "sudoku-llama-tiny",
    "dtype": "fp32",
    "num_updates": 30,
    "lr_schedule": "linear",
    "warmup_updates": 5,
    "kl_coef": 0.02,
    "num_epochs": 2,
    "minibatch_size": 128,
    "eval_every": 10,
    "eval_queries": 250,
    "checkpoint_every": 30,
    "keep_checkpoints": 1,
}
"""Settings of all trained arms, also if they are the preset's, which may change."""
LEARNING_RATES = (1e-4, 3e-5, 3e-4)
TEMPERATURES = (0.7, 1.0, 1.3)
PILOT_SEEDS = (100, 101, 102)
NUM_FINALISTS = 2
"""Arms of each pilot that are run with all pilot seeds: those with the best scores of the first seed."""
MAIN_SEEDS = tuple(range(10))
OTHER_SEEDS = (0, 1, 2)
ESTIMATORS = ("rloo", "ppo")
CREDITS = ("own", "last")

Source = Literal["one_answer", "best_of", "chain"]
"""How an arm answers: once; as often as the chain's tokens allow, with the same check; or as a chain with a stop."""


class ProbePlan(NamedTuple):
    """How a run is measured."""

    split: Split
    queries: int
    samples: int
    """First answers per query."""
    temperatures: tuple[float, ...]


PILOT_PROBE = ProbePlan("validation", 250, 3, TEMPERATURES)


class Arm(NamedTuple):
    """A way to train, run with several seeds; its settings are those that differ from `SHARED` and the preset."""

    name: str
    settings: Mapping[str, Any] | None
    """None: not trained."""
    seeds: tuple[int, ...]
    probe: ProbePlan


class Choice(NamedTuple):
    """What the pilot chose."""

    estimator: str
    single_lr: float
    credit: str
    chain_lr: float
    temperatures: Mapping[str, float]
    """Of the single agent's one answer (`single`), of its best-of-n (`best_of`), and of the chains (`chain`,
    `untrained`)."""


class Contrast(NamedTuple):
    """A planned comparison; `at` says at equal what."""

    arm: str
    source: Source
    against: str
    against_source: Source
    at: str


CONTRASTS = (
    Contrast("chain", "chain", "single", "best_of", "equal tokens per query"),
    Contrast("chain", "chain", "single", "one_answer", "equal tokens in training"),
    Contrast("chain", "chain", "untrained", "chain", "before training"),
)
"""Paired t intervals over the ten main seeds, Holm's correction for three."""
SOURCES: dict[str, Source] = {"single": "one_answer", "best_of": "best_of", "chain": "chain", "untrained": "chain"}
"""Keys of `Choice.temperatures`, and what is measured there."""


def single_settings(estimator: str, lr: float) -> dict[str, Any]:
    """Returns the settings of a single agent with all responses."""
    return {"num_agents": 1, "lr": lr, **_batch(estimator, RESPONSES)}


def chain_settings(credit: str, estimator: str, lr: float, chains: int = RESPONSES // 2) -> dict[str, Any]:
    """Returns the settings of a chain of two agents that share an LLM and the responses."""
    feedback = {"feedback": "task", "stop_when": "solved", "num_policies": 1, "credit": "chain"}
    rewards = {"chain_gamma": 1.0, "reward_scope": "last"} if credit == "last" else {"chain_gamma": 0.0}
    return {"lr": lr, **_batch(estimator, chains), **feedback, **rewards}


def _batch(estimator: str, chains: int) -> dict[str, Any]:
    if estimator == "ppo":
        return {"advantage": "gae", "queries_per_update": chains, "num_generations": 1}
    return {"advantage": estimator, "queries_per_update": chains // GROUP_SIZE, "num_generations": GROUP_SIZE}


def single_pilots(finalists: Container[str] = ()) -> list[Arm]:
    """Returns the untrained model and the single agents of the pilot; only finalists have all pilot seeds."""
    untrained = Arm("untrained-pilot", None, PILOT_SEEDS, PILOT_PROBE)
    return [untrained] + [
        _pilot(f"single-{estimator}-{lr:g}", single_settings(estimator, lr), finalists)
        for estimator in ESTIMATORS
        for lr in LEARNING_RATES
    ]


def chain_pilots(estimator: str, finalists: Container[str] = ()) -> list[Arm]:
    """Returns the chains of the pilot, with the estimator of the better single agent."""
    return [
        _pilot(f"chain-{credit}-{estimator}-{lr:g}", chain_settings(credit, estimator, lr), finalists)
        for credit in CREDITS
        for lr in LEARNING_RATES
    ]


def equal_rate_contrasts(choice: Choice) -> list[Contrast]:
    """Returns the pilot's trained chains against its single agents at the same learning rate, both used as chains.

    They are not planned: they were added because the arms of the main runs differ in their learning rates, so that
    those cannot say whether training in a chain makes a better chain.
    """
    names = [
        (f"chain-{choice.credit}-{choice.estimator}-{lr:g}", f"single-{choice.estimator}-{lr:g}", lr)
        for lr in LEARNING_RATES
    ]
    return [Contrast(chain, "chain", single, "chain", f"lr {lr:g}") for chain, single, lr in names]


def _pilot(name: str, settings: Mapping[str, Any], finalists: Container[str]) -> Arm:
    return Arm(name, settings, PILOT_SEEDS if name in finalists else PILOT_SEEDS[:1], PILOT_PROBE)


def main_arms(choice: Choice) -> list[Arm]:
    """Returns the arms of the contrasts."""
    probe = main_probe(choice)
    return [
        Arm("untrained", None, MAIN_SEEDS, probe),
        Arm("single", single_settings(choice.estimator, choice.single_lr), MAIN_SEEDS, probe),
        Arm("chain", chain_settings(choice.credit, choice.estimator, choice.chain_lr), MAIN_SEEDS, probe),
    ]


def main_probe(choice: Choice) -> ProbePlan:
    """Returns how the runs of the contrasts are measured."""
    return ProbePlan("test", 500, 4, tuple(sorted({*choice.temperatures.values()})))


def other_arms(choice: Choice) -> list[Arm]:
    """Returns variations of the trained chain."""
    chain = chain_settings(choice.credit, choice.estimator, choice.chain_lr)
    # More chains give as many responses, because some end at their first answer.
    chains = round(RESPONSES / (1 + FIRST_WRONG) / GROUP_SIZE) * GROUP_SIZE
    stopped = chain_settings(choice.credit, choice.estimator, choice.chain_lr, chains)
    # Three responses per chain, so fewer chains.
    triples = RESPONSES // (NUM_DRAFTS + 1) // GROUP_SIZE * GROUP_SIZE
    roles = [{"name": "solver", "count": NUM_DRAFTS, "policy": "llm_1"}, {"name": "reader", "policy": "llm_1"}]
    two_drafts = {"roles": roles, "minibatch_size": triples * (NUM_DRAFTS + 1) // 2}
    variations = {
        "two-llms": {**chain, "num_policies": 2, "exchange_period": 5, "minibatch_size": SHARED["minibatch_size"] // 2},
        "no-feedback": {**chain, "observer_prompt": OBSERVER_PROMPT},
        "stop-in-training": {**stopped, "stop_in_training": True, "minibatch_size": chains},
        "two-drafts": {
            **chain_settings(choice.credit, choice.estimator, choice.chain_lr, triples),
            **two_drafts,
            "max_prompt_tokens": prompt_lengths(two_drafts)[-1],
        },
    }
    probe = main_probe(choice)._replace(temperatures=(choice.temperatures["chain"],))
    return [Arm(name, settings, OTHER_SEEDS, probe) for name, settings in variations.items()]


def prompt_lengths(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the tokens of each position's prompt: one per character."""
    template, cells = settings.get("observer_prompt") or FEEDBACK_PROMPT, "." * CELLS
    first = len(PROMPT.format(query=cells))
    drafts = NUM_DRAFTS if settings.get("roles") else 1
    seen = "~".join([cells] * drafts)  # the drafts, or their feedback
    return *[first] * drafts, len(template.format(query=cells, reference=seen, feedback=seen))


assert set(SHARED) <= set(Fields.model_fields)
