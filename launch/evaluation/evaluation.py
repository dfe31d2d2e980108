"""An evaluation: who answers which queries, batch by batch, in a folder from which a killed one goes on.

responses.jsonl   what is evaluated (a folder holds one evaluation), then a line per finished batch, with its responses
evaluation.json   the figures, written when all batches are done
log.txt           what libraries and rewards printed
"""

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cory_env.chain import role_names
from cory_env.tasks import Split, Task
from launch.cluster import session
from launch.cluster.gpus import check_gpus
from launch.console import output
from launch.console.errors import CommandError, make_folder
from launch.console.interrupts import Interrupts
from launch.display.terminal import ProgressPrinter
from launch.evaluation.batches import Batches
from launch.evaluation.figures import BASE, PolicyScores, Scoring, summarise
from launch.run_folder import manifest
from launch.run_folder.environment import versions
from launch.run_folder.final import measure_chains
from launch.run_folder.journal import atomic_write
from launch.run_folder.locations import NAMED, add_module_folders, located
from launch.run_folder.locks import lock_folder
from launch.run_folder.records import Batch, Evaluation, to_json
from launch.run_folder.run import Run
from launch.run_folder.sources import SPLITS, Sources, compare, function_names, sources_of
from launch.run_folder.storage import check_location
from launch.training import preflight
from policies.models.model_names import AVERAGE
from policies.rollout.role_mapping import RoleMapping
from policies.settings.processes import processes
from policies.settings.settings import BY_CONTENT, Settings, settings_in

if TYPE_CHECKING:
    from policies.cory import Cory

RESPONSE_SETTINGS = set(settings_in("task", "policy", "sampling")) - {*NAMED}
"""Settings that responses, or measures of them, depend on, but for names of files: `Sources` has what these hold."""


class Lineup(NamedTuple):
    """Who answers: one policy alone, or the whole chain in some order. A pioneer's answers are those it gives alone."""

    trained: bool
    policy_ids: tuple[str, ...]
    """By position."""
    names: tuple[str, ...]
    """The same as results call them."""


EvaluationBatch = tuple[Lineup, list[tuple[int, int]]]
"""A batch: who answers, and pairs of query and sample."""


