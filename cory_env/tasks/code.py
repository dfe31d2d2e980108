"""Code: write a program, which hidden tests are put to.

The bundled problems ask for short Python functions; data of one's own has the columns `query` and `tests`, or the form
of MBPP, HumanEval or APPS (`cory_env.tasks.code_formats`). The reward is the share of the tests that the program
passes; `cory_env.rewards.code:all_passed` pays for all or nothing. Programs run shut in: see docs/tasks.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cory_env.tasks.code_formats import OWN, Format, find_format
from cory_env.tasks.rows import Source, read_queries, read_splits
from cory_env.tasks.task import Query, Task
from cory_env.tasks.template import placeholders

PROBLEMS = Path(__file__).parents[1] / "assets" / "code-problems"
REWARD = "cory_env.rewards.code:share_passed"

PROMPT = "{query}\n\nAnswer with one block of Python code.\n"
OBSERVER_PROMPT = "{query}\n\nAn answer that may be wrong:\n\n{reference}\n\nAnswer with one block of Python code.\n"
REFERENCE_SEPARATOR = "\n\nAnother one:\n\n"  # three agents or more


@dataclass(frozen=True, kw_only=True)
class Code(Task):
    """The task. Where the data has a solution it is the gold answer, unless the user set another reward."""

    def observer_prompt(self, query: Query, responses: Sequence[str]) -> str:
        """Returns the later agents' prompt; the space around a response goes, because the template has its own."""
        return super().observer_prompt(query, [response.strip() for response in responses])

    def gold(self, query: Query) -> str | None:
        """Returns the solution, if there is one."""
        solution = query.columns.get("solution")
        return solution if self.solved_at is not None and isinstance(solution, str) and solution else None


def make(
    *,
    data: Source | None = None,
    eval_data: Source | None = None,
    reward: str | None = None,
    prompt: str | None = None,
    observer_prompt: str | None = None,
) -> Task:
    """Builds the task; see `cory_env.tasks.make_task` for the settings and errors.

    With a reward of one's own, other than those of `cory_env.rewards.code`, the data needs no tests and there are no
    gold answers.
    """
    tested = reward is None or "cory_env.rewards.code:" in reward
    prompt, observer_prompt, separator = prompt or PROMPT, observer_prompt or OBSERVER_PROMPT, REFERENCE_SEPARATOR
    columns = set(placeholders(prompt) | placeholders(observer_prompt)) - {"reference"} - set(OWN)

    def format_of(source: Source) -> tuple[Format, set[str]]:
        found = find_format(source, tested)
        return found, columns | set(found.needs if tested else ())

    def read(source: Source) -> list[Query]:
        found, needs = format_of(source)
        return [found.convert(query) for query in read_queries(source, needs, found.query)]

    if data is None:
        train, test = read(PROBLEMS / "train.jsonl"), read(eval_data or PROBLEMS / "test.jsonl")
    elif eval_data is not None:
        train, test = read(data), read(eval_data)
    else:
        found, needs = format_of(data)
        rows = read_splits(data, None, needs, found.query)
        train, test = ([found.convert(query) for query in split] for split in rows)
    return Code(
        name="code",
        train=train,
        test=test,
        reward=reward or REWARD,
        prompt_template=prompt,
        observer_template=observer_prompt,
        reference_separator=separator if observer_prompt == OBSERVER_PROMPT else "\n",
        solved_at=1.0 if tested and " " not in (reward or REWARD) else None,  # of several functions, a sum,
    )
