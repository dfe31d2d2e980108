"""Claims about CORY, and whether a study reproduces them.

These are the claims of the paper, and three figures that are quoted for the method elsewhere. They are judged
individually, without correction for multiple tests.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from benchmarks.reproduction import findings as find
from benchmarks.reproduction.findings import FAR, LATE, MUCH_MORE, NEARLY, SIMILAR, Arms, Finding
from benchmarks.reproduction.measures import trained, unsteadiness, untrained
from launch.experiments.measures import final_value
from launch.experiments.results import StudyRun

PAPER = "paper, IMDB"
GSM8K = "paper, GSM8K"
QUOTED = "quoted, not in the paper's text"


class Claim(NamedTuple):
    """A claim and the rule by which it is judged."""

    study: str
    """The bundled study that tests it."""
    source: str
    text: str
    rule: str
    """When it counts as reproduced; for a claim that is not judged, the reason."""
    judge: Callable[[Arms], Finding | None] | None
    """Returns the finding, or None if required runs are missing."""


class Judged(NamedTuple):
    """A claim and its finding."""

    claim: Claim
    finding: Finding


def judge_all(runs: Iterable[StudyRun]) -> list[Judged]:
    """Returns every claim with our figure; those whose arms are missing are `not run`.

    Args:
        runs: of one or several studies.
    """
    studies: dict[str, dict[str, list[StudyRun]]] = {}
    for run in runs:
        studies.setdefault(run.study, {}).setdefault(run.arm, []).append(run)
    return [Judged(claim, _finding(claim, studies.get(claim.study, {}))) for claim in CLAIMS]


def _finding(claim: Claim, arms: Arms) -> Finding:
    finding = claim.judge(arms) if claim.judge is not None else None
    return finding or Finding("", "not run")


def _cooperation(study: str) -> Claim:
    return Claim(
        study,
        "paper, appendix",
        "Cooperative agents do better than competitive ones",
        "CORY's combined reward ends higher than with α = -1",
        partial(
            find.difference,
            one="cory",
            other="competitive",
            measure=final_value("combined_reward"),
            name="combined reward",
        ),
    )


CLAIMS = (
    Claim(
        "imdb",
        PAPER,
        "PPO and CORY reach a similar task reward",
        f"the difference lies within ± {SIMILAR:.0%} of what training gains PPO, where it gains anything",
        partial(find.similar_reward, one="cory", other="ppo", upper=SIMILAR),
    ),
    Claim(
        "imdb",
        PAPER,
        "PPO's final KL is more than twice CORY's",
        "KL of PPO over KL of CORY is above 2",
        partial(find.ratio, one="ppo", other="cory", bound=2.0),
    ),
    Claim(
        "imdb",
        PAPER,
        "PPO's combined reward falls in training",
        "held out, it is lower after training than before",
        partial(find.changes, arm="ppo", rises=False),
    ),
    Claim(
        "imdb",
        PAPER,
        "CORY's combined reward rises in training",
        "held out, it is higher after training than before",
        partial(find.changes, arm="cory", rises=True),
    ),
    Claim(
        "imdb",
        PAPER,
        "The two CORY agents end almost equal",
        f"their combined rewards differ by less than {SIMILAR:.0%} of the gain in task reward",
        find.equal_agents,
    ),
    Claim(
        "imdb",
        PAPER,
        "CORY's Pareto frontier lies outside PPO's",
        "over the sweep of η its hypervolume is larger",
        find.pareto,
    ),
    Claim(
        "imdb",
        PAPER,
        "At a high learning rate PPO collapses and CORY does not",
        "at one of the learning rates that were tried all PPO runs collapse, at least three, and no CORY run; not "
        "reproduced where most do at one, and at none more of them than of CORY's",
        find.learning_rates,
    ),
    Claim(
        "imdb",
        PAPER,
        "Where PPO collapses, it repeats itself",
        "of its collapsed runs, in all arms, most repeat token pairs beyond the limit of health; not reproduced where "
        f"most do not even repeat {MUCH_MORE} times as much as before training",
        find.collapse_repeats,
    ),
    Claim(
        "imdb",
        PAPER,
        "A larger single model ends with more KL",
        "PPO with twice the parameters ends with more than CORY",
        partial(find.difference, one="ppo-double-model", other="cory", measure=final_value("kl"), name="KL"),
    ),
    Claim(
        "imdb",
        PAPER,
        "Without knowledge transfer the reward is unsteady",
        "the training task reward changes more from update to update than CORY's",
        partial(find.difference, one="no-transfer", other="cory", measure=unsteadiness, name="unsteadiness"),
    ),
    Claim(
        "imdb",
        PAPER,
        "Without knowledge transfer the KL is higher",
        "it ends higher than CORY's",
        partial(find.difference, one="no-transfer", other="cory", measure=final_value("kl"), name="KL"),
    ),
    Claim(
        "imdb",
        PAPER,
        "Without role exchange the task reward is good",
        f"in the last updates, over both roles, it is at most {SIMILAR:.0%} of the gain below CORY's",
        partial(
            find.similar_reward,
            one="no-exchange",
            other="cory",
            upper=float("inf"),
            reward=trained("task_reward", LATE),
            start_of=untrained("task_reward"),
        ),
    ),
    Claim(
        "imdb",
        PAPER,
        "Without role exchange the KL is much higher",
        f"in the last updates, over both roles, it is above {FAR:g} times CORY's",
        partial(find.ratio, one="no-exchange", other="cory", bound=FAR, kl=trained("kl", LATE)),
    ),
    Claim(
        "imdb",
        PAPER,
        "Without role exchange the observer's KL is far below the pioneer's",
        f"in the last updates the pioneer's is above {FAR:g} times the observer's",
        find.observer_below_pioneer,
    ),
    _cooperation("imdb"),
    Claim(
        "arithmetic",
        GSM8K,
        "PPO's task reward peaks midway and declines",
        "held out, it is lower at the end than at the first evaluation from half of the updates on",
        partial(find.declines, arm="ppo"),
    ),
    Claim(
        "arithmetic",
        GSM8K,
        "CORY converges early",
        f"at the first evaluation from a tenth of the updates on it has {NEARLY:.0%} of its largest gain",
        partial(find.early, arm="cory"),
    ),
    Claim(
        "arithmetic",
        GSM8K,
        "CORY ends with less KL",
        "KL of PPO over KL of CORY is above 1",
        partial(find.ratio, one="ppo", other="cory", bound=1.0),
    ),
    Claim(
        "arithmetic",
        GSM8K,
        "Where PPO collapses, responses no longer end",
        "of its collapsed runs most have an EOS rate below half of that before training",
        find.collapse_is_endless,
    ),
    _cooperation("arithmetic"),
    Claim(
        "arithmetic",
        GSM8K,
        "CORY answers 18 % of GSM8K's test questions right at the first try",
        "not asked here: it is of Llama-2-7b-chat in 4 bits (preset gsm8k-llama2-7b), which needs GPUs",
        None,
    ),
    Claim(
        "arithmetic",
        GSM8K,
        "At lr 1e-4 PPO collapses and CORY does not, with 7 and with 13 billion parameters",
        "not asked here: models of this size need GPUs",
        None,
    ),
    Claim(
        "imdb",
        QUOTED,
        "+12.3 % optimality",
        "CORY's task reward less PPO's, as a share of what training gains PPO: the interval holds 12.3 % and not 0",
        find.optimality,
    ),
    Claim(
        "imdb",
        QUOTED,
        "-67 % collapse",
        "share of collapsed runs, over the settings of tier 1 and of both sweeps in which any did, at least three: the "
        "interval holds -67 % and not 0",
        find.fewer_collapses,
    ),
    Claim(
        "imdb",
        QUOTED,
        "-41 % variance",
        "variance over seeds of one policy's final combined reward: the interval holds -41 % and not 0",
        find.less_variance,
    ),
)
