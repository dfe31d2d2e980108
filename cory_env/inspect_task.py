"""A task of this package as one of Inspect's; inspect-ai lives in an environment of its own (docs/evaluations.md).

inspect eval cory_env/inspect_task.py -T name=arithmetic --limit 50 --model openai-api/cory/chain
"""

import asyncio

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessage, ChatMessageAssistant, ChatMessageSystem, ChatMessageUser
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState, generate

from cory_env.rewarding.episodes import RewardedResponse, reward_responses
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks import Query, make_task
from cory_env.tasks.task import Split

MESSAGES = {"system": ChatMessageSystem, "user": ChatMessageUser, "assistant": ChatMessageAssistant}


@task  # type: ignore[untyped-decorator]
def cory(
    name: str = "imdb",
    split: Split = "test",
    data: str | None = None,
    reward: str | None = None,
    prompt: str | None = None,
    template: bool = False,
    timeout: float = 60.0,
) -> Task:
    """Asks the queries of a task, and scores each answer by the task's reward.

    Args:
        name: the task's.
        split: which queries.
        data: a file of queries, all of which are asked.
        reward, prompt: as the settings of these names.
        template: put each query into the task's prompt; `cory serve` does that by itself.
        timeout: seconds that one reward may take.
    """
    made = make_task(name, data=data, eval_data=data, reward=reward, prompt=prompt)
    queries = made.queries(split)

    def asked(query: Query) -> list[ChatMessage]:
        text = made.prompt(query) if template else query.text
        history = [MESSAGES[message["role"]](content=message["content"]) for message in query.history or ()]
        return [*history, ChatMessageUser(content=text)]

    samples = [Sample(id=query.id, input=asked(query), target=made.gold(query) or "") for query in queries]
    return Task(
        dataset=MemoryDataset(samples, name=name),
        solver=generate(),
        scorer=task_reward(RewardWorker(made.reward, timeout=timeout), {query.id: query for query in queries}),
    )


@scorer(metrics=[mean(), stderr()])  # type: ignore[untyped-decorator]
def task_reward(worker: RewardWorker, queries: dict[int, Query]) -> Scorer:
    """Scores an answer by the task's reward, which a child process computes for one answer after another."""
    turn = asyncio.Lock()

    async def score(state: TaskState, target: Target) -> Score:
        response = RewardedResponse(queries[int(state.sample_id)], "pioneer", state.output.completion, [])
        async with turn:
            (value,) = await asyncio.to_thread(reward_responses, worker, [response])
        return Score(value=value, answer=response.text)

    return score
