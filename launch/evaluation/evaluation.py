"""An evaluation: who answers which queries, batch by batch, in a folder from which a killed one goes on.

responses.jsonl   what is evaluated (a folder holds one evaluation), then a line per finished batch, with its responses
evaluation.json   the figures, written when all batches are done
log.txt           what libraries and rewards printed
"""

import contextlib
import hashlib
import json
import zlib
from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cory_env.chain import role_names
from cory_env.tasks import Split, Task
from launch.cluster import session
from launch.console import output
from launch.console.errors import CommandError
from launch.console.interrupts import Interrupts
from launch.display.terminal import Voice
from launch.evaluation.batches import Batches
from launch.evaluation.figures import BASE, Scoring, Standing, summarise
from launch.run_folder import manifest
from launch.run_folder.environment import versions
from launch.run_folder.final import measure_chains
from launch.run_folder.journal import replace_text
from launch.run_folder.locations import NAMED, add_module_folders, located
from launch.run_folder.locks import lock_folder
from launch.run_folder.records import Batch, Evaluation, plain
from launch.run_folder.run import Run
from launch.run_folder.sources import SPLITS, Sources, compare, function_names
from policies.models.model_names import AVERAGE
from policies.rollout.role_mapping import RoleMapping
from policies.settings.placement import processes
from policies.settings.settings import BY_CONTENT, Settings, deciding

if TYPE_CHECKING:
    from policies.cory import Cory

ASKED = set(deciding("task", "policy", "sampling")) - {*NAMED}
"""Settings that responses, or measures of them, depend on, but for names of files: `Sources` has what these hold."""


class Lineup(NamedTuple):
    """Who answers: one policy alone, or the whole chain in some order. A pioneer's answers are those it gives alone."""

    trained: bool
    modules: tuple[str, ...]
    """By position."""
    names: tuple[str, ...]
    """The same as results call them."""


Work = tuple[Lineup, list[tuple[int, int]]]
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
        modules = self.settings.modules
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
        if self.settings.evaluate_average:  # in all roles, as it has no other to play with
            orders.append((AVERAGE,) * len(orders[0]))
        return lineups + [Lineup(True, order, order) for order in orders]

    def batches(self) -> list[Work]:
        """All the work, in order: for a lineup pairs of query and sample, as many at once as an update has chains."""
        size = self.settings.chains
        deals = [(query, sample) for query in range(self.queries) for sample in range(self.samples)]
        parts = [deals[start : start + size] for start in range(0, len(deals), size)]
        return [(lineup, part) for lineup in self.lineups for part in parts]

    def identity(self) -> dict[str, Any]:
        """Everything that the responses depend on, as JSON: two plans with the same one give the same responses."""
        assert self.sources is not None
        split = self.split if self.split in self.sources.queries else "test"
        average = {"average": True} if self.settings.evaluate_average else {}  # else as earlier versions wrote it
        return {
            **average,
            "settings": {name: value for name, value in self.settings.told().items() if name in ASKED}
            | {"eval_kl_coef": self.settings.report_kl_coef},
            "at_once": self.settings.chains,
            "functions": self.sources.functions,
            "prompts": self.sources.task,
            "llms": self.sources.llms,
            "checkpoint": None if self.checkpoint is None else _seal(*self.checkpoint),
            "split": self.split,
            "data": {"queries": self.queries, "checksum": self.sources.queries[split]["digest"]},
            "samples": self.samples,
        }

    def scoring(self, solved_at: float | None, ks: Sequence[int]) -> Scoring:
        """How its responses are scored; see `Scoring`."""
        return Scoring(self.queries, self.settings.report_kl_coef, solved_at, ks, self.settings.seed)

    @property
    def fingerprint(self) -> str:
        """A short name of the identity."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:8]


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


class EvaluationFolder:
    """The folder of one evaluation, locked by this process."""

    def __init__(self, path: Path, plan: Plan) -> None:
        """Makes the folder, or takes one in which the same evaluation was begun.

        Raises:
            CommandError: it holds something else, another process has it, or it cannot be made.
        """
        self.path = path
        self.results = path / "evaluation.json"
        self.log = path / "log.txt"
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"The folder {path} cannot be made: {error.strerror}.") from error
        self._lock = lock_folder(path)
        responses = path / "responses.jsonl"
        if not responses.exists() and any(not entry.name.startswith(".") for entry in path.iterdir()):
            raise CommandError(f"{path} is not empty: empty it, or name another folder with --out.")
        self.identity = plan.identity()  # once: a run that still trains may drop the checkpoint later
        self.batches = Batches(responses, self.identity, plan.batches())


def evaluate(plan: Plan, folder: EvaluationFolder, voice: Voice, *, debug: bool) -> int:
    """Plays what is not yet played.

    Returns:
        0; 128 + the number of the signal that stopped it.
    """
    if folder.batches.done == len(folder.batches.work):
        return 0
    interrupts = Interrupts(lambda: None)
    try:
        with contextlib.ExitStack() as around:
            if not debug:
                around.enter_context(output.output_into(folder.log))
            around.enter_context(output.warnings_told(lambda text: voice.say(text, True)))
            around.enter_context(voice)
            around.enter_context(interrupts)
            voice.stage("Starting Ray")
            around.enter_context(session.ray_session(processes(plan.settings), debug))
            interrupts.install()  # Ray took SIGTERM
            _play(plan, folder.batches, voice)
    except KeyboardInterrupt:
        voice.say(f"Aborted. {folder.batches.progress}", True)
        return interrupts.exit_code
    except Exception as error:
        error.add_note(folder.batches.progress)
        raise
    return 0


def _play(plan: Plan, batches: Batches[Work], voice: Voice) -> None:
    """Plays what is left: the batches of the base, then, with a checkpoint's weights, all others."""
    from policies.cory import CoryConfig

    voice.stage("Loading the models")
    config = CoryConfig().cory(**plan.settings.model_dump()).cory(start_from=None)
    algo = config.build_algo()  # whose policies are the base
    present: Lineup | None = None
    weights = contextlib.ExitStack()  # lent for one lineup

    def play(batch: Work) -> dict[str, object]:
        nonlocal present
        lineup, deals = batch
        if lineup != present:
            weights.close()
            if lineup.trained and not (present and present.trained) and plan.checkpoint is not None:
                update, checkpoint = plan.checkpoint
                if not checkpoint.is_dir():
                    raise CommandError(f"{checkpoint} is gone: the run went on and dropped it. Evaluate a later one.")
                algo.load_policies(checkpoint, update)
            voice.stage(f" {voice.arrow} ".join(lineup.names))
            if AVERAGE in lineup.modules:
                weights.enter_context(algo.evaluator.average())
            present = lineup
        return {"chains": answers(algo, lineup, deals, plan.split)}

    batches.run(play, voice)
    algo.stop()


