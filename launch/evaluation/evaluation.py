"""Evaluates policies batch by batch, in a folder from which a killed evaluation resumes.

responses.jsonl   the identity of the evaluation, then a line per completed batch with its responses
evaluation.json   the metrics, written when all batches are completed
log.txt           the output of libraries and rewards
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cory_env.tasks import Split, Task
from launch.cluster import session
from launch.cluster.gpus import check_gpus
from launch.console.errors import CommandError
from launch.display.terminal import ProgressPrinter
from launch.evaluation.batches import Batches, open_batches, show_work
from launch.evaluation.figures import BASE, PolicyScores, Scoring, compute_scores
from launch.run_folder import manifest
from launch.run_folder.checkpoints import UNTRAINED
from launch.run_folder.environment import versions
from launch.run_folder.final import measure_chains
from launch.run_folder.locations import PATH_SETTINGS, locate_files
from launch.run_folder.records import BatchRecord, EvaluatedResponse, to_json
from launch.run_folder.run import Run
from launch.run_folder.sources import SPLITS, Sources, collect_sources, find_changes, public_task_fields
from launch.training import preflight
from policies.files import atomic_write
from policies.models.model_names import AVERAGE_POLICY
from policies.rollout.role_mapping import RoleMapping, make_orders
from policies.settings.processes import processes
from policies.settings.settings import BY_CONTENT, Settings, settings_in_categories

if TYPE_CHECKING:
    from policies.cory import Cory

RESPONSE_SETTINGS = set(settings_in_categories("task", "policy", "sampling")) - {*PATH_SETTINGS}
"""Settings that affect responses or their metrics, except file names, because `Sources` has checksums of the files."""


class Lineup(NamedTuple):
    """The policies that respond: one alone, or a whole chain. A pioneer's responses are those it gives alone."""

    trained: bool
    policy_ids: tuple[str, ...]
    names: tuple[str, ...]
    """Their names in the results, by position."""


EvaluationBatch = tuple[Lineup, list[tuple[int, int]]]
"""A lineup, and pairs of query index and sample index."""


class EvaluationPlan(NamedTuple):
    """An evaluation, with everything its responses depend on."""

    settings: Settings
    task: Task
    sources: Sources | None
    """Checksums of the files and models used; None: an algorithm in memory, whose evaluation has no identity."""
    split: Split
    queries: int
    """Number of queries, the first of the split."""
    samples: int
    """Responses of each policy to each query."""
    checkpoint: tuple[int, Path] | None
    """The update and folder of the run's checkpoint; None: only the model."""

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

    def batches(self) -> list[EvaluationBatch]:
        """All batches in order; the batch size is the number of chains per update."""
        size = self.settings.chains
        prompt_refs = [(query, sample) for query in range(self.queries) for sample in range(self.samples)]
        chunks = [prompt_refs[start : start + size] for start in range(0, len(prompt_refs), size)]
        return [(lineup, chunk) for lineup in self.lineups for chunk in chunks]

    def identity(self) -> dict[str, Any]:
        """Everything the responses depend on, as JSON: plans with equal identities give the same responses."""
        assert self.sources is not None
        split = self.split if self.split in self.sources.queries else "test"
        settings = self.settings.public_dict() | {"eval_kl_coef": self.settings.report_kl_coef}
        return {
            "average": self.settings.eval_average,
            "settings": {name: value for name, value in settings.items() if name in RESPONSE_SETTINGS},
            "at_once": self.settings.chains,
            "functions": self.sources.functions,
            "prompts": public_task_fields(self.sources.task),
            "llms": {policy_id: asdict(source) for policy_id, source in self.sources.llms.items()},
            "checkpoint": self.checkpoint
            and {"update": self.checkpoint[0], "checksum": manifest.manifest_checksum(self.checkpoint[1])},
            "split": self.split,
            "data": {"queries": self.queries, "digest": self.sources.queries[split].digest},
            "samples": self.samples,
        }

    @property
    def orders(self) -> list[tuple[str, ...]]:
        """If chains can stop: per batch, the names of the policies by position; see `compute_scores`."""
        return [] if self.settings.stop_when is None else [lineup.names for lineup, _ in self.batches()]

    def scoring(self, solved_at: float | None) -> Scoring:
        """Returns how responses are scored, with pass@1, 2, 4, … up to the number of samples."""
        ks = [] if solved_at is None else [2**power for power in range(self.samples.bit_length())]
        return Scoring(self.queries, self.settings.report_kl_coef, solved_at, ks, self.settings.seed)

    @property
    def fingerprint(self) -> str:
        """A short hash of the identity."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:8]


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
    """Evaluates the remaining batches and writes `evaluation.json`.

    Args:
        path: The evaluation's folder: new, empty, or with the same evaluation to resume.
        solved_at: Task reward from which a response is correct; None: the task's.

    Returns:
        By label, the metrics of each policy in each role.
    """
    identity = plan.identity()  # computed first: a run that is still training may delete the checkpoint
    with open_batches(path, "evaluation", identity, plan.batches(), quiet=quiet, debug=debug) as (batches, progress):
        if batches.done < len(batches.work):
            with show_work(progress, path / "log.txt", debug=debug) as interrupts, contextlib.ExitStack() as stack:
                progress.stage("Starting Ray")
                stack.enter_context(session.ray_session(processes(plan.settings), debug))
                interrupts.install()  # Ray has replaced the SIGTERM handler
                _run_batches(plan, batches, progress)
        results = cast(list[BatchRecord], batches.results)
        scoring = plan.scoring(plan.task.solved_at if solved_at is None else solved_at)
        scores = compute_scores(results, scoring, plan.orders, plan.settings.agents)
        if not scores:
            raise CommandError("The reward failed on every response. Fix the reward function.")
        planned_chains = len(plan.lineups) * plan.queries * plan.samples
        if dropped := planned_chains - sum(len(batch["chains"]) for batch in results):
            functions = "The reward" if plan.task.feedback is None else "The reward or the feedback"
            warn(f"{functions} failed on {dropped} of {planned_chains} chains. They are left out.")
        record = {
            "command": command,
            "versions": versions(),
            **identity,
            "names": {key: getattr(plan.settings, key) for key in BY_CONTENT},
            "scoring": scoring._asdict(),
            "dropped": dropped,
            "rows": {
                label: {
                    **policy_scores,
                    "figures": {name: estimate._asdict() for name, estimate in policy_scores["figures"].items()},
                }
                for label, policy_scores in scores.items()
            },
        }
        atomic_write(path / "evaluation.json", json.dumps(to_json(record), indent=1, ensure_ascii=False) + "\n")
    return scores


def _run_batches(plan: EvaluationPlan, batches: Batches[EvaluationBatch], progress: ProgressPrinter) -> None:
    """Evaluates the remaining batches: first those of the base, then the others with the checkpoint's weights."""
    from policies.cory import CoryConfig

    progress.stage("Loading the models")
    config = CoryConfig().cory(**plan.settings.model_dump()).cory(start_from=None)
    algo = config.build_algo()  # its policies are the base
    current: Lineup | None = None
    temporary_weights = contextlib.ExitStack()  # the average, during its lineup

    def evaluate_next(batch: EvaluationBatch) -> dict[str, object]:
        nonlocal current
        lineup, prompt_refs = batch
        if lineup != current:
            temporary_weights.close()
            if lineup.trained and not (current and current.trained) and plan.checkpoint is not None:
                update, checkpoint = plan.checkpoint
                if not checkpoint.is_dir():
                    raise CommandError(f"{checkpoint} was deleted by the continuing run. Evaluate a later checkpoint.")
                algo.load_policies(checkpoint, update)
            progress.stage(f" {progress.arrow} ".join(lineup.names))
            if AVERAGE_POLICY in lineup.policy_ids:
                temporary_weights.enter_context(algo.evaluator.average())
            current = lineup
        return {"chains": evaluate_batch(algo, lineup, prompt_refs, plan.split)}

    batches.run(evaluate_next, progress)
    algo.stop()


