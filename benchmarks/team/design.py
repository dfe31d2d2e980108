"""The design of the study: arms, rates, seeds and contrasts, written down before the main runs.

Pilot   every arm at every learning rate with the pilot seeds, measured on validation queries.
Main    every arm at its best rate with ten other seeds, on test queries; and the arms of a contrast whose best rates
        differ also at one another's rates.

All arms train the same bundled model on Sudoku for as many updates, with as many responses per update, all of which
have nearly the same length. Nothing else differs but who answers, and what a second answer sees.

A chain of two is an agent with two turns: the second turn has a prompt of its own, which shows the first grid but no
conversation. So "one LLM with turns" and "one LLM in both roles of a chain" are the same arm here.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.feedback import design as feedback
from benchmarks.feedback.design import GROUP_SIZE, PILOT_SEEDS, RESPONSES
from cory_env.tasks.sudoku import OBSERVER_PROMPT
from cory_env.tasks.task import Split

SHARED: dict[str, Any] = {**feedback.SHARED, "eval_every": 30, "advantage": "rloo", "num_generations": GROUP_SIZE}
"""Settings of all arms, also if they are the preset's, which may change."""
SINGLE: dict[str, Any] = {"num_agents": 1, "queries_per_update": RESPONSES // GROUP_SIZE}
TURNS: dict[str, Any] = {
    "feedback": "task",
    "stop_when": "solved",
    "credit": "chain",
    "chain_gamma": 0.0,  # each answer's own reward
    "queries_per_update": RESPONSES // 2 // GROUP_SIZE,
}
"""Two answers per query. All chains are complete in training; used, they end at a right grid."""
TEAM: dict[str, Any] = {**TURNS, "num_policies": 2, "minibatch_size": SHARED["minibatch_size"] // 2}
KINDS: dict[str, dict[str, Any]] = {
    "single": SINGLE,
    "turns": {**TURNS, "num_policies": 1, "observer_prompt": OBSERVER_PROMPT},
    "feedback": {**TURNS, "num_policies": 1},
    "exchange": {**TEAM, "exchange_period": 5},
    "fixed": {**TEAM, "exchange_period": None},
}
"""One LLM that answers once; one LLM with two turns, without and with feedback; two LLMs with feedback, with and
without role exchange. The settings are those that differ from `SHARED` and the preset."""
RATES = (1e-4, 3e-5, 3e-4)
MAIN_SEEDS = tuple(range(10))
TEMPERATURE = 0.7
"""Of all measurements: the best of 0.7, 1.0 and 1.3 for each way to answer in the feedback study."""
SAMPLES = 3
"""First answers per query and LLM."""


class Arm(NamedTuple):
    """A way to train, at one learning rate, with several seeds."""

    kind: str
    lr: float
    seeds: tuple[int, ...]
    split: Split
    queries: int

    @property
    def name(self) -> str:
        """The name of the arm's folder."""
        return f"{self.kind}-{self.lr:g}"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that differ from `SHARED` and the preset."""
        return {**KINDS[self.kind], "lr": self.lr}

    @property
    def num_llms(self) -> int:
        """Number of LLMs in training."""
        return 2 if self.kind in ("exchange", "fixed") else 1


class Contrast(NamedTuple):
    """A planned comparison: the score of a way to answer minus another one's, paired by seed."""

    name: str
    kind: str
    way: str
    against: str
    against_way: str


CONTRASTS = (
    Contrast("turns", "turns", "blind", "single", "best_of_2"),
    Contrast("feedback", "feedback", "chain", "turns", "blind"),
    Contrast("a second LLM", "fixed", "chain", "feedback", "chain"),
    Contrast("role exchange", "exchange", "chain", "fixed", "chain"),
    Contrast("training with feedback", "feedback", "chain", "single", "chain"),
)
"""The ways are those of `benchmarks.team.runs.measure`, all with two answers and equal tokens per query. The first four
add up to the gain of a team with role exchange over a single agent's best-of-2.

Paired t intervals over the main seeds, Holm's correction for these and for `SWAP`."""
SWAP = "survives a swap"
"""(chain − swapped) of `fixed` minus (chain − swapped) of `exchange`: positive if exchanging roles makes LLMs that lose
less when their roles are swapped."""
OWN_WAYS = {"single": "one_answer", "turns": "blind", "feedback": "chain", "exchange": "chain", "fixed": "chain"}
"""How each kind answers in training; its best rate has the highest score in this way."""


def pilot_arms() -> list[Arm]:
    """Returns the arms of the pilot, in the order of execution."""
    return [Arm(kind, lr, PILOT_SEEDS, "validation", 250) for lr in RATES for kind in KINDS]


def main_arms(rates: Mapping[str, float]) -> list[Arm]:
    """Returns the arms of the main runs.

    Args:
        rates: By kind, the best learning rate of the pilot.
    """
    pairs = {(contrast.kind, contrast.against) for contrast in CONTRASTS} | {("fixed", "exchange")}
    needed = {(kind, rates[kind]) for kind in KINDS}
    needed |= {(kind, rates[other]) for pair in pairs for kind in pair for other in pair}
    return [Arm(kind, lr, MAIN_SEEDS, "test", 500) for kind in KINDS for lr in RATES if (kind, lr) in needed]
