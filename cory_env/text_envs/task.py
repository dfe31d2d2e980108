"""The task of an environment: its queries are seeds, each with a row of data if there are any."""

from dataclasses import dataclass

from cory_env.tasks.rows import QUERY, Source, choose_validation, hold_out, read_queries
from cory_env.tasks.task import Query, Task

NUM_TRAIN_SEEDS = 10_000
NUM_TEST_SEEDS = 1_000
FIRST_TEST_SEED = 1_000_000
"""Training uses the seeds from 0 on; held-out seeds, of validation and test, start here. With data, row by row."""


@dataclass(frozen=True, kw_only=True)
class EnvTask(Task):
    """An environment as a task. Prompts and rewards are the environment's.

    Attributes:
        env: The environment, `module:function`, with settings as `?name=value`.
        max_turns: The maximum number of turns of an agent; then its episode is truncated.
    """

    env: str
    max_turns: int


def make_env_task(
    env: str, max_turns: int, validation: int = 0, data: Source | None = None, eval_data: Source | None = None
) -> EnvTask:
    """Makes the task of an environment.

    Args:
        env: The environment.
        max_turns: See `EnvTask`.
        validation: Number of held-out seeds that are for decisions of training only; 0: all serve both purposes.
        data: Rows, one for each seed, which `reset` gets as `options={"row": ...}`, with the query in the column
            `query`; see `cory_env.tasks.rows`. None: the seeds alone.
        eval_data: Held-out rows; None: rows of `data` are held out.

    Raises:
        DataError: The data cannot be used.
    """
    if data is None:
        train = [seed_query(seed) for seed in range(NUM_TRAIN_SEEDS)]
        held_out = [seed_query(FIRST_TEST_SEED + k, k) for k in range(NUM_TEST_SEEDS + validation)]
    else:
        rows = read_queries(data)
        rows, test_rows = hold_out(rows, str(data)) if eval_data is None else (rows, read_queries(eval_data))
        train = [_with_seed(row, row.id) for row in rows]
        held_out = [_with_seed(row, FIRST_TEST_SEED + row.id) for row in test_rows]
    splits: tuple[list[Query] | None, list[Query]] = (None, held_out)
    if validation and len(held_out) > 1:
        splits = choose_validation(held_out, validation, data is not None and eval_data is None)
    return EnvTask(
        name=env,
        train=train,
        test=splits[1],
        validation=splits[0],
        reward="",
        env=env,
        max_turns=max_turns,
    )


def seed_query(seed: int, index: int | None = None) -> Query:
    """Returns the query of a seed without a row; by default its index is the seed."""
    return Query(seed if index is None else index, f"seed {seed}", {"seed": seed})


def _with_seed(row: Query, seed: int) -> Query:
    return Query(row.id, row.text, {"seed": seed, "row": {QUERY: row.raw, **row.columns}})
