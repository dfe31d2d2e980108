"""CoMLRL's `MAGRPOTrainer` on one of our tasks, in a separate process; see `benchmarks.against_comlrl`.

Its functions are timed from outside. The clock starts with the command. It stands still while held-out queries are
measured, and while this module prepares what only the comparison needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from comlrl.trainers import MAGRPOConfig, MAGRPOTrainer
from datasets import Dataset
from transformers import set_seed

from benchmarks.side import print_answer, read_work

if TYPE_CHECKING:
    from benchmarks.referee import Referee


class TimedTrainer(MAGRPOTrainer):
    """CoMLRL's trainer with timers around its phases. All agents learn at the end of an update."""

    def __init__(self, referee: Referee, **arguments: Any) -> None:
        """Takes the arguments of CoMLRL's trainer and who measures its agents."""
        super().__init__(**arguments)
        self.referee = referee
        self.phases: list[dict[str, float]] = []
        """Seconds by phase of each update."""
        self._phases = {"generation": 0.0, "reward": 0.0, "learning": 0.0}
        self._started = 0.0

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._phases[name] += time.perf_counter() - started

    def train(self, **arguments: Any) -> None:
        """Starts the clock of the first update."""
        self._started = time.perf_counter()
        super().train(**arguments)

    def _run_agent_tasks(
        self, fn: Callable[[int], Any], *, agent_indices: list[int] | None = None, parallel: bool | None = None
    ) -> list[Any]:
        """Generates the agents' responses to a query, or lets the agents with the given indices learn."""
        with self._phase("generation" if agent_indices is None else "learning"):
            results: list[Any] = super()._run_agent_tasks(fn, agent_indices=agent_indices, parallel=parallel)
        return results

    def _compute_rewards(self, *arguments: Any, **options: Any) -> list[float]:
        with self._phase("reward"):
            rewards: list[float] = super()._compute_rewards(*arguments, **options)
        return rewards

    def _drain_ready_buffers(self, ready_agents: Sequence[int]) -> None:
        """Called after each query, with the agents whose buffers are full, which then learn."""
        super()._drain_ready_buffers(ready_agents)
        if ready_agents:
            self.phases.append({**self._phases, "update": time.perf_counter() - self._started})
            if self.referee.is_due(len(self.phases)):
                self.referee.add_point(len(self.phases), self.agents)
            self._phases = dict.fromkeys(self._phases, 0.0)
            self._started = time.perf_counter()


def main() -> None:
    """Trains, and prints the curve and the seconds of each update's phases."""
    work = read_work()
    stopped = time.time()  # what follows is not CoMLRL's
    from benchmarks.referee import Referee
    from policies.rollout.prompt_sampling import sample_prompts
    from policies.settings.settings import make_settings

    settings = make_settings(work["settings"])
    referee = Referee(settings, work["began"])
    task, size = referee.task, settings.queries_per_update
    refs = [ref for u in range(settings.num_updates) for ref in sample_prompts(settings.seed, u, size, len(task.train))]
    queries = [task.train[ref.query] for ref in refs]
    referee.paused = time.time() - stopped

    def joint_reward(first: list[str], second: list[str], *, batch_items: Sequence[dict[str, Any]]) -> list[float]:
        """The sum of the two agents' rewards, for the joint response that CoMLRL passes."""
        query = queries[batch_items[0]["query"]]
        return [sum(referee.rewards([query] * 2, first + second))]

    set_seed(settings.seed)
    torch.set_num_threads(work["threads"])
    parallel = work["parallel_training"]
    prompts = [task.prompt(query) for query in queries]
    trainer = TimedTrainer(
        referee,
        agents=list(settings.model_paths.values()),
        num_agents=settings.num_agents,
        reward_func=joint_reward,
        train_dataset=Dataset.from_dict({"prompt": prompts, "query": list(range(len(prompts)))}),
        args=MAGRPOConfig(
            num_train_epochs=1,
            agent_learning_rate=settings.learning_rate,
            num_generations=settings.num_generations,
            max_new_tokens=settings.max_response_tokens,
            temperature=settings.temperature,
            top_p=1.0,
            top_k=0,
            num_turns=1,
            eval_interval=0,
            rollout_buffer_size=size,
            train_batch_size=settings.responses_per_step // settings.num_generations,
            parallel_training=parallel,
            # "mp" runs agents in parallel threads if their devices have different names
            agent_devices=[f"cpu:{index}" for index in range(settings.num_agents)] if parallel == "mp" else "cpu",
        ),
    )
    for tokenizer in trainer.tokenizers:
        if tokenizer(prompts[:100])["input_ids"] != referee.encoder.encode_prompts(queries[:100]):
            raise RuntimeError("The trainer would read other prompts than ours.")
    referee.add_point(0, trainer.agents)
    trainer.train()
    trainer.save_model(work["folder"])
    referee.worker.close()
    print_answer(
        {"curve": referee.curve, "paused": referee.paused, "phases": trainer.phases, "version": version("comlrl")}
    )


if __name__ == "__main__":
    main()