class Plan(NamedTuple):
    """What is evaluated, and all that its responses depend on."""

    settings: Settings
    task: Task
    sources: Sources | None
    """What both are made from; None: an algorithm in memory, whose evaluation has no identity."""
    split: Split
    queries: int
    """The first so many of the split."""
    samples: int
    """Responses of each policy to each query."""
    checkpoint: tuple[int, Path] | None
    """The update and folder of the run's checkpoint; None: the model alone."""

    @property
    def lineups(self) -> list[Lineup]:
        """The base, then the policies of the checkpoint in every order that role exchange brings: each in each role.

        LLMs that start from one model are one and the same before anything is trained, the base. Where they start from
        different ones their bases play in the same orders, each called after the first LLM that started from it.
        """
        modules = self.settings.policy_ids
        orders: list[tuple[str, ...]] = [(module,) for module in modules]
        if self.settings.knowledge_transfer:  # else nobody sees another's response
            turns = (RoleMapping(self.settings.roles, modules, turn) for turn in range(len(modules)))
            orders = [tuple(turn.as_dict().values()) for turn in turns]
        models = self.settings.models
        first = {model: module for module, model in reversed(models.items())}
        called = {module: BASE if len(first) == 1 else f"{BASE} of {first[models[module]]}" for module in modules}
        bases: dict[tuple[str, ...], tuple[str, ...]] = {}
        for order in orders:
            bases.setdefault(tuple(called[module] for module in order), order)
        lineups = [Lineup(False, order, names) for names, order in bases.items()]
        if self.checkpoint is None:
            return lineups
        if self.settings.eval_average:  # in all roles, as it has no other to play with
            orders.append((AVERAGE,) * len(orders[0]))
        return lineups + [Lineup(True, order, order) for order in orders]

    def batches(self) -> list[EvaluationBatch]:
        """All the work, in order: for a lineup pairs of query and sample, as many at once as an update has chains."""
        size = self.settings.chains
        prompt_refs = [(query, sample) for query in range(self.queries) for sample in range(self.samples)]
        parts = [prompt_refs[start : start + size] for start in range(0, len(prompt_refs), size)]
        return [(lineup, part) for lineup in self.lineups for part in parts]

    def identity(self) -> dict[str, Any]:
        """Everything that the responses depend on, as JSON: two plans with the same one give the same responses."""
        assert self.sources is not None
        split = self.split if self.split in self.sources.queries else "test"
        average = {"average": True} if self.settings.eval_average else {}  # else as earlier versions wrote it
        return {
            **average,
            "settings": {
                name: value for name, value in self.settings.public_dict().items() if name in RESPONSE_SETTINGS
            }
            | {"eval_kl_coef": self.settings.report_kl_coef},
            "at_once": self.settings.chains,
            "functions": self.sources.functions,
            "prompts": self.sources.task,
            "llms": {llm: asdict(source) for llm, source in self.sources.llms.items()},
            "checkpoint": None if self.checkpoint is None else _checkpoint_identity(*self.checkpoint),
            "split": self.split,
            "data": {"queries": self.queries, "digest": self.sources.queries[split].digest},
            "samples": self.samples,
        }

    def scoring(self, solved_at: float | None) -> Scoring:
        """How its responses are scored, with pass@1, 2, 4, … up to the samples; see `Scoring`."""
        ks = [] if solved_at is None else [2**power for power in range(self.samples.bit_length())]
        return Scoring(self.queries, self.settings.report_kl_coef, solved_at, ks, self.settings.seed)

    @property
    def fingerprint(self) -> str:
        """A short name of the identity."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:8]


def plan_evaluation(
    settings: Settings,
    run: Run | None,
    checkpoint: tuple[int, Path] | None,
    split: Split,
    queries: int | None,
    samples: int,
    warn: Callable[[str], None],
) -> Plan:
    """Returns the evaluation of a run's checkpoint, or of a model; `warn` is told what is not as in training.

    Raises:
        CommandError: a setting or file cannot be used, a number is below 1, or the split has no queries.
        ModelError: there is no such model.
    """
    task, tokenizers = preflight.check(settings)
    settings = settings.with_chat_date()
    check_gpus(settings)
    sources = sources_of(settings, task, tokenizers)
    for text in changes_since(run, settings, task, sources) if run is not None else ():
        warn(text)
    return make_plan(settings, task, sources, split, queries, samples, checkpoint)


def make_plan(
    settings: Settings,
    task: Task,
    sources: Sources | None,
    split: Split,
    queries: int | None,
    samples: int,
    checkpoint: tuple[int, Path] | None,
) -> Plan:
    """Returns an evaluation on the first so many queries of a split, or on all.

    Raises:
        CommandError: a number is below 1, or the split has no queries.
    """
    for name, number in (("queries", queries), ("samples", samples)):
        if number is not None and number < 1:
            raise CommandError(f"{name}={number} is not above 0.")
    available = len(task.queries(split))
    if not available:
        raise CommandError(f"The {split} split of task {task.name} has no queries. Name another split.")
    return Plan(settings, task, sources, split, min(queries or available, available), samples, checkpoint)


def evaluate(
    plan: Plan,
    path: Path,
    command: str,
    *,
    solved_at: float | None = None,
    quiet: bool = False,
    debug: bool = False,
    warn: Callable[[str], None],
) -> dict[str, PolicyScores]:
    """Plays what is not yet played, and writes `evaluation.json`.

    Args:
        plan: what is evaluated.
        path: the evaluation's folder, new or empty, or one in which the same evaluation was begun.
        command: that asked for it.
        solved_at: the task reward from which a response is correct; None: the task's.
        quiet: show no progress.
        debug: let libraries print.
        warn: takes what the user should know.

    Returns:
        By label, the figures of each policy in each role.

    Raises:
        CommandError: the folder holds something else, another process has it, it cannot be made, or the reward failed
            on every response.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; what is done is kept.
    """
    check_location(str(path), "evaluation")
    make_folder(path)
    responses = path / "responses.jsonl"
    if not responses.exists() and any(not entry.name.startswith(".") for entry in path.iterdir()):
        raise CommandError(f"{path} is not empty: empty it, or name another folder with --out.")
    identity = plan.identity()  # once: a run that still trains may drop the checkpoint later
    with lock_folder(path):
        batches = Batches(responses, identity, plan.batches())
        voice = ProgressPrinter(output.dup_stdout(), len(batches.work), done=batches.done, quiet=quiet, bar=not debug)
        voice.print(
            f"Folder: {path}" + (f" ({batches.done} of {len(batches.work)} batches are done)" * bool(batches.done))
        )
        if batches.done < len(batches.work):
            with contextlib.ExitStack() as stack:
                if not debug:
                    stack.enter_context(output.redirect_output(path / "log.txt"))
                stack.enter_context(output.forward_warnings(lambda text: voice.print(text, True)))
                stack.enter_context(voice)
                interrupts = stack.enter_context(Interrupts(lambda: None))
                voice.stage("Starting Ray")
                stack.enter_context(session.ray_session(processes(plan.settings), debug))
                interrupts.install()  # Ray took SIGTERM
                _run_batches(plan, batches, voice)
        results = cast(list[Batch], batches.results)
        scoring = plan.scoring(plan.task.solved_at if solved_at is None else solved_at)
        scores = summarise(results, scoring)
        if not scores:
            raise CommandError("The reward failed on every response, so there is nothing to show. Correct the reward.")
        asked = len(plan.lineups) * plan.queries * plan.samples
        if dropped := asked - sum(len(batch["chains"]) for batch in results):
            warn(f"The reward failed on {dropped} of {asked} chains; they are left out.")
        record = {
            "command": command,
            "versions": versions(),
            **identity,
            "names": {key: getattr(plan.settings, key) for key in BY_CONTENT},
            "scoring": scoring._asdict(),
            "dropped": dropped,
            "rows": {
                label: {**each, "figures": {name: figure._asdict() for name, figure in each["figures"].items()}}
                for label, each in scores.items()
            },
        }
        atomic_write(path / "evaluation.json", json.dumps(to_json(record), indent=1, ensure_ascii=False) + "\n")
    return scores


def _run_batches(plan: Plan, batches: Batches[EvaluationBatch], voice: ProgressPrinter) -> None:
    """Plays what is left: the batches of the base, then, with a checkpoint's weights, all others."""
    from policies.cory import CoryConfig

    voice.stage("Loading the models")
    config = CoryConfig().cory(**plan.settings.model_dump()).cory(start_from=None)
    algo = config.build_algo()  # whose policies are the base
    present: Lineup | None = None
    weights = contextlib.ExitStack()  # lent for one lineup

    def play(batch: EvaluationBatch) -> dict[str, object]:
        nonlocal present
        lineup, prompt_refs = batch
        if lineup != present:
            weights.close()
            if lineup.trained and not (present and present.trained) and plan.checkpoint is not None:
                update, checkpoint = plan.checkpoint
                if not checkpoint.is_dir():
                    raise CommandError(f"{checkpoint} is gone: the run went on and dropped it. Evaluate a later one.")
                algo.load_policies(checkpoint, update)
            voice.stage(f" {voice.arrow} ".join(lineup.names))
            if AVERAGE in lineup.policy_ids:
                weights.enter_context(algo.evaluator.average())
            present = lineup
        return {"chains": answers(algo, lineup, prompt_refs, plan.split)}

    batches.run(play, voice)
    algo.stop()