def answers(algo: "Cory", lineup: Lineup, deals: Sequence[tuple[int, int]], split: Split) -> list[list[Evaluation]]:
    """Plays a batch with an algorithm that holds the lineup's weights; for the `AVERAGE` within `Evaluator.average`.

    See `measure_chains`.
    """
    from policies.rollout.dealing import Deal

    first = algo.settings.modules[0]  # which holds the mean while that is in the lineup
    players = tuple(first if module == AVERAGE else module for module in lineup.modules)
    mapping = RoleMapping(role_names(len(players)), players)
    return measure_chains(algo, mapping, lineup.names, [Deal(query, sample) for query, sample in deals], split)


def results(plan: Plan, scoring: Scoring, folder: EvaluationFolder, command: str) -> tuple[dict[str, Standing], int]:
    """Writes `evaluation.json`.

    Args:
        plan: was played to the end.
        scoring: how.
        folder: where.
        command: that asked for it.

    Returns:
        Who stands where, and how many chains were dropped because their reward failed.

    Raises:
        CommandError: all were.
    """
    batches = cast(list[Batch], folder.batches.results)
    standings = summarise(batches, scoring)
    if not standings:
        raise CommandError("The reward failed on every response, so there is nothing to show. Correct the reward.")
    dropped = len(plan.lineups) * plan.queries * plan.samples - sum(len(batch["chains"]) for batch in batches)
    found: dict[str, Any] = {
        "command": command,
        "versions": versions(),
        **plan.identity(),
        "names": {key: getattr(plan.settings, key) for key in BY_CONTENT},
        "scoring": scoring._asdict(),
        "dropped": dropped,
        "rows": {
            label: {**each, "figures": {name: figure._asdict() for name, figure in each["figures"].items()}}
            for label, each in standings.items()
        },
    }
    replace_text(folder.results, json.dumps(plain(found), indent=1, ensure_ascii=False) + "\n")
    return standings, dropped


def own_folder(run: Run, checkpoint: Path, name: str) -> Path:
    """Returns the folder of a named evaluation of a checkpoint: in the run's, or here if that is in storage."""
    name = f"{checkpoint.name}-{name}"
    return Path("evaluations", f"{run.path.name}-{name}") if run.storage is not None else run.path / "evaluation" / name


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
    add_module_folders(function_names(settings, settings.whole_reward), sources.paths)
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
    same_task = all(getattr(own, key) == getattr(settings, key) for key in deciding("task"))
    leak = " So queries that are asked may have been trained on."
    return [
        f"{change.text}.{leak if change.part in SPLITS else ''}"
        for change in compare(before, settings, task, now)
        if same_task or not change.is_of_task
    ]


def _seal(update: int, checkpoint: Path) -> dict[str, int]:
    return {"update": update, "checksum": zlib.crc32((checkpoint / manifest.NAME).read_bytes())}
