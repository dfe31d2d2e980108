"""Use trained policies of a run, or of an algorithm in memory: generate, evaluate, export; probe a model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cory_env.home import expand_home
from cory_env.tasks import Query
from cory_env.tasks.task import Split
from cory_rllib.runs import Run, load_chain, load_run
from launch.console.errors import CommandError
from launch.evaluation.figures import PolicyScores
from launch.models.trained import PolicySet, current_policies, open_trained
from launch.run_folder.records import GeneratedSample
from launch.run_folder.storage import check_location
from policies.settings.settings import make_settings, reject_unknown_settings

if TYPE_CHECKING:
    from launch.probing.probe import ProbeResult
    from policies.cory import Cory


def generate(
    source: Cory | Run | str | Path,
    queries: str | Sequence[str],
    roles: Sequence[str] | None = None,
    *,
    checkpoint: str | int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    columns: Mapping[str, Sequence[object]] | None = None,
    feedback: bool = True,
) -> list[GeneratedSample]:
    """Generates responses to queries with the chain, or a single policy, by `transformers` in this process.

    Args:
        source: an algorithm (its current weights), a run, or a run's folder.
        queries: one query or several. Query n gets the same random numbers in each call.
        roles: policy ids in the order of the chain, such as `["llm_2", "llm_1"]`, or `["mean"]` for the LLM with the
            mean of all weights; None: the whole chain, in its roles at the end of training.
        checkpoint: of a run: `best`, `latest` or an update; None: the best, or the latest if none was evaluated.
        temperature: sampling temperature, 0 for greedy decoding; None: the run's.
        seed: random seed of sampling; None: the run's.
        columns: by name, one value per query, for prompt templates and the run's feedback function.
        feedback: give feedback on responses, and stop chains by it, if the run does; False: all roles answer without
            feedback.

    Returns:
        For each query `{"query": ..., "responses": [{"role": ..., "policy": ..., "text": ...}, ...]}`, pioneer first.
        A response on which there is feedback has it as `feedback`, None if nothing is to be corrected. A response with
        a thought before its text has it as `reasoning` (`thinking`).

    Raises:
        CommandError: the run, checkpoint or policy does not exist, or prompts or feedback require more columns.
        QueryTooLongError: a query exceeds the prompt length of training.
        RewardError: the feedback function failed.
        ValueError: a column does not have one value per query.
    """
    texts = [queries] if isinstance(queries, str) else queries
    values = {name: list(column) for name, column in (columns or {}).items()}
    if wrong := {name: len(column) for name, column in values.items() if len(column) != len(texts)}:
        raise ValueError(f"columns must have one value per query, {len(texts)} in all, but the lengths are {wrong}.")
    chain = load_chain(_policies(source, checkpoint), roles, temperature, seed, feedback=feedback)
    numbered = [
        Query(number, text, {name: column[number] for name, column in values.items()})
        for number, text in enumerate(texts)
    ]
    chain.check(numbered)
    return chain.answer_all([(query, 0) for query in numbered])


def evaluate(
    source: Cory | Run | str | Path,
    *,
    queries: int | None = None,
    samples: int = 4,
    split: Split = "test",
    checkpoint: str | int | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, PolicyScores]:
    """Evaluates every policy on the bare query and in each later role of the chain.

    For a run, the base model is evaluated too, and results are saved in the run's folder like those of `cory evaluate`.
    For an algorithm, its current weights are evaluated, and no file is written.

    Args:
        source: an algorithm, a run, or a run's folder.
        queries: number of queries, from the start of the split; None: all.
        samples: responses per query.
        split: `test`; `validation`, the queries that select the best checkpoint; or `train`.
        checkpoint: of a run: `best`, `latest` or an update; None: the best, or the latest if none was evaluated.
        out: of a run: folder for the results; None: a folder in the run's.
        quiet: whether to hide progress.

    Returns:
        Label, such as `llm_1` or `llm_2 after llm_1`, → scores with `policy`, `role`, `after` and `figures`. Each
        figure, such as `task_reward`, `kl`, `combined_reward` and `pass@1`, has a `mean` and the bounds of its 95 % CI,
        `low` and `high`. With `stop_when`, later roles have the figures of the chains that reached them, and
        `llm_1 then llm_2` those of the chain's last answers, with `chain_tokens`, the tokens generated per query.

    Raises:
        CommandError: the run or checkpoint does not exist, the split has no queries, a number is below 1, or the folder
            is not empty or is a URI.
    """
    if not isinstance(source, Run | str | Path):
        _reject_checkpoint(checkpoint)
        return _evaluate_algorithm(source, queries, samples, split)
    from launch.cluster import session
    from launch.evaluation import evaluation
    from launch.evaluation.target import default_folder
    from launch.run_folder.layout import POLICIES

    def warn(text: str) -> None:
        warnings.warn(text, stacklevel=2)

    run = source if isinstance(source, Run) else load_run(source)
    selected = run.checkpoints.choose(checkpoint, POLICIES)
    settings = make_settings({**evaluation.located_settings(run).model_dump(), "min_response_tokens": None})
    session.quiet_libraries(debug=True)
    plan = evaluation.plan_evaluation(settings, run, selected, split, queries, samples, warn)
    folder = default_folder("evaluation", run.location, selected[1]) if out is None else _local_path(out, "evaluation")
    return evaluation.evaluate(plan, folder, f"cory_rllib.evaluate({run.location!r})", quiet=quiet, warn=warn)


def probe(
    source: Run | str | Path,
    preset: str | None = None,
    *,
    temperatures: Sequence[float] = (0.7, 1.0, 1.3),
    queries: int | None = 300,
    samples: int = 4,
    split: Split = "test",
    solved_at: float | None = None,
    roles: Sequence[str] | None = None,
    checkpoint: str | int | None = None,
    endpoint: str | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> ProbeResult:
    """Measures, without training, whether a second answer pays: see `cory probe` and docs/probe.md.

    Results are saved in a folder like those of `cory probe`.

        probe("smollm2", "code-smollm2", feedback="task", max_prompt_tokens=352, queries=100).advice.text

    Args:
        source: a run, a run's folder; or a model: a folder, a hub id or a bundled name; or its name at `endpoint`.
        preset: of a model: the preset with the other settings; None: the defaults.
        temperatures: of sampling, each above 0.
        queries: number of queries, from the start of the split; None: all.
        samples: first answers per query, at least 3.
        split: `test`, `validation` or `train`.
        solved_at: task reward from which an answer is right; None: the task's.
        roles: of a run: the policies of the first and the second agent; None: as after training.
        checkpoint: of a run: `best`, `latest` or an update; None: the best, or the latest if none was evaluated.
        endpoint: base URL of an OpenAI-compatible API, whose model responds; None: policies in this process.
        out: folder for the results; None: a folder in the run's, or in `./probes`.
        quiet: whether to hide progress.
        **settings: settings to change, such as `task`, `data`, `reward` and `feedback`.

    Returns:
        `figures`, by temperature and name, each with an `estimate` (`mean` and the bounds of its 95 % CI, `low` and
        `high`); and `advice`, whose `choice` and `text` say what to train.

    Raises:
        CommandError: an argument does not fit the source, the task does not define which answers are right, or the
            folder is not empty or is a URI.
        SettingsError: a setting is invalid or conflicts with another.
    """
    from launch.cluster import session
    from launch.evaluation.target import default_folder
    from launch.probing.endpoint import Endpoint
    from launch.probing.plan import plan_probe
    from launch.probing.probe import run_probe

    session.quiet_libraries(debug=True)
    target = source.location if isinstance(source, Run) else str(source)
    target = target if endpoint is not None else expand_home(target)
    reject_unknown_settings(settings)
    plan = plan_probe(
        target,
        settings,
        lambda text: warnings.warn(text, stacklevel=4),
        preset=preset,
        checkpoint=None if checkpoint is None else str(checkpoint),
        roles=roles,
        split=split,
        queries=queries,
        samples=samples,
        temperatures=temperatures,
        solved_at=solved_at,
        endpoint=None if endpoint is None else Endpoint(endpoint, target),
    )
    folder = None if out is None else _local_path(out, "probe")
    folder = folder or default_folder("probe", target, plan.policies.folder if plan.policies else None)
    return run_probe(plan, folder, f"cory_rllib.probe({target!r})", quiet=quiet)


def export(
    source: Cory | Run | str | Path,
    out: str | Path,
    policy: str | None = None,
    *,
    checkpoint: str | int | None = None,
    merge: bool = False,
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> Path:
    """Writes a policy in Hugging Face's format, for `transformers` and vLLM; an adapter in PEFT's format.

    Active health warnings of the policy are issued as Python warnings.

    Args:
        source: an algorithm (its current weights), a run, or a run's folder.
        out: folder for the model, new or empty.
        policy: policy id such as `llm_1`, or `mean` for the mean of all weights; None if there is only one policy.
        checkpoint: of a run: `best`, `latest` or an update; None: the best, or the latest if none was evaluated.
        merge: whether to merge the adapter into its base (`weights=lora`).
        dtype: of the weights.

    Returns:
        The folder.

    Raises:
        CommandError: the run, checkpoint or policy does not exist, or the folder is in use or a URI.
        OSError: the folder cannot be written.
    """
    from launch.models.export import export_policy

    out = _local_path(out, "model")
    policies = _policies(source, checkpoint)
    export_policy(policies, policy, out, dtype, merge, lambda text: warnings.warn(text, stacklevel=4))
    return out


def _policies(source: Cory | Run | str | Path, checkpoint: str | int | None) -> PolicySet:
    if isinstance(source, Run | str | Path):
        return open_trained(source, checkpoint)
    _reject_checkpoint(checkpoint)
    return current_policies(source)


def _local_path(out: str | Path, content: str) -> Path:
    path = expand_home(str(out))
    check_location(path, content)
    return Path(path)


def _reject_checkpoint(checkpoint: str | int | None) -> None:
    if checkpoint is not None:
        raise CommandError(f"checkpoint={checkpoint} requires a run, but the source is an algorithm.")


def _evaluate_algorithm(algorithm: Cory, queries: int | None, samples: int, split: Split) -> dict[str, PolicyScores]:
    from launch.evaluation.evaluation import evaluate_lineup, make_plan

    task, checkpoint = algorithm.task, (algorithm.updates, Path())
    plan = make_plan(algorithm.settings, task, None, split, queries, samples, checkpoint)
    lineups = [lineup for lineup in plan.lineups if lineup.trained]
    chains = [chain for lineup in lineups for batch in evaluate_lineup(algorithm, plan, lineup) for chain in batch]
    return plan.score(chains, task.solved_at)
