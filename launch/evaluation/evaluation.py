"""Evaluates policies batch by batch, with all results in a folder.

responses.jsonl   a line per chain, with its responses
evaluation.json   the metrics, and what they depend on
log.txt           the output of libraries and rewards
"""

import contextlib
import json
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cory_env.tasks import Split, Task
from launch.cluster import session
from launch.cluster.gpus import check_gpus
from launch.console.errors import CommandError
from launch.display.terminal import ProgressPrinter
from launch.evaluation.batches import RESPONSES, open_results, show_progress, write_lines
from launch.evaluation.figures import BASE, PolicyScores, Scoring, compute_scores
from launch.run_folder.checkpoints import UNTRAINED
from launch.run_folder.environment import versions
from launch.run_folder.final import measure_chains
from launch.run_folder.locations import locate_files
from launch.run_folder.records import EvaluatedChain, to_json
from launch.run_folder.run import Run
from launch.run_folder.sources import SPLITS, Sources, collect_sources, find_changes, public_task_fields
from launch.training import preflight
from policies.files import atomic_write
from policies.models.model_names import AVERAGE_POLICY
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import RoleMapping, make_orders
from policies.settings.processes import processes
from policies.settings.settings import Settings, settings_in_categories

if TYPE_CHECKING:
    from policies.cory import Cory

RESULT = "evaluation.json"


class Lineup(NamedTuple):
    """The policies that respond, and their names in the results: one alone, or a whole chain, by position.

    A pioneer's responses are those it gives alone.
    """

    trained: bool
    policy_ids: tuple[str, ...]
    names: tuple[str, ...]


class EvaluationPlan(NamedTuple):
    """An evaluation of samples to each of the first queries of a split, with everything its responses depend on.

    `checkpoint` has the update and folder of the run's checkpoint; None: only the model is evaluated. `sources` is None
    for an algorithm in memory.
    """

    settings: Settings
    task: Task
    sources: Sources | None
    split: Split
    queries: int
    samples: int
    checkpoint: tuple[int, Path] | None

    @property
    def lineups(self) -> list[Lineup]:
        """The base, then the policies of the checkpoint in every order of role exchange, so each policy in each role.

        Policies that start from the same model are the same base before training. If they start from different models,
        the bases are evaluated in the same orders, each named after the first policy that starts from it.
        """
        policy_ids = self.settings.policy_ids
        orders: list[tuple[str, ...]] = [(policy_id,) for policy_id in policy_ids]
        if self.settings.knowledge_transfer:  # otherwise no policy sees another's response
            orders = [tuple(mapping.as_dict().values()) for mapping in make_orders(self.settings)]
        models = self.settings.models
        first_policy = {model: policy_id for policy_id, model in reversed(models.items())}
        base_names = {
            policy_id: BASE if len(first_policy) == 1 else f"{BASE} of {first_policy[models[policy_id]]}"
            for policy_id in policy_ids
        }
        bases: dict[tuple[str, ...], tuple[str, ...]] = {}
        for order in orders:
            bases.setdefault(tuple(base_names.get(policy_id, policy_id) for policy_id in order), order)
        lineups = [Lineup(False, order, names) for names, order in bases.items()]
        if self.checkpoint is None:
            return lineups
        if self.settings.eval_average:  # in all roles, because there is only one average
            orders.append(tuple(AVERAGE_POLICY if name in policy_ids else name for name in orders[0]))
        return lineups + [Lineup(True, order, order) for order in orders]

    def batches(self) -> list[list[PromptRef]]:
        """The queries and samples of each lineup; a batch is as large as the chains of an update."""
        size = self.settings.chains
        prompt_refs = [PromptRef(query, sample) for query in range(self.queries) for sample in range(self.samples)]
        return [prompt_refs[start : start + size] for start in range(0, len(prompt_refs), size)]

    def score(self, chains: list[EvaluatedChain], solved_at: float | None) -> dict[str, PolicyScores]:
        """Computes the metrics; with `solved_at` also pass@1, 2, 4, … up to the number of samples."""
        ks = [] if solved_at is None else [2**power for power in range(self.samples.bit_length())]
        scoring = Scoring(self.queries, self.settings.report_kl_coef, solved_at, ks, self.settings.seed)
        s = self.settings
        can_stop, is_env = s.stop_when is not None, s.env is not None
        return compute_scores(chains, scoring, s.agents, can_stop=can_stop, is_env=is_env)


