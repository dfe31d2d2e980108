"""IMDB: continue the opening words of a film review so that it sounds positive (paper §4).

The query is the first few tokens of a review; the pioneer continues it, the observer continues it again with the
pioneer's sentence before it. The reward is the raw logit of "positive" of a sentiment classifier on query + response.
"""

from pathlib import Path

from cory_env.tasks.rows import Source, read_queries, read_splits
from cory_env.tasks.task import Task
from cory_env.tasks.template import placeholders

QUERIES = Path(__file__).parents[1] / "assets" / "imdb-queries"

PROMPT = "{query}"
OBSERVER_PROMPT = 'I can make this sentence "{query}{reference}" more positive: {query}'
# Three agents or more, ours: I can make this sentence "…" and this sentence "…" more positive: …
REFERENCE_SEPARATOR = '" and this sentence "{query}'


def make(
    *,
    data: Source | None = None,
    eval_data: Source | None = None,
    reward: str | None = None,
    prompt: str | None = None,
    observer_prompt: str | None = None,
) -> Task:
    """Builds the task; see `cory_env.tasks.make_task` for the settings and errors.

    An `observer_prompt` of one's own puts several earlier responses on a line each.
    """
    required = placeholders(prompt or PROMPT) | placeholders(observer_prompt or OBSERVER_PROMPT) - {"reference"}
    if data is not None:
        train, test = read_splits(data, eval_data, required)
    else:
        train = read_queries(QUERIES / "train.jsonl", required)
        test = read_queries(eval_data or QUERIES / "test.jsonl", required)
    return Task(
        name="imdb",
        train=train,
        test=test,
        reward=reward or "cory_env.rewards.sentiment:positive_logit",
        prompt_template=prompt or PROMPT,
        observer_template=observer_prompt or OBSERVER_PROMPT,
        reference_separator="\n" if observer_prompt else REFERENCE_SEPARATOR,
    )