def answers(
    algo: "Cory", lineup: Lineup, prompt_refs: Sequence[tuple[int, int]], split: Split
) -> list[list[Evaluation]]:
    """Plays a batch with an algorithm that holds the lineup's weights; for the `AVERAGE` within `Evaluator.average`.

    See `measure_chains`.
    """
    from policies.rollout.prompt_sampling import PromptRef

    first = algo.settings.policy_ids[0]  # which holds the mean while that is in the lineup
    policy_ids = tuple(first if module == AVERAGE else module for module in lineup.policy_ids)
    mapping = RoleMapping(role_names(len(policy_ids)), policy_ids)
    return measure_chains(
        algo, mapping, lineup.names, [PromptRef(query, sample) for query, sample in prompt_refs], split
    )


def default_folder(target: str, run: Run | None, checkpoint: Path | None, fingerprint: str) -> Path:
    """Returns the folder of an evaluation: in the run's, or here if that is in storage or a model is evaluated."""
    name = fingerprint if checkpoint is None else f"{checkpoint.name}-{fingerprint}"
    if run is not None and run.storage is None:
        return run.path / "evaluation" / name
    return Path("evaluations", f"{Path(target).resolve().name}-{name}")


def located_settings(run: Run, given: Container[str] = ()) -> Settings:
    """Returns the settings of a run, with its files where they are (`launch.run_folder.locations`).

    Args:
        run: to be evaluated.
        given: settings that take the place of the run's.

    Raises:
        CommandError: a file that is needed is gone.
    """
    settings, sources = run.settings(), Sources.read(run.path)
    if sources is None:
        return settings
    add_module_folders(function_names(settings, settings.reward_spec), sources.paths)
    data = () if "task" in given else tuple(key for key in ("data", "eval_data") if key not in given)
    return located(settings, sources.paths, needed=("model", *data), settable=data)


def changes_since(run: Run, settings: Settings, task: Task, now: Sources) -> list[str]:
    """Returns a sentence on each part of what a run was made from that its evaluation has otherwise.

    Args:
        run: that is evaluated.
        settings: of the evaluation; where it has another task than the run, that is on purpose.
        task: of these settings.
        now: what they are made from.
    """
    before = Sources.read(run.path)
    if before is None:
        return []
    own = located(run.settings(), before.paths, needed=())
    same_task = all(getattr(own, key) == getattr(settings, key) for key in settings_in("task"))
    leak = " So queries that are asked may have been trained on."
    return [
        f"{change.text}.{leak if change.part in SPLITS else ''}"
        for change in compare(before, settings, task, now)
        if same_task or not change.is_of_task
    ]


def _checkpoint_identity(update: int, checkpoint: Path) -> dict[str, int]:
    return {"update": update, "checksum": zlib.crc32((checkpoint / manifest.NAME).read_bytes())}
