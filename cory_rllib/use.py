"""What is done with trained policies, of a run or of an algorithm in memory: asked, measured, exported."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cory_env.home import expand_home
from cory_env.tasks import Query
from cory_env.tasks.task import Split
from cory_rllib.runs import Run, chain_of, load_run
from launch.console.errors import CommandError
from launch.evaluation.figures import PolicyScores, summarise
from launch.models.trained import PolicySet, policies_of
from launch.run_folder.records import Batch, RawSample
from launch.run_folder.storage import check_location
from policies.models.model_names import AVERAGE
from policies.settings.settings import make_settings

if TYPE_CHECKING:
    from policies.cory import Cory


def generate(
    source: Cory | Run | str | Path,
    queries: str | Sequence[str],
    roles: Sequence[str] | None = None,
    *,
    checkpoint: str | int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
) -> list[RawSample]:
    """Lets the chain answer queries, or one policy alone, by `transformers` in this process.

    Args:
        source: an algorithm, as it is now; a run; or where a run is.
        queries: what is asked, of which query n gets the same samples each time; a text is one query.
        roles: the policies in the order in which they answer, such as `["llm_2", "llm_1"]`, or `["mean"]` for the mean
            of the weights of all; None: the whole chain, as training left it.
        checkpoint: of a run: `best`, `latest` or an update; None: the best, or the latest where none was evaluated.
        temperature: of sampling, 0 for the likeliest token always; None: the run's.
        seed: of sampling; None: the run's.

    Returns:
        For each query `{"query": ..., "responses": [{"role": ..., "policy": ..., "text": ...}, ...]}`, pioneer first.

    Raises:
        CommandError: there is no such run, checkpoint or policy, or prompts need more than a query.
        QueryTooLong: a query does not fit the prompt that the policies were trained with.
    """
    texts = [queries] if isinstance(queries, str) else queries
    chain = chain_of(_policies(source, checkpoint), roles, temperature, seed)
    asked = [Query(number, text) for number, text in enumerate(texts)]
    chain.check(asked)
    return chain.answer_all([(query, 0) for query in asked])


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
    """Measures every policy on the bare query, and in each later role of the chain, on queries never trained on.

    Of a run also the untouched base, in a folder of the run as `cory evaluate` makes it, from which an evaluation that
    was killed goes on. Of an algorithm only what it holds now; nothing is written.

    Args:
        source: an algorithm, as it is now; a run; or where a run is.
        queries: the first so many of the split; None: all.
        samples: responses to each query.
        split: `test`; `validation`, the queries that choose the best checkpoint; or `train`.
        checkpoint: of a run: `best`, `latest` or an update; None: the best, or the latest where none was evaluated.
        out: of a run: the evaluation's folder; None: one in the run's.
        quiet: show no progress.

    Returns:
        By label, such as `llm_1` or `llm_2 after llm_1`: `policy`, `role`, `after` and `figures`. Each of these, such
        as `task_reward`, `kl`, `combined_reward` and `pass@1`, has a `mean` and the ends of its 95 % interval, `low`
        and `high`.

    Raises:
        CommandError: there is no such run or checkpoint, the split has no queries, a number is below 1, or the folder
            has another evaluation or is a URI.
        KeyboardInterrupt: Ctrl-C ended it; of a run, the same call goes on.
    """
    if isinstance(source, Run | str | Path):
        return _evaluate_run(_run(source), queries, samples, split, checkpoint, out, quiet)
    _refuse_checkpoint(checkpoint)
    return _evaluate_present(source, queries, samples, split)


def export(
    source: Cory | Run | str | Path,
    out: str | Path,
    policy: str | None = None,
    *,
    checkpoint: str | int | None = None,
    merge: bool = False,
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> Path:
    """Writes a policy as a Hugging Face folder, which `transformers` and vLLM load; an adapter as PEFT does.

    Health warnings that stand for the policy are warned of.

    Args:
        source: an algorithm, as it is now; a run; or where a run is.
        out: a folder that is new or empty.
        policy: such as `llm_1`, or `mean`: the mean of the weights of all; None, where there is one only.
        checkpoint: of a run: `best`, `latest` or an update; None: the best, or the latest where none was evaluated.
        merge: put the adapter into its base (runs with `weights=lora`).
        dtype: of the weights.

    Returns:
        The folder.

    Raises:
        CommandError: there is no such run, checkpoint or policy, or the folder is in use or a URI.
        OSError: the folder could not be written.
    """
    from launch.models.export import check_free_folder, choose_policy, export_warnings, write

    out = _local_path(out, "model")
    check_free_folder(out)
    policies = _policies(source, checkpoint)
    name = choose_policy(policies, policy)
    for text in export_warnings(policies, name):
        warnings.warn(text, stacklevel=2)
    write(policies, name, out, dtype, merge)
    return out


def _policies(source: Cory | Run | str | Path, checkpoint: str | int | None) -> PolicySet:
    if isinstance(source, Run | str | Path):
        return _run(source).trained(checkpoint)
    _refuse_checkpoint(checkpoint)
    return policies_of(source)


def _local_path(out: str | Path, what: str) -> Path:
    path = expand_home(str(out))
    check_location(path, what)
    return Path(path)


def _run(source: Run | str | Path) -> Run:
    return source if isinstance(source, Run) else load_run(source)


def _refuse_checkpoint(checkpoint: str | int | None) -> None:
    if checkpoint is not None:
        raise CommandError(f"checkpoint={checkpoint} chooses among those of a run, but this is an algorithm.")


def _evaluate_present(algorithm: Cory, queries: int | None, samples: int, split: Split) -> dict[str, PolicyScores]:
    from launch.evaluation.evaluation import answers, make_plan

    task, checkpoint = algorithm.task, (algorithm.updates, Path())
    plan = make_plan(algorithm.settings, task, None, split, queries, samples, checkpoint)
    batches: list[Batch] = []
    for lineup, prompt_refs in plan.batches():
        if lineup.trained:
            average = algorithm.evaluator.average() if AVERAGE in lineup.policy_ids else contextlib.nullcontext()
            with average:
                batches.append(Batch(batch=len(batches), chains=answers(algorithm, lineup, prompt_refs, split)))
    return summarise(batches, plan.scoring(task.solved_at))


def _evaluate_run(
    run: Run,
    queries: int | None,
    samples: int,
    split: Split,
    checkpoint: str | int | None,
    out: str | Path | None,
    quiet: bool,
) -> dict[str, PolicyScores]:
    from launch.cluster import session
    from launch.evaluation import evaluation
    from launch.run_folder.layout import POLICIES

    def warn(text: str) -> None:
        warnings.warn(text, stacklevel=2)

    chosen = run.directory.checkpoints.choose(None if checkpoint is None else str(checkpoint), POLICIES)
    settings = make_settings({**evaluation.located_settings(run.directory).model_dump(), "min_response_tokens": None})
    session.quiet_libraries(debug=True)
    plan = evaluation.plan_evaluation(settings, run.directory, chosen, split, queries, samples, warn)
    folder = evaluation.default_folder(run.place, run.directory, chosen[1], plan.fingerprint)
    folder = folder if out is None else _local_path(out, "evaluation")
    return evaluation.evaluate(plan, folder, f"cory_rllib.evaluate({run.place!r})", quiet=quiet, warn=warn)
