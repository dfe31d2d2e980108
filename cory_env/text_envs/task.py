"""The task of an environment: its queries are seeds."""

from dataclasses import dataclass

from cory_env.tasks.task import Query, Task

NUM_TRAIN_SEEDS = 10_000
NUM_TEST_SEEDS = 1_000
FIRST_TEST_SEED = 1_000_000
"""Training uses the seeds from 0 on; held-out seeds, of validation and test, start here."""


@dataclass(frozen=True, kw_only=True)
class EnvTask(Task):
    """An environment as a task. Prompts and rewards are the environment's.

    Attributes:
        env: The environment, `module:function`, with settings as `?name=value`.
        max_turns: The maximum number of turns of an agent; then its episode is truncated.
    """

    env: str
    max_turns: int


def make_env_task(env: str, max_turns: int, validation: int = 0) -> EnvTask:
    """Makes the task of an environment.

    Args:
        env: The environment.
        max_turns: See `EnvTask`.
        validation: Number of held-out seeds that are for decisions of training only; 0: all serve both purposes.
    """
    train, held_out = _seeds(0, NUM_TRAIN_SEEDS), _seeds(FIRST_TEST_SEED, NUM_TEST_SEEDS + validation)
    test = [Query(number, query.text, query.columns) for number, query in enumerate(held_out[validation:])]
    return EnvTask(
        name=env,
        train=train,
        test=test,
        validation=held_out[:validation] if validation else None,
        reward="",
        env=env,
        max_turns=max_turns,
    )


def _seeds(first: int, number: int) -> list[Query]:
    return [Query(index, f"seed {first + index}", {"seed": first + index}) for index in range(number)]