def plan_evaluation(
    settings: Settings,
    run: Run | None,
    checkpoint: tuple[int, Path] | None,
    split: Split,
    queries: int | None,
    samples: int,
    warn: Callable[[str], None],
) -> EvaluationPlan:
    """Plans the evaluation of a run's checkpoint or of a model.

    Args:
        run: The run to evaluate; None: a model.
        checkpoint: Update and folder of the run's checkpoint; None: a model.
        queries: Number of queries; None: all.
        warn: Called with each difference from the sources of training, and if the checkpoint is untrained.
    """
    settings = preflight.fill_in_settings(settings)
    task, tokenizers = preflight.check_run_settings(settings)
    if run is not None:
        preflight.check_rope_factors(settings, run.settings.max_length)
    check_gpus(settings)
    sources = collect_sources(settings, task, tokenizers)
    for text in changes_since(run, settings, sources) if run is not None else ():
        warn(text)
    if checkpoint is not None and checkpoint[0] == 0:
        warn(UNTRAINED)
    return make_plan(settings, task, sources, split, queries, samples, checkpoint)


def make_plan(
    settings: Settings,
    task: Task,
    sources: Sources | None,
    split: Split,
    queries: int | None,
    samples: int,
    checkpoint: tuple[int, Path] | None,
) -> EvaluationPlan:
    """Plans an evaluation on the first queries of a split, or on all; see `plan_evaluation`."""
    for name, number in (("queries", queries), ("samples", samples)):
        if number is not None and number < 1:
            raise CommandError(f"{name}={number} must be at least 1.")
    available = len(task.queries(split))
    if not available:
        raise CommandError(f"The {split} split of task {task.name} has no queries. Choose another split.")
    return EvaluationPlan(settings, task, sources, split, min(queries or available, available), samples, checkpoint)


def evaluate(
    plan: EvaluationPlan,
    path: Path,
    command: str,
    *,
    solved_at: float | None = None,
    quiet: bool = False,
    debug: bool = False,
    warn: Callable[[str], None],
) -> dict[str, PolicyScores]:
    """Evaluates the plan and writes the results.

    Args:
        path: The evaluation's folder, new or empty.
        solved_at: Task reward from which a response is correct; None: the task's.

    Returns:
        By label, the metrics of each policy in each role.
    """
    assert plan.sources is not None
    solved_at = plan.task.solved_at if solved_at is None else solved_at
    planned_chains = len(plan.lineups) * plan.queries * plan.samples
    batches = len(plan.lineups) * len(plan.batches())
    with open_results(path, "evaluation", batches, quiet=quiet, debug=debug) as (progress, interrupts):
        on_start = partial(progress.stage, "Starting Ray")
        with session.run_session(processes(plan.settings), debug, on_start=on_start):
            interrupts.install()  # Ray has replaced the SIGTERM handler
            results = show_progress(_evaluate_lineups(plan, progress), batches, progress)
            chains = [chain for batch in results for chain in batch]
        if not chains:
            raise CommandError("The reward failed on every response. Fix the reward function.")
        scores, dropped = plan.score(chains, solved_at), planned_chains - len(chains)
        record = {
            "command": command,
            **describe_inputs(plan.settings, plan.sources, plan.checkpoint and plan.checkpoint[0]),
            **{"split": plan.split, "queries": plan.queries, "samples": plan.samples, "solved_at": solved_at},
            "dropped": dropped,
            "rows": {
                label: {
                    **policy_scores,
                    "figures": {name: estimate._asdict() for name, estimate in policy_scores["figures"].items()},
                }
                for label, policy_scores in scores.items()
            },
        }
        write_lines(path / RESPONSES, chains)
        atomic_write(path / RESULT, json.dumps(to_json(record), indent=1, ensure_ascii=False) + "\n")
    if dropped:
        functions = "The reward" if plan.task.feedback is None else "The reward or the feedback"
        warn(f"{functions} failed on {dropped} of {planned_chains} chains. They are left out.")
    return scores