def evaluate_batch(
    algo: "Cory", lineup: Lineup, prompt_refs: Sequence[tuple[int, int]], split: Split
) -> list[list[EvaluatedResponse]]:
    """Evaluates a batch with an algorithm that has the lineup's weights; see `measure_chains`.

    For the `AVERAGE_POLICY`, call it within `Evaluator.average`.
    """
    from policies.rollout.prompt_sampling import PromptRef

    first = algo.settings.policy_ids[0]  # has the average weights within `Evaluator.average`
    policy_ids = tuple(first if policy_id == AVERAGE_POLICY else policy_id for policy_id in lineup.policy_ids)
    mapping = RoleMapping(algo.settings.agents[: len(policy_ids)], policy_ids)
    return measure_chains(
        algo, mapping, lineup.names, [PromptRef(query, sample) for query, sample in prompt_refs], split
    )


def default_folder(target: str, run: Run | None, checkpoint: Path | None, fingerprint: str) -> Path:
    """Returns the default folder: inside the run's folder, or in `./evaluations` for models."""
    name = fingerprint if checkpoint is None else f"{checkpoint.name}-{fingerprint}"
    if run is not None:
        return run.path / "evaluation" / name
    return Path("evaluations", f"{Path(target).resolve().name}-{name}")


def located_settings(run: Run) -> Settings:
    """Returns the settings of a run with the current paths of its files (`launch.run_folder.locations`)."""
    sources = Sources.read(run.path)
    return run.settings if sources is None else locate_files(run.settings, sources.paths)


def changes_since(run: Run, settings: Settings, now: Sources) -> list[str]:
    """Returns a sentence per difference between the sources of a run's training and of its evaluation.

    Args:
        settings: Settings of the evaluation; differences due to another task are intended and not reported.
    """
    before = Sources.read(run.path)
    if before is None:
        return []
    run_settings = locate_files(run.settings, before.paths)
    same_task = all(getattr(run_settings, key) == getattr(settings, key) for key in settings_in_categories("task"))
    leak = " Evaluated queries may have been used in training."
    return [
        f"{change.text}.{leak if change.part in SPLITS else ''}"
        for change in find_changes(before, now)
        if same_task or change.part not in (*SPLITS, "prompts", "function")
    ]