def describe_inputs(settings: Settings, sources: Sources, update: int | None) -> dict[str, Any]:
    """Returns, as JSON, what responses depend on: settings, data, models and code.

    Args:
        update: Of the run's checkpoint; None: there is no run.
    """
    values = asdict(sources)
    return {
        "versions": versions(),
        "settings": settings.public_dict(),
        "sources": {name: values[name] for name in ("queries", "llms", "functions")}
        | {"task": public_task_fields(sources.task)},
        "update": update,
    }


def _evaluate_lineups(plan: EvaluationPlan, progress: ProgressPrinter) -> Iterator[list[EvaluatedChain]]:
    """Yields the chains of each batch: first those of the base, then the others with the checkpoint's weights."""
    from policies.cory import CoryConfig

    progress.stage("Loading the models")
    config = CoryConfig().cory(**plan.settings.model_dump()).cory(start_from=None)
    algo = config.build_algo()  # its policies are the base
    progress.start_clock()
    checkpoint = plan.checkpoint
    for lineup in plan.lineups:
        if lineup.trained and checkpoint is not None:
            update, folder = checkpoint
            if not folder.is_dir():
                raise CommandError(f"{folder} was deleted by the continuing run. Evaluate a later checkpoint.")
            algo.load_policies(folder, update)
            checkpoint = None
        progress.stage(f" {progress.arrow} ".join(lineup.names))
        yield from evaluate_lineup(algo, plan, lineup)
    algo.stop()


def evaluate_lineup(algo: "Cory", plan: EvaluationPlan, lineup: Lineup) -> Iterator[list[EvaluatedChain]]:
    """Yields the chains of each batch, by an algorithm that has the lineup's weights; see `measure_chains`."""
    first = algo.settings.policy_ids[0]  # has the average weights within `Evaluator.average`
    policy_ids = tuple(first if policy_id == AVERAGE_POLICY else policy_id for policy_id in lineup.policy_ids)
    mapping = RoleMapping(algo.settings.agents[: len(policy_ids)], policy_ids)
    is_average = AVERAGE_POLICY in lineup.policy_ids
    with algo.evaluator.average() if is_average else contextlib.nullcontext():
        for prompt_refs in plan.batches():
            chains = measure_chains(algo, mapping, lineup.names, prompt_refs, plan.split)
            yield [EvaluatedChain(policies=lineup.names, responses=chain) for chain in chains]


def located_settings(run: Run, overridden: Container[str] = ()) -> Settings:
    """Returns the settings of a run with the current paths of its files (`launch.run_folder.locations`)."""
    sources = Sources.read(run.path)
    if sources is None:
        return run.settings
    data = () if "task" in overridden else tuple(key for key in ("data", "eval_data") if key not in overridden)
    return locate_files(run.settings, sources.paths, needed=("model", *data))


def changes_since(run: Run, settings: Settings, now: Sources) -> list[str]:
    """Returns a sentence per difference between the sources of a run's training and of its evaluation.

    Args:
        settings: Settings of the evaluation; differences due to another task are intended and not reported.
    """
    before = Sources.read(run.path)
    if before is None:
        return []
    run_settings = locate_files(run.settings, before.paths, needed=())
    same_task = all(getattr(run_settings, key) == getattr(settings, key) for key in settings_in_categories("task"))
    leak = " Evaluated queries may have been used in training."
    return [
        f"{change.text}.{leak if change.part in SPLITS else ''}"
        for change in find_changes(before, now, settings)
        if same_task or change.part not in (*SPLITS, "prompts", "function")
    ]
